"""/metrics: samples of the catalogue rendered by prometheus-client from a registry of its own."""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, exposition
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from gpuwatch.metrics import BY_NAME, HistogramSample, Sample, labels_of


class SampleCollector(Collector):
    """Gives one moment's samples to prometheus-client, in the catalogue's order."""

    def __init__(self, samples: Sequence[Sample | HistogramSample]) -> None:
        self._samples = samples

    def collect(self) -> Iterable[Metric]:
        by_metric: dict[str, list[Sample | HistogramSample]] = {}
        for sample in self._samples:
            by_metric.setdefault(sample.metric, []).append(sample)
        for name in BY_NAME:
            if name in by_metric:
                yield _family(name, by_metric[name])

    def describe(self) -> Iterator[Metric]:
        return iter(())


class Page:
    """One moment's /metrics, rendered when first asked for and then served as bytes."""

    def __init__(self, samples: Sequence[Sample | HistogramSample]) -> None:
        self._samples = samples
        self._bodies: dict[tuple[bool, bool], bytes] = {}

    def body(self, open_metrics: bool, compressed: bool) -> bytes:
        """Return the page as Prometheus text or OpenMetrics, gzipped or plain."""
        key = (open_metrics, compressed)
        body = self._bodies.get(key)
        if body is None:
            body = gzip.compress(self.body(open_metrics, False), 1) if compressed else self._render(open_metrics)
            self._bodies[key] = body
        return body

    def value(self, metric: str) -> float | None:
        """Return the value of a metric without labels; None when it was not measured."""
        return next((s.value for s in self._samples if s.metric == metric and isinstance(s, Sample)), None)

    def values(self, metric: str) -> dict[tuple[str, ...], float]:
        """Return the values of a metric by its labels' values, in the catalogue's order; empty when it was not measured."""
        return {s.labels: s.value for s in self._samples if s.metric == metric and isinstance(s, Sample)}

    def _render(self, open_metrics: bool) -> bytes:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(SampleCollector(self._samples))
        module: Any = openmetrics if open_metrics else exposition  # typed in one of the two only
        body: bytes = module.generate_latest(registry)
        return body


def content_type(open_metrics: bool) -> str:
    """Return the Content-Type of a page."""
    return openmetrics.CONTENT_TYPE_LATEST if open_metrics else exposition.CONTENT_TYPE_LATEST


def _family(name: str, samples: list[Sample | HistogramSample]) -> Metric:
    metric = BY_NAME[name]
    labels = list(metric.labels)
    if metric.kind == "histogram":
        histogram = HistogramMetricFamily(name, metric.help, labels=labels)
        for sample in samples:
            if isinstance(sample, HistogramSample):
                histogram.add_metric(list(sample.labels), _cumulative(sample), sample.sum)
        return histogram
    family: CounterMetricFamily | GaugeMetricFamily | InfoMetricFamily
    if metric.kind == "counter":
        family = CounterMetricFamily(name.removesuffix("_total"), metric.help, labels=labels)
    elif metric.kind == "info":
        info = InfoMetricFamily(name.removesuffix("_info"), metric.help, labels=labels)
        for sample in samples:
            info.add_metric([], labels_of(sample))
        return info
    else:
        family = GaugeMetricFamily(name, metric.help, labels=labels)
    for sample in samples:
        if isinstance(sample, Sample):
            family.add_metric(list(sample.labels), sample.value)
    return family


def _cumulative(sample: HistogramSample) -> list[tuple[str, float]]:
    buckets, count = [], 0
    for bound, number in zip((*sample.bounds, float("inf")), sample.counts, strict=True):
        count += number
        buckets.append(("+Inf" if bound == float("inf") else repr(float(bound)), float(count)))
    return buckets
