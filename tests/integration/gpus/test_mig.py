"""A GPU split by MIG, on a real agent: each instance has its own owner and ledger, whose sum is the GPU's time."""

from __future__ import annotations

import getpass
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pynvml
import pytest

from gpuwatch.alerting.render import render
from gpuwatch.alerting.thresholds import AlertThresholds
from tests.integration.agent_process import Agent, Series, Trainer
from tests.nvml.fake import FakeGpu, FakeNvml
from tests.pod_resources import Devices, kubelet
from tests.servers import hastened, prometheus_config, start_prometheus, wait_for

pytest.importorskip("jh2", reason="the kubelet of these tests needs an HTTP/2 server: pip install jh2")
GIB = 1 << 30
LISTED_S = 60
"""The agent lists instances, processes and allocations every ten seconds; a busy machine takes longer."""
MIG = (
    (1, "3g.40gb", 30 * GIB, 40 * GIB, "MIG-train"),
    (5, "2g.20gb", 0, 20 * GIB, "MIG-pod"),
    (9, "1g.10gb", 1 * GIB, 10 * GIB, "MIG-idle"),
)
SIZES = {"GPU-0": 1 / 7, "MIG-train": 3 / 7, "MIG-pod": 2 / 7, "MIG-idle": 1 / 7}
GPM = {pynvml.NVML_GPM_METRIC_GRAPHICS_UTIL: 90.0, pynvml.NVML_GPM_METRIC_SM_UTIL: 60.0}


def split(*processes: tuple[int, int], mig=MIG, **more: object) -> FakeGpu:
    """A GPU with these processes: pid and index of the instance."""
    listed = tuple((pid, GIB, index) for pid, index in processes)
    return FakeGpu(uuid="GPU-0", minor=0, mig=mig, processes=listed, gpm=GPM, mig_activity={1: 0.0, 2: 0.0}, **more)  # type: ignore[arg-type]


def seconds(page: Series) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for key, value in page.items():
        if key[0] == "gpuwatch_gpu_seconds_total":
            found.setdefault(key[2], {})[key[3]] = value
    return found


def growth(before: Series, after: Series) -> dict[str, tuple[float, float]]:
    """Each account's (GPU-seconds in all states, wall clock) between two pages, by UUID."""
    wall = {
        key[2]: value - before[key]
        for key, value in after.items()
        if key[0] == "gpuwatch_gpu_ledger_watermark_timestamp_seconds"
    }
    first, last = seconds(before), seconds(after)
    return {uuid: (sum(last[uuid].values()) - sum(first[uuid].values()), wall[uuid]) for uuid in wall}


def owner(agent: Agent, uuid: str) -> dict[str, str]:
    names = ("run", "rank", "user", "job", "namespace", "pod", "container")
    key = next(k for k in agent.metrics() if k[0] == "gpuwatch_gpu_owner_info" and k[2] == uuid)
    return {name: value for name, value in zip(names, key[3:], strict=True) if value}


def states(agent: Agent) -> dict[str, str]:
    return {each["uuid"]: each["state"] for each in agent.get("/api/v1/status")["gpus"]}


@pytest.fixture
def idler() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(900)"])
    yield process
    process.kill()
    process.wait(10)


def test_instances_have_owners_and_ledgers_that_sum_to_the_gpus_time(
    tmp_path: Path, idler: subprocess.Popen[bytes]
) -> None:
    nvml, energy_mj = FakeNvml(tmp_path), 1_000_000
    nvml.write([split(energy_mj=energy_mj)])
    agent = Agent(tmp_path, "--pod-resources", str(tmp_path / "kubelet.sock"), environment=nvml.environment())
    with kubelet(tmp_path / "kubelet.sock") as pods:
        pods.devices = [Devices("vision", "train-0", "trainer", "nvidia.com/mig-2g.20gb", ("MIG-pod",))]
        with agent, Trainer(agent, run="r1", data_s=0.02, compute_s=0.02) as trainer:
            agent.wait_run("r1")
            nvml.write([split((trainer.pid, 0), (idler.pid, 2), energy_mj=energy_mj)])

            def is_booked() -> bool:
                found = states(agent)
                known = {uuid: found.get(uuid) for uuid in ("GPU-0", "MIG-pod", "MIG-idle")}
                return known == {"GPU-0": "free", "MIG-pod": "allocated_unused", "MIG-idle": "held_idle"} and bool(
                    owner(agent, "MIG-train").get("run")
                )

            wait_for("each instance has its own state", is_booked, LISTED_S, 0.5)
            assert owner(agent, "GPU-0") == {}
            assert owner(agent, "MIG-train")["run"] == "r1" and owner(agent, "MIG-train")["rank"] == "0"
            assert owner(agent, "MIG-pod") == {"namespace": "vision", "pod": "train-0", "container": "trainer"}
            assert owner(agent, "MIG-idle")["user"] == getpass.getuser() and "run" not in owner(agent, "MIG-idle")
            before = agent.metrics()

            def later() -> Series | None:
                page = agent.metrics()
                return page if min(wall for _, wall in growth(before, page).values()) > 15 else None

            nvml.write([split((trainer.pid, 0), (idler.pid, 2), energy_mj=energy_mj + 5_000_000)])
            after = wait_for("15 s of each account", later, LISTED_S, 0.5)
            assert {k[2]: v for k, v in after.items() if k[0] == "gpuwatch_gpu_mig_ratio"} == pytest.approx(SIZES)
            for uuid, (booked_s, wall_s) in growth(before, after).items():
                assert booked_s == pytest.approx(wall_s * SIZES[uuid], abs=0.01), uuid
            first, last = seconds(before), seconds(after)
            grown = {uuid: {state: last[uuid][state] - first[uuid][state] for state in last[uuid]} for uuid in last}
            assert {
                uuid: max(by_state, key=lambda s: by_state[s])
                for uuid, by_state in grown.items()
                if uuid != "MIG-train"
            } == {
                "GPU-0": "free",
                "MIG-pod": "allocated_unused",
                "MIG-idle": "held_idle",
            }
            whose = {uuid: by_state["compute"] + by_state["input_wait"] for uuid, by_state in grown.items()}
            assert whose["MIG-train"] > 5 and not any(v for uuid, v in whose.items() if uuid != "MIG-train")

            # what an instance measures of its own, and what belongs to the whole GPU alone
            def gauge(name: str) -> dict[str, float]:
                return {key[2]: value for key, value in after.items() if key[0] == f"gpuwatch_gpu_{name}"}

            assert gauge("engine_active_ratio") == pytest.approx({"MIG-train": 0.45, "MIG-pod": 0, "MIG-idle": 0})
            assert gauge("memory_used_bytes")["MIG-train"] == 30 * GIB
            assert set(gauge("power_watts")) == {"GPU-0"} and not gauge("utilization_ratio")
            assert gauge("processes") == {"GPU-0": 2, "MIG-train": 1, "MIG-pod": 0, "MIG-idle": 1}
            joules = {k[2:]: v for k, v in after.items() if k[0] == "gpuwatch_gpu_energy_joules_total" and v}
            assert joules == {("GPU-0", "unknown"): pytest.approx(5000)}
            (run,) = agent.get("/api/v1/runs")["runs"]
            assert run["gpus"] == ["NVIDIA H100 80GB HBM3 MIG 3g.40gb"]
            ledger = {each["UUID"]: each["seconds"] for each in agent.get("/api/v1/ledger")["gpus"]}
            assert ledger["MIG-pod"] == pytest.approx(ledger["MIG-train"] * 2 / 3, rel=0.5)
            agent.kill()
            agent.start()  # with the same sizes: counters go on
            restarted = wait_for("the instances", lambda: states(agent).keys() == SIZES.keys() and agent.metrics(), 30)
            assert seconds(restarted)["MIG-pod"]["allocated_unused"] >= last["MIG-pod"]["allocated_unused"]
            # the pod's instance and the idle one are destroyed: a larger one takes their place
            one = (*MIG[:1], (2, "4g.40gb", 0, 40 * GIB, "MIG-new"))
            nvml.write([split((trainer.pid, 0), mig=one)])
            wait_for("the new one", lambda: states(agent).keys() == {"GPU-0", "MIG-train", "MIG-new"}, LISTED_S, 0.5)
            page = agent.metrics()
            assert {k[2]: v for k, v in page.items() if k[0] == "gpuwatch_gpu_mig_ratio"} == pytest.approx(
                {"GPU-0": 0, "MIG-train": 3 / 7, "MIG-new": 4 / 7}
            )
            assert sum(seconds(page)["GPU-0"].values()) == 0  # nothing of it is left, and its account began again
            assert owner(agent, "MIG-train")["run"] == "r1"


def test_alert_about_an_instance_names_it_and_costs_its_share(tmp_path: Path) -> None:
    nvml = FakeNvml(tmp_path)
    nvml.write([split()])
    rules = hastened(render(AlertThresholds(processless_for_s=2, keep_firing_for_s=0)))
    agent = Agent(tmp_path, "--pod-resources", str(tmp_path / "kubelet.sock"), environment=nvml.environment())
    with kubelet(tmp_path / "kubelet.sock") as pods, agent:
        pods.devices = [Devices("vision", "train-0", "trainer", "nvidia.com/mig-2g.20gb", ("MIG-pod",))]
        config = prometheus_config({"gpuwatch": agent.url.removeprefix("http://")})
        with start_prometheus(tmp_path / "prometheus", config, rules) as prometheus:
            firing = 'ALERTS{alertname="GpuAllocatedUnused",alertstate="firing"}'
            (found,) = wait_for("it fires", lambda: prometheus.query(firing), 120)
            assert (found["metric"]["gpu"], found["metric"]["UUID"]) == ("0:1", "MIG-pod")
            assert found["metric"]["workload_pod"] == "train-0"
            (alert,) = (
                each
                for each in prometheus.get("/api/v1/alerts")["data"]["alerts"]
                if each["labels"]["alertname"] == "GpuAllocatedUnused"
            )
            notes = alert["annotations"]
            assert notes["gpus"].startswith("GPU 0:1 (MIG-pod, 2g.20gb, 28.57% of a GPU) on ")
            assert "6.9 GPU-hours a day" in notes["cost"]
