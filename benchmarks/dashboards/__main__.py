"""What the pages cost: CPU of a refresh, ten viewers, first content, a hidden tab, a run of a million steps, a fleet.

    python -m benchmarks.dashboards [--seconds 30] [--no-browser] [--fleet 1000]

The agent is the tests' fake one: eight GPUs, an hour of history, answers in a millisecond or two, in this process; a
million steps it reads from a real history file, as the real one does. The page's process is measured alone, by /proc.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil

from benchmarks.dashboards.browser import a_fleet, a_hidden_tab, a_million_steps, in_the_browser
from benchmarks.dashboards.viewers import WINDOWS, cpu_s, viewers
from gpuwatch import wire
from gpuwatch_agent.history import History, StepBatch, Tick
from gpuwatch_agent.history.reader import HistoryReader
from gpuwatch_dashboards.panels import BY_KEY, GROUPS
from gpuwatch_dashboards.query import Scope, Span
from gpuwatch_dashboards.sources.prometheus import PrometheusSource
from gpuwatch_dashboards.views.fleet import RECORDED_S
from tests.integration.dashboards.fake import RUN_ID, FakeAgent, a_run, streamlit_page
from tests.integration.dashboards.steps import MadeUpSteps
from tests.integration.recorded_fleet import Share, recorded, write_blocks
from tests.servers import prometheus_config, start_prometheus

MESSAGES, PER_MESSAGE, STEP_S = 10_000, 100, 0.005
"""A million steps of 5 ms, sent twice a second."""
WEEK_S = 7 * 86_400.0


@dataclass(frozen=True)
class KeptSteps(MadeUpSteps):
    """Steps that are read from a history file."""

    reader: HistoryReader | None = None

    def downsampled(self, start_s: float, query: dict[str, str]) -> dict[str, Any] | None:
        assert self.reader is not None
        found = self.reader.steps("million", 0, int(query["points"]))
        return None if found is None else msgspec.to_builtins(found)


@contextlib.contextmanager
def a_million_kept(start_s: float) -> Iterator[HistoryReader]:
    """Give a history that holds them, and print how long it takes to downsample them."""
    names = [name for name in wire.STEP_COLUMNS if name not in ("start_ns", "epoch_start", "comm_wait_ns")]
    chance = random.Random(1)
    columns = [
        {name: wire.pack([chance.randrange(1_000_000) for _ in range(PER_MESSAGE)]) for name in names}
        for _ in range(50)
    ]
    with tempfile.TemporaryDirectory() as folder:
        history = History(Path(folder) / "history.db")
        for n in range(MESSAGES):
            first, step_ns = n * PER_MESSAGE, int(STEP_S * 1e9)
            starts = wire.pack([(first + k) * step_ns for k in range(PER_MESSAGE)])
            at_s = start_s + (first + PER_MESSAGE) * STEP_S
            batch = StepBatch("million", 0, first, at_s, int(start_s * 1e9), {**columns[n % 50], "start_ns": starts})
            history.commit(Tick(at_s, [], {}, [], [batch], []))
        times = []
        for _ in range(3):
            begin = time.process_time()
            found = history.reader.steps("million", 0, 6000)
            assert found is not None and found.steps == MESSAGES * PER_MESSAGE
            times.append(time.process_time() - begin)
        print(f"the agent downsamples 1,000,000 steps in {statistics.median(times):.2f} s of CPU", flush=True)
        yield history.reader
        history.close()


@contextlib.contextmanager
def served(agent_url: str, prometheus_url: str | None = None) -> Iterator[str]:
    with (
        tempfile.TemporaryDirectory() as folder,
        streamlit_page(agent_url, Path(folder) / "streamlit.log", prometheus_url) as url,
    ):
        yield url


def pages(seconds: float, browser: bool) -> None:
    """Print what Live and Run cost."""
    start_s = time.time() - MESSAGES * PER_MESSAGE * STEP_S - 60
    with a_million_kept(start_s) as reader:
        over = {"status": "ended", "started_s": start_s, "steps": 1_000_000, "verdict": None, "recent": None}
        million = a_run("million", "long", MESSAGES * PER_MESSAGE * STEP_S, **over)
        agent = FakeAgent([a_run(age_s=3700.0), million], gpus=True)
        agent.steps = {
            RUN_ID: MadeUpSteps(35_000, 0.103, 0.064, 1000),
            "million": KeptSteps(1_000_000, STEP_S, 0.0, 5000, reader=reader),
        }
        agent.start()
        with served(agent.url) as url:
            for window in WINDOWS:
                for count in (1, 10):
                    asyncio.run(viewers(url, count, seconds, window))
            if browser:
                in_the_browser(url, seconds)
                a_hidden_tab(url, seconds)
                a_million_steps(url)
        agent.stop()


def a_week_of_a_fleet(nodes: int, browser: bool) -> None:
    """Print what the page "Fleet" costs with a Prometheus that holds a week of 50 users, 300 jobs and so many nodes."""
    chance = random.Random(1)
    shares = [
        Share(
            f"node-{n:04d}:9478", f"user{chance.randrange(50):02d}", str(n % 300), f"run-{n % 300}", 8.0,
            starved=max(0.0, chance.gauss(0.1, 0.15)), idle=chance.choice((0.0, 0.0, 0.3)),
        )
        for n in range(nodes)
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "server"
        store.mkdir()
        begin = time.monotonic()
        write_blocks(recorded(shares), WEEK_S / 3600, store / "data", ahead_s=7200)
        print(f"a week of {nodes} nodes is written in {time.monotonic() - begin:.0f} s", flush=True)
        with start_prometheus(store, prometheus_config({})) as server:
            source, process = PrometheusSource(server.url), psutil.Process(server.process.pid)
            for level in ("user", "node", "run", "job"):
                cpu, begin = cpu_s(process), time.monotonic()
                end_s = time.time() // RECORDED_S * RECORDED_S
                span = Span(end_s - WEEK_S, end_s, 300)
                stats = [panel for panel in GROUPS["fleet"] if panel.kind == "stat"]
                for panel in stats:
                    source.answers(panel, Scope(), span)
                head_s = time.monotonic() - begin
                rows = {
                    tuple(each.labels.items())
                    for of in source.answers(BY_KEY[f"by_{level}"], Scope(), span)
                    for each in of
                }
                print(
                    f"queries for a week of {nodes} nodes by {level}: head {head_s:.2f} s, all {time.monotonic() - begin:.2f} s "
                    f"({cpu_s(process) - cpu:.2f} s of Prometheus's CPU); {len(rows)} rows",
                    flush=True,
                )
            if browser:
                with served("http://127.0.0.1:1", server.url) as url:
                    a_fleet(url, nodes)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.dashboards", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--seconds", type=float, default=30, help="how long each is watched")
    parser.add_argument("--no-browser", action="store_true")
    parser.add_argument(
        "--fleet",
        type=int,
        default=0,
        metavar="NODES",
        help="a week of so many nodes as well (1,000: 1 minute more, 2 GB)",
    )
    parser.add_argument("--fleet-only", action="store_true", help="nothing but that")
    options = parser.parse_args()
    print(
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; 8 GPUs, 1 h of history, refresh every 2 s", flush=True
    )
    if not options.fleet_only:
        pages(options.seconds, not options.no_browser)
    if options.fleet:
        a_week_of_a_fleet(options.fleet, not options.no_browser)


if __name__ == "__main__":
    main()
