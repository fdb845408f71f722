"""The GPU collector through the real pynvml and a library with NVML's ABI."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pynvml
import pytest

from gpuwatch.errors import GpuwatchError, NoData
from gpuwatch.metrics import Sample
from gpuwatch_agent.collectors.drivers import GpuDevice
from gpuwatch_agent.collectors.nvml import GpuCollector
from gpuwatch_agent.exporter import standard
from tests.catalogue import check
from tests.nvml.fake import MIB, FakeGpu, FakeNvml, patch_library, recorded

FIRST = FakeGpu(uuid="GPU-aaaa", energy_mj=7_200_250, processes=((4711, 2 << 30), (4712, None)))
"""The recorded H100 at work: 100%, 631.95 W, 59 °C, 19,818 of 81,559 MiB."""
SECOND = replace(recorded("l40s", "load", "GPU-bbbb"), minor=3, energy_mj=1_500, processes=())
"""The recorded L40S at work: 9%, 110.23 W, 54 °C, 1,235 of 46,068 MiB."""
NOT_SUPPORTED = pynvml.NVML_ERROR_NOT_SUPPORTED

Values = dict[tuple[str, ...], float]


def values(collector: GpuCollector) -> Values:
    """Return the values of one turn by (metric without its prefix, labels): the standard set and its energy counter."""
    found = list(collector.collect())
    counters = [s for s in found if s.metric == "gpuwatch_gpu_driver_energy_joules_total"]
    samples = list(check([*standard(found), *counters]))
    found = {(s.metric.removeprefix("gpuwatch_"), *s.labels): s.value for s in samples if isinstance(s, Sample)}
    assert len(found) == len(samples)
    return {key: value for key, value in found.items() if key[0] != "nvml_call_seconds_total"}


def of(gpu: FakeGpu, found: Values) -> set[str]:
    """The metrics that there are of a GPU."""
    return {key[0] for key in found if gpu.uuid in key}


def test_every_value_of_two_gpus(nvml, collector):
    nvml.write([FIRST, SECOND])
    found = values(collector)
    assert found == {
        ("gpu_info", "0", "GPU-aaaa", "NVIDIA H100 80GB HBM3", "00000000:00:09.0", "550.54.15"): 1,
        ("gpu_utilization_ratio", "0", "GPU-aaaa"): 1.0,
        ("gpu_memory_used_bytes", "0", "GPU-aaaa"): 19_818 * MIB,  # without what the driver has reserved
        ("gpu_memory_total_bytes", "0", "GPU-aaaa"): 81_559 * MIB,
        ("gpu_power_watts", "0", "GPU-aaaa"): 631.95,
        ("gpu_driver_energy_joules_total", "0", "GPU-aaaa"): 7200.25,
        ("gpu_temperature_celsius", "0", "GPU-aaaa"): 59,
        ("gpu_throttled", "0", "GPU-aaaa", "power"): 0,
        ("gpu_throttled", "0", "GPU-aaaa", "thermal"): 0,
        ("gpu_throttled", "0", "GPU-aaaa", "hardware"): 0,
        ("gpu_sm_clock_hertz", "0", "GPU-aaaa"): 1.98e9,
        ("gpu_pcie_replays_total", "0", "GPU-aaaa"): 9,
        ("gpu_nvlink_transmit_bytes_total", "0", "GPU-aaaa"): 0,
        ("gpu_nvlink_receive_bytes_total", "0", "GPU-aaaa"): 0,
        ("gpu_processes", "0", "GPU-aaaa"): 2,
        ("gpu_info", "1", "GPU-bbbb", "NVIDIA L40S", "00000000:01:00.0", "550.54.15"): 1,
        ("gpu_utilization_ratio", "1", "GPU-bbbb"): 0.09,
        ("gpu_memory_used_bytes", "1", "GPU-bbbb"): 1_235 * MIB,
        ("gpu_memory_total_bytes", "1", "GPU-bbbb"): 46_068 * MIB,
        ("gpu_power_watts", "1", "GPU-bbbb"): 110.23,
        ("gpu_driver_energy_joules_total", "1", "GPU-bbbb"): 1.5,
        ("gpu_temperature_celsius", "1", "GPU-bbbb"): 54,
        ("gpu_throttled", "1", "GPU-bbbb", "power"): 0,
        ("gpu_throttled", "1", "GPU-bbbb", "thermal"): 0,
        ("gpu_throttled", "1", "GPU-bbbb", "hardware"): 0,
        ("gpu_sm_clock_hertz", "1", "GPU-bbbb"): 2.52e9,
        ("gpu_processes", "1", "GPU-bbbb"): 0,
        ("gpus_seen",): 2,
        ("gpus_expected",): 2,
    }
    assert collector.devices() == (
        GpuDevice(0, "GPU-aaaa", "NVIDIA H100 80GB HBM3", "00000000:00:09.0", 0),
        GpuDevice(1, "GPU-bbbb", "NVIDIA L40S", "00000000:01:00.0", 3),
    )
    assert collector.processes() == {
        "GPU-aaaa": (4711, 4712),
        "GPU-bbbb": (),
    }


def test_a_process_on_two_mig_instances_is_one(nvml, collector):
    nvml.write([replace(FIRST, processes=((7, 1 << 30), (7, 2 << 30), (5, None), (5, 1)))])
    assert values(collector)["gpu_processes", "0", "GPU-aaaa"] == 2
    assert collector.processes() == {"GPU-aaaa": (5, 7)}


@pytest.mark.parametrize(
    ("bits", "power", "thermal", "hardware"),
    [
        (pynvml.nvmlClocksEventReasonSwPowerCap, 1, 0, 0),
        (pynvml.nvmlClocksEventReasonSwThermalSlowdown, 0, 1, 0),
        (pynvml.nvmlClocksEventReasonHwSlowdown, 0, 0, 1),
        (pynvml.nvmlClocksEventReasonHwSlowdown | pynvml.nvmlClocksEventReasonHwThermalSlowdown, 0, 1, 1),
        (pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown, 1, 0, 1),
        (pynvml.nvmlClocksEventReasonGpuIdle | pynvml.nvmlClocksEventReasonApplicationsClocksSetting, 0, 0, 0),
    ],
)
def test_throttle_reasons(nvml, collector, bits, power, thermal, hardware):
    nvml.write([replace(FIRST, event_reasons=bits)])
    found = values(collector)
    reasons = {key[3]: value for key, value in found.items() if key[0] == "gpu_throttled"}
    assert reasons == {"power": power, "thermal": thermal, "hardware": hardware}


def test_an_unsupported_value_is_absent_and_the_rest_is_there(nvml, collector):
    mig = {
        "nvmlDeviceGetUtilizationRates": NOT_SUPPORTED,
        "nvmlDeviceGetPowerUsage": pynvml.NVML_ERROR_NO_PERMISSION,
        "nvmlDeviceGetComputeRunningProcesses_v3": NOT_SUPPORTED,
        "nvmlDeviceGetMinorNumber": NOT_SUPPORTED,
    }
    nvml.write([replace(FIRST, errors=mig), SECOND])
    found = values(collector)
    assert of(FIRST, found) == {
        "gpu_info",
        "gpu_memory_used_bytes",
        "gpu_memory_total_bytes",
        "gpu_driver_energy_joules_total",
        "gpu_temperature_celsius",
        "gpu_throttled",
        "gpu_sm_clock_hertz",
        "gpu_pcie_replays_total",
        "gpu_nvlink_transmit_bytes_total",
        "gpu_nvlink_receive_bytes_total",
    }
    assert found["gpu_utilization_ratio", "1", "GPU-bbbb"] == 0.09
    assert found["gpus_seen",] == 2
    assert collector.processes() == {"GPU-bbbb": ()}  # not reported, and not "no process"
    assert collector.devices()[0].minor is None


def test_an_old_driver_without_the_newer_calls(nvml, collector):
    missing = pynvml.NVML_ERROR_FUNCTION_NOT_FOUND
    newer = (
        "nvmlDeviceGetMemoryInfo_v2",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetComputeRunningProcesses_v3",
    )
    nvml.write([replace(FIRST, event_reasons=0x4)], driver="470.256.02", errors=dict.fromkeys(newer, missing))
    found = values(collector)
    assert found["gpu_memory_used_bytes", "0", "GPU-aaaa"] == (19_818 + 479) * MIB
    assert found["gpu_throttled", "0", "GPU-aaaa", "power"] == 1
    assert found["gpu_processes", "0", "GPU-aaaa"] == 2


def test_a_new_driver_without_the_old_temperature_call(nvml, collector):
    nvml.write([FIRST], errors={"nvmlDeviceGetTemperature": pynvml.NVML_ERROR_DEPRECATED})
    assert values(collector)["gpu_temperature_celsius", "0", "GPU-aaaa"] == 59


def test_process_lists_are_polled_every_ten_seconds_and_the_rest_in_every_turn(nvml, collector, clock):
    nvml.write([FIRST])
    values(collector)
    nvml.write([replace(FIRST, processes=(), utilization_percent=0)])
    clock.now_s += 9
    found = values(collector)
    assert found["gpu_utilization_ratio", "0", "GPU-aaaa"] == 0
    assert found["gpu_processes", "0", "GPU-aaaa"] == 2
    assert len(collector.processes()["GPU-aaaa"]) == 2
    clock.now_s += 1
    assert values(collector)["gpu_processes", "0", "GPU-aaaa"] == 0
    assert collector.processes() == {"GPU-aaaa": ()}


def test_a_gpu_falls_off_the_bus_and_comes_back(nvml, collector, clock, caplog):
    nvml.write([FIRST, SECOND])
    values(collector)
    nvml.write([FIRST, replace(SECOND, lost=True)])
    for seconds in (10, 1, 1):
        clock.now_s += seconds
        found = values(collector)
        assert of(SECOND, found) == set()
        assert found["gpu_utilization_ratio", "0", "GPU-aaaa"] == 1.0
        assert (found["gpus_seen",], found["gpus_expected",]) == (1, 2)
    assert [device.uuid for device in collector.devices()] == ["GPU-aaaa"]
    assert set(collector.processes()) == {"GPU-aaaa"}
    assert [r.message for r in caplog.records if r.levelno == logging.WARNING] == [
        "GPU 1 (GPU-bbbb) is lost: GPU is lost",
        "GPU 1 is listed but does not answer: GPU is lost",
    ]

    nvml.write([FIRST, replace(SECOND, processes=((9, 1),))])
    clock.now_s += 10
    found = values(collector)
    assert found["gpu_power_watts", "1", "GPU-bbbb"] == 110.23
    assert found["gpu_processes", "1", "GPU-bbbb"] == 1  # not only at the next poll
    assert (found["gpus_seen",], found["gpus_expected",]) == (2, 2)


def test_gpus_are_known_by_uuid_when_their_indices_move(nvml, collector, clock):
    nvml.write([FIRST, SECOND])
    values(collector)
    nvml.write([SECOND])
    clock.now_s += 10
    found = values(collector)
    assert found["gpu_power_watts", "0", "GPU-bbbb"] == 110.23
    assert of(FIRST, found) == set()
    assert (found["gpus_seen",], found["gpus_expected",]) == (1, 2)


def test_a_gpu_that_was_lost_before_the_agent_started_is_expected(nvml, collector):
    nvml.write([FIRST, replace(SECOND, lost=True)])
    found = values(collector)
    assert (found["gpus_seen",], found["gpus_expected",]) == (1, 2)


def test_a_gpu_without_a_pci_address_is_seen(nvml, collector):
    """As a Jetson's, for which nvidia-smi prints N/A."""
    nvml.write([replace(FIRST, minor=None, errors={"nvmlDeviceGetPciInfo_v3": NOT_SUPPORTED})])
    found = values(collector)
    assert (found["gpus_seen",], found["gpus_expected",]) == (1, 1)
    assert found["gpu_info", "0", "GPU-aaaa", "NVIDIA H100 80GB HBM3", "", "550.54.15"] == 1


def test_an_error_that_is_not_nvmls_costs_its_own_value_alone(nvml, collector, monkeypatch, caplog):
    """As of an older nvidia-ml-py, which lacks a function."""
    monkeypatch.delattr(pynvml, "nvmlDeviceGetPowerUsage")
    nvml.write([FIRST])
    found = values(collector)
    assert "gpu_power_watts" not in of(FIRST, found) and found["gpu_utilization_ratio", "0", "GPU-aaaa"] == 1.0
    assert "GPU 0 (GPU-aaaa): no power: " in caplog.text


def test_a_gpu_that_a_former_agent_saw_is_expected(nvml, collector):
    collector.expect(2)
    assert (values(collector)["gpus_seen",], values(collector)["gpus_expected",]) == (0, 2), "no driver"
    nvml.write([FIRST])
    collector.clock.now_s += 60
    found = values(collector)
    assert (found["gpus_seen",], found["gpus_expected",]) == (1, 2)


def test_another_containers_gpu_is_not_expected(nvml, collector):
    forbidden = {"nvmlDeviceGetHandleByIndex_v2": pynvml.NVML_ERROR_NO_PERMISSION}
    nvml.write([replace(FIRST, errors=forbidden), SECOND])
    found = values(collector)
    assert (found["gpus_seen",], found["gpus_expected",]) == (1, 1)
    assert found["gpu_power_watts", "1", "GPU-bbbb"] == 110.23


def test_a_reloaded_driver_costs_no_sample(nvml, collector, clock):
    nvml.write([FIRST], load=1)
    values(collector)
    nvml.write([replace(FIRST, energy_mj=1000)], load=2, driver="560.28.03")
    clock.now_s += 10
    found = values(collector)
    assert found["gpu_driver_energy_joules_total", "0", "GPU-aaaa"] == 1
    assert ("gpu_info", "0", "GPU-aaaa", FIRST.name, FIRST.pci_bus_id, "560.28.03") in found


def test_a_driver_that_is_unloaded_under_the_agent_is_seen_as_missing_gpus(nvml, collector, clock):
    nvml.write([FIRST])
    values(collector)
    nvml.unload()
    clock.now_s += 10
    assert values(collector) == {("gpus_seen",): 0, ("gpus_expected",): 1}
    assert collector.devices() == ()
    assert collector.processes() == {}
    nvml.write([FIRST], load=2)
    clock.now_s += 20
    assert values(collector)["gpu_power_watts", "0", "GPU-aaaa"] == 631.95


def test_an_unknown_error_leaves_out_the_value_alone_and_enumerates_at_growing_intervals(
    nvml, collector, clock, monkeypatch
):
    inits = count_calls(monkeypatch, "nvmlInitWithFlags")
    nvml.write([replace(FIRST, errors={"nvmlDeviceGetPowerUsage": pynvml.NVML_ERROR_UNKNOWN})])
    times_s = []
    for _ in range(200):
        before = len(inits)
        found = values(collector)
        assert "gpu_power_watts" not in of(FIRST, found)
        assert found["gpu_utilization_ratio", "0", "GPU-aaaa"] == 1.0
        times_s += [clock.now_s - 1000] * (len(inits) - before)
        clock.now_s += 1
    assert times_s == [0, 10, 30, 70, 130, 190]


def count_calls(monkeypatch: pytest.MonkeyPatch, name: str) -> list[str]:
    real: Callable[..., object] = getattr(pynvml, name)
    calls: list[str] = []

    def counted(*arguments: object) -> object:
        calls.append(name)
        return real(*arguments)

    monkeypatch.setattr(pynvml, name, counted)
    return calls


def test_a_hang_past_the_deadline_is_named_and_recovered_from(nvml, collector, clock, monkeypatch):
    calls = count_calls(monkeypatch, "nvmlDeviceGetUtilizationRates")
    nvml.write([FIRST])
    values(collector)
    assert collector.processes() == {"GPU-aaaa": (4711, 4712)}

    nvml.write([replace(FIRST, hangs_s={"nvmlDeviceGetUtilizationRates": 300})])
    collector.fast.thread._deadline_s = 2.0
    for _ in range(3):
        clock.now_s += 1
        with pytest.raises(TimeoutError, match=r"^NVML did not answer within 2 s \(utilization of GPU 0\)$"):
            collector.collect()
    assert len(calls) == 2  # one before, and the one that hangs: no other was started meanwhile
    assert collector.processes() == {}

    nvml.write([replace(FIRST, power_mw=1000, processes=((1, 1),))])
    overdue = collector.fast.thread.pending
    assert overdue is not None
    overdue.exception(60)
    collector.fast.thread._deadline_s = 60
    clock.now_s += 1
    found = values(collector)
    assert found["gpu_power_watts", "0", "GPU-aaaa"] == 1
    assert found["gpu_processes", "0", "GPU-aaaa"] == 1
    assert len(calls) == 3


def test_no_library(monkeypatch, tmp_path):
    patch_library(monkeypatch, tmp_path / "libnvidia-ml.so.1")
    collector = GpuCollector()
    for _ in range(2):
        with pytest.raises(NoData, match=r"libnvidia-ml\.so\.1 was not found: there is no NVIDIA driver here"):
            collector.collect()
    assert collector.devices() == ()
    assert collector.processes() == {}


def test_a_driver_that_is_loaded_later(nvml, collector, clock):
    for _ in range(2):
        with pytest.raises(NoData, match="the NVIDIA driver is not loaded"):
            collector.collect()
    nvml.write([FIRST])
    clock.now_s += 10
    assert values(collector)["gpus_seen",] == 1


def test_a_driver_without_gpus(nvml, collector):
    nvml.write([])
    with pytest.raises(NoData, match="lists no GPU"):
        collector.collect()


def test_a_driver_that_refuses_is_a_failure_and_says_what_to_do(nvml, collector):
    nvml.write([FIRST], errors={"nvmlInitWithFlags": pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH})
    with pytest.raises(GpuwatchError, match="reload it and restart the agent") as raised:
        collector.collect()
    assert not isinstance(raised.value, NoData)


def test_a_subprocess_sees_the_gpus_and_exits_while_nvml_hangs(tmp_path):
    """Through the dynamic loader alone, as the agent does; a wedged call does not hold up the interpreter's exit."""
    nvml = FakeNvml(tmp_path)
    nvml.write([FIRST, replace(SECOND, hangs_s={"nvmlDeviceGetTotalEnergyConsumption": 300})])
    program = """
import json, sys
from gpuwatch_agent.collectors.nvml import GpuCollector, Timing
collector = GpuCollector(Timing(deadline_s=float(sys.argv[1])))
try:
    print(json.dumps([sample.value for sample in collector.collect() if sample.metric == sys.argv[2]]))
except TimeoutError as error:
    print(json.dumps(str(error)))
"""

    def run(deadline_s: float, metric: str) -> object:
        command = [sys.executable, "-c", program, str(deadline_s), metric]
        done = subprocess.run(command, env=nvml.environment(), capture_output=True, text=True, timeout=180, check=True)
        return json.loads(done.stdout)

    assert run(5, "gpuwatch_gpu_power_watts") == "NVML did not answer within 5 s (energy of GPU 1)"
    nvml.write([FIRST, SECOND])
    assert run(60, "gpuwatch_gpu_power_watts") == [631.95, 110.23]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (0, {}),
        (NOT_SUPPORTED, {4711: 0.6, 4713: 0.2}),
        (pynvml.NVML_ERROR_NO_PERMISSION, {4711: 0.6, 4713: 0.2}),
        (pynvml.NVML_ERROR_INSUFFICIENT_SIZE, {4711: 0.6, 4713: 0.2}),
        (pynvml.NVML_ERROR_GPU_IS_LOST, {4711: 0.6, 4713: 0.2}),
    ],
)
def test_use_of_the_multiprocessors_is_that_of_each_process(nvml, collector, clock, answer, expected):
    """And with clients of an MPS server. A call that fails leaves the last answer, and the process list."""
    call = "nvmlDeviceGetProcessUtilization"
    shared = replace(FIRST, mps=(4713, 4714), sm_percent={4711: 60, 4712: 0, 4713: 20})
    nvml.write([shared, replace(SECOND, processes=((4720, None),), sm_percent={4720: 90})])
    values(collector)
    assert collector.processes() == {"GPU-aaaa": (4711, 4712, 4713, 4714), "GPU-bbbb": (4720,)}
    assert collector.sm_utilization == {"GPU-aaaa": {4711: 0.6, 4713: 0.2}, "GPU-bbbb": {}}
    nvml.write([replace(shared, errors={call: answer} if answer else {}, sm_percent={})])
    clock.now_s += 10
    values(collector)
    assert collector.processes()["GPU-aaaa"] == (4711, 4712, 4713, 4714)
    assert collector.sm_utilization["GPU-aaaa"] == expected


@pytest.mark.parametrize(
    "answer", [NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, pynvml.NVML_ERROR_NO_PERMISSION]
)
def test_a_driver_that_does_not_list_mps_clients_lists_the_others(nvml, collector, answer):
    nvml.write([replace(FIRST, mps=(4713,), errors={"nvmlDeviceGetMPSComputeRunningProcesses_v3": answer})])
    values(collector)
    assert collector.processes() == {"GPU-aaaa": (4711, 4712)}
