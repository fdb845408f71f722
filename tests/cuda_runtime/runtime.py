"""The simulated CUDA runtime under torch's own CUDA build, for tests and benchmarks: work, errors, counters, captures.

runtime = loaded()             # skips where torch is no CUDA build on this runtime: make test-cuda-runtime
runtime.launch(3_000_000)      # 3 ms of work on torch's current stream
runtime.fail("cudaEventQuery", nth=2, error=ILLEGAL_ADDRESS, sticky=True)
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cuda_runtime.build import RUNTIME

INVALID_VALUE, OUT_OF_MEMORY, INVALID_CONFIGURATION, INVALID_HANDLE, NOT_READY = 1, 2, 9, 400, 600
ILLEGAL_ADDRESS, CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED, CAPTURED_EVENT = 700, 900, 901, 907
GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
"""Capture modes."""
RECORD, QUERY, ELAPSED, CAPTURE_CHECK = (
    "cudaEventRecordWithFlags",
    "cudaEventQuery",
    "cudaEventElapsedTime",
    "cudaStreamIsCapturing",
)


class Runtime:
    """The runtime's own controls, and raw calls of the CUDA Runtime API that torch has no function for. Times in ns."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.cuda = library
        library.sim_now.restype = library.sim_end_ns.restype = ctypes.c_int64
        library.sim_calls.restype = library.sim_synchronising_calls.restype = ctypes.c_uint64
        library.sim_call_name.restype = ctypes.c_char_p
        library.sim_copy_bytes_per_ns.argtypes = [ctypes.c_double]

    def launch(self, work_ns: int, stream: int | None = None, fails_with: int = 0) -> None:
        """Queue work on a stream, which may end with a sticky error. None is torch's current stream.

        Raises what torch's own launches raise.
        """
        handle = ctypes.c_void_p(_current_stream() if stream is None else stream)
        if fails_with:
            error = self.cuda.sim_launch_failing(handle, ctypes.c_int64(work_ns), fails_with)
        else:
            error = self.cuda.sim_launch(handle, ctypes.c_int64(work_ns))
        if error:
            self.cuda.cudaGetLastError()
            import torch

            raise torch.AcceleratorError(f"CUDA error: {self.text(error)}")

    def text(self, error: int) -> str:
        self.cuda.cudaGetErrorString.restype = ctypes.c_char_p
        return bytes(self.cuda.cudaGetErrorString(error)).decode()

    def end_ns(self, stream: int | None = None) -> int:
        """Return when the last work of a stream ends, by the clock of `now_ns`."""
        return int(self.cuda.sim_end_ns(ctypes.c_void_p(_current_stream() if stream is None else stream)))

    def now_ns(self) -> int:
        """Return the device's clock: the host's monotonic one, but under `manual_clock`."""
        return int(self.cuda.sim_now())

    @contextmanager
    def manual_clock(self) -> Iterator[None]:
        """The device's time stands still in here, but for `advance` and for what waits for the device."""
        self.cuda.sim_manual_clock(1)
        yield
        self.cuda.sim_manual_clock(0)

    def advance(self, ns: int) -> None:
        self.cuda.sim_advance(ctypes.c_int64(ns))

    def copy_rate(self, bytes_per_ns: float) -> None:
        self.cuda.sim_copy_bytes_per_ns(bytes_per_ns)

    def fail(self, call: str, nth: int, error: int, sticky: bool = False) -> None:
        """Let the nth call of that name from now on fail (0: every one). After a sticky error, all later calls fail."""
        assert self.cuda.sim_fail(call.encode(), ctypes.c_long(nth), error, int(sticky)), "too many errors at once"

    def reset(self) -> None:
        """Forget errors, and count from 0."""
        self.cuda.sim_reset()

    def calls(self) -> Counter[str]:
        """Return how often each function was called since `reset`."""
        counts: Counter[str] = Counter()
        index = 0
        while (name := self.cuda.sim_call_name(index)) is not None:
            counts[name.decode()] = int(self.cuda.sim_calls(name))
            index += 1
        return +counts

    @property
    def synchronising_calls(self) -> int:
        """How many calls since `reset` made the host wait for the device, or can."""
        return int(self.cuda.sim_synchronising_calls())

    @property
    def events_alive(self) -> int:
        return int(self.cuda.sim_events_alive())

    def stream(self, non_blocking: bool = True) -> int:
        """Return a new stream's handle."""
        handle = ctypes.c_void_p()
        assert not self.cuda.cudaStreamCreateWithFlags(ctypes.byref(handle), int(non_blocking))
        assert handle.value is not None
        return handle.value

    def begin_capture(self, stream: int, mode: int) -> int:
        """Return the error of beginning a capture, 0 if none."""
        return int(self.cuda.cudaStreamBeginCapture(ctypes.c_void_p(stream), mode))

    def end_capture(self, stream: int) -> int:
        """Return the error of ending a capture: 0, or why there is no graph."""
        graph = ctypes.c_void_p()
        return int(self.cuda.cudaStreamEndCapture(ctypes.c_void_p(stream), ctypes.byref(graph)))


def _current_stream() -> int:
    import torch

    return int(torch.cuda.current_stream().cuda_stream)


@functools.cache
def _library() -> ctypes.CDLL | None:
    spec = importlib.util.find_spec("torch")
    path = Path(spec.origin).parent / "lib" / RUNTIME if spec is not None and spec.origin is not None else None
    if path is None or not path.exists():
        return None
    library = ctypes.CDLL(str(path))
    return library if hasattr(library, "sim_now") else None


def loaded() -> Runtime:
    """Return the runtime that torch runs on. Skip the test or module where there is none.

    Under `make test-cuda-runtime` the test fails instead.
    """
    library = _library()
    if library is None:
        reason = "torch's CUDA build on a simulated runtime: make test-cuda-runtime"
        if os.environ.get("GPUWATCH_TEST_CUDA_RUNTIME") == "1":
            pytest.fail(f"there is no {reason}")
        pytest.skip(f"needs {reason}", allow_module_level=True)
    return Runtime(library)


# A training without maths --------------------------------------------------------------------------------------------


def optimizer_of(runtime: Runtime, work_ns: int) -> Any:
    """Return an optimizer of torch's whose step is so much work on the device."""
    import torch

    class Simulated(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:
            runtime.launch(work_ns)

    return Simulated([torch.nn.Parameter(torch.empty(1, device="cuda"))], {})


_kept: list[Any] = []


def pinned_batch(sizes: Sequence[int] = (4096, 64)) -> tuple[Any, ...]:
    """Return pinned tensors of so many bytes, allocated once, so that torch's allocators make no calls in the loop.

    They are kept for good: torch records an event when pinned memory is freed, and ends the process if that fails.
    """
    import torch

    batch = tuple(torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in sizes)
    _kept.append(batch)
    return batch
