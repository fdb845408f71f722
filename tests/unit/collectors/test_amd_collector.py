"""AMD's GPUs through a module with amdsmi's own function names: no hardware."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from gpuwatch.errors import GpuwatchError, NoData
from gpuwatch_agent.collectors import gpu_source
from gpuwatch_agent.collectors.amd import AmdCollector, load_amdsmi
from gpuwatch_agent.collectors.drivers import Timing
from gpuwatch_agent.collectors.node import Roots
from gpuwatch_agent.collectors.nvml import GpuCollector
from tests.catalogue import check
from tests.unit.collectors.amdsmi_fake import DRIVER_NOT_LOADED, NOT_SUPPORTED, FakeAmdsmi

FIRST = ("0", "fcff74a1-0000-1000-80e9-b388cfe84650")
SECOND = ("1", "fcff74a1-0000-1000-80e9-b388cfe84651")


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def smi() -> FakeAmdsmi:
    return FakeAmdsmi()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def collector(smi: FakeAmdsmi, clock: Clock) -> AmdCollector:
    return AmdCollector(Timing(clock, deadline_s=20), lambda: smi)


def look(collector: AmdCollector) -> dict[tuple[str, ...], float]:
    samples = list(check(iter(collector.collect())))
    found = {(s.metric.removeprefix("gpuwatch_gpu_"), *s.labels): s.value for s in samples}
    assert len(found) == len(samples)
    return found


def test_values_in_our_names_and_base_units(collector: AmdCollector) -> None:
    found = look(collector)
    own = {(key[0], *key[3:]): value for key, value in found.items() if key[1:3] == FIRST}
    assert own == {
        ("info", "AMD Instinct MI300X", "00000000:C1:00.0", "6.12.12"): 1,
        ("utilization_ratio",): pytest.approx(0.97),
        ("memory_used_bytes",): 20480 << 20,
        ("memory_total_bytes",): 196592 << 20,
        ("power_watts",): 612,
        ("driver_energy_joules_total",): pytest.approx(61.0),
        ("temperature_celsius",): 61,
        ("sm_clock_hertz",): 2.1e9,
        ("ecc_errors_total", "corrected"): 3,
        ("ecc_errors_total", "uncorrected"): 0,
        ("processes",): 1,
    }
    assert (found["gpuwatch_gpus_seen",], found["gpuwatch_gpus_expected",]) == (2, 2)
    assert found["gpuwatch_nvml_call_seconds_total", "activity"] > 0
    assert collector.processes() == {FIRST[1]: (4711,), SECOND[1]: ()}
    assert [device.uuid for device in collector.devices()] == [FIRST[1], SECOND[1]]


def test_what_is_not_reported_is_absent_and_the_rest_is_there(collector: AmdCollector, smi: FakeAmdsmi) -> None:
    smi.activity["gfx_activity"] = "N/A"
    smi.errors = {"amdsmi_get_energy_count": NOT_SUPPORTED, ("amdsmi_get_gpu_process_list", 1): NOT_SUPPORTED}
    found = look(collector)
    assert ("utilization_ratio", *FIRST) not in found and ("driver_energy_joules_total", *FIRST) not in found
    assert found[("power_watts", *FIRST)] == 612
    assert collector.processes() == {FIRST[1]: (4711,)}  # of the other one it is not known


def test_processes_are_listed_every_ten_seconds_and_are_good_for_thirty(
    collector: AmdCollector, smi: FakeAmdsmi, clock: Clock
) -> None:
    for _ in range(10):
        look(collector)
        clock.now_s += 1
    assert smi.calls.count("amdsmi_get_gpu_process_list") == 2  # one a GPU
    assert smi.calls.count("amdsmi_get_gpu_activity") == 20
    assert collector.process_list_age_s(FIRST[1]) == 10
    look(collector)
    assert smi.calls.count("amdsmi_get_gpu_process_list") == 4
    smi.errors["amdsmi_get_gpu_process_list"] = NOT_SUPPORTED
    clock.now_s += 31
    assert collector.processes() == {}


def test_lost_gpu_is_missing_and_found_again(collector: AmdCollector, smi: FakeAmdsmi, clock: Clock) -> None:
    look(collector)
    smi.errors = {
        ("amdsmi_get_gpu_activity", 1): DRIVER_NOT_LOADED,
        ("amdsmi_get_gpu_device_uuid", 1): DRIVER_NOT_LOADED,
    }
    clock.now_s += 1
    found = look(collector)
    assert (found["gpuwatch_gpus_seen",], found["gpuwatch_gpus_expected",]) == (1, 2)
    assert ("power_watts", *FIRST) in found and ("power_watts", *SECOND) not in found
    assert SECOND[1] not in collector.processes()
    smi.errors = {}
    clock.now_s += 10
    assert look(collector)["gpuwatch_gpus_seen",] == 2


@pytest.mark.parametrize("answer", [{}, {"energy_accumulator": "N/A", "counter_resolution": "N/A"}])
def test_an_answer_that_is_not_as_expected_costs_its_own_value_alone(
    collector: AmdCollector,
    smi: FakeAmdsmi,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    answer: dict[str, Any],
) -> None:
    monkeypatch.setattr(smi, "amdsmi_get_energy_count", lambda _handle: answer)
    found = look(collector)
    assert ("driver_energy_joules_total", *FIRST) not in found
    assert found[("power_watts", *FIRST)] == found[("power_watts", *SECOND)] == 612
    assert collector.processes()[FIRST[1]] == (4711,)
    assert f"GPU 0 ({FIRST[1]}): no energy" in caplog.text


def test_a_gpu_without_a_name_and_a_driver_version_is_not_lost(collector: AmdCollector, smi: FakeAmdsmi) -> None:
    smi.errors = {"amdsmi_get_gpu_asic_info": NOT_SUPPORTED, "amdsmi_get_gpu_driver_info": NOT_SUPPORTED}
    found = look(collector)
    assert (found["gpuwatch_gpus_seen",], found["gpuwatch_gpus_expected",]) == (2, 2)
    assert found[("info", *FIRST, "AMD GPU", "00000000:C1:00.0", "")] == 1, "one without a name counts as missing"


def test_driver_that_is_reloaded_is_restarted(collector: AmdCollector, smi: FakeAmdsmi, clock: Clock) -> None:
    look(collector)
    smi.started = False
    clock.now_s += 1
    assert look(collector)["gpuwatch_gpus_seen",] == 0
    clock.now_s += 10
    assert look(collector)["gpuwatch_gpus_seen",] == 2


def test_no_gpu_no_library_and_a_library_that_fails(
    collector: AmdCollector, smi: FakeAmdsmi, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi.errors = {"amdsmi_init": DRIVER_NOT_LOADED}
    with pytest.raises(GpuwatchError, match="amdsmi does not start"):
        collector.collect()
    smi.errors, smi.count = {}, 0
    clock.now_s += 10
    with pytest.raises(NoData, match="lists no GPU"):
        collector.collect()
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    with pytest.raises(NoData, match=r"amdsmi cannot be used .*pip install /opt/rocm"):
        load_amdsmi()


def test_call_that_hangs_is_given_up_on_named_and_waited_for(smi: FakeAmdsmi, clock: Clock) -> None:
    collector = AmdCollector(Timing(clock, deadline_s=2.0), lambda: smi)
    go_on = threading.Event()
    patient = smi.amdsmi_get_power_info
    smi.amdsmi_get_power_info = lambda handle: patient(handle) if go_on.wait(30) else {}  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(TimeoutError, match=r"amdsmi did not answer within 2 s \(power of GPU 0\)"):
            collector.collect()
    assert collector.processes() == {}
    go_on.set()
    for _ in range(600):
        try:
            found = look(collector)
            break
        except TimeoutError:
            threading.Event().wait(0.05)
    assert found["gpuwatch_gpus_seen",] == 2


def test_amds_driver_alone_makes_it_the_source(tmp_path: Path) -> None:
    roots = Roots(sysfs=tmp_path)
    assert isinstance(gpu_source(roots), GpuCollector)
    (tmp_path / "module" / "amdgpu").mkdir(parents=True)
    assert isinstance(gpu_source(roots), AmdCollector)
    (tmp_path / "module" / "nvidia").mkdir()  # the processor's own graphics are AMD's, the GPUs are not
    assert isinstance(gpu_source(roots), GpuCollector)
