"""Pages and findings as OTLP requests: the golden page there and back, names, units, begins of sums, odd values."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from gpuwatch.metrics import BY_NAME, CATALOGUE, Sample
from gpuwatch_agent.exporter import Page

pytest.importorskip("opentelemetry.proto")

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import AGGREGATION_TEMPORALITY_CUMULATIVE

from gpuwatch_agent.otlp.messages import Event, MetricsConverter, logs_request

GOLDEN = Path(__file__).parents[2] / "golden" / "metrics.txt"
GPU = ("0", "GPU-1")
STEPS = "gpuwatch_steps_total"
BEGIN_S = 1_790_000_000.0
BEGIN_NS = 1_790_000_000 * 10**9


def attributes(message: Any) -> dict[str, str]:
    return {each.key: each.value.string_value for each in message.attributes}


def metrics(request: bytes) -> dict[str, Any]:
    """Return a request's metrics by name: each is there once."""
    (resource,) = ExportMetricsServiceRequest.FromString(request).resource_metrics
    (scope,) = resource.scope_metrics
    assert scope.scope.name == "gpuwatch"
    found = {metric.name: metric for metric in scope.metrics}
    assert len(found) == len(scope.metrics)
    return found


def points(metric: Any) -> list[Any]:
    return list(metric.gauge.data_points if metric.HasField("gauge") else metric.sum.data_points)


def converted(*samples: Sample) -> dict[str, Any]:
    return metrics(MetricsConverter({}).request(Page(samples).collect(), BEGIN_S))


def test_each_series_of_the_page_is_a_point_of_the_same_name_labels_and_value() -> None:
    families = list(parse(GOLDEN.read_text()))
    found = metrics(MetricsConverter({}).request(families, BEGIN_S))
    there = {
        (name, frozenset(attributes(point).items())): point.as_double
        for name, metric in found.items()
        if not name.startswith("hw.")
        for point in points(metric)
    }
    page = {
        (sample.name, frozenset((k, v) for k, v in sample.labels.items() if v)): sample.value
        for family in families
        for sample in family.samples
    }
    assert there == page
    assert [name for name in found if not name.startswith("hw.")] == [metric.name for metric in CATALOGUE]
    for name, metric in found.items():
        assert {point.time_unix_nano for point in points(metric)} == {BEGIN_NS}
        if name in BY_NAME:
            kind = BY_NAME[name].kind
            assert metric.description == BY_NAME[name].help
            assert [(each.key, each.value.string_value) for each in metric.metadata] == [("prometheus.type", kind)]
            assert metric.HasField("gauge") == (kind == "gauge")
            assert metric.sum.is_monotonic == (kind == "counter")
        if metric.HasField("sum"):
            assert metric.sum.aggregation_temporality == AGGREGATION_TEMPORALITY_CUMULATIVE


WORDS = {"s": "seconds", "By": "bytes", "By/s": "bytes_per_second", "1": "ratio", "W": "watts", "J": "joules"}
WORDS |= {"Cel": "celsius", "Hz": "hertz", "": ""}


def test_a_collector_that_adds_units_to_names_leaves_them_as_they_are() -> None:
    """Its translation to Prometheus adds a unit's word where the name does not have it, and `_total` to a counter."""
    for name, metric in metrics(MetricsConverter({}).request(parse(GOLDEN.read_text()), BEGIN_S)).items():
        if name in BY_NAME:
            assert WORDS[metric.unit] in name, (name, metric.unit)
            assert name.endswith("_total") == (BY_NAME[name].kind == "counter")
            assert (metric.unit == "1") == name.endswith("_ratio")


def test_a_gpu_has_the_names_of_the_semantic_conventions_too() -> None:
    found = converted(
        Sample("gpuwatch_gpu_info", 1, (*GPU, "NVIDIA H200", "0000:1b:00.0", "560.35")),
        Sample("gpuwatch_gpu_utilization_ratio", 0.75, GPU),
        Sample("gpuwatch_gpu_memory_used_bytes", 30e9, GPU),
        Sample("gpuwatch_gpu_memory_total_bytes", 120e9, GPU),
        Sample("gpuwatch_gpu_power_watts", 512, GPU),
        Sample("gpuwatch_gpu_temperature_celsius", 61, GPU),
        Sample("gpuwatch_gpu_energy_joules_total", 900, (*GPU, "working")),
        Sample("gpuwatch_gpu_energy_joules_total", 100, (*GPU, "idle")),
        Sample("gpuwatch_gpu_ecc_errors_total", 3, (*GPU, "corrected")),
        Sample("gpuwatch_gpu_xid_errors_total", 2, GPU),
    )
    common = {"hw.id": "GPU-1", "hw.name": "GPU 0", "hw.model": "NVIDIA H200"}
    is_gpu = {**common, "hw.type": "gpu"}
    there = {
        name: (m.unit, m.WhichOneof("data"), m.sum.is_monotonic, [(p.as_double, attributes(p)) for p in points(m)])
        for name, m in found.items()
        if name.startswith("hw.")
    }
    assert there == {
        "hw.gpu.utilization": ("1", "gauge", False, [(0.75, {**common, "hw.gpu.task": "general"})]),
        "hw.gpu.memory.usage": ("By", "sum", False, [(30e9, common)]),
        "hw.gpu.memory.limit": ("By", "sum", False, [(120e9, common)]),
        "hw.gpu.memory.utilization": ("1", "gauge", False, [(0.25, common)]),
        "hw.power": ("W", "gauge", False, [(512, is_gpu)]),
        "hw.temperature": ("Cel", "gauge", False, [(61, {**common, "hw.sensor_location": "gpu"})]),
        "hw.energy": ("J", "sum", True, [(900, {**is_gpu, "kind": "working"}), (100, {**is_gpu, "kind": "idle"})]),
        "hw.errors": (
            "{error}", "sum", True, [(3, {**is_gpu, "error.type": "corrected"}), (2, {**is_gpu, "error.type": "xid"})]
        ),
    }  # fmt: skip


def test_without_the_size_of_its_memory_a_gpu_has_no_share_of_it_and_without_a_value_no_point() -> None:
    found = converted(Sample("gpuwatch_gpu_memory_used_bytes", 30e9, GPU), Sample("gpuwatch_load1", math.nan))
    assert set(found) == {"gpuwatch_gpu_memory_used_bytes", "hw.gpu.memory.usage"}
    found = converted(*(Sample("gpuwatch_gpu_memory_" + each, 0.0, GPU) for each in ("used_bytes", "total_bytes")))
    assert "hw.gpu.memory.utilization" not in found
    assert converted(Sample("gpuwatch_load1", math.inf), Sample(STEPS, math.nan, ("r", "0"))) == {}


class Counting:
    """One counter of one run, pushed again and again."""

    def __init__(self) -> None:
        self.converter = MetricsConverter({})

    def push(self, after_s: float, value: float, delivered: bool = True) -> tuple[float, float, float]:
        """Return the point's start and time, in seconds after the begin, and its value."""
        page = Page([Sample(STEPS, value, ("r", "0"))]).collect()
        (point,) = points(metrics(self.converter.request(page, BEGIN_S + after_s))[STEPS])
        if delivered:
            self.converter.delivered()
        times = [(ns - BEGIN_NS) / 1e9 for ns in (point.start_time_unix_nano, point.time_unix_nano)]
        return times[0], times[1], point.as_double


def test_a_sum_begins_where_it_was_first_delivered() -> None:
    counter = Counting()
    assert counter.push(0, 100) == (0, 0, 100)
    assert counter.push(15, 130) == (0, 15, 130)
    assert counter.push(30, 160, delivered=False) == (0, 30, 160)
    assert counter.push(45, 190) == (0, 45, 190)


def test_a_first_point_that_was_lost_is_not_the_begin() -> None:
    counter = Counting()
    assert counter.push(0, 100, delivered=False) == (0, 0, 100)
    assert counter.push(15, 130) == (15, 15, 130)
    assert counter.push(30, 150) == (15, 30, 150)


def test_a_counter_that_begins_again_has_a_new_start() -> None:
    counter = Counting()
    counter.push(0, 100)
    assert counter.push(15, 7) == (1e-9, 15, 7)  # it was 0 after the point at 0 s
    counter.push(30, 20)
    assert counter.push(45, 4) == (30 + 1e-9, 45, 4)
    assert counter.push(60, 9) == (30 + 1e-9, 60, 9)


def test_a_clock_that_is_set_back_never_gives_a_start_after_its_point() -> None:
    counter = Counting()
    counter.push(1000, 100)
    assert counter.push(400, 110) == (400, 400, 110)
    assert counter.push(415, 120) == (400, 415, 120)


def test_a_series_that_was_away_begins_again() -> None:
    counter = Counting()
    counter.push(0, 100)
    counter.converter.request([], BEGIN_S + 15)
    counter.converter.delivered()
    assert counter.push(30, 120) == (30, 30, 120)


@pytest.mark.parametrize("name", ["α “quoted” \\ \n\0", "x" * 100_000, "🙂" * 1000, "half \ud83d"])
def test_labels_may_have_any_characters(name: str) -> None:
    found = converted(Sample("gpuwatch_job_goodput_ratio", 0.5, (name,)))
    (point,) = points(found["gpuwatch_job_goodput_ratio"])
    assert attributes(point) == {"job_id": name.replace("\ud83d", "?")}


def test_a_finding_is_a_log_record() -> None:
    resource = {"service.name": "gpuwatch-agent", "empty": ""}
    event = Event("gpuwatch.finding.begin", BEGIN_S, "warning", "the loader is slow (40%)", {"cause": "input_cpu"})
    end = Event("gpuwatch.finding.end", BEGIN_S + 9, "info", "ended: the loader is slow (40%)", {"cause": "input_cpu"})
    request = ExportLogsServiceRequest.FromString(logs_request(resource, [event, end], BEGIN_S + 10))
    (logs,) = request.resource_logs
    assert attributes(logs.resource) == {"service.name": "gpuwatch-agent"}
    first, second = logs.scope_logs[0].log_records
    assert (first.event_name, first.body.string_value) == ("gpuwatch.finding.begin", "the loader is slow (40%)")
    assert (first.severity_text, first.severity_number) == ("WARN", 13)
    assert (first.time_unix_nano, first.observed_time_unix_nano) == (BEGIN_NS, BEGIN_NS + 10 * 10**9)
    assert attributes(first) == {"cause": "input_cpu"}
    assert (second.event_name, second.severity_text, second.severity_number) == ("gpuwatch.finding.end", "INFO", 9)
