"""GPUs through a dcgm-exporter that runs on this node already, so that the driver is not asked twice for the same.

Which processes hold a GPU is not on its page: that alone is asked of NVML, every ten seconds, where there is one.
"""

from __future__ import annotations

import time
import urllib.parse
from collections.abc import Callable, Iterable

from gpuwatch.errors import ConfigError, GpuwatchError, NoData
from gpuwatch.http import fetch
from gpuwatch.metrics import Sample
from gpuwatch_agent.collectors.dcgm_page import DcgmGpu, parse_page
from gpuwatch_agent.collectors.deadline import DeadlineThread
from gpuwatch_agent.collectors.gpu import GpuCollector
from gpuwatch_agent.collectors.nvml import GpuDevice, GpuProcess

_OWN = ("gpuwatch_gpus_seen", "gpuwatch_gpus_expected", "gpuwatch_gpu_info")
"""Told from the page, though NVML may tell them as well."""


def page_url(url: str) -> str:
    """Return the address of the exporter's page, /metrics unless told. Raises: ConfigError."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--dcgm {url}: give the dcgm-exporter's address, e.g. http://127.0.0.1:9400")
    return url if parts.path.strip("/") else urllib.parse.urlunsplit(parts._replace(path="/metrics"))


def read_text(url: str, timeout_s: float) -> str:
    """Return the text at an address. Raises: OSError."""
    reply = fetch(url, timeout_s)
    if reply.status != 200:
        raise OSError(f"HTTP status {reply.status}")
    return reply.body.decode("utf-8", "replace")


class DcgmCollector:
    """The gpuwatch_gpu_* metrics from a dcgm-exporter's page; processes from NVML."""

    name = "gpu"

    def __init__(
        self,
        url: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        deadline_s: float = 2.0,
        interval_s: float = 1.0,
        nvml: GpuCollector | None = None,
        fetch: Callable[[str, float], str] = read_text,
    ) -> None:
        self.url = page_url(url)
        self._clock = clock
        self._fetch = fetch
        self._deadline_s = deadline_s
        self._interval_s = interval_s
        self._thread = DeadlineThread(f"dcgm-exporter at {self.url}", deadline_s + 0.5)
        self._nvml = nvml or GpuCollector(clock=clock, readings=(), links=())
        self._read_s = float("-inf")
        self._gpus: dict[str, DcgmGpu] = {}
        self._expected = 0

    def collect(self) -> Iterable[Sample]:
        """Return what the exporter says of every GPU, and the processes that NVML lists.

        Raises: NoData for an exporter without a GPU, GpuwatchError for one that does not answer, TimeoutError.
        """
        try:
            processes = [sample for sample in self._nvml.collect() if sample.metric not in _OWN]
        except (GpuwatchError, TimeoutError):
            processes = []  # no driver here, as in a container without its GPU runtime: who holds a GPU is not known
        if self._clock() - self._read_s >= self._interval_s:
            self._gpus = {}
            self._gpus = self._thread.call(self._read)
            self._read_s = self._clock()
        self._expected = max(self._expected, len(self._gpus))
        if not self._expected:
            raise NoData(f"the dcgm-exporter at {self.url} lists no GPU")
        samples = [*processes]
        for uuid, gpu in self._gpus.items():
            labels = (str(gpu.device.index), uuid)
            info = (gpu.device.name, gpu.device.pci_bus_id, gpu.driver)
            samples.append(Sample("gpuwatch_gpu_info", 1, (*labels, *info)))
            samples += [Sample(metric, value, (*labels, *more)) for metric, value, more in gpu.values()]
        samples.append(Sample("gpuwatch_gpus_seen", len(self._gpus)))
        samples.append(Sample("gpuwatch_gpus_expected", self._expected))
        return samples

    def devices(self) -> tuple[GpuDevice, ...]:
        """Return the GPUs on the page last read, by index."""
        return tuple(sorted((gpu.device for gpu in self._gpus.values()), key=lambda device: device.index))

    def processes(self) -> dict[str, tuple[GpuProcess, ...]]:
        """Return the compute processes on each GPU by UUID; not known where NVML does not tell."""
        return self._nvml.processes()

    def process_list_age_s(self, uuid: str) -> float:
        """Return how old a GPU's process list is, 0 where there is none."""
        return self._nvml.process_list_age_s(uuid)

    def _read(self) -> dict[str, DcgmGpu]:
        try:
            return parse_page(self._fetch(self.url, self._deadline_s))
        except (OSError, ValueError) as error:
            raise GpuwatchError(f"the dcgm-exporter at {self.url} cannot be read ({error}); is it running?") from error
