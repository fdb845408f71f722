"""Copies to the device without a line of code: `Tensor.to` and `Tensor.cuda` are timed while a watched loop runs.

Where the device's timeline measures, what is read back (`.item()`, `.cpu()`, `if loss > 1:` …) is noted too: the host
waits for it. A replacement acts while a loop is open, in the training thread, inside a step; see `tensor_patch` for
when it is there. It is no TorchFunctionMode: those change how every operation is dispatched. A Tensor subclass or such
a mode gets the original function.
"""

import functools
from collections.abc import Callable
from threading import get_ident
from typing import Any

from gpuwatch.errors import pass_on
from gpuwatch.hook.recorder import Recorder
from gpuwatch.hook.torch.tensor_patch import TorchMethods
from gpuwatch.ledger.events import COPY_FOLLOWS_NS, DATA_WAIT, IN_STEP

_COPIES = ("to", "cuda")
READS = ("item", "tolist", "cpu", "__float__", "__int__", "__bool__")  # only where a device measures
_BATCH_BYTES = 1 << 16  # of a smaller copy, of labels say, it does not matter whether its memory is pinned


class TransferWatch(TorchMethods):
    """Times copies of one recorder's training thread while it is installed."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(_COPIES, self._made)
        self._recorder = recorder

    def _made(self, torch: Any, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        return self._timed(torch, name, original) if name in _COPIES else self._noted(torch, name, original)

    def _overridden(self, torch: Any, name: str, original: Any, tensor: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Call `original` on what overrides torch's functions, and time it as a whole."""
        lowest = original
        while hasattr(lowest, "gpuwatch_before"):  # another Watch's
            lowest = lowest.__wrapped__
        try:
            modes = torch._C._len_torch_function_stack()
        except AttributeError:  # a torch that is built otherwise
            return original(tensor, *args, **kwargs)
        if modes > 1 or (modes and _overrides(torch, tensor)):
            # Only the first of several can be seen: leave the method to torch until the last loop ends.
            self.leave(name)
            return original(tensor, *args, **kwargs)
        recorder = self._recorder
        acts = self.loops and recorder.doing() is IN_STEP and recorder.thread == get_ident()
        before_ns, begin = recorder.transfer_ns, recorder.clock()
        relevant = tensor, *args, *kwargs.values()
        result = torch.overrides.handle_torch_function(lowest, relevant, tensor, *args, **kwargs)
        if not acts or recorder.begin_ns > begin:
            return result
        try:
            with torch._C.DisableTorchFunction():
                device, is_copy = recorder.active_timeline, name in _COPIES
                if tensor.is_cpu and is_copy and not result.is_cpu:
                    recorder.set_copied(before_ns, begin)  # whatever was timed inside
                    if device is not None:
                        device.saw(result)
                elif device is not None and not tensor.is_cpu and (not is_copy or result.is_cpu):
                    recorder.read_back(begin)
        except Exception as error:  # a subclass with a device of its own making: its copy is not timed
            pass_on(error)
        return result

    def _timed(self, torch: Any, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        recorder = self._recorder
        is_overridden = torch.overrides.has_torch_function_unary
        devices = (str, int, torch.device)
        # What `.to(…)` takes for a device, or for a tensor that is on one; a dtype is none of them.
        places = (*devices, torch.Tensor)
        default = "cuda" if name == "cuda" else "cpu"
        last_ns = seen_ns = 0  # when the last copy ended; when the step began whose first copy's device was noted

        def any_copy(tensor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            nonlocal last_ns, seen_ns
            if is_overridden(tensor):
                return self._overridden(torch, name, original, tensor, args, kwargs)
            if not self.loops:
                return original(tensor, *args, **kwargs)
            try:
                is_cpu = tensor.is_cpu
                place = args[0] if args else kwargs.get("device", kwargs.get("other"))
                is_copy = not (is_cpu and _names_cpu(place if isinstance(place, places) else default))
            except Exception as error:  # a subclass with a device of its own making: its copy is not timed
                pass_on(error)
                is_copy = False
            if recorder.thread != get_ident() or not is_copy:
                return original(tensor, *args, **kwargs)
            if not is_cpu:
                return self._reads_back(original, tensor, args, kwargs)
            device, clock = recorder.active_timeline, recorder.clock
            waits = recorder.copied_ns > 0 or recorder.in_bounded_wait()
            waits = bool(waits and (device is None or device.is_home) and recorder.end_bounded_wait(clock()))
            doing = recorder.doing()
            if doing is not IN_STEP:
                if device is None:
                    return original(tensor, *args, **kwargs)
                # A prefetcher copies on a stream of its own while a batch is fetched.
                token = device.copy_begins(clock(), follows=False) if doing is DATA_WAIT else None
                result = original(tensor, *args, **kwargs)
                device.copy_ends(token)
                if seen_ns != recorder.begin_ns:
                    seen_ns = recorder.begin_ns
                    device.saw(result)
                return result
            begin, token = clock(), None
            if device is not None:
                batch_ns = recorder.begin_ns + recorder.data_ns
                token = device.copy_begins(begin, follows=begin - max(last_ns, batch_ns) < COPY_FOLLOWS_NS)
            result = original(tensor, *args, **kwargs)
            try:
                if not result.is_cpu:
                    if args and isinstance(args[0], devices):
                        now_usual(args[0])
                    if device is not None:
                        device.copy_ends(token, clock() - begin)
                        if seen_ns != recorder.begin_ns:
                            seen_ns = recorder.begin_ns
                            device.saw(result)
                    last_ns = clock()
                    is_pinned = tensor.is_pinned() if token is not None and tensor.nbytes >= _BATCH_BYTES else None
                    recorder.add_copy(last_ns - begin, is_pinned)
                    if waits:
                        recorder.after_copy()
            except Exception as error:  # a subclass with a device of its own making: its copy is not timed
                pass_on(error)
            return result

        timed, now_usual = recorder.fast_copy(original, is_overridden, any_copy)
        return timed

    def _reads_back(self, original: Any, tensor: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Call `original` on a device's tensor, in a frame by whose name a thread is known to wait for the device."""
        recorder = self._recorder
        begin = recorder.clock()
        result = original(tensor, *args, **kwargs)
        if getattr(result, "is_cpu", True):
            recorder.read_back(begin)
        elif recorder.active_timeline is not None:
            recorder.active_timeline.saw(result)
        return result

    def _noted(self, torch: Any, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        recorder = self._recorder
        is_overridden = torch.overrides.has_torch_function_unary

        @functools.wraps(original)
        def noted(tensor: Any, /, *args: Any, **kwargs: Any) -> Any:
            if is_overridden(tensor):
                return self._overridden(torch, name, original, tensor, args, kwargs)
            if tensor.is_cpu or recorder.timeline is None or recorder.thread != get_ident():
                return original(tensor, *args, **kwargs)
            return self._reads_back(original, tensor, args, kwargs)

        return noted


def _names_cpu(place: Any) -> bool:
    """Whether a device, its name or number, or a tensor on it is the CPU."""
    if isinstance(place, (str, int)):
        return str(place).startswith("cpu")
    return getattr(getattr(place, "device", place), "type", None) == "cpu"


def _overrides(torch: Any, tensor: Any) -> bool:
    """Whether the tensor's own type overrides torch's functions."""
    with torch._C.DisableTorchFunctionSubclass():
        override = getattr(type(tensor), "__torch_function__", None)
    plain = (torch.Tensor.__torch_function__, torch._C._disabled_torch_function_impl)
    return type(tensor) is not torch.Tensor and override not in plain
