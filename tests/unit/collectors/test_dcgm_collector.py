"""A dcgm-exporter's page in our names and units; which page was recorded is in fixtures/dcgm/README.md."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuwatch.api.client import Reply
from gpuwatch.errors import ConfigError, GpuwatchError, NoData
from gpuwatch.metrics import Sample
from gpuwatch_agent.collectors.dcgm import DcgmCollector, page_url, parse_page
from gpuwatch_agent.collectors.drivers import GpuDevice, Timing
from gpuwatch_agent.collectors.nvml import GpuCollector
from tests.catalogue import check

PAGES = Path(__file__).parents[2] / "fixtures/dcgm"
PAGE = (PAGES / "metrics.txt").read_text()
MIB = 1 << 20


@pytest.fixture(autouse=True)
def nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    """The NVML side, which lists processes alone."""

    def collect(source: Any) -> tuple[Sample, ...]:
        if not source.samples:
            raise NoData("no driver")
        return source.samples  # type: ignore[no-any-return]

    monkeypatch.setattr(GpuCollector, "collect", collect)
    monkeypatch.setattr(GpuCollector, "processes", lambda source: {"GPU-aaaa": (4711,)} if source.samples else {})
    monkeypatch.setattr(GpuCollector, "process_list_age_s", lambda source, uuid: 3.0)


class Exporter:
    """A page that tests set, without a server."""

    url = "http://node:9400"

    def __init__(self) -> None:
        self.page, self.failure, self.asked = PAGE, "", 0

    def fetch(self, url: str, timeout_s: float) -> Reply:
        assert url == f"{self.url}/metrics"
        self.asked += 1
        if self.failure:
            raise OSError(self.failure)
        return Reply(200, self.page.encode())


@pytest.fixture
def exporter() -> Exporter:
    return Exporter()


def collector(exporter: Exporter, *samples: Sample, clock=lambda: 0.0) -> DcgmCollector:
    source: Any = DcgmCollector(exporter.url, Timing(clock, deadline_s=30), exporter.fetch)
    source.samples = samples
    return source  # type: ignore[no-any-return]


def test_page_in_our_names_and_units() -> None:
    first, second = parse_page(PAGE).values()
    assert first.gpu == GpuDevice(0, "GPU-aaaa", "NVIDIA H100 80GB HBM3", "00000000:1B:00.0", 0)
    assert first.gpu.driver == "550.54.15"
    found = {(name.removeprefix("gpuwatch_gpu_"), *labels): value for name, value, labels in first.values(first.gpu)}
    assert {key: value for key, value in found.items() if key[0] != "throttled"} == pytest.approx(
        {
            ("utilization_ratio",): 0.97,
            ("memory_used_bytes",): 20480 * MIB,
            ("memory_total_bytes",): (20480 + 60928 + 512) * MIB,
            ("power_watts",): 612.5,
            ("driver_energy_joules_total",): 7200.25,
            ("temperature_celsius",): 61,
            ("sm_clock_hertz",): 1.98e9,
            ("pcie_replays_total",): 0,
            ("ecc_errors_total", "corrected"): 3,
            ("ecc_errors_total", "uncorrected"): 0,
            ("sm_active_ratio",): 0.875,
            ("tensor_active_ratio",): 0.3125,
            ("dram_bandwidth_ratio",): 0.5,
            ("pcie_transmit_bytes_per_second",): 1e6,
            ("pcie_receive_bytes_per_second",): 2e6,
        }
    )
    assert {key[1] for key, value in found.items() if key[0] == "throttled" and value} == {"power", "sw_power_cap"}
    other = {(name.removeprefix("gpuwatch_gpu_"), *labels): value for name, value, labels in second.values(second.gpu)}
    assert other["last_xid",] == 79 and ("last_xid",) not in found
    # blank values of either width, and fields that the exporter left out
    assert not {("pcie_transmit_bytes_per_second",), ("pcie_receive_bytes_per_second",), ("sm_active_ratio",)} & set(
        other
    )


def test_mig_instances_are_apart_from_their_gpu() -> None:
    labels = 'gpu="0",UUID="GPU-m",GPU_I_PROFILE="1g.10gb",GPU_I_ID="7"'
    fields = {"DEV_FB_USED": 3, "DEV_GPU_UTIL": 0, "DEV_SM_CLOCK": 1980, "PROF_SM_ACTIVE": 0.25}
    fields |= {"PROF_GR_ENGINE_ACTIVE": 0.5, "PROF_DRAM_ACTIVE": 0.125}
    (gpu,) = parse_page("".join(f"DCGM_FI_{name}{{{labels}}} {value}\n" for name, value in fields.items())).values()
    assert gpu.values(gpu.gpu) == [
        ("gpuwatch_gpu_sm_clock_hertz", 1.98e9, ())
    ]  # it has no utilization, though the page says 0
    instance = GpuDevice("0:0", "MIG-a", "NVIDIA H100 MIG 1g.10gb", "", None, ("7", "1g.10gb"), 1 / 7)
    used = ("gpuwatch_gpu_memory_used_bytes", 3 * MIB, ())
    assert gpu.values(instance) == [
        used,
        ("gpuwatch_gpu_engine_active_ratio", 0.5, ()),
        ("gpuwatch_gpu_sm_active_ratio", 0.25, ()),
    ]
    assert gpu.values(replace(instance, instance=("7", "1c.2g.20gb"))) == [used]  # of two that share it
    assert gpu.values(replace(instance, instance=("8", "1g.10gb"))) == []


def test_recorded_page_of_an_idle_l40s() -> None:
    (gpu,) = parse_page((PAGES / "l40s.txt").read_text()).values()
    assert gpu.gpu == GpuDevice(0, "GPU-l40s", "NVIDIA L40S", "00000000:00:07.0", 0) and gpu.gpu.driver == "595.58.03"
    assert dict((name.removeprefix("gpuwatch_gpu_"), value) for name, value, _ in gpu.values(gpu.gpu)) == pytest.approx(
        {
            "utilization_ratio": 0,
            "memory_used_bytes": 0,
            "memory_total_bytes": (45459 + 608) * MIB,
            "power_watts": 35.686,
            "driver_energy_joules_total": 5_551_899.58,
            "temperature_celsius": 32,
            "sm_clock_hertz": 2.1e8,
            "pcie_replays_total": 0,
            "tensor_active_ratio": 0,
            "dram_bandwidth_ratio": 0.000131,
            "pcie_transmit_bytes_per_second": 175084,
            "pcie_receive_bytes_per_second": 19831,
        }
    )


def test_recorded_page_with_mig_gives_the_whole_gpus_values_once() -> None:
    split, whole = parse_page((PAGES / "a800-mig.txt").read_text()).values()
    found = {(name.removeprefix("gpuwatch_gpu_"), *labels): value for name, value, labels in split.values(split.gpu)}
    assert found == pytest.approx(
        {
            ("power_watts",): 78.446,
            ("driver_energy_joules_total",): 257_858.316,
            ("temperature_celsius",): 33,
            ("sm_clock_hertz",): 1.41e9,
        }
    )
    assert split.gpu.pci_bus_id == "" and dict(whole.fields)["DCGM_FI_DEV_POWER_USAGE"] == 55.942


def test_exporter_and_nvml_together(exporter: Exporter) -> None:
    labels = ("0", "GPU-aaaa")
    processes = Sample("gpuwatch_gpu_processes", 1, labels)
    own = [Sample("gpuwatch_gpus_seen", 9), Sample("gpuwatch_gpu_info", 1, (*labels, "nvml's", "", ""))]
    source = collector(exporter, processes, *own)
    samples = list(check(iter(source.collect())))
    values = {(s.metric, *s.labels): s.value for s in samples}
    assert len(values) == len(samples)
    assert values["gpuwatch_gpu_processes", "0", "GPU-aaaa"] == 1
    assert values["gpuwatch_gpu_power_watts", "1", "GPU-bbbb"] == 70.125
    assert (values["gpuwatch_gpus_seen",], values["gpuwatch_gpus_expected",]) == (2, 2)
    assert ("gpuwatch_gpu_info", *labels, "NVIDIA H100 80GB HBM3", "00000000:1B:00.0", "550.54.15") in values
    assert [device.uuid for device in source.devices()] == ["GPU-aaaa", "GPU-bbbb"]
    assert source.processes() == {"GPU-aaaa": (4711,)}
    assert source.process_list_age_s("GPU-aaaa") == 3.0


def test_an_xid_that_nvml_reports_is_there_once(exporter: Exporter) -> None:
    """The exporter's is the last one of all, also a program's that a fault has killed."""
    exporter.page = 'DCGM_FI_DEV_XID_ERRORS{gpu="0",UUID="GPU-aaaa"} 31\n'
    fault = Sample("gpuwatch_gpu_last_xid", 79, ("0", "GPU-aaaa"))
    for of_nvml, expected in ([fault], [79]), ([Sample("gpuwatch_gpu_processes", 1, fault.labels)], [31]):
        samples = collector(exporter, *of_nvml).collect()
        assert [s.value for s in samples if s.metric == fault.metric] == expected


def test_without_nvml_the_processes_are_not_known(exporter: Exporter) -> None:
    source = collector(exporter)
    names = {sample.metric for sample in source.collect()}
    assert "gpuwatch_gpu_power_watts" in names and "gpuwatch_gpu_processes" not in names
    assert source.processes() == {}


def test_gpu_that_leaves_the_page_is_missing(exporter: Exporter) -> None:
    now_s = [0.0]
    source = collector(exporter, clock=lambda: now_s[0])
    source.collect()
    exporter.page = "\n".join(line for line in PAGE.splitlines() if "GPU-bbbb" not in line) + "\n"
    now_s[0] = 0.5
    source.collect()
    assert exporter.asked == 1  # once a second at most
    now_s[0] = 1.0
    values = {s.metric: s.value for s in source.collect()}
    assert (values["gpuwatch_gpus_seen"], values["gpuwatch_gpus_expected"]) == (1, 2)


def test_gpu_that_a_former_agent_saw_is_expected(exporter: Exporter) -> None:
    source = collector(exporter)
    source.expect(3)
    values = {s.metric: s.value for s in source.collect()}
    assert (values["gpuwatch_gpus_seen"], values["gpuwatch_gpus_expected"]) == (2, 3)


def test_exporter_that_fails_is_a_failure_that_is_named(exporter: Exporter) -> None:
    now_s = [0.0]
    source = collector(exporter, clock=lambda: now_s[0])
    source.collect()
    exporter.failure, now_s[0] = "HTTP status 500", 5.0
    with pytest.raises(GpuwatchError, match=rf"dcgm-exporter at {exporter.url}/metrics cannot be read .*is it running"):
        source.collect()
    assert source.devices() == ()  # what it reported before may have changed


def test_page_without_a_gpu_is_no_data(exporter: Exporter) -> None:
    exporter.page = "# nothing\n"
    with pytest.raises(NoData, match="lists no GPU"):
        collector(exporter).collect()


def test_address() -> None:
    assert page_url("http://127.0.0.1:9400") == page_url("http://127.0.0.1:9400/") == "http://127.0.0.1:9400/metrics"
    assert page_url("https://node:9400/other") == "https://node:9400/other"
    for wrong in ("127.0.0.1:9400", "ftp://x", "http://", "http://[::1", "http://h:99999", "http://h:x"):
        with pytest.raises(ConfigError, match=r"--dcgm .*e\.g\. http://127\.0\.0\.1:9400"):
            page_url(wrong)


def test_an_xid_that_the_exporter_alone_reports_has_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without NVML (a container without the GPU runtime): without a time GpuXid never fires."""

    def no_driver(source: Any) -> tuple[()]:
        raise NoData("no driver")

    monkeypatch.setattr(GpuCollector, "collect", no_driver)
    page, now = ['DCGM_FI_DEV_XID_ERRORS{gpu="0",UUID="GPU-aaaa"} 31\n'], [0.0]
    clock = lambda: now[0]  # noqa: E731
    timing = Timing(clock, lambda: 1000.0 + now[0], deadline_s=30)
    dcgm = DcgmCollector("http://node:9400", timing, lambda url, timeout_s: Reply(200, page[0].encode()))

    def times() -> dict[tuple[str, ...], float]:
        samples = dcgm.collect()
        return {s.labels: s.value for s in samples if s.metric == "gpuwatch_gpu_last_xid_timestamp_seconds"}

    assert times() == {}  # of an XID from before the agent's start the time is not known
    page[0], now[0] = page[0].replace("31", "79"), 10.0
    assert times() == {("0", "GPU-aaaa"): 1010.0}
    now[0] = 20.0
    assert times() == {("0", "GPU-aaaa"): 1010.0}
    page[0], now[0] = page[0].replace("79", "0"), 30.0  # it was reset, for which the exporter is stopped
    assert times() == {}
    page[0], now[0] = page[0].replace("} 0", "} 79"), 5000.0
    assert times() == {("0", "GPU-aaaa"): 6000.0}
