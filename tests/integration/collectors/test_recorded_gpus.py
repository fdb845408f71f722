"""The agent on recorded machines: their drivers' figures and no others, through the real pynvml on NVML's ABI."""

from __future__ import annotations

import os
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
    """Values of one turn by (metric without its prefix, labels beyond gpu and UUID), of MIG device 1 as "1 metric".

    Raises: AssertionError for a series given twice.
    """
    samples: list[Any] = list(check(collector.collect()))
    samples = [s for s in samples if isinstance(s, Sample) and s.metric.startswith("gpuwatch_gpu_")]
    of = {("0", UUID): ""} | {(f"0:{index}", f"MIG-{UUID}-{index}"): f"{index} " for index in range(7)}
    kept = samples if full else [s for s in standard(samples) if isinstance(s, Sample)]
    found = {(of[s.labels[:2]] + s.metric.removeprefix("gpuwatch_gpu_"), *s.labels[2:]): s.value for s in kept}
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
    left = 7
    for index, (instance, profile, used_mib, total_mib) in enumerate(seen["mig"] or ()):
        left -= int(profile[0])
        wanted[f"{index} mig_ratio", str(instance), profile] = int(profile[0]) / 7
        wanted[f"{index} info", found["gpu"]["name"], found["gpu"]["pci_bus_id"], found["driver"]] = 1
        wanted[f"{index} memory_used_bytes",] = used_mib * MIB
        wanted[f"{index} memory_total_bytes",] = total_mib * MIB
        if "processes" in seen:
            wanted[f"{index} processes",] = 0  # no recording has whose they are
    if seen["mig"]:
        wanted["mig_ratio", "", ""] = left / 7
    return wanted


@pytest.mark.parametrize(("machine", "state"), recordings())
def test_what_is_served_is_what_was_recorded(
    nvml: FakeNvml, collector: GpuCollector, caplog: pytest.LogCaptureFixture, machine: str, state: str
) -> None:
    write(nvml, machine, state)
    assert values(collector) == pytest.approx(expected(machine, state))
    listed = recording(machine)["states"][state].get("processes")
    processes = {UUID: tuple(pid for pid, used in sorted(listed))} if listed is not None else {}
    found = collector.processes()
    assert {uuid: pids for uuid, pids in found.items() if uuid == UUID} == processes
    assert not any(pids for uuid, pids in found.items() if uuid != UUID)
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == []


@pytest.mark.parametrize(("machine", "state"), recordings())
def test_doctor_takes_every_recorded_gpu_for_one_that_answers(nvml: FakeNvml, machine: str, state: str) -> None:
    write(nvml, machine, state)
    found, facts = recording(machine), read_nvml()
    assert (facts.state, facts.lost) == ("answers", ())
    assert facts.gpus == ((UUID, found["gpu"]["name"]),)
    assert (facts.driver, facts.cuda) == (found["driver"], tuple(map(int, found["cuda"].split("."))))


def test_h200_in_five_compute_instances_is_five_parts(nvml: FakeNvml, collector: GpuCollector) -> None:
    """Two compute instances share the first GPU instance and its memory: each has its own UUID and compute slices."""
    write(nvml, "h200-mig", "load")
    found = values(collector, full=False)
    assert {key[0] for key in found if key[0][0].isalpha()} == {
        *("info", "memory_used_bytes", "memory_total_bytes", "power_watts", "temperature_celsius", "throttled"),
        *("sm_clock_hertz", "processes", "mig_ratio"),
    }
    sizes = {key: round(7 * value, 6) for key, value in found.items() if key[0].endswith("mig_ratio")}
    assert sizes == {
        ("mig_ratio", "", ""): 0,
        ("0 mig_ratio", "2", "1c.3g.71gb"): 1,
        ("1 mig_ratio", "2", "2c.3g.71gb"): 2,
        ("2 mig_ratio", "3", "2g.35gb"): 2,
        ("3 mig_ratio", "9", "1g.18gb"): 1,
        ("4 mig_ratio", "10", "1g.18gb"): 1,
    }
    used = [found[f"{index} memory_used_bytes",] // MIB for index in range(5)]
    assert used == [16_925, 16_925, 17, 9, 9] and found["memory_used_bytes",] == 16_959 * MIB


def test_activity_of_an_instance_of_two_compute_instances_is_neithers(
    nvml: FakeNvml, collector: GpuCollector, clock: Clock
) -> None:
    gpm = {pynvml.NVML_GPM_METRIC_SM_UTIL: 80.0}
    nvml.write([replace(recorded("h200-mig", "load"), gpm=gpm)])
    for _ in range(3):
        found = values(collector)
        clock.now_s += 1
    active = {key[0]: value for key, value in found.items() if key[0].endswith("sm_active_ratio")}
    assert active == pytest.approx({"sm_active_ratio": 0.8} | {f"{index} sm_active_ratio": 0.4 for index in (2, 3, 4)})


@pytest.mark.parametrize(
    ("machine", "state", "absent"),
    [
        ("h100-mig", "load", {"utilization_ratio", "nvlink_errors_total"}),
        ("h200-mig", "idle", {"utilization_ratio", "nvlink_errors_total"}),
        ("a100-mig", "once", {"utilization_ratio"}),
        ("rtx-4080-super", "load", {"ecc_errors_total", "nvlink_errors_total", "mig_ratio"}),
        ("rtx-2080-super", "idle", {"ecc_errors_total", "mig_ratio"}),
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


def test_agent_on_a_split_gpu_calls_no_state_of_an_instance_without_activity(tmp_path: Path) -> None:
    """The agent's process and page on an H100 with MIG, with a process on one instance.

    The driver does not say how active an instance is.
    """
    nvml, found = FakeNvml(tmp_path), recording("h100-mig")
    held = replace(recorded("h100-mig", "idle"), processes=((os.getpid(), MIB, 0),))
    nvml.write([held], driver=found["driver"], cuda=found["cuda"])
    with Agent(tmp_path, "--series", "full", environment=nvml.environment()) as agent:

        def states() -> list[str]:
            return [each["state"] for each in agent.get("/api/v1/status")["gpus"]]

        wait_for("the instances", lambda: states() == ["unallocated", "unknown", *["unallocated"] * 3], 60, 0.5)
        page, gpus = agent.metrics(), agent.get("/api/v1/status")["gpus"]
    assert [each["gpu"] for each in gpus] == ["0", "0:0", "0:1", "0:2", "0:3"]
    used = [each["memory_used_bytes"] // MIB for each in gpus]
    assert used == [59, 26, 17, 9, 9] and not any(each["utilization_ratio"] for each in gpus)
    assert [each["name"].removeprefix("NVIDIA H100 80GB HBM3") for each in gpus] == [
        *("", " MIG 3g.40gb", " MIG 2g.20gb", " MIG 1g.10gb", " MIG 1g.10gb")
    ]
    assert not [v for k, v in page.items() if k[0] == "gpuwatch_gpu_seconds_total" and k[3] == "held_idle" and v]
