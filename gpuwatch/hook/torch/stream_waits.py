"""What torch's streams and the host wait for on a device: copies on other streams, FSDP's collectives, `synchronize()`.

A prefetcher copies on its own stream and has the training's stream wait: `transfer`, where that has nothing else to do.
FSDP does so for its collectives: `comm_wait` where a model is watched. A `synchronize()` waits for the device, like a
result that is read back. From when a device is adopted until the Watch is closed, `wait_event` of its `Stream`, `wait`
of its `Event`, `synchronize` of both, and the functions of `torch._C` behind `synchronize()` are replaced.
`torch.Stream` and `torch.Event` are of C and cannot be.
"""

import functools
import sys
from collections.abc import Callable
from math import inf
from operator import attrgetter
from threading import get_ident
from types import BuiltinFunctionType, FunctionType
from typing import Any

from gpuwatch.hook.recorder import Recorder
from gpuwatch.hook.torch.tensor_patch import TorchMethods
from gpuwatch.ledger.device_timeline import DeviceTimeline
from gpuwatch.ledger.events import IN_STEP

_SYNCHRONIZE = "synchronize"
_FSDP = "torch.distributed.fsdp."
_BETWEEN = ("gpuwatch.", "torch.cuda.streams", "torch.xpu.streams")  # between FSDP's code and our function


class StreamWaits:
    """The waits of one recorder's training, while its `methods` are installed."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._kind: str | None = None
        self._home: tuple[int, int] | None = None  # the training's stream: its id and its device's index
        self._methods: list[TorchMethods] = []
        self._is_waiting = False  # `wait_event` calls `wait`, which is replaced too

    def install(self, kind: str | None) -> None:
        """A device of this kind ("cuda") measures from now on, on the current stream. None: it is none of torch's."""
        torch: Any = sys.modules.get("torch")
        module: Any = getattr(torch, kind or "", None)
        self._home = _identity(module.current_stream()) if hasattr(module, "current_stream") else None
        if self._home is None or kind == self._kind:
            return
        self.remove()
        self._kind = kind
        for owner, *wanted in (
            (f"{kind}.Stream", "wait_event", _SYNCHRONIZE),
            (f"{kind}.Event", "wait", _SYNCHRONIZE),
            ("_C", f"_{kind}_synchronize", "_accelerator_synchronizeDevice"),
        ):
            try:
                found = attrgetter(owner)(torch)
            except AttributeError:
                continue
            functions = FunctionType, BuiltinFunctionType
            if names := tuple(name for name in wanted if isinstance(getattr(found, name, None), functions)):
                methods = TorchMethods(names, self._made, owner, compiled_around=inf)
                self._methods.append(methods)
                methods.install()

    def remove(self) -> None:
        """Leave torch's own functions in their places."""
        methods, self._methods, self._kind = self._methods, [], None
        for replaced in methods:
            replaced.remove_all()

    def _made(self, torch: Any, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        if _SYNCHRONIZE in name:
            return self._synchronizes(original)
        if name == "wait_event":
            return self._waits(original, lambda stream, *args, **kwargs: stream)
        return self._waits(original, lambda event, stream=None: stream)

    def _synchronizes(self, original: Callable[..., Any]) -> Callable[..., Any]:
        recorder = self._recorder

        @functools.wraps(original)
        def synchronizes(*args: Any, **kwargs: Any) -> Any:
            begin = recorder.clock()
            result = original(*args, **kwargs)
            if recorder.thread == get_ident():
                recorder.read_back(begin)
            return result

        return synchronizes

    def _waits(self, original: Callable[..., Any], stream_of: Callable[..., Any]) -> Callable[..., Any]:
        recorder = self._recorder

        @functools.wraps(original)
        def waits(*args: Any, **kwargs: Any) -> Any:
            device = recorder.active_timeline
            if device is None or not (device.copied_aside or device.watches_ranks) or self._is_waiting:
                return original(*args, **kwargs)
            end, begin = self._begins(device, stream_of(*args, **kwargs))
            self._is_waiting = True
            try:
                return original(*args, **kwargs)
            finally:
                self._is_waiting = False
                end(begin)

        return waits

    def _begins(self, device: DeviceTimeline, stream: Any) -> tuple[Callable[[Any], None], Any]:
        """Note that this stream (None: the current one) will wait; return what to call after that, and with what."""
        try:
            current = _identity(getattr(sys.modules["torch"], self._kind or "").current_stream())
            waits = current == self._home and (stream is None or _identity(stream) == current)
        except Exception:  # a stream of a kind that we do not know
            waits = False
        if waits and device.watches_ranks and _is_asked_by_fsdp():
            return device.wait_ends, device.wait_begins()
        recorder = self._recorder
        if not (waits and device.copied_aside and recorder.thread == get_ident()):
            return device.wait_ends, None
        waited, now = recorder.end_bounded_wait(recorder.clock()), recorder.clock()

        def ends(token: Any) -> None:
            device.copy_ends(token)
            if waited:
                recorder.after_copy()

        return ends, device.awaits_asides(now if recorder.doing() is IN_STEP else None)


def _identity(stream: Any) -> tuple[int, int]:
    return stream.stream_id, stream.device_index


def _is_asked_by_fsdp() -> bool:
    """Whether FSDP's code is what makes a stream wait."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_BETWEEN):
        frame = frame.f_back
    return bool(frame.f_globals.get("__name__", "").startswith(_FSDP))
