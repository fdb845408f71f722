"""The pictures in docs/images: `python -m benchmarks.dashboards.pictures`, about eight minutes. Look before you commit.

The pages are the real ones in the real Chromium; the agent is the tests' fake one, with eight GPUs and an hour of
history, and for Fleet a real Prometheus that holds a recorded day of a made-up fleet. Each page is taken at 1,440 px
and at 390 px, light and dark. `demo` is the page of a real `gpuwatch demo`, `report` a report and a comparison of two
real runs of `PROGRAM` under a real agent.
"""

from __future__ import annotations

import argparse
import io
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.dashboards.browser import opened
from tests.chromium import chromium
from tests.integration.agent_process import Agent
from tests.integration.dashboards.fake import RUN_ID, FakeAgent, a_run, streamlit_page
from tests.integration.dashboards.steps import MadeUpSteps
from tests.integration.recorded_fleet import Share, recorded, write_blocks
from tests.servers import prometheus_config, start_prometheus

FOLDER = Path(__file__).parents[2] / "docs/images"
SIZES = {"": {"width": 1440, "height": 1000}, "-phone": {"width": 390, "height": 844}}
LONGEST_PX = {"": 2600, "-phone": 1700}
"""How much of a page is shown."""
SETTLE_MS = 4000
"""A page has its charts by then, drawn to the end, and has refreshed once."""
PAGES = {
    "live": ("/?window=5+min", ".st-key-panel-disk canvas"),
    "run": (f"/run?run={RUN_ID}", ".st-key-panel-heat canvas"),
    "compare": ("/compare?runs=before,after", ".gw-outcome"),
    "fleet": ("/fleet?by=user&window=24+h", ".st-key-panel-by_user tbody td"),
}
"""By picture: its address, and what is there when the page is."""

PROGRAM = """
import sys, time
import torch
import gpuwatch

class Photos(torch.utils.data.Dataset):
    def __len__(self):
        return 6400

    def __getitem__(self, index):
        time.sleep(0.006 + 0.004 * (index * 7919 % 100) / 100)  # it arrives
        return torch.full((3, 32, 32), index / 6400)

torch.set_num_threads(1)
weights = torch.randn(512, 512)
loader = torch.utils.data.DataLoader(Photos(), batch_size=16, num_workers=int(sys.argv[1]), persistent_workers=True)
with gpuwatch.Watch(quiet=True) as watch:
    for epoch in range(2):
        for photos in watch.steps(loader):
            end = time.perf_counter() + 0.045
            while time.perf_counter() < end:
                weights @ weights
        with watch.phase("eval"):
            time.sleep(3.0)
        with watch.phase("checkpoint"):
            time.sleep(1.5)
"""
"""Photos that take 6 to 10 ms each to arrive, a 45 ms step, an evaluation and a checkpoint after each pass.

For docs/guides/report.md.
"""


class Lively(MadeUpSteps):
    """Steps that wait for longer or shorter, as real ones do."""

    def downsampled(self, start_s: float, query: dict[str, str]) -> dict[str, Any] | None:
        found = super().downsampled(start_s, query)
        if found is None:
            return None
        chance = random.Random(7)
        waits = found["columns"]["data_wait_s"]
        factors = [chance.lognormvariate(0, 0.3) for _ in found["step"]]
        for kind, spread in (("min", 0.8), ("mean", 1.0), ("max", 1.5)):
            waits[kind] = [spread * factor * wait for factor, wait in zip(factors, waits[kind], strict=True)]
        means = sorted(self.step_s + wait - self.wait_s for wait in waits["mean"])
        for name, spread in (("p5", 0.93), ("p50", 1.0), ("p95", 1.2)):
            found["bucket_s"][name] = [spread * (self.step_s + wait - self.wait_s) for wait in waits["mean"]]
            found["step_s"][name] = spread * means[int(float(name[1:]) / 100 * len(means))]
        found["step_s"]["p99"] = 1.1 * found["step_s"]["p95"]
        return found

    def records(self, start_s: float, last: int) -> dict[str, Any]:
        found = super().records(start_s, last)
        chance = random.Random(7)
        slow = [chance.lognormvariate(0, 0.2) for _ in range(0, len(found["time_s"]) + 100, 100)]
        waits = (slow[n // 100] * chance.lognormvariate(0, 0.2) * wait for n, wait in enumerate(found["data_wait_s"]))
        return found | {"data_wait_s": list(waits)}


BEFORE, AFTER = Lively(10_000, 0.1, 0.06, 1000), Lively(10_000, 0.05, 0.01, 1000)
FLEET = [
    Share("train-01:9478", "alice", "4711", "resnet50-a", 8.0, starved=0.42, cause="input_cpu"),
    Share("train-02:9478", "bob", "4718", "bert-large", 8.0, starved=0.04, stalled=0.1),
    Share("train-03:9478", "carol", "4720", "llm-7b", 8.0, starved=0.02),
    Share("train-04:9478", "carol", "4720", "llm-7b", 8.0, starved=0.02),
    Share("train-05:9478", "dave", "4722", "", 4.0, idle=1.0),
    Share("train-05:9478", "erin", "4731", "vit-b", 4.0, idle=0.25, starved=0.1, cause="input_disk"),
]


EVERY = (*PAGES, "demo", "job", "report")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.dashboards.pictures", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--only", nargs="+", choices=EVERY, default=EVERY)
    parser.add_argument("--into", type=Path, default=FOLDER)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        browser = stack.enter_context(chromium())
        agent = an_agent()
        stack.callback(agent.stop)
        store = folder / "server"
        store.mkdir()
        write_blocks(recorded(FLEET, 2.5, silent=["train-09:9478"]), 24.0, store / "data", drawn=True)
        prometheus = stack.enter_context(start_prometheus(store, prometheus_config({})))
        site = stack.enter_context(streamlit_page("http://127.0.0.1:1", folder / "fleet.log", prometheus.url))
        node = stack.enter_context(streamlit_page(agent.url, folder / "node.log"))
        for page in options.only:
            if page == "demo":
                take_demo(browser, options.into)
            elif page == "job":
                take_job(browser, options.into)
            elif page == "report":
                take_report(browser, folder, options.into)
            else:
                take(browser, site if page == "fleet" else node, page, options.into)


class Node(FakeAgent):
    """The fake agent with GPUs that draw power for what they do."""

    def gpu(self, n: int) -> dict[str, Any]:
        busy = (0.34, 0.31, 0.36, 0.33, 0.35, 0.32, 0.0, 0.0)[n]
        memory = (52, 52, 52, 52, 52, 52, 0, 14)[n] * 2**30
        return super().gpu(n) | {
            "utilization_ratio": busy,
            "memory_used_bytes": memory,
            "power_watts": 92.0 + 900 * busy,
        }


def an_agent() -> FakeAgent:
    """Return a running agent of a node with a run in its second hour, and two that ended before.

    The second one's loader has workers.
    """
    agent = Node(gpus=True)
    running = a_run(age_s=3700.0)
    before = _ended("before", "resnet50-a", 9000.0, BEFORE)
    loader = {"num_workers": 8, "prefetch_factor": 2, "batch_size": 64, "pin_memory": False}
    states = {"startup": 6.0, "input_wait": 102.0, "transfer": 30.0, "compute": 370.0}
    after = _ended("after", "resnet50-b", 6000.0, AFTER, states=states, loader=loader, findings=[])
    agent.runs = [running, before, after]
    agent.steps = {RUN_ID: Lively(35_000, 0.103, 0.064, 1000), "before": BEFORE, "after": AFTER}
    agent.past = [
        {
            **run["findings"][0],
            "rank": 0,
            "run": run["run"],
            "since_s": run["started_s"] + 65.0,
            "seen_s": run["watermark_s"],
        }
        for run in (running, before)
    ]
    agent.start()
    return agent


def _ended(run: str, name: str, age_s: float, steps: MadeUpSteps, **more: Any) -> dict[str, Any]:
    took_s = steps.begin_s(steps.count) + 6.0
    its = a_run(run, name, took_s, status="ended", steps=steps.count, samples=64 * steps.count, **more)
    past = {key: its[key] - age_s + took_s for key in ("started_s", "watermark_s", "last_message_s")}
    return its | past


def take(browser: Any, url: str, page: str, folder: Path) -> None:
    """Write the four pictures of a page."""
    address, wanted = PAGES[page]
    for size, viewport in SIZES.items():
        for scheme in ("light", "dark"):
            new: Callable[[], Any] = browser.new_context(viewport=viewport, color_scheme=scheme).new_page
            shown, _ = opened(new, url + address, ".gw-sentence", wanted)
            shown.wait_for_timeout(SETTLE_MS)
            height = shown.evaluate(
                "Math.max(...[...document.querySelectorAll('section, main, body')].map(e => e.scrollHeight))"
            )
            shown.set_viewport_size({**viewport, "height": min(height, LONGEST_PX[size])})
            shown.wait_for_timeout(SETTLE_MS)
            save(shown, folder / f"dashboard-{page}{size}{'-dark' if scheme == 'dark' else ''}.png")
            shown.context.close()


def take_demo(browser: Any, folder: Path) -> None:
    """Write live.png, half a minute into a demo."""
    command = [sys.executable, "-m", "gpuwatch", "demo", "--seconds", "60"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as demo:
        assert demo.stdout is not None
        url = next(found[1] for line in demo.stdout if (found := re.match(r"page +(\S+)", line)))
        new = browser.new_context(viewport={"width": 1280, "height": 1180}, color_scheme="light").new_page
        page, _ = opened(new, url, ".gw-sentence", ".st-key-panel-disk canvas")
        page.wait_for_timeout(35_000)
        save(page, folder / "live.png")
        page.context.close()
        demo.stdout.read()


def take_job(browser: Any, folder: Path) -> None:
    """Write job.png: the page of a job that was killed twice."""
    command = [sys.executable, "-m", "gpuwatch", "demo", "--bottleneck", "crash", "--keep"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as demo:
        assert demo.stdout is not None
        url = next(found[1] for line in demo.stdout if (found := re.match(r"The page keeps running at ([^;]+);", line)))
        new = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light").new_page
        page, _ = opened(new, f"{url}/run", ".gw-sentence", PAGES["run"][1])
        page.wait_for_timeout(SETTLE_MS)
        save(page, folder / "job.png")
        page.context.close()
        demo.send_signal(signal.SIGINT)
        demo.stdout.read()


def take_report(browser: Any, folder: Path, into: Path) -> None:
    """Write report.png and compare.png."""
    (folder / "program.py").write_text(PROGRAM)
    with Agent(folder, "--stacks") as agent:
        for workers, run in ((2, "resnet50-a"), (4, "resnet50-b")):
            environment = {**os.environ, "GPUWATCH_ENDPOINT": agent.endpoint, "GPUWATCH_RUN": run}
            subprocess.run([sys.executable, str(folder / "program.py"), str(workers)], env=environment, check=True)
            agent.wait_run(run, status="ended")
        for name, asked in (("report", ["report", "resnet50-a"]), ("compare", ["compare", "resnet50-a", "resnet50-b"])):
            html = folder / f"{name}.html"
            command = [sys.executable, "-m", "gpuwatch", *asked, "--agent", agent.url, "-o", str(html)]
            subprocess.run(command, check=True)
            page = browser.new_context(viewport={"width": 944, "height": 1100}, color_scheme="light").new_page()
            page.goto(html.as_uri())
            save(page, into / f"{name}.png")
            page.context.close()


def save(page: Any, path: Path) -> None:
    path.write_bytes(small(page.screenshot(animations="disabled")))
    print(f"{path}: {path.stat().st_size / 1e3:.0f} kB", flush=True)


def small(png: bytes) -> bytes:
    """Return a picture with a palette, a third as large."""
    from PIL import Image

    out = io.BytesIO()
    image = Image.open(io.BytesIO(png)).convert("RGB").quantize(256, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    image.save(out, "PNG", optimize=True)
    return out.getvalue()


if __name__ == "__main__":
    main()
