"""Links, errors, MIG and GPM of the GPU collector, its tiers and what they cost: the real pynvml on NVML's ABI."""

from __future__ import annotations

from dataclasses import replace

import pynvml
import pytest

from gpuwatch_agent.collectors.drivers import Timing
from gpuwatch_agent.collectors.nvml import GpuCollector
from tests.catalogue import check
from tests.integration.collectors.test_gpu_collector import count_calls
from tests.nvml.fake import FakeGpu, recorded, shut_down
from tests.servers import wait_for

Values = dict[tuple[str, ...], float]
GIB = 1 << 30
HOPPER = FakeGpu(
    uuid="GPU-h",
    pcie_replays=3,
    ecc_corrected=12,
    ecc_uncorrected=1,
    nvlinks=18,
    nvlink_errors=7,
    nvlink_transmit_kib=2048,
    nvlink_receive_kib=1024,
    gpm={
        pynvml.NVML_GPM_METRIC_GRAPHICS_UTIL: 90.0,
        pynvml.NVML_GPM_METRIC_SM_UTIL: 87.5,
        pynvml.NVML_GPM_METRIC_SM_OCCUPANCY: 40.0,
        pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL: 31.25,
        pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL: 50.0,
        pynvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC: 10.0,
        pynvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC: 2000.5,
        pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC: 300.0,
        pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC: 400.0,
    },
)
OLDER = replace(recorded("t4", "once", "GPU-o"), xids=())
"""No NVLink, no GPM: 26.78 W, PCIe 3 × 8."""


def values(collector: GpuCollector, uuid: str) -> Values:
    """Values of one GPU by (metric without its prefix, further labels)."""
    samples = list(check(iter(collector.collect())))
    keys = [(sample.metric, sample.labels) for sample in samples]
    assert len(keys) == len(set(keys))
    return {
        (s.metric.removeprefix("gpuwatch_gpu_"), *s.labels[2:]): s.value for s in samples if s.labels[1:2] == (uuid,)
    }


def test_links_and_errors_of_a_gpu_that_has_all_of_them(nvml, collector):
    nvml.write([HOPPER])
    found = values(collector, "GPU-h")
    reported = {
        ("sm_clock_hertz",): 1.98e9,
        ("pcie_replays_total",): 3,
        ("ecc_errors_total", "corrected"): 12,
        ("ecc_errors_total", "uncorrected"): 1,
        ("nvlink_errors_total",): 7,
        ("nvlink_transmit_bytes_total",): 2 << 20,
        ("nvlink_receive_bytes_total",): 1 << 20,
        ("xid_errors_total",): 0,
    }
    assert {key: found.get(key) for key in reported} == reported


def test_what_a_gpu_does_not_tell_is_absent(nvml, collector, clock):
    not_supported = pynvml.NVML_ERROR_NOT_SUPPORTED
    without = {
        name: not_supported
        for name in ("nvmlDeviceGetTotalEccErrors", "nvmlDeviceRegisterEvents", "nvmlDeviceGetClockInfo")
    }
    without["nvmlDeviceGetPcieReplayCounter"] = pynvml.NVML_ERROR_FUNCTION_NOT_FOUND
    nvml.write([HOPPER, replace(OLDER, errors=without)])
    for _ in range(2):
        clock.now_s += 1
        names = {key[0] for key in values(collector, "GPU-o")}
    assert not names & {
        "ecc_errors_total",
        "xid_errors_total",
        "sm_clock_hertz",
        "pcie_replays_total",
        "nvlink_errors_total",
        "nvlink_receive_bytes_total",
        "sm_active_ratio",
        "mig_info",
    }
    assert {"utilization_ratio", "processes"} <= names


def test_gpm_needs_two_samples_and_is_in_base_units(nvml, collector, clock):
    nvml.write([HOPPER, OLDER])
    assert ("sm_active_ratio",) not in values(collector, "GPU-h")
    clock.now_s += 1
    found = values(collector, "GPU-h")
    mib = 1 << 20
    reported = {
        ("sm_active_ratio",): 0.875,
        ("tensor_active_ratio",): 0.3125,
        ("dram_bandwidth_ratio",): 0.5,
        ("pcie_transmit_bytes_per_second",): 10 * mib,
        ("pcie_receive_bytes_per_second",): 2000.5 * mib,
        ("nvlink_receive_bytes_per_second",): 300 * mib,
        ("nvlink_transmit_bytes_per_second",): 400 * mib,
    }
    assert {key: found.get(key) for key in reported} == pytest.approx(reported)


def test_gpm_metric_that_the_driver_cannot_compute_is_absent_alone(nvml, collector, clock):
    gpm = {pynvml.NVML_GPM_METRIC_SM_UTIL: 10.0, pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL: float("nan")}
    nvml.write([replace(HOPPER, gpm=gpm)])
    values(collector, "GPU-h")
    clock.now_s += 1
    found = values(collector, "GPU-h")
    assert found["sm_active_ratio",] == pytest.approx(0.1)
    assert ("dram_bandwidth_ratio",) not in found and ("tensor_active_ratio",) not in found


def test_gpm_restarts_after_the_driver_was_reloaded(nvml, collector, clock):
    nvml.write([HOPPER], load=1)
    for _ in range(2):
        values(collector, "GPU-h")
        clock.now_s += 1
    nvml.write([HOPPER], load=2)
    clock.now_s += 10
    assert ("sm_active_ratio",) not in values(collector, "GPU-h")  # its samples were another driver's
    clock.now_s += 1
    assert values(collector, "GPU-h")["sm_active_ratio",] == 0.875


def test_gpm_samples_are_given_back_when_gpus_are_listed_again(nvml, collector, clock, monkeypatch):
    """While a GPU is missing they are listed each minute, for days: two samples of each other GPU were left behind."""
    made, freed = (count_calls(monkeypatch, f"nvmlGpmSample{what}") for what in ("Alloc", "Free"))
    nvml.write([HOPPER, replace(OLDER, lost=True)])
    for _ in range(10):
        collector.collect()
        clock.now_s += 60
    assert len(made) >= 10
    assert len(freed) == len(made) - 2


def test_xids_are_counted_from_the_agents_start_with_number_and_time(nvml, collector, clock):
    nvml.write([replace(HOPPER, xids=(13,)), OLDER])
    found = values(collector, "GPU-h")
    assert found["xid_errors_total",] == 0  # it was before the agent's time
    assert ("last_xid",) not in found and ("last_xid_timestamp_seconds",) not in found
    nvml.write([replace(HOPPER, xids=(13, 48, 79)), OLDER])
    clock.now_s += 5
    found = values(collector, "GPU-h")
    assert found["xid_errors_total",] == 2
    assert (found["last_xid",], found["last_xid_timestamp_seconds",]) == (79, 1_790_000_000 + 1005)
    assert values(collector, "GPU-o")["xid_errors_total",] == 0
    # the driver is reloaded: what was counted stays
    nvml.write([replace(HOPPER, xids=(79,)), OLDER], load=1)
    clock.now_s += 20
    assert values(collector, "GPU-h")["xid_errors_total",] == 2
    nvml.write([replace(HOPPER, xids=(79, 94)), OLDER], load=1)
    clock.now_s += 1
    found = values(collector, "GPU-h")
    assert (found["xid_errors_total",], found["last_xid",]) == (3, 94)


def test_the_xid_of_a_gpu_that_falls_off_the_bus_is_reported(nvml, collector, clock):
    """The GPU's series vanished in the tick in which its XID was read."""
    nvml.write([HOPPER, OLDER])
    values(collector, "GPU-o")
    nvml.write([HOPPER, replace(OLDER, xids=(79,), lost=True)])
    for seconds in (60, 1, 60):
        clock.now_s += seconds
        found = values(collector, "GPU-o")
        assert (found["last_xid",], found["last_xid_timestamp_seconds",]) == (79, 1_790_000_000 + 1060)
        assert ("info",) not in found and ("last_xid",) not in values(collector, "GPU-h")
    nvml.write([HOPPER, OLDER])  # it was reset
    clock.now_s += 60
    found = values(collector, "GPU-o")
    assert ("utilization_ratio",) in found and found["last_xid",] == 79


def test_an_xid_that_comes_between_the_look_at_the_queue_and_the_loss_is_reported(nvml, collector, clock, monkeypatch):
    """Listing the GPUs again threw the queue away unread."""
    nvml.write([HOPPER, OLDER])
    values(collector, "GPU-o")
    read = pynvml.nvmlDeviceGetUtilizationRates

    def fall_off(handle):
        nvml.write([HOPPER, replace(OLDER, xids=(79,), lost=True)])
        return read(handle)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetUtilizationRates", fall_off)
    clock.now_s += 60  # they are listed again in the same tick
    assert values(collector, "GPU-o")["last_xid",] == 79


def test_the_xids_of_programs_that_a_fault_kills_do_not_hide_it(nvml, collector, clock):
    """A double-bit error is followed by 45 (cleanup) of the processes that it ends: NVIDIA's list of XIDs."""
    nvml.write([HOPPER])
    values(collector, "GPU-h")
    nvml.write([replace(HOPPER, xids=(43, 48, 45, 45))])
    clock.now_s += 1
    found = values(collector, "GPU-h")
    assert (found["xid_errors_total",], found["last_xid",]) == (4, 48)
    nvml.write([replace(HOPPER, xids=(43, 48, 45, 45, 63))])
    clock.now_s += 1
    assert values(collector, "GPU-h")["last_xid",] == 63
    clock.now_s += 3601
    nvml.write([replace(HOPPER, xids=(43, 48, 45, 45, 63, 13))])
    assert values(collector, "GPU-h")["last_xid",] == 13


MIG = ((1, "3g.40gb", 2 * GIB, 40 * GIB, "MIG-a"), (5, "1g.10gb", 0, 10 * GIB, "MIG-b"))


def test_mig_instance_has_its_own_values_and_none_of_its_gpus(nvml, collector, clock):
    nvml.write([replace(HOPPER, mig=MIG, processes=((7, GIB, 0), (8, GIB, 0), (9, GIB, 1)))])
    for _ in range(3):
        found = {uuid: values(collector, uuid) for uuid in ("GPU-h", "MIG-a", "MIG-b")}
        clock.now_s += 1
    about = ("info", HOPPER.name, HOPPER.pci_bus_id, "550.54.15")
    both = {about: 1, ("engine_active_ratio",): 0.45, ("sm_active_ratio",): 0.4375}
    sizes = {("memory_used_bytes",): 2 * GIB, ("memory_total_bytes",): 40 * GIB, ("processes",): 2}
    assert found["MIG-a"] == pytest.approx({**both, **sizes, ("mig_ratio", "1", "3g.40gb"): 3 / 7})
    sizes = {("memory_used_bytes",): 0, ("memory_total_bytes",): 10 * GIB, ("processes",): 1}
    assert found["MIG-b"] == pytest.approx({**both, **sizes, ("mig_ratio", "5", "1g.10gb"): 1 / 7})
    assert found["GPU-h"]["mig_ratio", "", ""] == pytest.approx(3 / 7)  # the rest
    assert not {("utilization_ratio",), ("engine_active_ratio",)} & set(found["GPU-h"])
    assert {("power_watts",), ("sm_clock_hertz",), ("sm_active_ratio",)} <= set(found["GPU-h"])
    assert collector.processes() == {"GPU-h": (7, 8, 9), "MIG-a": (7, 8), "MIG-b": (9,)}
    assert [(str(d.index), d.uuid, d.name.partition(" MIG ")[2]) for d in collector.devices()] == [
        ("0", "GPU-h", ""),
        ("0:0", "MIG-a", "3g.40gb"),
        ("0:1", "MIG-b", "1g.10gb"),
    ]
    gpus = {(s.metric, s.value) for s in collector.collect() if s.metric.startswith("gpuwatch_gpus_")}
    assert gpus == {("gpuwatch_gpus_seen", 1), ("gpuwatch_gpus_expected", 1)}


def test_instances_are_listed_again_every_ten_seconds(nvml, collector, clock):
    def sizes():
        collector.collect()
        return {device.uuid: round(7 * device.size_ratio, 6) for device in collector.devices()}

    nvml.write([replace(HOPPER, mig=MIG), OLDER])
    assert sizes() == {"GPU-h": 3, "MIG-a": 3, "MIG-b": 1, "GPU-o": 7}
    nvml.write([replace(HOPPER, mig=(MIG[0], (2, "4g.40gb", 0, 40 * GIB, "MIG-c"))), OLDER])
    clock.now_s += 5
    assert sizes() == {"GPU-h": 3, "MIG-a": 3, "MIG-b": 1, "GPU-o": 7}
    clock.now_s += 5
    assert sizes() == {"GPU-h": 0, "MIG-a": 3, "MIG-c": 4, "GPU-o": 7}
    # a driver that fails for a moment has not put the GPU together again
    nvml.write([replace(HOPPER, mig=MIG, errors={"nvmlDeviceGetMigMode": pynvml.NVML_ERROR_UNKNOWN}), OLDER])
    clock.now_s += 5
    assert sizes() == {"GPU-h": 0, "MIG-a": 3, "MIG-c": 4, "GPU-o": 7}
    nvml.write([HOPPER, OLDER])
    clock.now_s += 30
    assert sizes() == {"GPU-h": 7, "GPU-o": 7}


def test_xids_of_a_split_gpu_are_read(nvml, collector, clock):
    nvml.write([replace(HOPPER, mig=MIG)])
    values(collector, "GPU-h")
    nvml.write([replace(HOPPER, mig=MIG, xids=(48,))])
    clock.now_s += 1
    assert values(collector, "GPU-h")["last_xid",] == 48


def test_instance_that_the_agent_may_not_see_hides_no_other(nvml, collector, monkeypatch):
    """In a container that may not monitor MIG. Its processes, where the driver lists them, are on no other instance."""
    find = pynvml.nvmlDeviceGetMigDeviceHandleByIndex

    def first_alone(handle, index):
        if index == 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)
        return find(handle, index)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetMigDeviceHandleByIndex", first_alone)
    nvml.write([replace(HOPPER, mig=MIG, processes=((7, GIB, 0), (9, GIB, 1)))])
    collector.collect()
    assert collector.processes() == {"GPU-h": (7, 9), "MIG-a": (7,)}
    assert [round(7 * device.size_ratio, 6) for device in collector.devices()] == [4, 3]


def test_every_throttle_reason_of_the_driver_is_reported(nvml, collector, clock):
    nvml.write([replace(HOPPER, event_reasons=pynvml.nvmlClocksEventReasonAll)])
    reasons = {key[1]: value for key, value in values(collector, "GPU-h").items() if key[0] == "throttled"}
    assert len(reasons) == 3 + 9 and set(reasons.values()) == {1}
    nvml.write([replace(HOPPER, event_reasons=pynvml.nvmlClocksEventReasonSyncBoost)])
    clock.now_s += 1
    reasons = {key[1]: value for key, value in values(collector, "GPU-h").items() if key[0] == "throttled"}
    assert [reason for reason, value in reasons.items() if value] == ["sync_boost"]


def test_links_are_asked_for_every_ten_seconds_and_kept_in_between(nvml, collector, clock, monkeypatch):
    calls = count_calls(monkeypatch, "nvmlDeviceGetPcieReplayCounter")
    nvml.write([HOPPER])
    for second in range(25):
        clock.now_s = 1000 + second
        assert values(collector, "GPU-h")["pcie_replays_total",] == 3
    assert len(calls) == 3


def test_what_each_kind_of_call_costs_is_reported(nvml, collector, clock):
    nvml.write([HOPPER])
    collector.collect()
    clock.now_s += 10
    samples = {(s.metric, *s.labels): s.value for s in collector.collect()}
    calls = {key[1] for key in samples if key[0] == "gpuwatch_nvml_call_seconds_total"}
    assert calls >= {"utilization", "memory", "gpm", "processes", "nvlinks", "mig_instances"}
    assert all(samples["gpuwatch_nvml_call_seconds_total", call] > 0 for call in calls)


def test_dear_call_is_made_as_seldom_as_its_budget_wants(nvml, collector, clock, monkeypatch):
    """30 ms in each of two GPUs: 1% of a core is one round in six seconds or more."""
    calls = count_calls(monkeypatch, "nvmlDeviceGetPowerUsage")
    slow = {"nvmlDeviceGetPowerUsage": 0.03}
    nvml.write([replace(HOPPER, hangs_s=slow), replace(OLDER, hangs_s=slow)])
    for _ in range(40):
        found = values(collector, "GPU-o")
        assert found["power_watts",] == 26.78  # in between, the last one
        clock.now_s += 1
    assert 2 * 3 < len(calls) <= 2 * (3 + 40 / 6)


def test_call_of_the_slow_tier_that_hangs_holds_up_nothing(nvml, clock, caplog):
    collector = GpuCollector(Timing(clock, deadline_s=60, slow_wait_s=0.05))
    nvml.write([HOPPER, replace(OLDER, hangs_s={"nvmlDeviceGetTotalEccErrors": 600})])
    values(collector, "GPU-o")
    wait_for("it hangs", lambda: collector.slow.current == "ecc_errors of GPU 1", 20, 0.01)
    collector.slow.thread._deadline_s = 0.1
    for _ in range(30):
        clock.now_s += 1
        found = values(collector, "GPU-o")
        assert found["utilization_ratio",] == 0
    assert ("ecc_errors_total", "corrected") not in found
    warnings = [record.getMessage() for record in caplog.records if "did not answer" in record.getMessage()]
    assert warnings == [
        "NVML did not answer within 0.1 s (ecc_errors of GPU 1); the other values are still read",
    ]
    clock.now_s += 100  # what it knew is too old by now
    assert collector.processes() == {}
    nvml.write([HOPPER, replace(OLDER, ecc_corrected=5)])

    def recovered() -> bool:
        clock.now_s += 1
        known = values(collector, "GPU-o").get(("ecc_errors_total", "corrected")) == 5
        return known and set(collector.processes()) == {"GPU-h", "GPU-o"}

    wait_for("the slow tier answers again", recovered, 30, 0.05)
    nvml.write([])
    collector.fast.thread.call(shut_down)
