"""Which of the samples a node serves and keeps: the standard set, small enough for 8 GPUs and their job, or all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gpuwatch.metrics import BY_NAME, HistogramSample, Sample

_STANDARD_REASONS = {"power", "thermal", "hardware"}
_FULL = frozenset(name for name, metric in BY_NAME.items() if metric.when == "full")
_COUNTED = frozenset(name for name, metric in BY_NAME.items() if metric.when == "counted")


def standard(samples: Iterable[Sample | HistogramSample]) -> Iterator[Sample | HistogramSample]:
    """Yield the standard set: without what `--series full` adds, and without the error counters that are still 0."""
    for sample in samples:
        name = sample.metric
        if name in _FULL or (name in _COUNTED and isinstance(sample, Sample) and not sample.value):
            continue
        if name == "gpuwatch_gpu_throttled" and sample.labels[2] not in _STANDARD_REASONS:
            continue
        yield sample
