"""GPUs through a dcgm-exporter that already runs on this node, so that the driver is not read twice.

Its page does not have the processes on each GPU: these come from NVML, every ten seconds, where that is available.
Source: etc/default-counters.csv and etc/dcp-metrics-included.csv of NVIDIA/dcgm-exporter; dcgm_fields.h for the units.
*Tested on pages that real exporters printed; never together with one that runs.*
"""

import math
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from gpuwatch.api.client import Get, fetch, is_url
from gpuwatch.errors import ConfigError, GpuwatchError, NoData
from gpuwatch.metrics import Sample
from gpuwatch.tables import table
from gpuwatch_agent.collectors.drivers import TIMING, GpuDevice, Timing, Value, values
from gpuwatch_agent.collectors.nvml import GpuCollector, throttle_values
from gpuwatch_agent.deadline import DeadlineThread

_MIB = float(1 << 20)
_FIELDS: Mapping[str, Mapping[str, Sequence[Any]]] = table("gpuwatch_agent.collectors", "dcgm.yml")
_REASONS = ("DCGM_FI_DEV_CLOCKS_EVENT_REASONS", "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS")
_MEMORY_PARTS = ("DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_FB_FREE", "DCGM_FI_DEV_FB_RESERVED")
_BLANK_INT32, _BLANK = 0x7FFFFFF0, float(1 << 46)
"""DCGM's codes for "blank", "not supported" and "no permission" are these and larger."""


@dataclass
class DcgmGpu:
    """One GPU on the exporter's page."""

    gpu: GpuDevice
    fields: dict[str, float] = field(default_factory=dict)
    instances: dict[str, dict[str, float]] = field(default_factory=dict)
    """By GPU_I_ID of its MIG instances. The GPU's own values (power, clocks), repeated for each, are in `fields`."""

    def values(self, part: GpuDevice) -> list[Value]:
        """Return the values of the GPU, or of a MIG instance, under our names; what the page lacks is absent."""
        if part.instance[0]:
            fields = {n: f for n, f in _FIELDS["instance"].items() if not (part.is_part_of_instance and "_PROF_" in n)}
            return _in_our_units(self.instances.get(part.instance[0], {}), fields)
        have = self.fields
        found = _in_our_units(have, _FIELDS["gpu"])
        if "DCGM_FI_DEV_FB_TOTAL" not in have and {"DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_FB_FREE"} <= have.keys():
            found += values(memory_total_bytes=sum(have.get(name, 0.0) for name in _MEMORY_PARTS) * _MIB)
        if (reasons := next((have[name] for name in _REASONS if name in have), None)) is not None:
            found += throttle_values(int(reasons))
        return found + values(last_xid=have.get("DCGM_FI_DEV_XID_ERRORS") or None)  # 0 before the first


def _in_our_units(have: Mapping[str, float], fields: Mapping[str, Sequence[Any]]) -> list[Value]:
    found: list[Value] = []
    for name, (metric, factor, *labels) in fields.items():
        if name in have:
            found += values(*labels, **{metric: have[name] * factor})
    return found


def parse_page(text: str) -> dict[str, DcgmGpu]:
    """Return each GPU on a dcgm-exporter's page, by UUID. Raises: ValueError for a page in another format."""
    gpus: dict[str, DcgmGpu] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = sample.labels
            uuid = labels.get("UUID", "")
            if not sample.name.startswith("DCGM_FI_") or not uuid or not labels.get("gpu", "").isdigit():
                continue
            if uuid not in gpus:
                gpus[uuid] = DcgmGpu(_device(uuid, labels))
            gpu, name, number = gpus[uuid], sample.name.removesuffix("_total"), labels.get("GPU_I_ID", "")
            is_blank = not math.isfinite(sample.value) or sample.value >= _BLANK
            is_blank = is_blank or _BLANK_INT32 <= sample.value <= 0x7FFFFFFF
            if is_blank or (number and name == "DCGM_FI_DEV_GPU_UTIL"):
                continue  # of an instance it is always 0: dcgm-exporter's issue 216
            of_instance = number and (name in _FIELDS["instance"] or name.startswith("DCGM_FI_PROF_"))
            (gpu.instances.setdefault(number, {}) if of_instance else gpu.fields)[name] = sample.value
    return gpus


def _device(uuid: str, labels: Mapping[str, str]) -> GpuDevice:
    minor = labels.get("device", "").removeprefix("nvidia")
    name, pci_bus_id = labels.get("modelName", ""), labels.get("pci_bus_id", "")
    number, driver = int(minor) if minor.isdigit() else None, labels.get("DCGM_FI_DRIVER_VERSION", "")
    return GpuDevice(int(labels["gpu"]), uuid, name, pci_bus_id, number, driver=driver)


_OWN = ("gpuwatch_gpus_seen", "gpuwatch_gpus_expected", "gpuwatch_gpu_info", "gpuwatch_gpu_mig_ratio")
"""Taken from the page, though NVML may give them as well."""


def page_url(url: str) -> str:
    """Return the address of the exporter's page, by default /metrics. Raises: ConfigError."""
    if not is_url(url):
        raise ConfigError(f"--dcgm {url}: give the dcgm-exporter's address, e.g. http://127.0.0.1:9400")
    parts = urllib.parse.urlsplit(url)
    return url if parts.path.strip("/") else urllib.parse.urlunsplit(parts._replace(path="/metrics"))


class DcgmCollector(GpuCollector):
    """The gpuwatch_gpu_* metrics from a dcgm-exporter's page; processes from NVML."""

    def __init__(self, url: str, timing: Timing = TIMING, fetch: Get = fetch) -> None:
        super().__init__(timing, only_processes=True)
        self.url = page_url(url)
        self._fetch = fetch
        self._thread = DeadlineThread(f"dcgm-exporter at {self.url}", timing.deadline_s + 0.5)
        self._read_s = float("-inf")
        self._page: dict[str, DcgmGpu] = {}
        self._most_seen = 0
        self._page_xids: dict[tuple[str, ...], float] | None = None  # the last on the page, which has no time of it
        self._seen_s: dict[tuple[str, ...], float] = {}  # when each was new, in Unix time

    def expect(self, count: int) -> None:
        self._most_seen = count

    def collect(self) -> Iterable[Sample]:
        """Return the exporter's values of every GPU, and the processes that NVML lists.

        Raises: NoData for an exporter without a GPU, GpuwatchError for one that does not answer, TimeoutError.
        """
        try:
            processes = [sample for sample in super().collect() if sample.metric not in _OWN]
        except (GpuwatchError, TimeoutError):
            processes = []  # no driver here, as in a container without the GPU runtime: processes are not known
        if self.clock() - self._read_s >= 1.0:
            self._page = {}
            self._page = self._thread.call(self._read)
            self._read_s = self.clock()
        self._most_seen = max(self._most_seen, len(self._page))
        if not self._most_seen:
            raise NoData(f"the dcgm-exporter at {self.url} lists no GPU")
        seen = Sample("gpuwatch_gpus_seen", len(self._page)), Sample("gpuwatch_gpus_expected", self._most_seen)
        parts = ((each, part) for each in self._page.values() for part in self.parts([each.gpu]))
        samples = [sample for each, part in parts for sample in part.samples(each.values(part))]
        xids = {sample.labels: sample.value for sample in samples if sample.metric == "gpuwatch_gpu_last_xid"}
        new = [gpu for gpu, xid in xids.items() if self._page_xids is not None and self._page_xids.get(gpu) != xid]
        gone = [each.gpu for each in self._page.values() if each.fields.get("DCGM_FI_DEV_XID_ERRORS") == 0]
        none: dict[tuple[str, ...], float] = {(str(gpu.index), gpu.uuid): 0.0 for gpu in gone}  # since a reset, say
        self._page_xids, now_s = {**(self._page_xids or {}), **none, **xids}, self.timing.wall_clock()
        self._seen_s |= dict.fromkeys(new, now_s)
        times = self._seen_s.items()
        samples += [Sample("gpuwatch_gpu_last_xid_timestamp_seconds", at_s, gpu) for gpu, at_s in times if gpu in xids]
        found = {(sample.metric, sample.labels): sample for sample in (*samples, *processes)}  # an XID can be in both
        return [*found.values(), *seen]

    def devices(self) -> tuple[GpuDevice, ...]:
        """Return the GPUs on the last page, by index, and the instances that NVML lists: the page lacks their UUIDs."""
        on_page = sorted((each.gpu for each in self._page.values()), key=lambda gpu: int(gpu.index))
        return tuple(self.parts(on_page))

    def _read(self) -> dict[str, DcgmGpu]:
        try:
            reply = self._fetch(self.url, self.timing.deadline_s)
            if reply.status != 200:
                raise OSError(f"HTTP status {reply.status}")
            return parse_page(reply.body.decode("utf-8", "replace"))
        except (OSError, ValueError) as error:
            raise GpuwatchError(f"the dcgm-exporter at {self.url} cannot be read ({error}); is it running?") from error
