"""The processes that the agent's benchmark measures: CPU time and resident size from /proc, scrapes over HTTP."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pynvml

from benchmarks import ROOT
from tests.nvml.fake import FakeGpu, FakeNvml

_TICKS = os.sysconf("SC_CLK_TCK")
_GPM = {
    pynvml.NVML_GPM_METRIC_SM_UTIL: 87.5,
    pynvml.NVML_GPM_METRIC_SM_OCCUPANCY: 40.0,
    pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL: 31.0,
    pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL: 50.0,
    pynvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC: 10.0,
    pynvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC: 2000.0,
    pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC: 300.0,
    pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC: 400.0,
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def cpu_s(pid: int) -> float:
    """Return user and system time of a process, all threads, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def main_thread_cpu_s(pid: int) -> float:
    """Return a process's main thread's time on a CPU, in seconds, to the ns. Source: /proc/PID/task/TID/schedstat."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def resident_mb(pid: int) -> float:
    """Return what a process has in memory, in 10⁶ bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def cpu_share(pid: int, seconds: float) -> float:
    """Return the share of one core that a process takes over the next seconds."""
    begin_s, begin = time.monotonic(), cpu_s(pid)
    time.sleep(seconds)
    return (cpu_s(pid) - begin) / (time.monotonic() - begin_s)


def get(url: str, compressed: bool = True) -> tuple[float, bytes]:
    """Return (seconds, body as sent) of one request on a connection of its own."""
    headers = {"Accept-Encoding": "gzip"} if compressed else {}
    begin = time.perf_counter()
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as response:
        body: bytes = response.read()
    return time.perf_counter() - begin, body


def series_on(url: str) -> list[tuple[str, float]]:
    """Return (name with labels, value) of every series on a page."""
    lines = get(url, compressed=False)[1].decode().splitlines()
    found = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
    return [(name, float(value)) for name, _, value in found]


def wait_until(url: str) -> None:
    """Wait until something answers there."""
    for _ in range(600):
        with contextlib.suppress(OSError):
            get(url)
            return
        time.sleep(0.1)
    raise SystemExit(f"{url} does not answer")


@contextmanager
def running(*command: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Start a program; end it afterwards."""
    everything = {**os.environ, **environment}
    process = subprocess.Popen(
        command,
        env=everything,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(20)
        if process.stdout is not None:
            process.stdout.close()


@contextmanager
def agent(directory: Path, nvml: FakeNvml, *options: str) -> Iterator[tuple[int, str, str]]:
    """Start an agent; give its pid, its URL and where hooks connect."""
    port, endpoint = free_port(), f"ipc://{directory}/hook.sock"
    command = [sys.executable, "-m", "gpuwatch", "agent", "--http", f"127.0.0.1:{port}", "--listen", endpoint]
    command += ["--history", str(directory / "history.db"), *options]
    with running(*command, **nvml.environment()) as process:
        url = f"http://127.0.0.1:{port}"
        wait_until(f"{url}/readyz")
        yield process.pid, url, endpoint


@contextmanager
def ranks(endpoint: str, count: int, rate: int, workers: int, seconds: float) -> Iterator[subprocess.Popen[str]]:
    """Start `benchmarks.agent.load`; its first line are the pids."""
    options = map(str, (count, rate, workers, seconds))
    with running(sys.executable, "-m", "benchmarks.agent.load", endpoint, *options) as process:
        yield process


def write_gpus(nvml: FakeNvml, pids: list[int], count: int = 8) -> None:
    """Script `count` H100 with GPM and NVLink, each held by one of these processes as far as there are any."""
    gpus = [
        FakeGpu(
            uuid=f"GPU-{n:08d}-0000-4000-8000-000000000000",
            pci_bus_id=f"00000000:{0x18 + n:02X}:00.0",
            minor=n,
            processes=((pids[n], 20 << 30),) if n < len(pids) else (),
            nvlinks=18,
            gpm=_GPM,
        )
        for n in range(count)
    ]
    nvml.write(gpus)
