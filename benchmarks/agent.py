"""What the agent costs, beside node_exporter on the same machine in the same minutes.

python -m benchmarks.agent [--seconds 60] [--flood-seconds 120]

Prints the tables of docs/agent.md. CPU is user and system time of the process in /proc/PID/stat, as a share of one core; memory is its
resident size. The GPUs are a scripted NVML (tests/nvml), whose own time is part of the agent's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import pynvml

from benchmarks.agent_ingest import ingest_table
from tests.nvml.fake import FakeGpu, FakeNvml

ROOT = Path(__file__).parents[1]
_TICKS = os.sysconf("SC_CLK_TCK")
GPM = {
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
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def resident_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def get(url: str, compressed: bool = True) -> tuple[float, bytes]:
    """Return (seconds, body as sent) of one request on a connection of its own, as Prometheus asks."""
    headers = {"Accept-Encoding": "gzip"} if compressed else {}
    begin = time.perf_counter()
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as response:
        body: bytes = response.read()
    return time.perf_counter() - begin, body


def wait_until(url: str) -> None:
    for _ in range(300):
        with contextlib.suppress(OSError):
            get(url)
            return
        time.sleep(0.1)
    raise SystemExit(f"{url} does not answer")


@contextmanager
def running(*command: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, cwd=ROOT)
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
def ranks(endpoint: str, count: int, rate: int, workers: int, seconds: int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "benchmarks.agent_load", endpoint]
    with running(*command, *map(str, (count, rate, workers, seconds))) as process:
        yield process


def write_gpus(nvml: FakeNvml, pids: list[int]) -> None:
    gpus = [
        FakeGpu(
            uuid=f"GPU-{n:08d}-0000-4000-8000-000000000000",
            pci_bus_id=f"00000000:{0x18 + n:02X}:00.0",
            minor=n,
            processes=((pid, 20 << 30),),
            nvlinks=18,
            gpm=GPM,
        )
        for n, pid in enumerate(pids)
    ]
    nvml.write(gpus)


def cost(pid: int, seconds: float) -> float:
    """Return the CPU share of a process over the next seconds."""
    begin_s, begin = time.monotonic(), cpu_s(pid)
    time.sleep(seconds)
    return (cpu_s(pid) - begin) / (time.monotonic() - begin_s)


def node(directory: Path, seconds: int, full: bool = False) -> None:
    """8 GPUs, 8 ranks of 20 steps/s with 4 workers each; scraped beside node_exporter."""
    nvml = FakeNvml(directory)
    write_gpus(nvml, [])
    options = ["--series", "full"] if full else []
    with (
        agent(directory, nvml, *options) as (pid, url, endpoint),
        ranks(endpoint, 8, 20, 4, 10 * seconds + 200) as load,
    ):
        assert load.stdout is not None
        write_gpus(nvml, json.loads(load.stdout.readline()))
        time.sleep(25)  # process lists are polled every 10 s
        page = get(f"{url}/metrics", False)[1].decode()
        series = sum(not line.startswith("#") for line in page.splitlines())
        print(f"\n## 8 GPUs, 8 ranks × 20 steps/s, 4 loader workers each{', --series full' if full else ''}\n")
        print(f"series {series}")
        if full:
            return
        idle = cost(pid, seconds)
        print(f"agent: {100 * idle:.2f}% of a core, {resident_mb(pid):.1f} MB resident")
        exporter = shutil.which("prometheus-node-exporter") or shutil.which("node_exporter")
        if exporter is None:
            print("node_exporter is not installed: no comparison")
            return
        port = free_port()
        with running(exporter, f"--web.listen-address=127.0.0.1:{port}", "--log.level=error") as other:
            other_url = f"http://127.0.0.1:{port}/metrics"
            wait_until(other_url)
            compare(pid, f"{url}/metrics", idle, other.pid, other_url, seconds)


def compare(pid: int, url: str, idle: float, other: int, other_url: str, seconds: int) -> None:
    """Scrape both in turns, each time a new sample of the agent's, and print medians and CPU a scrape."""
    times: dict[str, list[float]] = {url: [], other_url: []}
    begin_s, own, others = time.monotonic(), cpu_s(pid), cpu_s(other)
    while time.monotonic() - begin_s < seconds:
        for each, taken in times.items():
            taken.append(get(each)[0])
        time.sleep(1.07)
    elapsed_s = time.monotonic() - begin_s
    count = len(times[url])
    mine_ms = 1e3 * ((cpu_s(pid) - own) - idle * elapsed_s) / count
    theirs_ms = 1e3 * (cpu_s(other) - others) / count
    their_series = sum(not line.startswith("#") for line in get(other_url, False)[1].decode().splitlines())
    print(f"\n| scrape (gzip, {count} in turns) | series | median ms | CPU ms | resident MB |\n|---|---|---|---|---|")
    mine_series = sum(not line.startswith("#") for line in get(url, False)[1].decode().splitlines())
    print(
        f"| gpuwatch agent | {mine_series} | {1e3 * median(times[url]):.2f} | {mine_ms:.2f} | {resident_mb(pid):.1f} |"
    )
    their_ms = 1e3 * median(times[other_url])
    print(f"| node_exporter, defaults | {their_series} | {their_ms:.2f} | {theirs_ms:.2f} | {resident_mb(other):.1f} |")
    print(
        f"\nratio of medians {median(times[other_url]) / median(times[url]):.1f}, of CPU {theirs_ms / max(0.01, mine_ms):.1f}"
    )


def flood(directory: Path, count: int, rate: int, seconds: int) -> None:
    """Many ranks at a high rate for some minutes: memory flat, nothing lost."""
    nvml = FakeNvml(directory)
    write_gpus(nvml, [])
    with agent(directory, nvml) as (pid, url, endpoint), ranks(endpoint, count, rate, 0, seconds) as load:
        assert load.stdout is not None
        load.stdout.readline()
        time.sleep(min(30, seconds / 3))
        first_mb, begin, begin_s = resident_mb(pid), cpu_s(pid), time.monotonic()
        told = json.loads(load.stdout.readline())
        share = (cpu_s(pid) - begin) / (time.monotonic() - begin_s)
        last_mb = resident_mb(pid)
        time.sleep(3)
        page = get(f"{url}/metrics", False)[1].decode()
        values = [line.rsplit(" ", 1) for line in page.splitlines()]
        steps = sum(float(v) for k, v in values if k.startswith("gpuwatch_steps_total"))
        lost = sum(float(v) for k, v in values if k.startswith("gpuwatch_step_records_lost_total"))
        rejected = sum(float(v) for k, v in values if k.startswith("gpuwatch_messages_rejected_total"))
        print(f"\n## {count} ranks × {rate} steps/s for {seconds} s\n")
        print(f"sent {told['steps']} steps ({told['refused']} messages refused by the socket), counted {steps:.0f},")
        print(f"records lost {lost:.0f}, messages rejected {rejected:.0f}")
        print(f"agent: {100 * share:.1f}% of a core, resident {first_mb:.1f} → {last_mb:.1f} MB")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--flood-seconds", type=int, default=120)
    parser.add_argument("--only", choices=["ingest", "node", "full", "flood"])
    arguments = parser.parse_args()
    wanted = [arguments.only] if arguments.only else ["ingest", "node", "full", "flood"]
    for part in wanted:
        with tempfile.TemporaryDirectory() as directory:
            if part == "ingest":
                ingest_table(Path(directory))
            elif part == "flood":
                flood(Path(directory), 64, 100, arguments.flood_seconds)
            else:
                node(Path(directory), arguments.seconds, part == "full")


if __name__ == "__main__":
    main()
