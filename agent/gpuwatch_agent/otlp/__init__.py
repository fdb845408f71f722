"""Pushes metrics and findings to an OTLP collector by HTTP, for sites without Prometheus: `gpuwatch agent --otlp URL`.

Source: "OTLP Specification" of opentelemetry-proto 1.11, for answers and retries. Its own thread reads the snapshots.
Metrics are never queued: counters are cumulative, so a retry sends the newest page. Log records wait in a small file.
"""

import gzip
import logging
import os
import random
import re
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import msgspec
import urllib3
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse

from gpuwatch import __version__, api
from gpuwatch.api.client import MOST_OF_ANSWER, Http, is_url, why, without_password
from gpuwatch.errors import ConfigError
from gpuwatch.formatting import harmless
from gpuwatch.metrics import Sample
from gpuwatch_agent.deadline import Background, DeadlineThread, Rarely
from gpuwatch_agent.evaluator import QUIET_S
from gpuwatch_agent.exporter import Snapshot
from gpuwatch_agent.otlp.messages import Event, MetricsConverter, logs_request
from gpuwatch_agent.state_file import StateFile

logger = logging.getLogger(__name__)

TIMEOUT_S = 10.0
LONGEST_BACKOFF_S, LONGEST_RETRY_AFTER_S = 60.0, 3600.0
MAX_WAITING = 1000
_RETRIED = (429, 502, 503, 504)


class State(msgspec.Struct):
    """What outlives the agent."""

    active: dict[str, Event] = msgspec.field(default_factory=dict)  # how it began, by run, rank, cause and GPU
    waiting: list[Event] = msgspec.field(default_factory=list)  # not delivered yet, oldest first


@dataclass
class Signal:
    """Metrics or logs: its path, what answers it, and when it is sent next."""

    path: str
    response: Any
    due_s: float = 0.0  # on the monotonic clock
    failures: int = 0  # in a row


class OtlpPusher(Background):
    """Evaluates and pushes the snapshots in its own thread. A collector that does not answer does not delay its end."""

    def __init__(
        self, url: str, every_s: float, snapshot: Callable[[], Snapshot | None], host: str, port: int, path: Path | None
    ) -> None:
        """`path`: where the state is kept; None: nowhere. Raises: ConfigError for a URL or a variable that is wrong."""
        super().__init__("otlp", 5.0)
        self._http, self._every_s, self._snapshot = Http(_checked(url)), every_s, snapshot
        self._where = f"the OTLP collector at {without_password(url)}"
        self._headers = {name.lower(): text for name, text in _pairs("OTEL_EXPORTER_OTLP_HEADERS", "[ -~]+").items()}
        self._headers |= {"content-type": "application/x-protobuf", "content-encoding": "gzip"}
        self._headers["user-agent"] = f"gpuwatch/{__version__}"
        self._resource = {
            "service.name": "gpuwatch-agent",
            "service.instance.id": f"{host}:{port}",
            "service.version": __version__,
            "host.name": host,
            **_pairs("OTEL_RESOURCE_ATTRIBUTES", ".+"),
        }
        if name := os.environ.get("OTEL_SERVICE_NAME"):
            self._resource["service.name"] = name
        self._converter = MetricsConverter(self._resource)
        self._file = StateFile(path, State, "log records")
        self._metrics = Signal("/v1/metrics", ExportMetricsServiceResponse)
        self._logs = Signal("/v1/logs", ExportLogsServiceResponse)
        self._pushed: Snapshot | None = None
        self._seen_s: dict[str, tuple[float, float]] = {}  # when an active finding was last seen, by both clocks
        self._may_warn = Rarely(3600.0)
        self._sent = self._failed = 0
        self._deadline = DeadlineThread("OTLP collector", TIMEOUT_S)

    def samples(self) -> Iterable[Sample]:
        """Return the counters for /metrics."""
        yield Sample("gpuwatch_otlp_requests_sent_total", self._sent)
        yield Sample("gpuwatch_otlp_request_failures_total", self._failed)

    def tick(self, now_s: float, last: bool = False) -> None:
        """Note new and ended findings; send what is due. `now_s`: monotonic; `last`: metrics too unless they failed."""
        snapshot, state = self._snapshot(), self._file.state
        if snapshot is not None and snapshot is not self._pushed:
            self._note(snapshot, state)
            if now_s >= self._metrics.due_s or (last and not self._metrics.failures):
                self._pushed = snapshot
                request = self._converter.request(snapshot.page.collect(), snapshot.time_s)
                if self._is_taken(self._metrics, request, now_s):
                    self._converter.delivered()
                    (self._snapshot() or snapshot).page.taken += 1  # a scrape: first zeros and last values wait for it
        if state.waiting and now_s >= self._logs.due_s:
            count = len(state.waiting)
            if self._is_taken(self._logs, logs_request(self._resource, state.waiting, time.time()), now_s) is not None:
                del state.waiting[:count]
        self._file.save()

    def _note(self, snapshot: Snapshot, state: State) -> None:
        now = snapshot.monotonic_s, snapshot.time_s
        runs = {(run.run, run.rank): run for run in snapshot.runs}
        for finding in snapshot.findings:
            key = "/".join((finding.run or "", str(finding.rank), finding.cause, finding.gpu or ""))
            self._seen_s[key] = now
            if key not in state.active:
                state.active[key] = _begin(finding, runs.get((finding.run or "", finding.rank or 0)), now[1])
                state.waiting.append(state.active[key])
        for key, begun in list(state.active.items()):
            seen_s, ended_s = self._seen_s.setdefault(key, now)
            if now[0] - seen_s > QUIET_S:
                del self._seen_s[key], state.active[key]
                body = f"ended: {begun.body}"
                state.waiting.append(Event("gpuwatch.finding.end", ended_s, "info", body, begun.attributes))
        if len(state.waiting) > MAX_WAITING:
            del state.waiting[:-MAX_WAITING]
            self._warn("full", "%d log records are queued for %s: the oldest are dropped", MAX_WAITING, self._where)

    def _is_taken(self, signal: Signal, message: bytes, now_s: float) -> bool | None:
        """Send a request and set when the next one is due; return None where it failed and is to be retried."""
        body, retry_after = gzip.compress(message, 1), None
        signal.due_s = now_s + self._every_s
        try:
            reply = self._deadline.call(lambda: self._http.post(signal.path, body, self._headers, TIMEOUT_S))
            if 200 <= reply.status < 300 and len(reply.body) <= MOST_OF_ANSWER:
                signal.failures = 0
                self._sent += 1
                with suppress(DecodeError):  # some answer with JSON
                    for field, value in signal.response.FromString(reply.body).partial_success.ListFields():
                        text = harmless(str(value)[:200])
                        self._warn(signal.path + field.name, "%s: %s: %s", self._where, field.name, text)
                return True
            is_retried, retry_after, kind = reply.status in _RETRIED, reply.retry_after, f"status {reply.status}"
            text = reply.location or reply.body[:200].decode("utf-8", "replace")
            reason = f"{kind}, {harmless(without_password(text))}"
        except OSError as error:
            is_retried, kind, reason = True, type(error).__name__, why(error)
        self._failed += 1
        self._warn(signal.path + kind, "%s rejected or did not answer %s: %s", self._where, signal.path, reason)
        if not is_retried:
            return False
        backoff_s = min(LONGEST_BACKOFF_S, 2.0 ** min(signal.failures, 10)) * random.uniform(0.5, 1.0)
        signal.failures += 1
        signal.due_s = now_s + max(backoff_s, min(_seconds(retry_after), LONGEST_RETRY_AFTER_S))
        return None

    def _warn(self, kind: str, text: str, *arguments: object) -> None:
        """Log a warning once an hour for each kind."""
        if self._may_warn(kind):
            logger.warning(text, *arguments)

    def _run(self) -> None:
        last = False
        while not last:
            last = self._stop.wait(1.0)
            try:
                self.tick(time.monotonic(), last)
            except Exception as error:
                self._warn(type(error).__name__, "an OTLP push failed; continuing with the next one: %r", error)


def _begin(finding: api.Finding, run: api.Run | None, now_s: float) -> Event:
    """Return the event of a finding that is new."""
    about = {"cause": finding.cause, "run": finding.run, "name": finding.name, "UUID": finding.gpu}
    if run is not None:
        about |= {"rank": str(run.rank), "user": run.user, "job_id": (run.owner and run.owner.job) or run.job}
    evidence = "\n".join(each.text for each in finding.evidence if each.text)
    about |= {"ratio": f"{finding.ratio:.3g}", "evidence": evidence, "advice": finding.advice}
    body = harmless(f"{finding.title} ({finding.ratio:.0%})")
    attributes = {name: value for name, value in about.items() if value}
    return Event("gpuwatch.finding.begin", finding.since_s or now_s, finding.severity, body, attributes)


def _checked(url: str) -> str:
    """Return the URL of a collector. Raises: ConfigError, which does not show its password."""
    if url.isprintable() and is_url(url) and not re.search(r"[\s?#]|/v1/(metrics|logs)/?$", url):
        return url
    where = re.sub("//.*@", "//", url)  # a password may have a slash, which makes the URL wrong
    raise ConfigError(f"--otlp {where}: give the collector's URL without /v1/metrics, e.g. http://127.0.0.1:4318")


def _pairs(variable: str, value_pattern: str) -> dict[str, str]:
    """Return an OpenTelemetry variable's NAME=VALUE,NAME=VALUE. Raises: ConfigError, which does not show it."""
    found = {}
    for item in filter(None, map(str.strip, os.environ.get(variable, "").split(","))):
        name, equals, value = (unquote(part.strip()) for part in item.partition("="))
        if not re.fullmatch(rf"[\w./-]+={value_pattern}", f"{name}{equals}{value}", re.ASCII):
            raise ConfigError(f"{variable}: give NAME=VALUE,NAME=VALUE; special characters as %XX")
        found[name] = value
    return found


def _seconds(retry_after: str | None) -> float:
    """Return what a Retry-After header asks for, a time or seconds; 0 without one that can be read."""
    try:
        return float(urllib3.Retry().parse_retry_after(retry_after or "0"))
    except (urllib3.exceptions.InvalidHeader, ValueError, OverflowError):
        return 0.0
