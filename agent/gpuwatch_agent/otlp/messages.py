"""A page of metrics, and findings that begin or end, as OTLP requests.

Sources: OpenTelemetry's specification 1.60, "Prometheus and OpenMetrics Compatibility" (names stay, units are UCUM's,
an info is a sum that may fall) and "Metrics Data Model" (unknown start times); its semantic conventions 1.44, "GPU" and
"Common hardware metrics", for `hw.*`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality
from prometheus_client.core import Metric

from gpuwatch import __version__
from gpuwatch.metrics import BY_NAME
from gpuwatch.tables import table

_UNITS = {"seconds": "s", "timestamp": "s", "bytes": "By", "ratio": "1", "watts": "W", "joules": "J", "celsius": "Cel", "hertz": "Hz"}  # fmt: skip
"""By unit of the catalogue. A count has none: collectors add "ratio" to the name of a gauge of unit 1."""
_HARDWARE = table("gpuwatch_agent.otlp", "hardware.yml")
_Sums = dict[tuple[Any, ...], tuple[int, int, float]]
"""By series: its start and its last time (Unix, ns), and its last value."""


class MetricsConverter:
    """Makes requests of pages. A new sum begins at its first point, with the value there: its start is not known.

    That holds once the collector has this point. Were it lost, the next one would count in full.
    """

    def __init__(self, resource: Mapping[str, str]) -> None:
        self._resource = resource
        self._delivered: _Sums = {}
        self._sent: _Sums = {}

    def request(self, page: Iterable[Metric], time_s: float) -> bytes:
        """Return a page of a Unix time as an ExportMetricsServiceRequest, without values that are not finite."""
        request = ExportMetricsServiceRequest()
        self._scope = _scope(request.resource_metrics.add(), "scope_metrics", self._resource)
        self._metrics: dict[str, Any] = {}
        self._at_ns, self._sent = int(time_s * 1e9), {}
        samples = [sample for family in page for sample in family.samples]
        models = {each.labels["UUID"]: each.labels["model"] for each in samples if each.name == "gpuwatch_gpu_info"}
        sizes = {each.labels["UUID"]: each.value for each in samples if each.name == "gpuwatch_gpu_memory_total_bytes"}
        for name, labels, value, *_ in samples:
            metric = BY_NAME[name]
            unit = "By/s" if name.endswith("_bytes_per_second") else _UNITS.get(metric.unit, "")
            self._add(name, metric.kind, unit, metric.help, labels, value)
            for of in _HARDWARE.get(name, ()):
                hardware, uuid = of["name"], labels["UUID"]
                about = {"hw.id": uuid, "hw.name": f"GPU {labels['gpu']}", "hw.model": models.get(uuid, "")}
                about |= of.get("attributes", {})
                if "kind" in labels:
                    about["error.type" if hardware == "hw.errors" else "kind"] = labels["kind"]
                divisor = (sizes.get(uuid) or math.nan) if hardware == "hw.gpu.memory.utilization" else 1.0
                self._add(hardware, of["kind"], of["unit"], "", about, value / divisor)
        return bytes(request.SerializeToString())

    def delivered(self) -> None:
        """The collector has the last request."""
        self._delivered = self._sent

    def _add(self, name: str, kind: str, unit: str, help_text: str, about: Mapping[str, str], value: float) -> None:
        """Add a point; `kind` is one of the catalogue's."""
        if not math.isfinite(value):
            return
        if name not in self._metrics:
            metric = self._metrics[name] = self._scope.metrics.add(name=name, unit=unit, description=help_text)
            if name in BY_NAME:
                metric.metadata.add(key="prometheus.type").value.string_value = kind
            if kind != "gauge":
                metric.sum.aggregation_temporality = AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
                metric.sum.is_monotonic = kind == "counter"
        data = self._metrics[name].gauge if kind == "gauge" else self._metrics[name].sum
        point = data.data_points.add(time_unix_nano=self._at_ns, as_double=value)
        _add_attributes(point, about)
        if kind != "gauge":
            series = (name, *about.items())
            start_ns, last_ns, last = self._delivered.get(series, (self._at_ns, self._at_ns, value))
            if kind == "counter" and value < last:
                start_ns = last_ns + 1  # it has begun again since
            point.start_time_unix_nano = min(start_ns, self._at_ns)  # the clock may be set
            self._sent[series] = point.start_time_unix_nano, self._at_ns, value


class Event(msgspec.Struct):
    """A finding that has begun, or ended."""

    name: str  # gpuwatch.finding.begin or .end
    time_s: float
    severity: str  # the finding's; of an end info
    body: str
    attributes: dict[str, str]


_SEVERITIES = {"info": ("INFO", 9), "warning": ("WARN", 13), "critical": ("ERROR", 17)}


def logs_request(resource: Mapping[str, str], events: Sequence[Event], now_s: float) -> bytes:
    """Return events as an ExportLogsServiceRequest."""
    request = ExportLogsServiceRequest()
    scope = _scope(request.resource_logs.add(), "scope_logs", resource)
    for event in events:
        record = scope.log_records.add(event_name=event.name, time_unix_nano=int(event.time_s * 1e9))
        record.observed_time_unix_nano = int(now_s * 1e9)
        record.severity_text, record.severity_number = _SEVERITIES[event.severity]
        record.body.string_value = event.body
        _add_attributes(record, event.attributes)
    return bytes(request.SerializeToString())


def _scope(group: Any, scopes: str, resource: Mapping[str, str]) -> Any:
    _add_attributes(group.resource, resource)
    scope = getattr(group, scopes).add()
    scope.scope.name, scope.scope.version = "gpuwatch", __version__
    return scope


def _add_attributes(message: Any, attributes: Mapping[str, str]) -> None:
    """Add those that are not empty: to Prometheus an empty label is none."""
    for name, value in attributes.items():
        if value:
            message.attributes.add(key=name).value.string_value = value.encode("utf-8", "replace").decode()
