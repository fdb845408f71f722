"""What the agent costs, next to node_exporter on the same machine in the same minutes; goes to docs/evidence/agent.md.

    python -m benchmarks.agent [--only node|otlp|full|ingest|history|flood] [--seconds 60] [--flood-seconds 120]

CPU is user and system time of the process, as a share of one core; memory is its resident size. The GPUs are a
scripted NVML (tests/nvml), whose own time is part of the agent's. Ranks are real processes, and one process speaks for
all of their hooks.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median

from benchmarks.agent.history import history_part
from benchmarks.agent.ingest import ingest_part
from benchmarks.agent.otlp import otlp_part
from benchmarks.agent.page import write_part
from benchmarks.agent.processes import (
    agent,
    cpu_s,
    cpu_share,
    free_port,
    get,
    main_thread_cpu_s,
    ranks,
    resident_mb,
    running,
    series_on,
    wait_until,
    write_gpus,
)
from tests.nvml.fake import FakeNvml

_LISTED_S = 25
"""Process lists are asked for every ten seconds."""


def node_part(directory: Path, seconds: int) -> list[str]:
    """8 GPUs, 8 ranks of 20 steps/s with 4 workers each; then scraped in turns with node_exporter."""
    nvml = FakeNvml(directory)
    write_gpus(nvml, [])
    duration_s = 3 * seconds + 2 * _LISTED_S + 60
    with agent(directory, nvml) as (pid, url, endpoint), ranks(endpoint, 8, 20, 4, duration_s) as load:
        assert load.stdout is not None
        write_gpus(nvml, json.loads(load.stdout.readline()))
        time.sleep(max(_LISTED_S, seconds / 2))
        begin_s, alone = time.monotonic(), main_thread_cpu_s(pid)
        share = cpu_share(pid, seconds)
        alone = (main_thread_cpu_s(pid) - alone) / (time.monotonic() - begin_s)
        lines = [f"The agent takes **{100 * share:.1f}% of a core** and **{resident_mb(pid):.0f} MB**.", ""]
        exporter = shutil.which("prometheus-node-exporter") or shutil.which("node_exporter")
        if exporter is None:
            return [*lines, "node_exporter was not installed: no comparison."]
        port = free_port()
        with running(exporter, f"--web.listen-address=127.0.0.1:{port}") as other:
            other_url = f"http://127.0.0.1:{port}/metrics"
            wait_until(other_url)
            return lines + compare(pid, f"{url}/metrics", alone, other.pid, other_url, seconds)


def compare(pid: int, url: str, share: float, other: int, other_url: str, seconds: int) -> list[str]:
    """Scrape both in turns, each time a new sample of the agent's; return medians and CPU a scrape.

    The agent answers in its main thread, which does nothing else: a scrape's CPU is what that takes beyond `share`, its
    cost without scrapes.
    """
    times: dict[str, list[float]] = {url: [], other_url: []}
    begin_s, own, others = time.monotonic(), main_thread_cpu_s(pid), cpu_s(other)
    while time.monotonic() - begin_s < seconds:
        for each, taken in times.items():
            taken.append(get(each)[0])
        time.sleep(1.07)
    elapsed_s, count = time.monotonic() - begin_s, len(times[url])
    own_ms = 1e3 * (main_thread_cpu_s(pid) - own - share * elapsed_s) / count
    other_ms = 1e3 * (cpu_s(other) - others) / count
    again = [get(url)[0] for _ in range(20)]
    return [
        f"| scrape with gzip, medians of {count} in turns | series | ms | CPU ms | resident MB |",
        "|---|---|---|---|---|",
        f"| gpuwatch agent, each a new sample | {len(series_on(url))} | {1e3 * median(times[url]):.1f} | {own_ms:.1f} | {resident_mb(pid):.0f} |",
        f"| gpuwatch agent, the same sample again | | {1e3 * median(again):.1f} | | |",
        f"| node_exporter, its defaults | {len(series_on(other_url))} | {1e3 * median(times[other_url]):.1f} | {other_ms:.1f} | {resident_mb(other):.0f} |",
    ]


def full_part(directory: Path) -> list[str]:
    """How many series the same node has, by what they describe: with the standard set and with all."""
    found: dict[str, Counter[str]] = {}
    for kind in ("standard", "full"):
        place = directory / kind
        place.mkdir()
        nvml = FakeNvml(place)
        write_gpus(nvml, [])
        with agent(place, nvml, "--series", kind) as (_, url, endpoint), ranks(endpoint, 8, 20, 4, 200) as load:
            assert load.stdout is not None
            write_gpus(nvml, json.loads(load.stdout.readline()))
            time.sleep(_LISTED_S + 15)
            found[kind] = Counter(group(name) for name, _ in series_on(f"{url}/metrics"))
    lines = ["| series | standard | `--series full` |", "|---|---|---|"]
    for name in sorted(found["full"], key=lambda each: -found["full"][each]):
        lines.append(f"| {name} | {found['standard'][name]} | {found['full'][name]} |")
    return [*lines, f"| **together** | **{found['standard'].total()}** | **{found['full'].total()}** |"]


def group(series: str) -> str:
    """Return what a series describes, as text."""
    name, _, labels = series.partition("{")
    if "GPU-" in labels and "UUID=" in labels:
        ledger = name in ("gpuwatch_gpu_seconds_total", "gpuwatch_gpu_ledger_watermark_timestamp_seconds")
        return "8 GPUs: ledger (states, watermark)" if ledger else "8 GPUs: readings, info, owner"
    if "run=" in labels and "rank=" in labels:
        if name in ("gpuwatch_run_seconds_total", "gpuwatch_ledger_watermark_timestamp_seconds"):
            return "8 ranks: ledger (states, watermark)"
        return (
            "8 ranks: step histogram"
            if name.startswith("gpuwatch_step_seconds")
            else "8 ranks: steps, phases, workers, process, info"
        )
    return "the run: findings" if "run=" in labels else "the node and the agent itself"


def flood_part(directory: Path, count: int, rate: int, seconds: int) -> list[str]:
    """Many ranks at a high rate for some minutes: is memory flat, is anything lost?"""
    nvml = FakeNvml(directory)
    write_gpus(nvml, [])
    with agent(directory, nvml) as (pid, url, endpoint), ranks(endpoint, count, rate, 0, seconds) as load:
        assert load.stdout is not None
        load.stdout.readline()
        time.sleep(min(120, seconds / 3))  # a minute of steps is kept in memory, and then no more
        first_mb, begin, begin_s = resident_mb(pid), cpu_s(pid), time.monotonic()
        reported = json.loads(load.stdout.readline())
        share = (cpu_s(pid) - begin) / (time.monotonic() - begin_s)
        last_mb = resident_mb(pid)
        for _ in range(30):  # on a busy machine the last messages take a while
            time.sleep(2)
            series = series_on(f"{url}/metrics")
            if (
                round(sum(value for name, value in series if name.startswith("gpuwatch_steps_total{")))
                == reported["steps"]
            ):
                break
        size_mb = (directory / "history.db").stat().st_size / 1e6

    def total(metric: str) -> int:
        return round(sum(value for name, value in series if name.partition("{")[0] == metric))

    return [
        "| | |",
        "|---|---|",
        f"| steps sent, messages that the socket refused | {reported['steps']:,}, {reported['refused']} |",
        f"| steps counted by the agent | {total('gpuwatch_steps_total'):,} |",
        f"| step records lost, messages rejected | {total('gpuwatch_step_records_lost_total')}, {total('gpuwatch_messages_rejected_total')} |",
        f"| CPU | {100 * share:.1f}% of a core |",
        f"| resident memory after {min(120, seconds // 3)} s and after {seconds} s | {first_mb:.0f} MB, {last_mb:.0f} MB |",
        f"| history file | {size_mb:.0f} MB |",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.agent", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--flood-seconds", type=int, default=120)
    parts = ("ingest", "history", "full", "node", "otlp", "flood")
    parser.add_argument("--only", choices=parts, action="append")
    arguments = parser.parse_args()
    for part in arguments.only or parts:
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            if part == "ingest":
                lines = ingest_part(directory)
            elif part == "history":
                lines = history_part(directory)
            elif part == "otlp":
                lines = otlp_part(directory)
            elif part == "full":
                lines = full_part(directory)
            elif part == "node":
                lines = node_part(directory, arguments.seconds)
            else:
                lines = flood_part(directory, 64, 100, arguments.flood_seconds)
        print("\n".join([f"\n## {part}\n", *lines]), flush=True)
        write_part(part, lines, os.getloadavg()[0])


if __name__ == "__main__":
    main()
