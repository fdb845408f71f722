"""The metric catalogue as a check of what collectors and exporters return."""

from __future__ import annotations

from collections.abc import Iterator

from gpuwatch.metrics import BY_NAME, Sample


def check(samples: Iterator[Sample]) -> Iterator[Sample]:
    """Pass samples on; raise KeyError or ValueError for a metric or label set that the catalogue lacks."""
    for sample in samples:
        metric = BY_NAME.get(sample.metric)
        if metric is None:
            raise KeyError(f"{sample.metric}: add it to gpuwatch/metrics.yml")
        if len(metric.labels) != len(sample.labels):
            raise ValueError(f"{sample.metric}: {len(sample.labels)} label values for labels {metric.labels}")
        yield sample
