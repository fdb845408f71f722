"""The node's samples of the last quarter of a minute, as far as a diagnosis needs them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from gpuwatch.metrics import HistogramSample, Sample

KEPT = 16
"""Samples, one a second."""
_WATCHED = frozenset(
    {
        "gpuwatch_cpu_seconds_total",
        "gpuwatch_cpu_cores",
        "gpuwatch_pressure_cpu_waiting_seconds_total",
        "gpuwatch_pressure_io_waiting_seconds_total",
        "gpuwatch_memory_available_bytes",
        "gpuwatch_shm_size_bytes",
        "gpuwatch_shm_used_bytes",
        "gpuwatch_gpu_utilization_ratio",
        "gpuwatch_gpu_memory_used_bytes",
        "gpuwatch_gpu_memory_total_bytes",
        "gpuwatch_gpu_power_watts",
        "gpuwatch_gpu_throttled",
        "gpuwatch_disk_io_time_seconds_total",
        "gpuwatch_disk_read_bytes_total",
    }
)
_IDLE_MODES = {"idle", "iowait"}
_Labels = tuple[str, ...]


class NodeMemory:
    """Samples by metric and labels, oldest first."""

    def __init__(self) -> None:
        self._seen: deque[tuple[int, dict[str, dict[_Labels, float]]]] = deque(maxlen=KEPT)

    def remember(self, samples: Iterable[Sample | HistogramSample], now_ns: int) -> None:
        """Take this second's samples."""
        kept: dict[str, dict[_Labels, float]] = {}
        for sample in samples:
            if sample.metric in _WATCHED and isinstance(sample, Sample):
                kept.setdefault(sample.metric, {})[sample.labels] = sample.value
        self._seen.append((now_ns, kept))

    def latest(self, metric: str, *labels: str) -> float | None:
        """Return a series' last value; None where it was not measured."""
        return self._now(metric).get(labels)

    def rate(self, metric: str, *labels: str) -> float | None:
        """Return a counter's growth per second over the kept samples; None where it was not measured throughout."""
        if len(self._seen) < 2:
            return None
        (begin_ns, first), (end_ns, last) = self._seen[0], self._seen[-1]
        before, after = first.get(metric, {}).get(labels), last.get(metric, {}).get(labels)
        if before is None or after is None or end_ns <= begin_ns:
            return None
        return max(0.0, after - before) / ((end_ns - begin_ns) / 1e9)

    def rates(self, metric: str) -> list[float]:
        """Return the rate of each of a counter's series; [] where none was measured."""
        found = (self.rate(metric, *labels) for labels in self._now(metric))
        return [rate for rate in found if rate is not None]

    def mean(self, metric: str, *labels: str, since_ns: int = 0) -> float | None:
        """Return a series' mean since a moment; None where it was not measured."""
        kept = [seen for at_ns, seen in self._seen if at_ns >= since_ns]
        values = [value for seen in kept if (value := seen.get(metric, {}).get(labels)) is not None]
        return sum(values) / len(values) if values else None

    def throttled(self, gpu: str, uuid: str) -> dict[str, float] | None:
        """Return the share of time in which a GPU's clocks were held down, by reason; None where it is not told."""
        reasons = [labels[2] for labels in self._now("gpuwatch_gpu_throttled") if labels[:2] == (gpu, uuid)]
        return {reason: self.mean("gpuwatch_gpu_throttled", gpu, uuid, reason) or 0.0 for reason in reasons} or None

    def cpu_busy_ratio(self) -> float | None:
        """Return the busy share of all cores, waiting for I/O counted as idle."""
        rates = {
            labels[0]: self.rate("gpuwatch_cpu_seconds_total", *labels)
            for labels in self._now("gpuwatch_cpu_seconds_total")
        }
        known = {mode: rate for mode, rate in rates.items() if rate is not None}
        whole = sum(known.values())
        return sum(rate for mode, rate in known.items() if mode not in _IDLE_MODES) / whole if whole > 0 else None

    def _now(self, metric: str) -> dict[_Labels, float]:
        return self._seen[-1][1].get(metric, {}) if self._seen else {}
