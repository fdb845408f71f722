"""The agent on recorded machines: their drivers' figures and no others, through the real pynvml on NVML's ABI."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pynvml
import pytest

from gpuwatch.metrics import Sample
from gpuwatch.tools.doctor.machine import read_nvml
from gpuwatch_agent.collectors.nvml import GpuCollector
from gpuwatch_agent.exporter import standard
from tests.catalogue import check
from tests.integration.agent_process import Agent
from tests.nvml.fake import MIB, Clock, FakeNvml, recorded, recording, recordings
from tests.servers import wait_for

Values = dict[tuple[str, ...], float]
UUID = "GPU-0"
REASONS = {
    "power": 0x84,
    "thermal": 0x60,
    "hardware": 0xC8,
    "sw_power_cap": 0x4,
    "sw_thermal": 0x20,
    "hw_slowdown": 0x8,
    "hw_thermal": 0x40,
    "hw_power_brake": 0x80,
    "sync_boost": 0x10,
    "applications_clocks": 0x2,
    "display_clocks": 0x100,
    "idle": 0x1,
}


def write(nvml: FakeNvml, machine: str, state: str) -> None:
    found = recording(machine)
    nvml.write([recorded(machine, state)], driver=found["driver"], cuda=found["cuda"])


def values(collector: GpuCollector, *, full: bool = True) -> Values:
    """Values of one turn by (metric without its prefix, labels beyond gpu and UUID). Raises: AssertionError for a series given twice."""
    samples: list[Any] = list(check(collector.collect()))
    samples = [s for s in samples if isinstance(s, Sample) and s.metric.startswith("gpuwatch_gpu_")]
    assert all(s.labels[:2] == ("0", UUID) for s in samples)
    kept = samples if full else [s for s in standard(samples) if isinstance(s, Sample)]
    found = {(s.metric.removeprefix("gpuwatch_gpu_"), *s.labels[2:]): s.value for s in kept}
    assert len(found) == len(kept)
    return found


def expected(machine: str, state: str) -> Values:
    """What a recording says, in base units; nothing for what it says N/A of or does not have."""
    found = recording(machine)
    seen = found["states"][state]
    plain = {
        "utilization_ratio": ("utilization_percent", 0.01),
        "memory_used_bytes": ("memory_used_mib", MIB),
        "memory_total_bytes": ("memory_total_mib", MIB),
        "power_watts": ("power_watts", 1),
        "temperature_celsius": ("temperature_celsius", 1),
        "sm_clock_hertz": ("sm_clock_mhz", 1e6),
        "pcie_replays_total": ("pcie_replays", 1),
    }
    wanted: Values = {(metric,): seen[key] * unit for metric, (key, unit) in plain.items() if seen.get(key) is not None}
    wanted["info", found["gpu"]["name"], found["gpu"]["pci_bus_id"], found["driver"]] = 1
    for kind in ("corrected", "uncorrected"):
        if seen[f"ecc_{kind}"] is not None:
            wanted["ecc_errors_total", kind] = seen[f"ecc_{kind}"]
    if "event_reasons" in seen:
        for reason, bits in REASONS.items():
            wanted["throttled", reason] = float(bool(seen["event_reasons"] & bits))
    if "processes" in seen:
        wanted["processes",] = len(seen["processes"])
    for instance, profile, used_mib, total_mib in seen["mig"] or ():
        wanted["mig_info", str(instance), profile.partition("c.")[2] or profile] = 1
        wanted["mig_memory_used_bytes", str(instance)] = used_mib * MIB
        wanted["mig_memory_total_bytes", str(instance)] = total_mib * MIB
    return wanted


@pytest.mark.parametrize(("machine", "state"), recordings())
def test_what_is_served_is_what_was_recorded(
    nvml: FakeNvml, collector: GpuCollector, caplog: pytest.LogCaptureFixture, machine: str, state: str
) -> None:
    write(nvml, machine, state)
    assert values(collector) == pytest.approx(expected(machine, state))
    listed = recording(machine)["states"][state].get("processes")
    processes = {UUID: tuple(pid for pid, used in sorted(listed))} if listed is not None else {}
    assert collector.processes() == processes
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == []


@pytest.mark.parametrize(("machine", "state"), recordings())
def test_doctor_takes_every_recorded_gpu_for_one_that_answers(nvml: FakeNvml, machine: str, state: str) -> None:
    write(nvml, machine, state)
    found, facts = recording(machine), read_nvml()
    assert (facts.state, facts.lost) == ("answers", ())
    assert facts.gpus == ((UUID, found["gpu"]["name"]),)
    assert (facts.driver, facts.cuda) == (found["driver"], tuple(map(int, found["cuda"].split("."))))


def test_h200_in_five_compute_instances_is_four_instances(nvml: FakeNvml, collector: GpuCollector) -> None:
    """Two compute instances share the first GPU instance and its memory: one series, and the profile is the GPU instance's."""
    write(nvml, "h200-mig", "load")
    assert values(collector, full=False) == {
        ("info", "NVIDIA H200", "00000000:83:00.0", "590.48.01"): 1,
        ("memory_used_bytes",): 16_959 * MIB,
        ("memory_total_bytes",): 143_771 * MIB,
        ("power_watts",): 295.01,
        ("temperature_celsius",): 36,
        ("throttled", "power"): 0,
        ("throttled", "thermal"): 0,
        ("throttled", "hardware"): 0,
        ("sm_clock_hertz",): 1.98e9,
        ("processes",): 3,
        ("mig_info", "2", "3g.71gb"): 1,
        ("mig_memory_used_bytes", "2"): 16_925 * MIB,
        ("mig_memory_total_bytes", "2"): 71_424 * MIB,
        ("mig_info", "3", "2g.35gb"): 1,
        ("mig_memory_used_bytes", "3"): 17 * MIB,
        ("mig_memory_total_bytes", "3"): 33_280 * MIB,
        ("mig_info", "9", "1g.18gb"): 1,
        ("mig_memory_used_bytes", "9"): 9 * MIB,
        ("mig_memory_total_bytes", "9"): 16_384 * MIB,
        ("mig_info", "10", "1g.18gb"): 1,
        ("mig_memory_used_bytes", "10"): 9 * MIB,
        ("mig_memory_total_bytes", "10"): 16_384 * MIB,
    }


def test_instance_of_two_compute_instances_is_sampled_once_a_turn(
    nvml: FakeNvml, collector: GpuCollector, clock: Clock
) -> None:
    gpm = {pynvml.NVML_GPM_METRIC_SM_UTIL: 80.0}
    nvml.write([replace(recorded("h200-mig", "load"), gpm=gpm)])
    for _ in range(3):
        found = values(collector)
        clock.now_s += 1
    active = {key[1]: value for key, value in found.items() if key[0] == "mig_sm_active_ratio"}
    assert active == pytest.approx({"2": 0.4, "3": 0.4, "9": 0.4, "10": 0.4})


@pytest.mark.parametrize(
    ("machine", "state", "absent"),
    [
        ("h100-mig", "load", {"utilization_ratio", "nvlink_errors_total"}),
        ("h200-mig", "idle", {"utilization_ratio", "nvlink_errors_total"}),
        ("a100-mig", "once", {"utilization_ratio"}),
        ("rtx-4080-super", "load", {"ecc_errors_total", "nvlink_errors_total", "mig_info"}),
        ("rtx-2080-super", "idle", {"ecc_errors_total", "mig_info"}),
        ("quadro-p400", "once", {"power_watts", "ecc_errors_total"}),
        ("gb10", "once", {"memory_used_bytes", "memory_total_bytes", "ecc_errors_total"}),
    ],
)
def test_not_available_is_absent_and_never_0(
    nvml: FakeNvml, collector: GpuCollector, machine: str, state: str, absent: set[str]
) -> None:
    write(nvml, machine, state)
    found = {key[0] for key in values(collector)}
    assert not found & (
        absent | {"driver_energy_joules_total", "xid_errors_total", "nvlink_errors_total", "sm_active_ratio"}
    )
    assert {"temperature_celsius", "info"} <= found


def test_agent_on_a_split_gpu_serves_its_instances_and_calls_no_state_without_utilization(tmp_path: Path) -> None:
    """The agent's process and page: a GPU at work under MIG, without a hook, is neither idle nor busy."""
    nvml = FakeNvml(tmp_path)
    write(nvml, "h100-mig", "idle")
    with Agent(tmp_path, "--series", "full", environment=nvml.environment()) as agent:
        wait_for("the instances", lambda: any(k[0] == "gpuwatch_gpu_mig_info" for k in agent.metrics()), 60, 0.5)
        page = agent.metrics()
        (gpu,) = agent.get("/api/v1/status")["gpus"]
    assert {key[3:]: value for key, value in page.items() if key[0] == "gpuwatch_gpu_mig_memory_used_bytes"} == {
        ("2",): 26 * MIB,
        ("3",): 17 * MIB,
        ("9",): 9 * MIB,
        ("10",): 9 * MIB,
    }
    assert not [key for key in page if key[0] == "gpuwatch_gpu_utilization_ratio"]
    assert (gpu["name"], gpu["utilization_ratio"], gpu["memory_used_bytes"]) == (
        "NVIDIA H100 80GB HBM3",
        None,
        59 * MIB,
    )
    assert not [v for k, v in page.items() if k[0] == "gpuwatch_gpu_seconds_total" and k[3] == "held_idle" and v]
