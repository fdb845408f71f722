"""A torch device without hardware, `asyncdev`: results are real, work only takes time, on streams as on a GPU.

    from benchmarks import async_device

    async_device.load()                    # builds device.cpp with the system's C++ compiler once (15 s): then cached
    model.to("asyncdev")                   # tensors, autograd, optimizers, loaders, torch.accelerator, streams, events
    async_device.launch(0.010)             # 10 ms of work on the current stream: returns at once
    async_device.settings(op_s=1e-5, to_device_s=0.004)    # what each operation, and each copy from the host, takes
    async_device.fail("query", nth=3)      # the third query of a timing event from here on raises RuntimeError
    async_device.idle_ns(since_ns)         # the truth: for how long the device had nothing to do

Once loaded, this module is `torch.asyncdev`. Results are computed by CPU kernels before an operation returns; only the
time is asynchronous.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import itertools
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

NAME = "asyncdev"
DEVICES = 2
COMPILERS = ("g++", "c++", "clang++")
SETTINGS = ("op_s", "to_device_s", "from_device_s", "kind", "event_delay_s", "capturing")
CALLS = ("create", "record", "query", "elapsed", "wait", "synchronize", "launch")
"""The positions of both are those of the enums in device.cpp."""
COMPUTE, TRANSFER = "compute", "transfer"

Span = tuple[int, int, str]
"""Begin and end in CLOCK_MONOTONIC ns, and the kind of work."""

_SOURCE = Path(__file__).with_name("device.cpp")
_kinds = [COMPUTE, TRANSFER]
_library: Any = None


class NoCompiler(RuntimeError):
    """There is no C++ compiler to build the device with."""


def load() -> None:
    """Build the device if it is not cached, and register it with torch. A second call does nothing.

    Raises: NoCompiler; CalledProcessError with the compiler's output on stderr.
    """
    global _library
    if _library is not None:
        return
    library = ctypes.CDLL(str(build()))
    library.asyncdev_launch.argtypes = [ctypes.c_int64, ctypes.c_int64]
    library.asyncdev_set.argtypes = [ctypes.c_int, ctypes.c_int64]
    library.asyncdev_fail.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    library.asyncdev_spans.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64]
    library.asyncdev_get.restype = library.asyncdev_calls.restype = library.asyncdev_spans.restype = ctypes.c_int64
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, sys.modules[__name__])
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    library.asyncdev_register()
    _library = library


def build() -> Path:
    """Return the compiled library: from the cache, or compiled now. Its name holds what it was made from.

    Raises: NoCompiler; CalledProcessError with the compiler's output on stderr.
    """
    root = Path(torch.__file__).parent
    include = [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"]
    options = [
        "-O1",
        "-shared",
        "-fPIC",
        "-std=c++20",
        "-w",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
    ]
    made_from = hashlib.sha256(
        _SOURCE.read_bytes() + repr((torch.__version__, str(root), options)).encode()
    ).hexdigest()
    library = _cache() / f"asyncdev-{made_from[:16]}.so"
    with library.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one process builds, others wait for it
        if not library.exists():
            compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
            if compiler is None:
                raise NoCompiler(f"none of {', '.join(COMPILERS)} is installed (scripts/install-test-tools.sh)")
            new = library.with_suffix(".new")
            libraries = [f"-L{root / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
            subprocess.run([compiler, *options, *include, str(_SOURCE), "-o", str(new), *libraries], check=True)
            new.rename(library)
    return library


def in_a_fork(work: Callable[[], Any], seconds: int = 120) -> Any:
    """Return what `work` returns in a forked process that has loaded the device, and is killed after so long.

    A process that has the device keeps it, and gpuwatch finds it there: what else runs in this one is left alone.
    Raises: RuntimeError with the traceback if it raises; ChildProcessError if it is killed.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(seconds)
            torch.set_num_threads(1)  # the threads for more stayed in the parent
            load()
            answer = pickle.dumps((True, work()))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        with contextlib.suppress(BaseException), os.fdopen(writing, "wb") as pipe:
            pipe.write(answer)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if not answer:
        raise ChildProcessError(f"ended with status {status}")
    worked, result = pickle.loads(answer)
    if not worked:
        raise RuntimeError(result)
    return result


def _cache() -> Path:
    """Return a directory of the user's for compiled files; a temporary one where the home directory is read-only."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    for directory in (home / "gpuwatch-tests", Path(tempfile.gettempdir()) / f"gpuwatch-tests-{os.getuid()}"):
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(directory, os.W_OK):
            return directory
    raise OSError("no directory for the compiled device can be written")


# Work, and what it costs ----------------------------------------------------------------------------------------------


def launch(seconds: float, kind: str | None = None) -> None:
    """Add work of that many seconds to the current stream; return at once. Raises: RuntimeError by `fail("launch")`."""
    number = _library.asyncdev_get(SETTINGS.index("kind")) if kind is None else _number(kind)
    if _library.asyncdev_launch(round(seconds * 1e9), number):
        raise RuntimeError("asyncdev: injected error in launch")


def settings(**values: float) -> None:
    """Set what takes how long: `op_s`, `to_device_s`, `from_device_s` seconds for each operation or copy.

    `event_delay_s`: timing events complete so much later, never if it is negative. `capturing`: 1 while a graph is
    captured.
    """
    for name, value in values.items():
        number = round(value * 1e9) if name.endswith("_s") else int(value)
        _library.asyncdev_set(SETTINGS.index(name), number)


@contextmanager
def working_on(kind: str) -> Iterator[None]:
    """Account all work that is launched meanwhile as of this kind."""
    position = SETTINGS.index("kind")
    before = _library.asyncdev_get(position)
    _library.asyncdev_set(position, _number(kind))
    try:
        yield
    finally:
        _library.asyncdev_set(position, before)


def _number(kind: str) -> int:
    if kind not in _kinds:
        _kinds.append(kind)
    return _kinds.index(kind)


# Faults ---------------------------------------------------------------------------------------------------------------


def fail(call: str, nth: int = 1, times: int = 1) -> None:
    """Let the nth next call of this kind (one of `CALLS`) raise RuntimeError, and `times` in all: -1 for ever, 0 none.

    Of events only those with timing are counted and fail: what torch itself records for autograd and `wait_stream` has
    none.
    """
    _library.asyncdev_fail(CALLS.index(call), nth, times)


def calls() -> dict[str, int]:
    """Return how often each of `CALLS` was made since `reset`, failed ones included."""
    return {name: int(_library.asyncdev_calls(number)) for number, name in enumerate(CALLS)}


def reset() -> None:
    """Take back faults and settings, and forget what was done and counted so far."""
    settings(**dict.fromkeys(SETTINGS, 0))
    _library.asyncdev_reset()


# Truth ----------------------------------------------------------------------------------------------------------------


def stream_spans(stream: int = 0, device: int = 0) -> list[Span]:
    """Return when a stream (0 is the default one, -1 all of them) works, also in the future, on what: in its order."""
    count = int(_library.asyncdev_spans(device, stream, None, 0))
    buffer = (ctypes.c_int64 * (3 * count))()
    count = min(count, int(_library.asyncdev_spans(device, stream, buffer, count)))
    return [(buffer[3 * at], buffer[3 * at + 1], _kinds[buffer[3 * at + 2]]) for at in range(count)]


def spans(device: int = 0) -> list[Span]:
    """Return when the device works on what, over all streams: copies are what is left besides other work."""
    return flattened(stream_spans(-1, device))


def flattened(spans: Iterable[Span]) -> list[Span]:
    """Return spans that do not overlap, in order: where several do, one that is no copy wins."""
    ordered = sorted(spans)
    edges = sorted({edge for begin, end, _ in ordered for edge in (begin, end)})
    flat: list[Span] = []
    active: list[Span] = []
    following = 0
    for low, high in itertools.pairwise(edges):
        while following < len(ordered) and ordered[following][0] <= low:
            active.append(ordered[following])
            following += 1
        active = [span for span in active if span[1] > low]
        if not active:
            continue
        kind = min(active, key=lambda span: span[2] == TRANSFER)[2]
        if flat and flat[-1][1:] == (low, kind):
            flat[-1] = (flat[-1][0], high, kind)
        else:
            flat.append((low, high, kind))
    return flat


def busy_ns(since_ns: int, until_ns: int | None = None, stream: int = -1, device: int = 0) -> int:
    """Return for how many ns a stream (-1: any) worked between two moments of CLOCK_MONOTONIC; until now for None."""
    end = time.monotonic_ns() if until_ns is None else until_ns
    worked = flattened(stream_spans(stream, device))
    return sum(max(0, min(high, end) - max(low, since_ns)) for low, high, _ in worked)


def idle_ns(since_ns: int, until_ns: int | None = None, stream: int = -1, device: int = 0) -> int:
    """Return for how many ns a stream (-1: all of them) had nothing to do between two moments; until now for None."""
    end = time.monotonic_ns() if until_ns is None else until_ns
    return end - since_ns - busy_ns(since_ns, end, stream, device)


# What torch asks of a device's module ---------------------------------------------------------------------------------


class Event(torch.Event):
    """An event of this device, in Python as `torch.cuda.Event`.

    To measure times, use `torch.Event`: that takes no derived class for the other one.
    """

    def __new__(cls, enable_timing: bool = False) -> Event:
        return super().__new__(cls, device=NAME, enable_timing=enable_timing)

    def record(self, stream: Any = None) -> None:
        super().record(current_stream() if stream is None else stream)

    def wait(self, stream: Any = None) -> None:
        super().wait(current_stream() if stream is None else stream)

    def synchronize(self) -> None:
        super().synchronize()


class Stream(torch.Stream):
    """A stream of this device, in Python as `torch.cuda.Stream`."""

    def __new__(cls, device: Any = NAME, **known: int) -> Stream:
        return super().__new__(cls, **known) if known else super().__new__(cls, device=device)

    def wait_event(self, event: Any) -> None:
        event.wait(self)

    def wait_stream(self, stream: Any) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Any = None) -> Any:
        event = Event() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        super().synchronize()


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    """Return whether the device has been used: like CUDA it is set up by the first tensor, stream or event."""
    return bool(_library.asyncdev_is_initialized())


def device_count() -> int:
    return DEVICES


def current_device() -> int:
    return int(torch.accelerator.current_device_index())


def set_device(device: Any) -> None:
    torch.accelerator.set_device_index(device)


class device(torch.accelerator.device_index):
    """Make a device the current one in a `with` block."""

    def __init__(self, device: Any) -> None:
        super().__init__(torch.accelerator._get_device_index(device, optional=True))


def current_stream(device: Any = None) -> Stream:
    current = torch.accelerator.current_stream(device)
    return Stream(stream_id=current.stream_id, device_index=current.device_index, device_type=current.device_type)


@contextmanager
def stream(stream: Any) -> Iterator[None]:
    """Launch on this stream in a `with` block; None changes nothing. As `torch.cuda.stream`."""
    if stream is None:
        yield
    else:
        with stream:
            yield


def synchronize(device: Any = None) -> None:
    torch.accelerator.synchronize(device)


def manual_seed_all(seed: int) -> None:
    """Do nothing: random numbers come from the CPU's generator."""


def _is_in_bad_fork() -> bool:
    return False


def get_rng_state(device: Any = None) -> Any:
    return torch.get_rng_state()


def set_rng_state(state: Any, device: Any = None) -> None:
    torch.set_rng_state(state)


def get_amp_supported_dtype() -> list[Any]:
    return [torch.float16, torch.bfloat16]
