"""Every query of every Grafana dashboard, sent as Grafana would to a real Prometheus that has scraped a real agent."""

from __future__ import annotations

import contextlib
import getpass
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pynvml
import pytest

from gpuwatch.alerting.render import render
from gpuwatch.alerting.thresholds import AlertThresholds, Prices
from gpuwatch.config import Config
from gpuwatch_dashboards.grafana import load
from tests.grafana_variables import Asked, Variables
from tests.integration.agent_process import Agent
from tests.nvml.fake import FakeGpu, FakeNvml
from tests.servers import Server, free_port, prometheus_config, require, start_prometheus, wait_for

PRICE = 2.5
CONFIG = Config(alerts=AlertThresholds(starved_min_training_s=5, starved_for_s=1, ledger_window_s=20))
"""Windows of twenty seconds where the defaults are five minutes; the dashboards are fitted to them, as a site's are."""
RUN = "two-ranks"
NO_DATA = {
    (
        "run",
        "Straggler",
        "A",
    ): "only while a rank is found to hold the others up: a machine that is short of cores blurs it "
    "(test_ddp.py makes one and looks at the metric)",
}
"""Queries that need not answer here, by dashboard, panel and query, each with its reason."""
_NO_LINK, _NO_DEVICE, _NO_NOTIFY = "this node has no such link", "it trains on CPUs", "the agent has no --notify"
_NO_GROUP = "the runs have no control group of their own, or one without a limit"
ABSENT = {
    "Nodes that do not answer": "all nodes answer",
    "Inside compute": "only on request (test_breakdown.py)",
    **dict.fromkeys(("InfiniBand", "InfiniBand errors", "Link errors"), _NO_LINK),
    **dict.fromkeys(("NVLink traffic", "NVLink traffic, counted", "PCIe traffic"), "only with --series full"),
    "MIG instances": "no GPU is split",
    "Shared GPUs": "no GPU is shared",
    "Declared phases": "no phase is declared",
    "Hook messages": "none is rejected",
    **dict.fromkeys(("History and deliveries of the agent", "Notifications waiting"), _NO_NOTIFY),
    **dict.fromkeys(("Hidden data wait", "Coverage"), _NO_DEVICE),
    "Disk traffic of the loader workers": "the workers write nothing",
    **dict.fromkeys(("Memory of the run", "Pressure in the run's cgroup"), _NO_GROUP),
}
"""Panels with a query that has nothing to count here: test_query_cost.py simulates them, or unit tests cover them."""
pytestmark = pytest.mark.timeout(
    600
)  # two trainings, an agent and a Prometheus start, on whatever the machine has left
TRAINING = """
import os, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
import gpuwatch

class Slow(Dataset):
    def __len__(self): return 1_000_000
    def __getitem__(self, index):
        time.sleep(0.01 if os.environ["RANK"] == "0" else 0.1)
        return torch.ones(16)

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
loader = DataLoader(Slow(), batch_size=2, num_workers=1)
with gpuwatch.Watch(quiet=True, flops_per_sample=1e6, peak_flops=1e12) as w:
    w.watch_communication(model)
    for batch in w.steps(loader, tokens=lambda b: b.numel()):
        time.sleep(0.01)
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
"""Two ranks that wait for data, the second one longer."""


@dataclass(frozen=True)
class Site:
    prometheus: Server
    agent: Agent

    def ask(self, asked: Asked, at: float | None = None) -> list[dict[str, Any]]:
        """Return the series of a panel's query, asked as by Grafana: at one instant (`at`) or over the last minute."""
        now = time.time() if at is None else at
        if asked.instant:
            answer: list[dict[str, Any]] = self.prometheus.get("/api/v1/query", query=asked.expr, time=str(now))[
                "data"
            ]["result"]
            return answer
        span = {"start": str(now - 60), "end": str(now), "step": "5"}
        found: list[dict[str, Any]] = self.prometheus.get("/api/v1/query_range", query=asked.expr, **span)["data"][
            "result"
        ]
        return found

    def table(
        self, dashboard: str, panel: str, ref_id: str, *labels: str, at: float | None = None
    ) -> dict[tuple[str, ...], float]:
        """Return the values of a panel's query by these labels, at a moment (None: now)."""
        [asked] = [a for a in variables(self, dashboard).asked() if (a.panel, a.ref_id) == (panel, ref_id)]
        return {
            tuple(each["metric"].get(label, "") for label in labels): float(each["value"][1])
            for each in self.ask(asked, at)
        }


def variables(site: Site, dashboard: str) -> Variables:
    return Variables(load(CONFIG)[f"gpuwatch-{dashboard}.json"], site.prometheus.url)


def ranks(agent: Agent) -> Iterator[subprocess.Popen[bytes]]:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "SLURM_JOB_ID": "4711"}
    for rank in ("0", "1"):
        own = {**place, "RANK": rank, "GPUWATCH_RUN": RUN, "GPUWATCH_ENDPOINT": agent.endpoint}
        yield subprocess.Popen([sys.executable, "-c", TRAINING], env={**os.environ, **own})


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Give a site of one node with four GPUs: two train, one is held idle, one is free; one has had an XID."""
    require("prometheus")
    folder = tmp_path_factory.mktemp("site")
    nvml = FakeNvml(folder)
    gpm = {pynvml.NVML_GPM_METRIC_SM_UTIL: 50.0, pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL: 20.0}
    gpm[pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL] = 30.0

    def write(*held: tuple[int, ...], xids: tuple[int, ...] = ()) -> None:
        nvml.write(
            [
                FakeGpu(
                    uuid=f"GPU-{n}",
                    utilization_percent=90 if n < 2 else 0,
                    processes=tuple((pid, 1 << 30) for pid in pids),
                    xids=xids if n == 2 else (),
                    ecc_corrected=3,
                    gpm=gpm,
                )
                for n, pids in enumerate(held)
            ]
        )

    write((), (), (), ())
    with ExitStack() as stack:
        agent = stack.enter_context(Agent(folder, environment=nvml.environment()))
        config = prometheus_config({"gpuwatch": agent.url}, scrape_interval="1s")
        rules = render(CONFIG.alerts, Prices(PRICE))
        prometheus = stack.enter_context(start_prometheus(folder / "prometheus", config, rules))
        sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        processes = [sleeper, *ranks(agent)]
        for process in processes:
            stack.callback(process.wait, 10)
            stack.callback(process.kill)
        held = [(process.pid,) for process in (*processes[1:], processes[0])]
        write(*held, ())
        time.sleep(2)  # the driver reports XIDs that occur while a subscriber listens
        write(*held, (), xids=(79,))
        here = Site(prometheus, agent)
        for ready in (
            f'gpuwatch_finding_active{{run="{RUN}"}} == 1',
            f'owner_kind:gpuwatch_gpu_cost:per_hour{{run="{RUN}",kind="starved"}} > 0',
            'ALERTS{alertname="GpuStarved",alertstate="firing"}',
            'gpu_kind:gpuwatch_gpu_seconds:share20s{kind="idle",gpu="2"} > 0.95',
            "gpuwatch_gpu_last_xid",
            'kind:gpuwatch_gpu_seconds:share20s{kind="starved"} > 0.06',
            f'owner_kind:gpuwatch_gpu_cost:increase{{run="{RUN}",kind="starved"}} > 0',
            "owner_state:gpuwatch_gpu_seconds:rate",
        ):
            wait_for(ready, lambda ready=ready: prometheus.query(ready), 240, 0.5)  # type: ignore[misc]
        yield here


@pytest.mark.parametrize("dashboard", ["fleet", "node", "run"])
def test_every_query_of_every_panel_has_data(site: Site, dashboard: str) -> None:
    resolved = variables(site, dashboard)
    asked = list(resolved.asked())
    assert len(asked) >= 25

    def silent() -> list[Asked]:
        expected = [a for a in asked if a.panel not in ABSENT and (dashboard, a.panel, a.ref_id) not in NO_DATA]
        return [a for a in expected if not site.ask(a)]

    # a scrape may just have been late; one more query in the end, to name those that are silent
    with contextlib.suppress(AssertionError):
        wait_for("every panel", lambda: not silent(), 60, 2)
    assert [(a.panel, a.ref_id) for a in silent()] == []


def test_every_variable_has_the_values_that_are_there(site: Site) -> None:
    instance = site.agent.url.removeprefix("http://")
    fleet, node, run = (variables(site, name).values for name in ("fleet", "node", "run"))
    assert fleet["instance"] == node["instance"] == run["instance"] == [instance]
    assert fleet["job"] == run["job"] == ["4711"]
    assert (run["run"], run["rank"], run["gpu"]) == ([RUN], ["0", "1"], ["0", "1"])
    assert node["gpu"] == ["0", "1", "2", "3"]
    assert len(fleet["user"]) == 1


def test_the_numbers_are_the_sites(site: Site) -> None:
    assert site.table("fleet", "GPUs", "A") == {(): 4.0}
    kinds = ("Useful", "Starved", "Held idle", "Stalled", "GPUs lost", "Money lost per hour")

    def at_once() -> dict[str, float] | None:
        at = time.time()
        found = {kind: site.table("fleet", kind, "A", at=at).get(()) for kind in kinds}
        known = {kind: value for kind, value in found.items() if value is not None}
        if len(known) < len(kinds) or known["Money lost per hour"] != pytest.approx(
            PRICE * known["GPUs lost"], rel=0.2
        ):
            return None  # costs are recorded later than what they are the costs of
        # One of four GPUs is held idle all the time; until each series fills its window, a rate over it is too small.
        return known if 0.2 < known["Held idle"] < 0.3 else None

    shares = wait_for("all numbers at one moment", at_once, 60, 1)
    assert shares["Stalled"] == 0.0
    assert 0.04 < shares["Starved"] < 0.55 and 0 < shares["Useful"] < 0.5
    lost = site.table("fleet", "GPU time lost now", "A", "kind", "run", "job_id")
    assert {("starved", RUN, "4711"), ("idle", "", "")} <= set(lost)
    assert 0.9 < lost[("idle", "", "")] < 1.1
    causes = site.table("fleet", "GPU time lost now", "A", "kind", "cause")
    assert ("idle", "") in causes and any(kind == "starved" and cause for kind, cause in causes)
    since = site.table("fleet", "GPU time lost now", "B", "kind")
    assert 0 < since[("idle",)] < 600
    price = pytest.approx(PRICE, rel=0.1)  # it is recorded a window later
    wait_for("its cost", lambda: site.table("fleet", "GPU time lost now", "C", "kind").get(("idle",)) == price, 60, 1)


def test_an_alert_has_its_owner(site: Site) -> None:
    owners = site.table("fleet", "Alerts", "A", "alertname", "user", "job_id")
    assert ("GpuStarved", getpass.getuser(), "4711") in owners


def test_lost_hours_are_starved_idle_and_stalled_ones_and_cost_their_price(site: Site) -> None:
    def by_run() -> dict[str, float]:
        at = time.time()
        return {ref: site.table("fleet", "By run", ref, "run", at=at)[(RUN,)] for ref in "ACDEFG"}

    # A cost is recorded a window later than its hours, which is much of them at first.
    wait_for(
        "the cost of the lost hours", lambda: (now := by_run())["G"] == pytest.approx(PRICE * now["F"], rel=0.2), 150, 2
    )
    found = by_run()
    assert found["F"] == pytest.approx(found["C"] + found["D"] + found["E"], rel=0.05)
    assert 0 < found["F"] < found["A"]


def test_firing_alerts_are_listed(site: Site) -> None:
    firing = set(site.table("run", "Alerts", "A", "alertname"))
    assert ("GpuStarved",) in firing and firing <= {("GpuStarved",), ("Straggler",)}, (
        "one rank's loader is the slower one"
    )


@pytest.mark.parametrize("dashboard", ["fleet", "node", "run"])
def test_annotations_ask_for_what_is_there(site: Site, dashboard: str) -> None:
    resolved = variables(site, dashboard)
    for mark in resolved.dashboard["annotations"]["list"]:
        if mark["datasource"]["type"] == "prometheus" and mark["name"] != "Run ends":
            expr = resolved.filled(mark["expr"])
            begun = max(0.0, time.time() - 1500)
            span = {"start": str(begun), "end": str(time.time()), "step": "5"}
            assert site.prometheus.get("/api/v1/query_range", query=expr, **span)["data"]["result"], mark["name"]


def test_top_from_prometheus_knows_the_gpus(site: Site) -> None:
    """Of `gpuwatch top`, but here there is a Prometheus that has scraped real GPUs, as far as NVML is."""
    command = [sys.executable, "-m", "gpuwatch", "top", "--once", "--prometheus", site.prometheus.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env={**os.environ, "COLUMNS": "160"})
    assert done.returncode == 0, done.stderr
    lines = {
        number: line for line in done.stdout.splitlines() for number in range(4) if line.startswith(f"  {number}   ")
    }
    assert "idle" in lines[2] or "unallocated" in lines[2]  # of the last minute the longer
    assert "632 W" in lines[2] and getpass.getuser() in lines[2]
    assert RUN in lines[0] and "job 4711" in lines[0]
    assert done.stdout.count("NVIDIA H100 80GB HBM3") == 4
