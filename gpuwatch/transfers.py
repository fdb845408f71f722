"""Copies to the device without a line of code: `Tensor.to` and `Tensor.cuda` are timed while a watched loop runs.

What is read back from the device (`.item()`, `.tolist()`, `.cpu()`, `float(loss)`, `if loss > 1:`, and `print`, which uses them) is noted too
where the device's timeline measures: the host waits for it.

The replacement lives for as long as a loop is open and is taken back on any exit. It acts in the training thread alone, inside a step, and
steps aside while torch compiles, so it breaks no graph. It is no TorchFunctionMode: those change how every operation is dispatched.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from threading import get_ident
from typing import Any

from gpuwatch.entries import COPY_FOLLOWS_NS, IN_STEP
from gpuwatch.recorder import Recorder

_COPIES = ("to", "cuda")
_READS = ("item", "tolist", "cpu", "__float__", "__int__", "__bool__")
_NOT_GIVEN = object()


class TransferWatch:
    """Times copies of one recorder's training thread while `install`ed, once for each open loop."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._loops = 0
        self._before: dict[str, Any] = {}
        self._ours: dict[str, Any] = {}

    def install(self) -> None:
        """A loop has begun. Does nothing before torch is imported."""
        self._loops += 1
        torch = sys.modules.get("torch")
        if self._ours or torch is None or not hasattr(torch, "Tensor"):
            return
        for name in (*_COPIES, *_READS):
            # Tensor inherits all of them from a C base: what is deleted again leaves the original.
            self._before[name] = torch.Tensor.__dict__.get(name)
            make = self._timed if name in _COPIES else self._noted
            self._ours[name] = make(torch, name, getattr(torch.Tensor, name))
            setattr(torch.Tensor, name, self._ours[name])

    def remove(self) -> None:
        """A loop has ended; the last one takes the replacement back."""
        self._loops = max(0, self._loops - 1)
        if self._loops == 0:
            self.remove_all()

    def remove_all(self) -> None:
        """Take the replacement back whatever is open. What somebody else put over it stays: it calls the original through us."""
        self._loops = 0
        torch = sys.modules.get("torch")
        for name, ours in self._ours.items():
            if torch is None or torch.Tensor.__dict__.get(name) is not ours:
                continue
            if self._before[name] is None:
                delattr(torch.Tensor, name)
            else:
                setattr(torch.Tensor, name, self._before[name])
        self._ours, self._before = {}, {}

    def _timed(self, torch: Any, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        recorder = self._recorder
        is_compiling = torch.compiler.is_compiling
        places = (str, int, torch.device, torch.Tensor)  # what `.to(…)` takes for a device; a dtype is none of them
        always = name == "cuda"
        last_ns = 0

        @functools.wraps(original)
        def timed(tensor: Any, place: Any = _NOT_GIVEN, *args: Any, **kwargs: Any) -> Any:
            nonlocal last_ns
            # In the order of what torch may trace, then of what tells most.
            if (
                is_compiling()
                or not (recorder.activity is IN_STEP if recorder.steady is None else recorder.fed_ns)
                or recorder.thread != get_ident()
                or not (isinstance(place, places) if place is not _NOT_GIVEN else always or _names_a_device(kwargs))
            ):
                if recorder.device is not None and recorder.thread == get_ident() and not is_compiling():
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
        is_compiling = torch.compiler.is_compiling

        @functools.wraps(original)
        def noted(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if not is_compiling() and recorder.device is not None and recorder.activity is IN_STEP:
                device = recorder.device
                if device is not None and not tensor.is_cpu and recorder.thread == get_ident():
                    device.read_back()
            return original(tensor, *args, **kwargs)

        return noted


def _names_a_device(options: dict[str, Any]) -> bool:
    """Whether `.to(…)` is asked for a device by name, not only for a type."""
    return options.get("device") is not None or options.get("other") is not None
