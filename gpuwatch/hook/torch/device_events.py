"""Timing events of torch's accelerator: CUDA's own, or those of `torch.Event` on any other device that has them."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any


def device_in_use(torch: Any) -> str | None:
    """Return the kind of device that the user's code has set up: "cuda", "xpu" …; None before. Never sets one up."""
    try:
        if torch.cuda.is_initialized():
            return "cuda" if torch.cuda.is_available() else None
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is None or accelerator.type == "cuda":
            return None
        return str(accelerator.type) if getattr(torch, accelerator.type).is_initialized() else None
    except (AttributeError, RuntimeError):
        return None


def torch_events(torch: Any) -> TorchEvents | None:
    """Return events of the current device; None where the user's code has not set it up, or it has no timing events."""
    kind = device_in_use(torch)
    if kind is None:
        return None
    try:
        events = (CudaEvents if kind == "cuda" else TorchEvents)(torch, kind)
        return events if events.can_time() else None
    except (AttributeError, RuntimeError, NotImplementedError, TypeError):
        return None


_RELAXED = 2  # cudaStreamCaptureModeRelaxed; the exchange of modes puts in its place the one that was in force
_made: list[Any] = []  # every event made in this process. None is ever destroyed: see `TorchEvents`.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_made))  # nor when the interpreter of a forked child ends
# by device: events that no timeline holds any more
_unused: defaultdict[tuple[str, int], list[Any]] = defaultdict(list)


class TorchEvents:
    """Events on the device and stream of `torch.accelerator` that were current at first, pooled and never destroyed.

    A destroyed event aborts a forked child, which cannot call CUDA (`std::terminate` from `~CUDAEvent`, torch 2.11).
    """

    def __init__(self, torch: Any, kind: str) -> None:
        self._torch, self.kind = torch, kind
        self._look_up(torch)
        self._device = int(self._device_now())
        self._free: list[Any] = []
        self._mine: list[Any] = []
        self._unused = _unused[kind, self._device]
        self._stream = self._stream_of(self._device)
        self._recorded_on: Any = None  # None: the stream that is current
        self.foreign = 0  # times that another device or stream was seen at work, which is not measured
        self.uuid: str | None = None

    def _look_up(self, torch: Any) -> None:
        """Look up the functions that are called at each step."""
        event, accelerator = torch.Event, torch.accelerator
        self._new = partial(event, device=self.kind, enable_timing=True)
        self._record, self._query, self._elapsed_ms = event.record, event.query, event.elapsed_time
        self._device_now, self._current = accelerator.current_device_index, accelerator.current_stream
        self._stream_of: Callable[[int], Any] = lambda device: accelerator.current_stream(device).stream_id
        self._capturing: Callable[[], bool] = lambda: False

    def __del__(self) -> None:
        if hasattr(self, "_unused"):
            self._unused.extend(self._mine)

    def can_time(self) -> bool:
        """Return whether this device has timing events. Nothing is recorded for that."""
        self._free.append(self._take())
        return True

    def record(self, event: Any | None) -> Any:
        if event is None:
            event = self._free.pop() if self._free else self._take()
        self._record(event, self._recorded_on)
        return event

    def record_aside(self) -> Any | None:
        if self._device_now() != self._device or self._stream_of(self._device) == self._stream or self._capturing():
            return None
        event = self._free.pop() if self._free else self._take()
        self._record(event, self._current(self._device))
        return event

    def ready(self, event: Any) -> bool:
        return bool(self._query(event))

    def elapsed_ns(self, first: Any, second: Any) -> int:
        return int(self._elapsed_ms(first, second) * 1e6)

    def release(self, event: Any) -> None:
        self._free.append(event)

    def usable(self) -> bool:
        if self._stream and self._capturing():  # the default stream cannot be captured
            return False
        if self._device_now() == self._device and self._stream_of(self._device) == self._stream:
            return True
        self.foreign += not self._capturing()  # what is captured does not run
        return False

    def saw(self, device: Any) -> None:
        if device.type == self.kind and device.index not in (None, self._device):
            self.foreign += 1

    def _take(self) -> Any:
        """Return an event that no other timeline holds, a new one where all are held."""
        try:
            event = self._unused.pop()
        except IndexError:
            event = self._new()
            _made.append(event)
        self._mine.append(event)
        return event


class CudaEvents(TorchEvents):
    """CUDA's: the same by quicker ways, and none while a graph is captured.

    `Event.record()` and torch's Python functions look up the stream and check that CUDA is set up, at the cost of the
    event itself. While any thread captures a graph in CUDA's global mode, a query by another one ends that capture,
    unless the thread that queries has left the mode before: that is done around each query. `elapsed_time()` queries
    both events first; the runtime is asked for the time alone.
    """

    def _look_up(self, torch: Any) -> None:
        c = torch._C
        event: Any = getattr(c, "_CudaEventBase", torch.cuda.Event)  # what `torch.cuda.Event` calls for each of these
        self._new = partial(torch.cuda.Event, enable_timing=True)
        self._record, self._query, self._elapsed_ms = event.record, event.query, event.elapsed_time
        self._device_now = getattr(c, "_cuda_getDevice", torch.cuda.current_device)
        self._current, self._stream_of = torch.cuda.current_stream, c._cuda_getCurrentRawStream
        self._capturing = getattr(c, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing)
        exchange, elapsed, last_error = _runtime_functions(torch)
        self._exchange_mode = exchange or (lambda mode: 0)
        if elapsed is not None and hasattr(event, "cuda_event"):
            self._elapsed_of_handles, self._forget_error = elapsed, last_error
            self._elapsed_ms = self._elapsed_ms_directly

    def can_time(self) -> bool:
        """Return whether the device has a context: an event would make one (on "cuda:1" without `set_device`)."""
        if not self._torch._C._cuda_hasPrimaryContext(self._device):
            return False
        self._recorded_on = self._current(self._device)
        with contextlib.suppress(AttributeError):  # torch has it since 2.4
            self.uuid = f"GPU-{self._torch.cuda.get_device_properties(self._device).uuid}"
        return True

    def ready(self, event: Any) -> bool:
        mode = ctypes.byref(ctypes.c_int(_RELAXED))
        self._exchange_mode(mode)
        try:
            return bool(self._query(event))
        finally:
            self._exchange_mode(mode)

    def elapsed_ns(self, first: Any, second: Any) -> int:
        mode = ctypes.byref(ctypes.c_int(_RELAXED))
        self._exchange_mode(mode)
        try:
            return int(self._elapsed_ms(first, second) * 1e6)
        finally:
            self._exchange_mode(mode)

    def _elapsed_ms_directly(self, first: Any, second: Any) -> float:
        ms = ctypes.c_float()
        error = self._elapsed_of_handles(ctypes.byref(ms), first.cuda_event, second.cuda_event)
        if error:
            self._forget_error()  # else torch would find it after the next launch of the user's
            raise RuntimeError(f"the time between two events: error {error} of the CUDA runtime")
        return ms.value


def _runtime_functions(torch: Any) -> tuple[Any, Any, Any]:
    """Return `cudaThreadExchangeStreamCaptureMode`, `cudaEventElapsedTime` and `cudaGetLastError` of torch's runtime.

    None where it is not found. They do not wait, so Python's lock is kept: getting it back could take 5 ms.
    """
    version = getattr(torch, "version", None)
    cuda, hip = getattr(version, "cuda", None), getattr(version, "hip", None)
    names = [f"libcudart.so.{str(cuda).split('.')[0]}", f"libcudart.so.{cuda}"] if cuda else []
    names += ["libamdhip64.so"] if hip else []
    prefix = "hip" if hip else "cuda"
    for name in names:
        with contextlib.suppress(OSError, AttributeError):  # not loaded by that name, or linked into torch itself
            library = ctypes.PyDLL(name, mode=getattr(os, "RTLD_NOLOAD", 0) | ctypes.DEFAULT_MODE)
            exchange: Any = getattr(library, f"{prefix}ThreadExchangeStreamCaptureMode")
            elapsed: Any = getattr(library, f"{prefix}EventElapsedTime")
            last_error: Any = getattr(library, f"{prefix}GetLastError")
            exchange.argtypes, elapsed.argtypes, last_error.argtypes = (ctypes.c_void_p,), (ctypes.c_void_p,) * 3, ()
            return exchange, elapsed, last_error
    return None, None, None
