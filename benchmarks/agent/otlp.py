"""What pushing by OTLP costs on a node of 8 GPUs and 8 ranks: CPU and resident memory; part of `benchmarks.agent`."""

from __future__ import annotations

import contextlib
import gzip
import json
import threading
import time
from pathlib import Path
from statistics import median

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.agent.processes import agent, get, ranks, resident_mb, write_gpus
from gpuwatch.metrics import BY_NAME, Sample
from gpuwatch_agent.exporter import Page, Snapshot
from tests.nvml.fake import FakeNvml
from tests.receivers import otlp_collector

_PUSHES = 200
_SETTLE_S = 60


def otlp_part(directory: Path) -> list[str]:
    """The resident size of two agents, with and without; then each push of a page here, by its threads' CPU time."""
    memory_mb: dict[bool, float] = {}
    with otlp_collector() as collector:
        for is_on in (False, True):
            place = directory / str(is_on)
            place.mkdir()
            nvml = FakeNvml(place)
            write_gpus(nvml, [])
            options = ["--otlp", collector.url] if is_on else []
            with agent(place, nvml, *options) as (pid, url, endpoint), ranks(endpoint, 8, 20, 4, 200) as load:
                assert load.stdout is not None
                write_gpus(nvml, json.loads(load.stdout.readline()))
                time.sleep(_SETTLE_S)
                memory_mb[is_on] = resident_mb(pid)
                page = get(f"{url}/metrics", compressed=False)[1].decode()
        samples = [
            Sample(sample.name, sample.value, tuple(sample.labels[name] for name in BY_NAME[sample.name].labels))
            for family in text_string_to_metric_families(page)
            for sample in family.samples
        ]
        cpu_ms, sent = _push(collector.url, samples), collector.posts[-1][2]
    return [
        "| series | bytes a push, gzipped | CPU ms a push, median | of a core at 15 s | MB resident without | with |",
        "|---|---|---|---|---|---|",
        f"| {len(samples)} | {len(gzip.compress(sent, 1)):,} | {cpu_ms:.1f} | {cpu_ms / 150:.2f}% "
        f"| {memory_mb[False]:.0f} | {memory_mb[True]:.0f} |",
    ]


def _push(url: str, samples: list[Sample]) -> float:
    """Return the CPU time of a push in ms, the median of many."""
    from gpuwatch_agent.otlp import OtlpPusher

    latest: list[Snapshot] = []
    pusher = OtlpPusher(url, 15.0, lambda: latest[-1], "node", 9478, None)
    taken_ms = []
    for number in range(_PUSHES):
        latest[:] = [Snapshot(1e9 + number, float(number), Page(samples))]
        begin_ms = _cpu_ms()
        pusher.tick(15.0 * number)
        taken_ms.append(_cpu_ms() - begin_ms)
    return median(taken_ms)


def _cpu_ms() -> float:
    """Return the CPU time of this thread and of the one that makes requests. Source: /proc/PID/task/TID/schedstat."""
    own = [
        threading.get_native_id(),
        *(t.native_id for t in threading.enumerate() if t.name == "gpuwatch-OTLP collector"),
    ]
    total_ns = 0
    for thread in own:
        with contextlib.suppress(FileNotFoundError):
            total_ns += int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0])
    return total_ns / 1e6
