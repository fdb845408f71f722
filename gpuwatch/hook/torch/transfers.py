"""Copies to the device without a line of code: `Tensor.to` and `Tensor.cuda` are timed while a watched loop runs.

Where the device's timeline measures, what is read back (`.item()`, `.cpu()`, `if loss > 1:` …) is noted too: the host waits for it.
A replacement acts while a loop is open, in the training thread, inside a step; see `tensor_patch` for when it is there. It is no
TorchFunctionMode: those change how every operation is dispatched. A Tensor subclass or such a mode gets the original function.
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
_NOT_GIVEN = object()
_BATCH_BYTES = 1 << 16  # of a smaller copy, of labels say, it does not matter whether its memory is pinned


class TransferWatch:
    """Times copies of one recorder's training thread while its `methods` are installed."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.methods = TorchMethods(_COPIES, self._made)

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
            self.methods.leave(name)
            return original(tensor, *args, **kwargs)
        recorder = self._recorder
        acts = self.methods.loops and recorder.doing() is IN_STEP and recorder.thread == get_ident()
        before_ns, begin = recorder.transfer_ns, recorder.clock()
        result = torch.overrides.handle_torch_function(
            lowest, (tensor, *args, *kwargs.values()), tensor, *args, **kwargs
        )
        if not acts or recorder.begin_ns > begin:
            return result
        try:
            with torch._C.DisableTorchFunction():
                device, is_copy = recorder.active_timeline, name in _COPIES
                if tensor.is_cpu and is_copy and not result.is_cpu:
                    recorder.transfer_ns = before_ns + recorder.clock() - begin  # whatever was timed inside
                elif device is not None and not tensor.is_cpu and (not is_copy or result.is_cpu):
                    device.read_back(recorder.clock() - begin)
        except Exception as error:  # a subclass with a device of its own making: its copy is not timed
            pass_on(error)
        return result

    def _timed(self, torch: Any, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        recorder, methods = self._recorder, self.methods
        is_overridden = torch.overrides.has_torch_function_unary
        devices = (str, int, torch.device)
        # What `.to(…)` takes for a device, or for a tensor that is on one; a dtype is none of them.
        places = (*devices, torch.Tensor)
        always = name == "cuda"

        def place_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            """Return where a copy goes, "cpu" where it names no place."""
            if args:
                return args[0] if isinstance(args[0], places) else "cuda" if always else "cpu"
            place = kwargs.get("device", kwargs.get("other"))
            return place if place is not None else "cuda" if always else "cpu"

        known: Any = self  # a place that is no CPU; at first none
        last_ns = 0

        @functools.wraps(original)
        def timed(tensor: Any, place: Any = _NOT_GIVEN, /, *args: Any, **kwargs: Any) -> Any:
            # The usual copy, in a usual step and to the usual place, whose result is on no CPU. Each look here is paid for by every batch.
            if (
                place is known
                and recorder.steady is not None
                and recorder.batch_ready_ns
                and recorder.thread == get_ident()
                and not is_overridden(tensor)
            ):
                clock = recorder.clock
                begin = clock()
                result = original(tensor, place, *args, **kwargs) if args or kwargs else original(tensor, place)
                if result is not tensor and tensor.is_cpu:
                    recorder.transfer_ns += clock() - begin
                return result
            if place is not _NOT_GIVEN:
                args = (place, *args)
            if not methods.loops and not is_overridden(tensor):
                return original(tensor, *args, **kwargs)
            return any_copy(tensor, args, kwargs)

        def any_copy(tensor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            nonlocal known, last_ns
            if is_overridden(tensor):
                return self._overridden(torch, name, original, tensor, args, kwargs)
            device, clock = recorder.active_timeline, recorder.clock
            if recorder.thread != get_ident():
                return original(tensor, *args, **kwargs)
            fed, waits = None, recorder.doing() is DATA_WAIT
            if (device is not None or waits) and tensor.is_cpu and not _names_cpu(place_of(args, kwargs)):
                fed = device
                if waits:
                    recorder.end_bounded_wait()
            has_place = always or kwargs.get("device", kwargs.get("other")) is not None
            if recorder.doing() is not IN_STEP or not (isinstance(args[0], places) if args else has_place):
                if fed is None or recorder.doing() is not DATA_WAIT:
                    return self._read_in_gap(original, tensor, args, kwargs)
                # A prefetcher copies on a stream of its own while a batch is fetched.
                token = fed.copy_begins(clock(), follows=False)
                result = original(tensor, *args, **kwargs)
                fed.copy_ends(token)
                return result
            begin, token = clock(), None
            if fed is not None:
                batch_ns = recorder.begin_ns + recorder.data_ns
                token = fed.copy_begins(begin, follows=begin - max(last_ns, batch_ns) < COPY_FOLLOWS_NS)
            result = original(tensor, *args, **kwargs)
            if result is tensor and device is None:  # it was there already
                return result
            try:
                if tensor.is_cpu and not result.is_cpu:  # reading a result back is no input
                    if args and isinstance(args[0], devices):
                        known = args[0]
                    if device is None:
                        recorder.transfer_ns += clock() - begin
                    else:
                        device.copy_ends(token, clock() - begin)
                        last_ns = clock()
                        recorder.transfer_ns += last_ns - begin
                        if token is not None and tensor.nbytes >= _BATCH_BYTES:
                            recorder.pinned = tensor.is_pinned()
                elif device is not None and result.is_cpu and not tensor.is_cpu:
                    device.read_back(clock() - begin)
                elif device is not None:
                    device.saw(result.device)
            except Exception as error:  # a subclass with a device of its own making: its copy is not timed
                pass_on(error)
            return result

        return timed

    def _read_in_gap(self, original: Any, tensor: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Call `original`. If it reads a result back between two forward passes without gradients, the device has nothing to do afterwards."""
        recorder = self._recorder
        begin = recorder.clock() if recorder.gap_since_ns else 0
        result = original(tensor, *args, **kwargs)
        if begin and not tensor.is_cpu and getattr(result, "is_cpu", True):
            recorder.read_in_gap(begin)
        return result

    def _noted(self, torch: Any, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        recorder, methods = self._recorder, self.methods
        is_overridden = torch.overrides.has_torch_function_unary

        @functools.wraps(original)
        def noted(tensor: Any, /, *args: Any, **kwargs: Any) -> Any:
            if is_overridden(tensor):
                return self._overridden(torch, name, original, tensor, args, kwargs)
            device = recorder.active_timeline
            is_idle = recorder.activity is not IN_STEP or not methods.loops
            if device is None or is_idle or tensor.is_cpu or recorder.thread != get_ident():
                return self._read_in_gap(original, tensor, args, kwargs)
            begin = recorder.clock()
            result = original(tensor, *args, **kwargs)
            device.read_back(recorder.clock() - begin)
            return result

        return noted


def _names_cpu(place: Any) -> bool:
    """Whether a device, its name or number, or a tensor on it is the CPU."""
    if isinstance(place, (str, int)):
        return str(place).startswith("cpu")
    device = getattr(place, "device", place)
    return bool(device.type == "cpu")


def _overrides(torch: Any, tensor: Any) -> bool:
    """Whether the tensor's own type overrides torch's functions."""
    with torch._C.DisableTorchFunctionSubclass():
        override = getattr(type(tensor), "__torch_function__", None)
    plain = (torch.Tensor.__torch_function__, torch._C._disabled_torch_function_impl)
    return type(tensor) is not torch.Tensor and override not in plain
