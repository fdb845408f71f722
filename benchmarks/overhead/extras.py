"""What is not a time per step: memory, bytes on the wire, lost steps. Each is run in a process of its own."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from time import perf_counter_ns

NO_AGENT = "ipc:///no/listener/here.sock"


def resident_mb() -> float:
    """Return this process's resident memory in MB. Source: /proc/self/statm, proc(5)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


def paced(count: int, every_ns: int) -> Iterator[int]:
    """Yield so many numbers, one every so many ns, however busy the time between them was."""
    due = perf_counter_ns()
    for number in range(count):
        while perf_counter_ns() < due:
            pass
        yield number
        due += every_ns


def memory() -> dict[str, float]:
    """MB the hook adds to a process with pyzmq, a socket open, and msgspec: after 30,000 steps at 10,000 a second."""
    import msgspec  # noqa: F401
    import zmq

    context = zmq.Context()
    context.socket(zmq.PUSH).connect(NO_AGENT)
    before = resident_mb()
    import gpuwatch

    imported = resident_mb()
    watch = gpuwatch.Watch(quiet=True, endpoint=NO_AGENT)
    for _ in watch.steps(paced(30_000, 100_000)):
        pass
    return {"before_mb": before, "import_mb": imported - before, "added_mb": resident_mb() - before}


def million() -> dict[str, float]:
    """MB of a process that trains 1,000,000 steps of 40 µs: what it keeps at the end of each tenth, and its peak.

    Python's own allocator keeps up to 40 MB in pieces, as bursts of steps come and go: this runs without it.
    """
    import gpuwatch

    watch = gpuwatch.Watch(quiet=True, endpoint=NO_AGENT)
    kept_mb, highest_mb = list[float](), 0.0
    for number, _ in enumerate(watch.steps(paced(1_000_000, 40_000)), 1):
        if number % 1_000 == 0:
            highest_mb = max(highest_mb, resident_mb())
        if number % 100_000 == 0:
            watch.report()
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            kept_mb.append(resident_mb())
    return {"second_tenth_mb": kept_mb[1], "last_tenth_mb": kept_mb[-1], "highest_mb": highest_mb}


@contextlib.contextmanager
def agent() -> Iterator[tuple[str, str]]:
    """Run a real agent; yield its endpoint and its URL."""
    with tempfile.TemporaryDirectory() as directory, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        endpoint, url = f"ipc://{directory}/hook.sock", f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "gpuwatch", "agent", "--http", f"127.0.0.1:{port}", "--listen", endpoint]
        process = subprocess.Popen(
            [*command, "--history", f"{directory}/history.db"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            _wait(lambda: _text(f"{url}/readyz") == "ok\n")
            yield endpoint, url
        finally:
            process.terminate()
            process.wait(15)


def loss() -> dict[str, float]:
    """Steps taken at 10,000 a second, and what a real agent says it got and lost."""
    import gpuwatch

    steps = 100_000
    with agent() as (endpoint, url):
        with gpuwatch.Watch(quiet=True, endpoint=endpoint) as watch:
            began = time.monotonic()
            for _ in watch.steps(paced(steps, 100_000)):
                pass
            seconds = time.monotonic() - began
        _wait(lambda: _sum(url, "gpuwatch_steps_total") >= steps)
        reported = _sum(url, "gpuwatch_steps_total")
        lost = _sum(url, "gpuwatch_step_records_lost_total")
    return {"taken": steps, "a_second": steps / seconds, "reported": reported, "records_lost": lost}


def wire() -> dict[str, float]:
    """Bytes that the hook sends, all messages together, a step: at 10,000 steps a second and at 200."""
    return {"at_10000": bytes_a_step(40_000, 100_000), "at_200": bytes_a_step(800, 5_000_000)}


def bytes_a_step(count: int, every_ns: int) -> float:
    """Return what the hook sends for so many steps, one every so many ns, divided by them."""
    import gpuwatch
    from benchmarks.fakes import MemorySender

    sender = MemorySender()
    watch = gpuwatch.Watch(quiet=True, endpoint=NO_AGENT)
    watch._publisher.send_buffer.sender = sender
    for _ in watch.steps(paced(count, every_ns)):
        pass
    watch.close()
    return sum(len(frame) for frame in sender.frames) / count


_IMPORT = """
import gc, time, torch
gc.collect()
gc.disable()  # a collection of torch's objects may fall into any import: 80 ms
began = time.process_time()
import gpuwatch
print((time.process_time() - began) * 1e3)
"""


def imports() -> dict[str, float]:
    """CPU ms of `import gpuwatch` after torch, of 11 fresh processes."""
    runs = [subprocess.run([sys.executable, "-c", _IMPORT], capture_output=True, check=True) for _ in range(11)]
    spent = sorted(float(run.stdout) for run in runs)
    return {"least_ms": spent[0], "median_ms": median(spent)}


EXTRAS: dict[str, Callable[[], dict[str, float]]] = {
    "memory": memory,
    "million": million,
    "loss": loss,
    "wire": wire,
    "import": imports,
}


def _text(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as answer:
        text: str = answer.read().decode()
        return text


def _sum(url: str, metric: str) -> float:
    """Return the sum of a metric's series."""
    lines = [line for line in _text(f"{url}/metrics").splitlines() if line.startswith(metric + "{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def _wait(look: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait until something is so, for so long at most."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            if look():
                return
        time.sleep(0.1)
