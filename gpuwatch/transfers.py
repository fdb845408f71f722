"""Copies to the device without a line of code: `Tensor.to` and `Tensor.cuda` are timed while a watched loop runs.

What is read back from the device (`.item()`, `.tolist()`, `.cpu()`, `float(loss)`, `if loss > 1:`, and `print`, which uses them) is noted too
where the device's timeline measures: the host waits for it.

The replacement lives for as long as a loop is open and is taken back on any exit. It acts in the training thread alone, inside a step, and
steps aside while torch compiles, so it breaks no graph. It is no TorchFunctionMode: those change how every operation is dispatched.

A Tensor subclass or a TorchFunctionMode is told by torch which function was called: whatever `torch.Tensor.to` is then. They are told the
original, which is what their tables hold.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from threading import get_ident
from typing import Any

from gpuwatch.entries import COPY_FOLLOWS_NS, IN_STEP
from gpuwatch.recorder import Recorder

_COPIES = ("to", "cuda")
_READS = ("item", "tolist", "cpu", "__float__", "__int__", "__bool__")
_NOT_GIVEN = object()
_left: set[Any] = set()
"""What could not be taken back, because somebody else's was on top of it."""


class TransferWatch:
    """Times copies of one recorder's training thread while `install`ed, once for each open loop."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._loops = 0
        self._ours: dict[str, Any] = {}

    def install(self) -> None:
        """A loop has begun. Does nothing before torch is imported."""
        self._loops += 1
        torch = sys.modules.get("torch")
        if self._loops > 1 or torch is None or not hasattr(torch, "Tensor"):
            return
        for name in (*_COPIES, *_READS):
            ours = self._ours.get(name)
            if ours is not None and ours in _chain(torch.Tensor.__dict__.get(name)):
                # Somebody else has put his own over it, and calls it: a second one would time the copy twice.
                _left.discard(ours)
                continue
            make = self._timed if name in _COPIES else self._noted
            self._put(torch, name, make(torch, name, getattr(torch.Tensor, name)))

    def remove(self) -> None:
        """A loop has ended; the last one takes the replacement back."""
        self._loops = max(0, self._loops - 1)
        if self._loops == 0:
            self.remove_all()

    def remove_all(self) -> None:
        """Take the replacement back whatever is open. What somebody else put over it stays: it calls the original through us."""
        self._loops = 0
        torch = sys.modules.get("torch")
        for name, ours in list(self._ours.items()):
            if torch is None or torch.Tensor.__dict__.get(name) is not ours:
                _left.add(ours)
                continue
            self._take_back(torch, name)

    def _take_back(self, torch: Any, name: str) -> None:
        """Take back what is on top."""
        before = self._ours.pop(name).gpuwatch_before
        while before in _left:  # another Watch's, taken back in the meantime
            _left.discard(before)
            before = before.gpuwatch_before
        if before is None:
            delattr(torch.Tensor, name)
        else:
            setattr(torch.Tensor, name, before)

    def _put(self, torch: Any, name: str, ours: Any) -> None:
        # Tensor inherits all of them from a C base: what is deleted again leaves the original.
        ours.gpuwatch_before = torch.Tensor.__dict__.get(name)
        self._ours[name] = ours
        setattr(torch.Tensor, name, ours)

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
            # Only the first of several can be told: leave the method to torch until the last loop ends.
            ours = self._ours.get(name)
            if ours is not None and torch.Tensor.__dict__.get(name) is ours:
                self._take_back(torch, name)
            return original(tensor, *args, **kwargs)
        recorder = self._recorder
        acts = (recorder.activity is IN_STEP if recorder.steady is None else recorder.fed_ns) and (
            recorder.thread == get_ident()
        )
        before_ns, begin = recorder.transfer_ns, recorder.clock()
        result = torch.overrides.handle_torch_function(
            lowest, (tensor, *args, *kwargs.values()), tensor, *args, **kwargs
        )
        if not acts or recorder.begin_ns > begin:
            return result
        try:
            with torch._C.DisableTorchFunction():
                was_on_cpu = tensor.is_cpu
                if name in _COPIES:
                    if was_on_cpu and not result.is_cpu:
                        recorder.transfer_ns = before_ns + recorder.clock() - begin  # whatever was timed inside
                    elif recorder.device is not None and result.is_cpu and not was_on_cpu:
                        recorder.device.read_back()
                elif recorder.device is not None and not was_on_cpu:
                    recorder.device.read_back()
        except Exception:  # a subclass with a device of its own making: its copy is not timed
            pass
        return result

    def _timed(self, torch: Any, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        recorder = self._recorder
        is_overridden = torch.overrides.has_torch_function_unary
        is_compiling = torch.compiler.is_compiling
        places = (str, int, torch.device, torch.Tensor)  # what `.to(…)` takes for a device; a dtype is none of them
        always = name == "cuda"
        last_ns = 0

        @functools.wraps(original)
        def timed(tensor: Any, place: Any = _NOT_GIVEN, *args: Any, **kwargs: Any) -> Any:
            nonlocal last_ns
            # In the order of what torch may trace, then of what tells most.
            if is_compiling():
                return original(tensor, *(() if place is _NOT_GIVEN else (place,)), *args, **kwargs)
            if is_overridden(tensor):
                args = args if place is _NOT_GIVEN else (place, *args)
                return self._overridden(torch, name, original, tensor, args, kwargs)
            if (
                not (recorder.activity is IN_STEP if recorder.steady is None else recorder.fed_ns)
                or recorder.thread != get_ident()
                or not (isinstance(place, places) if place is not _NOT_GIVEN else always or _names_a_device(kwargs))
            ):
                if recorder.device is not None and recorder.thread == get_ident():
                    recorder.device.look()  # a prefetcher copies on a stream of its own inside the fetch
                return original(tensor, *(() if place is _NOT_GIVEN else (place,)), *args, **kwargs)
            device, clock = recorder.device, recorder.clock
            begin = clock()
            if device is not None:
                batch_ns = recorder.begin_ns + recorder.data_ns
                token = device.copy_begins(follows=begin - max(last_ns, batch_ns) < COPY_FOLLOWS_NS)
            if place is _NOT_GIVEN:
                result = original(tensor, *args, **kwargs)
            elif args or kwargs:
                result = original(tensor, place, *args, **kwargs)
            else:
                result = original(tensor, place)  # without packing and unpacking: the usual call
            if result is tensor and device is None:  # it was there already
                return result
            try:
                if tensor.is_cpu and not result.is_cpu:  # reading a result back is no input
                    if device is None:
                        recorder.transfer_ns += clock() - begin
                    else:
                        device.copy_ends(token)
                        last_ns = clock()
                        recorder.transfer_ns += last_ns - begin
                elif device is not None and result.is_cpu and not tensor.is_cpu:
                    device.read_back()
                elif device is not None:
                    device.saw(result.device)
            except Exception:  # a subclass with a device of its own making: its copy is not timed
                pass
            return result

        return timed

    def _noted(self, torch: Any, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        recorder = self._recorder
        is_overridden = torch.overrides.has_torch_function_unary
        is_compiling = torch.compiler.is_compiling

        @functools.wraps(original)
        def noted(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return original(tensor, *args, **kwargs)
            if is_overridden(tensor):
                return self._overridden(torch, name, original, tensor, args, kwargs)
            if recorder.device is not None and recorder.activity is IN_STEP:
                device = recorder.device
                if device is not None and not tensor.is_cpu and recorder.thread == get_ident():
                    device.read_back()
            return original(tensor, *args, **kwargs)

        return noted


def _names_a_device(options: dict[str, Any]) -> bool:
    """Whether `.to(…)` is asked for a device by name, not only for a type."""
    return options.get("device") is not None or options.get("other") is not None


def _overrides(torch: Any, tensor: Any) -> bool:
    """Whether the tensor's own type overrides torch's functions."""
    with torch._C.DisableTorchFunctionSubclass():
        override = getattr(type(tensor), "__torch_function__", None)
    plain = (torch.Tensor.__torch_function__, torch._C._disabled_torch_function_impl)
    return type(tensor) is not torch.Tensor and override not in plain


def _chain(function: Any) -> Iterator[Any]:
    """Yield what a call goes through, as far as it says so: the outermost first."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)
