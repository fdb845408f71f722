"""What the pages cost: server CPU of a refresh, ten viewers, time to first content, a run of a million steps, a fleet.

python benchmarks/dashboard.py [--seconds 30] [--no-browser] [--fleet 1000]

The agent is the tests' fake one: eight GPUs, an hour of history, answers in a millisecond or two, in this process; the page's
process is measured alone, by /proc. Viewers speak Streamlit's own protocol over its websocket, without a browser, so that ten
of them do not compete with the server for cores. The browser is a headless Chromium without a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import psutil
import websockets
from streamlit.proto.BackMsg_pb2 import BackMsg
from streamlit.proto.ForwardMsg_pb2 import ForwardMsg

from gpuwatch_dashboards.model import Span
from gpuwatch_dashboards.sources import PrometheusSource
from gpuwatch_dashboards.sources.fleet import fleet
from tests.chromium import DESKTOP, chromium
from tests.integration.dashboard_fake import RUN_ID, FakeAgent, a_run, streamlit_page
from tests.integration.dashboard_steps import MadeUpSteps
from tests.integration.recorded_fleet import Share, recorded, write_blocks
from tests.servers import prometheus_config, start_prometheus

WARM_UP_S = 8.0
PATIENCE_MS = 180_000
WEEK_S = 7 * 86_400.0
WINDOWS = {"1 h": "window=1+h", "5 min": "window=5+min"}
"""The charts of an hour change every twelve seconds, those of five minutes at every refresh."""


@dataclass
class Viewer:
    """One open page: what it was sent."""

    refreshes: int = 0
    bytes: int = 0
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    async def watch(self, url: str, query: str) -> None:
        address = f"{url.replace('http', 'ws', 1)}/_stcore/stream"
        async with websockets.connect(
            address, subprotocols=["streamlit"], max_size=None, ping_interval=None, origin=url
        ) as socket:  # type: ignore[list-item, arg-type]
            begin = BackMsg()
            begin.rerun_script.query_string = query
            await socket.send(begin.SerializeToString())
            async for raw in socket:
                self._take(socket, raw, query)

    def _take(self, socket: Any, raw: Any, query: str) -> None:
        message = ForwardMsg()
        message.ParseFromString(raw)
        self.bytes += len(raw)
        kind = message.WhichOneof("type")
        if kind == "script_finished":
            self.refreshes += 1
        elif kind == "auto_rerun":
            fragment, every_s = message.auto_rerun.fragment_id, message.auto_rerun.interval
            if fragment in self.tasks:
                self.tasks[fragment].cancel()
            self.tasks[fragment] = asyncio.create_task(_rerun(socket, fragment, every_s, query))


async def _rerun(socket: Any, fragment: str, every_s: float, query: str) -> None:
    while True:
        await asyncio.sleep(every_s)
        message = BackMsg()
        message.rerun_script.fragment_id = fragment
        message.rerun_script.is_auto_rerun = True
        message.rerun_script.query_string = query
        await socket.send(message.SerializeToString())


async def viewers(url: str, count: int, seconds: float, window: str) -> None:
    """Print what `count` viewers cost the server in steady state."""
    process = next(p for p in psutil.process_iter() if _serves(p, url))
    watching = [Viewer() for _ in range(count)]
    tasks = []
    for viewer in watching:
        tasks.append(asyncio.create_task(viewer.watch(url, WINDOWS[window])))
        await asyncio.sleep(2.0 / count)  # people do not arrive at once
    await asyncio.sleep(WARM_UP_S)
    cpu, begin, seen = _cpu_s(process), time.monotonic(), sum(v.refreshes for v in watching)
    sent = sum(viewer.bytes for viewer in watching)
    await asyncio.sleep(seconds)
    cpu_s, took_s = _cpu_s(process) - cpu, time.monotonic() - begin
    refreshes = sum(viewer.refreshes for viewer in watching) - seen
    kib = (sum(viewer.bytes for viewer in watching) - sent) / refreshes / 1024
    print(
        f"{count:3d} viewer(s), {window}: {100 * cpu_s / took_s:5.1f}% of a core, {1e3 * cpu_s / refreshes:6.1f} ms of CPU and "
        f"{kib:.0f} KiB a refresh ({refreshes} refreshes in {took_s:.0f} s)",
        flush=True,
    )
    for task in (*tasks, *(task for viewer in watching for task in viewer.tasks.values())):
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _serves(process: psutil.Process, url: str) -> bool:
    with contextlib.suppress(psutil.Error):
        line = process.cmdline()
        return "streamlit" in line and f"--server.port={url.rpartition(':')[2]}" in line
    return False


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@contextlib.contextmanager
def served(agent: FakeAgent) -> Iterator[str]:
    with (
        tempfile.TemporaryDirectory() as folder,
        streamlit_page(agent.url, Path(folder) / "streamlit.log") as url,
    ):
        yield url


def in_the_browser(url: str, seconds: float) -> None:
    """Print times to first content, and what a refresh costs the browser's main thread."""
    with chromium() as browser:
        context = browser.new_context(viewport=DESKTOP)
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        for name in ("cold", "warm", "warm again"):
            begin = time.monotonic()
            page.goto(f"{url}/?{WINDOWS['1 h']}")
            page.wait_for_selector(".gw-sentence")
            verdict_s = time.monotonic() - begin
            page.wait_for_selector(".st-key-panel-ledger canvas")
            print(
                f"first content, {name}: verdict {verdict_s:.2f} s, charts {time.monotonic() - begin:.2f} s", flush=True
            )
        session = context.new_cdp_session(page)
        session.send("Performance.enable")
        for window, query in WINDOWS.items():
            page.goto(f"{url}/?{query}")
            page.wait_for_selector(".st-key-panel-disk canvas")
            page.wait_for_timeout(5000)
            texts: set[str] = set()
            before, begin = _task_s(session), time.monotonic()
            while time.monotonic() - begin < seconds:
                texts.add(page.locator(".gw-foot").inner_text())
                page.wait_for_timeout(400)
            each_ms = 1e3 * (_task_s(session) - before) / max(1, len(texts) - 1)
            print(f"refresh in the browser, {window}: {each_ms:.0f} ms of its main thread", flush=True)
        context.close()


def _task_s(session: Any) -> float:
    metrics = {metric["name"]: metric["value"] for metric in session.send("Performance.getMetrics")["metrics"]}
    return float(metrics["TaskDuration"])


def a_million_steps(url: str) -> None:
    """Print how long the page "Run" takes to show a million steps, the agent's own time left out."""
    with chromium() as browser:
        times = []
        for _ in range(3):
            context = browser.new_context(viewport=DESKTOP)
            page = context.new_page()
            page.set_default_timeout(PATIENCE_MS)
            begin = time.monotonic()
            page.goto(f"{url}/run?run=million")
            page.wait_for_selector(".st-key-panel-steps canvas")
            page.wait_for_selector(".st-key-panel-heat canvas")
            times.append(time.monotonic() - begin)
            context.close()
        print(f"a run of 1,000,000 steps: {', '.join(f'{t:.2f}' for t in times)} s to its charts", flush=True)


def history_of_a_million() -> None:
    """Print how long the real history takes to condense a million steps, as 10,000 messages of 100."""
    from gpuwatch import wire
    from gpuwatch_agent.history import History, StepBatch, Tick

    with tempfile.TemporaryDirectory() as folder:
        history = History(Path(folder) / "history.db")
        names = [name for name in wire.STEP_COLUMNS if name not in ("start_ns", "epoch_start")]
        columns = {name: wire.pack([5_000_000] * 100) for name in names}
        for n in range(10_000):
            starts = wire.pack([(100 * n + k) * 5_000_000 for k in range(100)])
            batch = StepBatch("r", 0, 100 * n, 0.5 * n, 0, {**columns, "start_ns": starts})
            history.commit(Tick(float(n), [], [], [], [batch], []))
        times = []
        for _ in range(3):
            begin = time.process_time()
            assert history.reader.condensed_steps("r", 0, 6000)["steps"] == 1_000_000
            times.append(time.process_time() - begin)
        history.close()
        print(f"the agent condenses 1,000,000 steps in {statistics.median(times):.2f} s of CPU", flush=True)


def a_week_of_a_fleet(nodes: int) -> None:
    """Print what the page "Fleet" asks of a Prometheus that holds a recorded week of 50 users, 300 jobs and so many nodes."""
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
        write_blocks(recorded(shares), WEEK_S / 3600, store / "data", ahead_s=7200)
        with start_prometheus(store, prometheus_config({})) as server:
            source, process = PrometheusSource(server.url), psutil.Process(server.process.pid)
            for level in ("user", "node", "run", "job"):
                cpu, own, begin, now = _cpu_s(process), time.process_time(), time.monotonic(), time.time()
                found = fleet(source, level, Span(now - WEEK_S, now, 300))
                print(
                    f"a week of {found.nodes} nodes by {level}: {time.monotonic() - begin:.2f} s ({_cpu_s(process) - cpu:.2f} s of "
                    f"Prometheus's CPU, {time.process_time() - own:.2f} s of the page's); {len(found.holders)} rows",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=30, help="how long each is watched")
    parser.add_argument("--no-browser", action="store_true")
    parser.add_argument(
        "--fleet", type=int, default=0, metavar="NODES", help="also a week of so many nodes (minutes to write, 4 GB)"
    )
    options = parser.parse_args()
    print(
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; 8 GPUs, 1 h of history, refresh every 2 s", flush=True
    )
    million = a_run("million", "long", 110_000.0, status="ended", verdict=None, recent=None)
    agent = FakeAgent([a_run(age_s=3700.0), million], gpus=True)
    agent.steps = {
        RUN_ID: MadeUpSteps(35_000, 0.103, 0.064, 1000),
        "million": MadeUpSteps(1_000_000, 0.1, 0.03, 5000, device=True),
    }
    agent.start()
    with served(agent) as url:
        for window in WINDOWS:
            for count in (1, 10):
                asyncio.run(viewers(url, count, options.seconds, window))
        if not options.no_browser:
            in_the_browser(url, options.seconds)
            a_million_steps(url)
    agent.stop()
    history_of_a_million()
    if options.fleet:
        a_week_of_a_fleet(options.fleet)


if __name__ == "__main__":
    main()
