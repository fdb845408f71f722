"""The chain of every alert: each series in its promtool scenarios is one that an agent or the simulator serves.

Names and labels are compared. An alert on a series that is not exported never fires, however well its scenarios pass.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.simulation.page import NodePages
from benchmarks.simulation.story import Node
from gpuwatch.diagnosis.rules import BY_CAUSE
from gpuwatch.metrics import BY_NAME
from gpuwatch_agent.processes.owners import ENVIRONMENT
from tests.integration.agent_process import Agent, Trainer
from tests.nvml.fake import FakeGpu, FakeNvml
from tests.pod_resources import Devices, kubelet
from tests.programs import ROOT
from tests.replay import parsed
from tests.servers import wait_for

pytest.importorskip("jh2", reason="the kubelet of these tests needs an HTTP/2 server: pip install jh2")
SCENARIOS = sorted((ROOT / "deploy/prometheus/tests").glob("*.yml"))
VALUES = {"state", "phase", "reason", "percentile", "mode", "collector"}
"""Labels whose values are the code's own, but for the phases that a program declares."""
DECLARED = "gpuwatch_phase_seconds_total"
TARGETS = {"job", "instance"}
"""Of Prometheus, as is the metric `up`."""

Shape = tuple[str, frozenset[str], frozenset[tuple[str, str]]]
"""A series' name, the names of its labels that are not empty, and the values of those in `VALUES`."""


def shape(name: str, labels: dict[str, str]) -> Shape:
    named = {label: value for label, value in labels.items() if value and label not in TARGETS | {"le"}}
    return name, frozenset(named), frozenset((k, v) for k, v in named.items() if k in VALUES and name != DECLARED)


def shapes(page: str) -> set[Shape]:
    return {shape(s.name, s.labels) for family in text_string_to_metric_families(page) for s in family.samples}


@pytest.fixture(scope="module")
def produced(tmp_path_factory: pytest.TempPathFactory) -> set[Shape]:
    found = shapes(
        (ROOT / "tests/golden/metrics.txt").read_text()
    )  # as the agent's exporter writes it: test_metrics_page.py
    served: set[str] = set()
    for number in range(8):
        pages = NodePages(Node(7, number, 8), 1.8e9)
        for time_s in range(0, 86400, 900):
            lines = (pages.body(float(time_s)) or b"").decode().splitlines()
            served |= {line.rpartition(" ")[0] for line in lines if not line.startswith("#")}
    found |= shapes("".join(f"{series} 1\n" for series in sorted(served)))
    with pytest.MonkeyPatch.context() as patch:
        for name in (name for names in ENVIRONMENT.values() for name in names):
            patch.delenv(name, raising=False)  # of the job or container that these tests run in
        return found | agent_shapes(tmp_path_factory.mktemp("agent"))


def agent_shapes(folder: Path) -> set[Shape]:
    """Return what a real agent serves of GPUs with every kind of owner.

    The owners: a run, a run in a pod, a process without a run, a job and a pod that do not use their GPUs, and two
    runs with a job.
    """
    nvml = FakeNvml(folder)
    (folder / "allocations").mkdir()
    (folder / "allocations/7.json").write_text(json.dumps({"gpus": [2], "job": "7", "user": "alice"}))
    idle = [sys.executable, "-c", "import time; time.sleep(600)"]
    idler, of_job = subprocess.Popen(idle), subprocess.Popen(idle, env={**os.environ, "SLURM_JOB_ID": "9"})
    sources = ("--allocations", str(folder / "allocations"), "--pod-resources", str(folder / "kubelet.sock"))
    agent = Agent(folder, *sources, environment=nvml.environment())
    try:
        with kubelet(folder / "kubelet.sock") as pods:
            pods.devices = [Devices("vision", "train-0", "trainer", "nvidia.com/gpu", ("GPU-3",))]
            mig = ((1, "3g.40gb", 0, 40 << 30), (5, "2g.20gb", 0, 20 << 30))
            split = replace(_gpu(5), mig=mig)
            nvml.write([*(_gpu(n) for n in range(5)), split, _gpu(6), _gpu(7)])
            pod = {"POD_NAMESPACE": "vision", "POD_NAME": "train-1", "CONTAINER_NAME": "trainer"}
            with (
                agent,
                Trainer(agent, run="r1") as trainer,
                Trainer(agent, run="r2", job="8") as other,
                Trainer(agent, run="r3", job="9", environment=pod) as in_pod,
            ):
                for run in ("r1", "r2", "r3"):
                    agent.wait_run(run)
                held = _gpu(0, trainer.pid), _gpu(1, idler.pid), _gpu(2), _gpu(3), _gpu(4), split
                nvml.write([*held, _gpu(6, trainer.pid, other.pid, of_job.pid), _gpu(7, in_pod.pid)])

                def owned() -> set[Shape] | None:
                    found = shapes(agent.get_text("/metrics"))
                    owners = {each[1] - {"gpu", "UUID"} for each in found if each[0] == "gpuwatch_gpu_owner_info"}
                    is_counted = any(each[0] == "gpuwatch_gpu_shared_seconds_total" for each in found)
                    return found if len(owners) == 7 and is_counted else None

                return wait_for("each GPU has its owner", owned, 60, 0.5)
    finally:
        for each in (idler, of_job):
            each.kill()
            each.wait(10)


def _gpu(number: int, *pids: int) -> FakeGpu:
    processes = tuple((pid, 1 << 30) for pid in pids)
    return FakeGpu(uuid=f"GPU-{number}", minor=number, utilization_percent=0, processes=processes)


def series_of(path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    for scenario in parsed(path.read_text())["tests"]:
        for each in scenario["input_series"]:
            name, _, labels = each["series"].partition("{")
            yield name.strip(), dict(re.findall(r'(\w+)="([^"]*)"', labels))


def is_produced(name: str, labels: dict[str, str], produced: set[Shape]) -> bool:
    if name == "up":
        return labels.keys() <= TARGETS
    if name.startswith("gpuwatch_finding_"):
        own = {"run", "cause", "advice"} if name == "gpuwatch_finding_info" else {"run", "cause"}
        return labels.keys() - TARGETS == own and labels["cause"] in BY_CAUSE
    if name.startswith("gpuwatch_shm_"):
        return labels.keys() - TARGETS == {"mount"} and ":" not in labels["mount"]  # "host", or a run's id
    wanted = shape(name, labels)
    if name in BY_NAME and BY_NAME[name].kind == "info" and name != "gpuwatch_gpu_owner_info":
        # labels that are only carried along may be left out; an owner's say which kind of owner it is
        return any(each[0] == name and wanted[1] <= set(BY_NAME[name].labels) for each in produced)
    return wanted in produced


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_series_of_an_alerts_scenarios_are_produced(path: Path, produced: set[Shape]) -> None:
    missing = {f"{name} {labels}" for name, labels in series_of(path) if not is_produced(name, labels, produced)}
    assert missing == set()


def test_a_series_that_is_not_exported_is_found(produced: set[Shape]) -> None:
    """As the scenario of GpuAllocatedUnused had it, before any agent knew an allocation."""
    gpu = {"gpu": "0", "UUID": "GPU-a", "job": "gpuwatch", "instance": "n1:9478"}
    for labels in ({"workload_pod": "train-0"}, {"run": "r1", "workload_pod": "p"}, {"team": "vision"}):
        assert not is_produced("gpuwatch_gpu_owner_info", {**gpu, **labels}, produced)
    assert is_produced("gpuwatch_gpu_owner_info", {**gpu, "user": "alice", "job_id": "7"}, produced)
    assert not is_produced("gpuwatch_gpu_seconds_total", {**gpu, "state": "asleep"}, produced)
    assert not is_produced("gpuwatch_finding_active", {"run": "r", "cause": "no_such"}, produced)
