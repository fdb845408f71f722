"""Pushes to a collector that takes, refuses, throttles, hangs, misbehaves; findings as log records, over restarts."""

from __future__ import annotations

import base64
import itertools
import json
import logging
import time
from collections.abc import Iterator, Sequence
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from gpuwatch.api import Finding, Owner, Run
from gpuwatch.diagnosis.finding import Evidence
from gpuwatch.errors import ConfigError
from gpuwatch.metrics import Sample
from gpuwatch_agent.exporter import Page, Snapshot
from tests.receivers import Collector, otlp_collector

pytest.importorskip("opentelemetry.proto")

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)

from gpuwatch_agent import otlp
from gpuwatch_agent.deadline import DeadlineThread
from gpuwatch_agent.otlp import OtlpPusher

START_S = 1_790_000_000.0
SLOW = Finding(
    "input_cpu", "warning", "the loader is slow", 0.4, (Evidence("cpu", 0.97, "ratio", "4 of 4 workers at 97% CPU"),),
    "num_workers 4 → 10", run="r1", rank=2, name="resnet50-a", since_s=START_S - 5,
)  # fmt: skip
FELL_OFF = Finding("gpu_throttled", "critical", "a GPU is slow", 0.5, (), "cool it", gpu="GPU-1", since_s=START_S)
RUN = Run("r1", 2, "resnet50-a", "running", START_S, START_S, START_S, user="alice", owner=Owner(job="4711"))
WAITING = {"active": {}, "waiting": []}


class Pushing:
    """A pusher on a clock of the test's own: `after` seconds pass, with a new snapshot each time."""

    def __init__(self, url: str, path: Path | None = None) -> None:
        self.path = path
        self.now_s = 0.0
        self.findings: Sequence[Finding] = ()
        self.last: Snapshot | None = None
        self.pusher = OtlpPusher(url, 15.0, lambda: self.last, "n1", 9478, path)

    def after(self, seconds: float, findings: Sequence[Finding] | None = None, last: bool = False) -> None:
        self.now_s += seconds
        self.findings = self.findings if findings is None else findings
        page = Page([Sample("gpuwatch_steps_total", 10 * self.now_s, ("r1", "2")), *self.pusher.samples()])
        self.last = Snapshot(START_S + self.now_s, self.now_s, page, [RUN], list(self.findings))
        self.pusher.tick(self.now_s, last)

    @property
    def counters(self) -> tuple[float, ...]:
        """Requests sent, and failed."""
        return tuple(sample.value for sample in self.pusher.samples())


@pytest.fixture
def collector() -> Iterator[Collector]:
    with otlp_collector() as box:
        yield box


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_HEADERS", "OTEL_RESOURCE_ATTRIBUTES", "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(otlp.random, "uniform", lambda low, high: high)
    monkeypatch.setattr(otlp, "TIMEOUT_S", 60.0)  # a busy machine is no collector, and no disk, that hangs
    monkeypatch.setattr("gpuwatch_agent.state_file.DeadlineThread", lambda what, _: DeadlineThread(what, 60.0))


def steps(collector: Collector) -> list[float]:
    """Return the counter of steps of each push."""
    found = []
    for body in collector.bodies("/v1/metrics"):
        (resource,) = ExportMetricsServiceRequest.FromString(body).resource_metrics
        (metric, *_) = [each for each in resource.scope_metrics[0].metrics if each.name == "gpuwatch_steps_total"]
        found.append(metric.sum.data_points[0].as_double)
    return found


def records(collector: Collector) -> list[Any]:
    requests = [ExportLogsServiceRequest.FromString(body) for body in collector.bodies("/v1/logs")]
    return [record for request in requests for record in request.resource_logs[0].scope_logs[0].log_records]


def attributes(message: Any) -> dict[str, str]:
    return {each.key: each.value.string_value for each in message.attributes}


def test_metrics_are_pushed_at_once_and_then_at_the_interval(collector: Collector) -> None:
    pushing = Pushing(f"{collector.url}/prefix/")
    for _ in range(31):
        pushing.after(1)
    assert steps(collector) == [10, 160, 310]
    path, headers, _ = collector.posts[0]
    assert path == "/prefix/v1/metrics"
    assert headers["content-type"] == "application/x-protobuf"
    assert headers["content-encoding"] == "gzip"
    assert headers["user-agent"].startswith("gpuwatch/")
    assert pushing.counters == (3, 0)


def test_the_same_snapshot_is_not_pushed_twice_and_the_last_one_is(collector: Collector) -> None:
    pushing = Pushing(collector.url)
    pushing.after(1)
    for each in range(20, 60):  # the sampler hangs
        pushing.pusher.tick(float(each))
    assert steps(collector) == [10]
    pushing.after(61, [])
    pushing.after(1, [], last=True)
    assert steps(collector) == [10, 620, 630]


def test_a_push_counts_as_a_scrape_once_it_was_taken(collector: Collector) -> None:
    pushing = Pushing(collector.url)
    collector.answer = lambda path: (503, {}, b"")
    pushing.after(1)
    assert pushing.last is not None and pushing.last.page.taken == 0
    collector.answer = lambda path: (200, {}, b"")
    pushing.after(1)
    assert pushing.last.page.taken == 1


def test_the_resource_is_the_agent_and_what_the_environment_adds(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resource() -> dict[str, str]:
        Pushing(collector.url).after(1)
        return attributes(
            ExportMetricsServiceRequest.FromString(collector.bodies("/v1/metrics")[-1]).resource_metrics[0].resource
        )

    own = resource()
    assert own.pop("service.version")
    assert own == {"service.name": "gpuwatch-agent", "service.instance.id": "n1:9478", "host.name": "n1"}
    monkeypatch.setenv(
        "OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=lab, host.name=n%C3%B6de%201,service.name=a"
    )
    assert resource() | {"service.version": ""} == {
        "service.name": "a", "service.instance.id": "n1:9478", "host.name": "nöde 1", "service.version": "",
        "deployment.environment.name": "lab",
    }  # fmt: skip
    monkeypatch.setenv("OTEL_SERVICE_NAME", "gpuwatch")
    assert resource()["service.name"] == "gpuwatch"


def test_headers_and_passwords_are_sent_and_never_logged(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "X-Scope-OrgID=lab,api-key=s3cret%3D")
    collector.answer = lambda path: (401, {}, b"who are you")
    pushing = Pushing(collector.url.replace("//", "//user:passw0rd@"))
    pushing.after(1)
    headers = collector.posts[0][1]
    assert (headers["x-scope-orgid"], headers["api-key"]) == ("lab", "s3cret=")
    assert headers["authorization"] == "Basic dXNlcjpwYXNzdzByZA=="
    Pushing(collector.url.replace("//", "//user:p%C3%A4ssw0rd€@")).after(1)
    assert base64.b64decode(collector.posts[-1][1]["authorization"].split()[1]).decode() == "user:pässw0rd€"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "Authorization=Bearer s3cret")
    pushing = Pushing(collector.url.replace("//", "//user:passw0rd@"))
    pushing.after(1)
    assert collector.posts[-1][1]["authorization"] == "Bearer s3cret"
    collector.port = 0
    Pushing("http://user:a@passw0rd@127.0.0.1:1").after(1)
    assert "status 401, who are you" in caplog.text and "Connection refused" in caplog.text
    assert "s3cret" not in caplog.text and "ssw0rd" not in caplog.text


@pytest.mark.parametrize(
    "url",
    [
        "", "collector:4318", "ftp://collector", "http://", "http://:4318", "http://collector:99999", "http://a b",
        "http://collector:4318/v1/metrics", "http://collector:4318/v1/logs/", "http://c:4318?key=s3cret", "http://[::1",
        "http://collector:x", "http://collector/\udcff",
    ],
)  # fmt: skip
def test_an_unusable_url_is_said_at_the_start_without_its_password(url: str) -> None:
    given = url.replace("//", "//user:a/passw0rd@")
    with pytest.raises(ConfigError, match=r"^--otlp .*give the collector's URL without /v1/metrics") as error:
        Pushing(given)
    assert "passw0rd" not in str(error.value)


HEADERS, RESOURCE = "OTEL_EXPORTER_OTLP_HEADERS", "OTEL_RESOURCE_ATTRIBUTES"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((HEADERS, value) for value in ("a", "a b=1", "=1", "a=", "a=1\n2", "a=%0A", "a=1,ß=2", "a=ß", "a=%C3%9F")),
        *((RESOURCE, value) for value in ("a", "a b=1", "=1", "a=", "a=1\n2", "a=%0A", "a=1,ß=2")),
    ],
)
def test_an_unusable_variable_is_said_at_the_start_without_its_value(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, f"key=s3cret,{value}")
    with pytest.raises(ConfigError, match=rf"^{name}: give NAME=VALUE") as error:
        Pushing("http://127.0.0.1:4318")
    assert "s3cret" not in str(error.value)


def test_a_retry_backs_off_and_sends_the_newest_page(collector: Collector) -> None:
    collector.answer = lambda path: (503, {}, b"")
    pushing = Pushing(collector.url)
    tried = []
    for _ in range(250):
        count = len(collector.posts)
        pushing.after(1)
        if len(collector.posts) > count:
            tried.append(pushing.now_s)
    assert tried == [1, 2, 4, 8, 16, 32, 64, 124, 184, 244]
    assert steps(collector) == [10 * at for at in tried]
    assert pushing.counters == (0, 10)
    collector.answer = lambda path: (200, {}, b"")
    pushing.after(60)
    pushing.after(14)
    assert len(collector.posts) == 11
    pushing.after(1)
    assert pushing.counters == (2, 10)


def check_retried_after(collector: Collector, again_s: float) -> None:
    pushing = Pushing(collector.url)
    pushing.after(1)
    pushing.after(again_s - 0.5)
    assert len(collector.posts) == 1
    pushing.after(0.5)
    assert len(collector.posts) == 2


@pytest.mark.parametrize(("status", "again_s"), [(429, 1), (502, 1), (504, 1), (400, 15), (413, 15), (500, 15)])
def test_what_must_not_be_retried_waits_for_the_next_interval(
    collector: Collector, status: int, again_s: float
) -> None:
    collector.answer = lambda path: (status, {}, b"")
    check_retried_after(collector, again_s)


@pytest.mark.parametrize(
    ("header", "again_s"),
    [
        ("30", 30),
        ("0", 1),
        ("999999", 3600),
        ("soon", 1),
        ("-5", 1),
        ("", 1),
        ("Mon, 01 Jan 2001 00:00:00 GMT", 1),
        ("9" * 5000, 1),
        ("Mon, 01 Jan 99999999999999 00:00:00 GMT", 1),
    ],
)
def test_retry_after_is_honoured_within_bounds(collector: Collector, header: str, again_s: float) -> None:
    collector.answer = lambda path: (429, {"Retry-After": header}, b"")
    check_retried_after(collector, again_s)


def test_retry_after_may_be_a_date(collector: Collector) -> None:
    collector.answer = lambda path: (503, {"Retry-After": formatdate(time.time() + 100, usegmt=True)}, b"")
    pushing = Pushing(collector.url)
    pushing.after(1)
    pushing.after(90)
    assert len(collector.posts) == 1
    pushing.after(11)
    assert len(collector.posts) == 2


def test_a_warning_comes_once_for_each_cause(collector: Collector, caplog: pytest.LogCaptureFixture) -> None:
    answers = itertools.cycle([400, 503, 200])
    collector.answer = lambda path: (next(answers), {}, b"\x12\x0bno such day")
    pushing = Pushing(collector.url)
    for _ in range(200):
        pushing.after(1)
    where = f"the OTLP collector at {collector.url} rejected or did not answer /v1/metrics"
    texts = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert texts == [f"{where}: status 400, ··no such day", f"{where}: status 503, ··no such day"]


def test_partial_success_is_logged_and_not_retried(collector: Collector, caplog: pytest.LogCaptureFixture) -> None:
    answer = ExportMetricsServiceResponse()
    answer.partial_success.rejected_data_points = 3
    answer.partial_success.error_message = "too\x1b[31m old"
    collector.answer = lambda path: (200, {}, answer.SerializeToString())
    pushing = Pushing(collector.url)
    pushing.after(1)
    pushing.after(15)
    where = f"the OTLP collector at {collector.url}"
    assert [record.getMessage() for record in caplog.records] == [
        f"{where}: rejected_data_points: 3", f"{where}: error_message: too·[31m old"
    ]  # fmt: skip
    assert pushing.counters == (2, 0)


@pytest.mark.parametrize("body", [b"{}", b"\xff" * 100, b"<html>"])
def test_an_answer_in_another_format_is_an_answer(collector: Collector, body: bytes) -> None:
    collector.answer = lambda path: (200, {}, body)
    pushing = Pushing(collector.url)
    pushing.after(1)
    assert pushing.counters == (1, 0)


def test_an_endless_answer_is_cut_off(collector: Collector, caplog: pytest.LogCaptureFixture) -> None:
    collector.drip = itertools.repeat(b"a" * 65536)
    pushing = Pushing(collector.url)
    pushing.after(1)
    collector.drip = None
    pushing.after(15)
    assert pushing.counters == (1, 1)
    assert [record.getMessage()[-20:] for record in caplog.records] == ["a" * 20]


def test_a_redirect_is_not_followed(collector: Collector, caplog: pytest.LogCaptureFixture) -> None:
    collector.answer = lambda path: (308, {"Location": "http://u:passw0rd@elsewhere/v1/metrics"}, b"")
    pushing = Pushing(collector.url)
    pushing.after(1)
    assert caplog.records[0].getMessage().endswith("status 308, http://elsewhere/v1/metrics")
    assert len(collector.posts) == 1


def test_a_collector_that_drips_holds_up_no_more_than_its_deadline(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(otlp, "TIMEOUT_S", 0.3)

    def drip() -> Iterator[bytes]:
        while collector.drip is not None:
            time.sleep(0.05)
            yield b"a"

    collector.drip = drip()
    pushing = Pushing(collector.url)
    begin_s = time.monotonic()
    pushing.after(1)
    pushing.after(1, [SLOW])  # at once: the first is still there
    assert time.monotonic() - begin_s < 30  # it drips on
    assert pushing.counters == (0, 3)
    assert "did not answer within 0.3 s" in caplog.text
    collector.drip = None
    deadline_s = time.monotonic() + 90
    while pushing.counters[0] < 2 and time.monotonic() < deadline_s:
        time.sleep(0.1)
        pushing.after(60)
    assert pushing.counters[0] >= 2
    assert [record.event_name for record in records(collector)][-1] == "gpuwatch.finding.begin"


def test_a_finding_is_sent_when_it_begins_and_when_it_has_ended(collector: Collector) -> None:
    pushing = Pushing(collector.url)
    pushing.after(1, [SLOW])
    for _ in range(40):
        pushing.after(1)
    (begin,) = records(collector)
    assert (begin.event_name, begin.body.string_value) == ("gpuwatch.finding.begin", "the loader is slow (40%)")
    assert (begin.severity_text, begin.time_unix_nano) == ("WARN", int((START_S - 5) * 1e9))
    about = {
        "cause": "input_cpu", "run": "r1", "rank": "2", "name": "resnet50-a", "user": "alice", "job_id": "4711",
        "ratio": "0.4", "evidence": "4 of 4 workers at 97% CPU", "advice": "num_workers 4 → 10",
    }  # fmt: skip
    assert attributes(begin) == about
    pushing.after(1, [])  # last seen at 41
    for _ in range(59):
        pushing.after(1)
    assert len(records(collector)) == 1
    for _ in range(16):
        pushing.after(1)
    _, end = records(collector)
    assert (end.event_name, end.body.string_value) == ("gpuwatch.finding.end", "ended: the loader is slow (40%)")
    assert (end.severity_text, end.time_unix_nano) == ("INFO", int((START_S + 41) * 1e9))
    assert attributes(end) == about
    pushing.after(20, [SLOW])
    assert [record.event_name.rpartition(".")[2] for record in records(collector)] == ["begin", "end", "begin"]


def test_a_finding_that_comes_back_soon_has_not_ended(collector: Collector) -> None:
    pushing = Pushing(collector.url)
    for _ in range(5):
        pushing.after(1, [SLOW])
        pushing.after(50, [])
    assert len(records(collector)) == 1


def test_a_finding_about_a_gpu_has_no_run(collector: Collector) -> None:
    Pushing(collector.url).after(1, [FELL_OFF])
    (record,) = records(collector)
    assert (record.severity_text, record.severity_number) == ("ERROR", 17)
    assert attributes(record) == {"cause": "gpu_throttled", "UUID": "GPU-1", "ratio": "0.5", "advice": "cool it"}


def test_a_restarted_agent_does_not_repeat_what_was_sent(collector: Collector, tmp_path: Path) -> None:
    path = tmp_path / "history.db.otlp.json"
    Pushing(collector.url, path).after(1, [SLOW])
    restarted = Pushing(collector.url, path)
    for _ in range(30):
        restarted.after(1, [])  # it has to find it again
    restarted.after(1, [SLOW])
    assert len(records(collector)) == 1
    third = Pushing(collector.url, path)
    for _ in range(80):
        third.after(1, [])
    assert [record.event_name.rpartition(".")[2] for record in records(collector)] == ["begin", "end"]
    assert json.loads(path.read_text()) == WAITING


def test_what_could_not_be_delivered_is_delivered_by_the_next_agent(collector: Collector, tmp_path: Path) -> None:
    path = tmp_path / "history.db.otlp.json"
    collector.answer = lambda path: (503, {}, b"")
    Pushing(collector.url, path).after(1, [SLOW])
    assert len(json.loads(path.read_text())["waiting"]) == 1
    collector.answer = lambda path: (200, {}, b"")
    Pushing(collector.url, path).after(1, [SLOW])
    assert [record.event_name for record in records(collector)] == ["gpuwatch.finding.begin"] * 2  # it was refused once
    assert json.loads(path.read_text())["waiting"] == []


def test_log_records_that_a_collector_does_not_take_are_dropped(collector: Collector) -> None:
    collector.answer = lambda path: (404 if path.endswith("logs") else 200, {}, b"404 page not found\n")
    pushing = Pushing(collector.url)
    pushing.after(1, [SLOW])
    pushing.after(30)
    assert len(records(collector)) == 1
    assert len(steps(collector)) == 2
    assert pushing.counters == (2, 1)


def test_a_quota_on_log_records_does_not_hold_up_metrics(collector: Collector) -> None:
    throttled = 429, {"Retry-After": "3600"}, b""
    collector.answer = lambda path: throttled if path.endswith("logs") else (200, {}, b"")
    pushing = Pushing(collector.url)
    for _ in range(61):
        pushing.after(1, [SLOW])
    assert len(steps(collector)) == 5
    assert len(collector.bodies("/v1/logs")) == 1


def test_log_records_that_wait_are_bounded(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(otlp, "MAX_WAITING", 10)
    path = tmp_path / "state.json"
    pushing = Pushing("http://127.0.0.1:1", path)
    for number in range(30):
        pushing.after(70, [Finding("input_cpu", "info", "slow", 0.1, (), "x", run=f"r{number}", rank=0)])
    state = json.loads(path.read_text())
    assert [each["attributes"]["run"] for each in state["waiting"]][-4:] == ["r28", "r27", "r29", "r28"]
    assert len(state["waiting"]) == 10 and len(state["active"]) == 1
    texts = [record.getMessage() for record in caplog.records]
    assert sum("10 log records are queued" in text for text in texts) == 1
    assert sum("Connection refused" in text for text in texts) == 2  # of metrics and of logs


def test_a_damaged_state_is_a_new_one(collector: Collector, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "state.json"
    path.write_text('{"active": 3}')
    Pushing(collector.url, path).after(1, [SLOW])
    assert "discarding previous log records" in caplog.text
    assert len(json.loads(path.read_text())["active"]) == 1


def test_clocks_that_are_set_end_no_finding(collector: Collector) -> None:
    pushing = Pushing(collector.url)
    pushing.after(1, [SLOW])
    for step_s in (86400.0, -86400.0):
        for _ in range(20):
            pushing.now_s += 1
            page = Page([])
            pushing.last = Snapshot(START_S + pushing.now_s + step_s, pushing.now_s, page, [RUN], [SLOW])
            pushing.pusher.tick(pushing.now_s)
    assert len(records(collector)) == 1


def test_the_thread_goes_on_after_an_error_and_ends_with_a_last_push(
    collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    pushing = Pushing(collector.url)
    broken = iter([True])
    pushing.pusher._snapshot = lambda: 1 / 0 if next(broken, False) else pushing.last  # type: ignore[assignment,return-value]
    pushing.last = Snapshot(START_S, 0.0, Page([Sample("gpuwatch_steps_total", 1, ("r1", "2"))]))
    pushing.pusher.start()
    deadline_s = time.monotonic() + 30
    while not collector.posts and time.monotonic() < deadline_s:
        time.sleep(0.05)
    pushing.last = Snapshot(START_S + 1, 0.0, Page([Sample("gpuwatch_steps_total", 2, ("r1", "2"))]))
    pushing.pusher.stop()
    assert steps(collector) == [1, 2]
    assert "continuing with the next one" in caplog.text
