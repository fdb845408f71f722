"""Write promtool's scenarios into a real Prometheus so that a moment of each is now, and what follows as time passes.

with start_prometheus(directory, CONFIG, "groups: []", options=OPTIONS) as prometheus:
    site = Site(prometheus, [scenario(test, now="7m", mark="-x01", ends={"gpuwatch_gpus_seen": 2})])
    site.record(recording_rules)
    with site.going_on():
        site.evaluate(rules)
"""

from __future__ import annotations

import json
import re
import signal
import struct
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from typing import Any

import yaml

from tests.servers import Server, wait_for

Labels = Mapping[str, str]
Series = tuple[Labels, Sequence[tuple[float, float]]]
"""Labels, and (unix time in seconds, value) in order."""
STALE = struct.unpack("<d", struct.pack("<Q", 0x7FF0000000000002))[0]
"""https://pkg.go.dev/github.com/prometheus/prometheus/model/value#pkg-constants"""
OWN = ("instance", "run", "user", "job_id", "workload_namespace", "workload_pod")
"""Labels whose values several scenarios use for different things."""


@cache
def parsed(text: str) -> Any:
    """Return a YAML text as Python values, by libyaml in a tenth of the time. It is kept: do not change it."""
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))


BEFORE_S = 30.0
"""How long before its moment a scenario begins to be live. Recording rules then continue from the written past."""
DEPTH = 4
"""How many groups of rules read each other in a chain: those of GPUs, owners' states, levels, and what reads them."""
OPTIONS = ("--web.enable-remote-write-receiver", "--rules.alert.resend-delay=15s")
CONFIG = {
    "global": {"evaluation_interval": "2s"},
    "rule_files": ["rules.yml"],
    "storage": {"tsdb": {"out_of_order_time_window": "1d"}},
}


@dataclass
class Scenario:
    """A scenario of promtool's, with the moment that is to be now. `mark` sets its nodes, runs and owners apart."""

    mark: str
    interval_s: float
    now_s: float
    """Of the scenario's own time."""
    series: list[tuple[dict[str, str], list[float | None]]]
    ends: Mapping[str, float] = field(default_factory=dict)
    """Values by a regular expression of series, once the problem is over."""
    begin_s: float = 0.0
    """Unix time of the scenario's beginning."""

    def due(self, after_s: float, until_s: float, is_over: bool) -> Iterator[Series]:
        """Yield what was measured after one unix time, up to another one."""
        for labels, values in self.series:
            name = labels["__name__"]
            zero = self.begin_s if name.endswith("_timestamp_seconds") else 0.0
            times = ((self.begin_s + n * self.interval_s, value) for n, value in enumerate(values))
            due = ((at, value) for at, value in times if value is not None and after_s < at <= until_s)
            samples = [(at, value if value is STALE else zero + value) for at, value in due]
            if is_over:
                text = f"{name}{json.dumps(labels)}"
                final = next((value for pattern, value in self.ends.items() if re.match(pattern, text)), None)
                samples = samples if final is None else [(until_s, final)]
            if samples:
                yield labels, samples


def scenario(test: Mapping[str, Any], now: str, mark: str, ends: Mapping[str, float]) -> Scenario:
    """Return a test of a file for `promtool test rules`, `now` being an eval_time of it."""
    series: list[tuple[dict[str, str], list[float | None]]] = []
    for each in test["input_series"]:
        name, _, labels = each["series"].partition("{")
        found = {key: marked(key, value, mark) for key, value in re.findall(r'(\w+)="([^"]*)"', labels)}
        series.append(({"__name__": name.strip(), **found}, expanded(each["values"])))
    nodes = {labels["instance"] for labels, _ in series}
    for node in nodes - {labels["instance"] for labels, _ in series if labels["__name__"] == "up"}:
        longest = max(len(values) for _, values in series)
        series.append(({"__name__": "up", "job": "gpuwatch", "instance": node}, [1.0] * longest))
    return Scenario(mark, seconds(test["interval"]), seconds(now), series, ends)


def ends(text: str) -> dict[str, float]:
    """Return what an alert's series are once the problem is over, by metric.

    They come from `# ends: {gpuwatch_run_up: 0}` in the text of its scenarios. It is {} for an alert that ends with a
    window of five to fifteen minutes: that is left to promtool. A series can go `stale`.
    """
    found = re.search(r"^ *# ends: (\{.*\})$", text, re.MULTILINE)
    assert found, "add the values of its series once the problem is over: `# ends: {gpuwatch_run_up: 0}`"
    return {metric: STALE if value == "stale" else float(value) for metric, value in parsed(found[1]).items()}


def marked(label: str, value: str, mark: str) -> str:
    return re.sub(r"^[^:]+", rf"\g<0>{mark}", value) if label in OWN else value


def seconds(text: str) -> float:
    return sum(float(number) * {"h": 3600, "m": 60, "s": 1}[unit] for number, unit in re.findall(r"(\d+)([hms])", text))


def expanded(values: str) -> list[float | None]:
    """Return the values of promtool's notation, None where nothing was measured."""
    found: list[float | None] = []
    for token in values.split():
        if token == "stale":
            found.append(STALE)
        elif token[0] == "_":
            found += [None] * int(token[2:] or 1)
        else:
            first, step, count = re.fullmatch(r"(-?[\d.]+)([+-][\d.]+)?(?:x(\d+))?", token).groups()  # type: ignore[union-attr]
            found += [float(first) + n * float(step or 0) for n in range(int(count or 0) + 1)]
    return found


class Site:
    """The scenarios' nodes, seen by one Prometheus, which must take remote writes of samples out of order."""

    def __init__(self, prometheus: Server, scenarios: Sequence[Scenario]) -> None:
        self.prometheus = prometheus
        self.scenarios = scenarios
        self.is_over = False
        self._began_s = self._written_s = float(int(time.time()))
        for each in scenarios:
            each.begin_s = self._written_s - each.now_s + BEFORE_S

    def record(self, rules: Sequence[Mapping[str, Any]], step_s: int = 30) -> None:
        """Write the past: what was measured, and what recording rules made of it, in their order, each `step_s`."""
        self._write(0.0, self._written_s)
        for rule in rules:
            self._record(rule, step_s)

    def _record(self, rule: Mapping[str, Any], step_s: int) -> None:
        begin_s = min(each.begin_s for each in self.scenarios)
        # A rule that continues its own series finds it at most five minutes back.
        length_s = 240.0 if rule["record"] in rule["expr"] else self._written_s - begin_s
        recorded: dict[str, list[tuple[float, float]]] = {}
        while begin_s <= self._written_s:
            end_s = min(begin_s + length_s, self._written_s)
            for each in self._range(rule["expr"], begin_s, end_s, step_s):
                labels = {**each["metric"], "__name__": rule["record"], **rule.get("labels", {})}
                samples = [(float(at), float(value)) for at, value in each["values"]]
                write(self.prometheus, [(labels, samples)])
                recorded.setdefault(json.dumps(labels), []).extend(samples)
            begin_s += (length_s // step_s + 1) * step_s
        ends = [(json.loads(key), _ends(samples, step_s, self._written_s)) for key, samples in recorded.items()]
        write(self.prometheus, ends)

    def _range(self, expr: str, begin_s: float, end_s: float, step_s: int) -> list[dict[str, Any]]:
        form = urllib.parse.urlencode({"query": expr, "start": begin_s, "end": end_s, "step": step_s})
        url = self.prometheus.url + "/api/v1/query_range"
        with urllib.request.urlopen(urllib.request.Request(url, form.encode()), timeout=60) as answer:
            found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        return found

    def evaluate(self, rules: str) -> None:
        """Give Prometheus these rules in place of those that it has: the alerts only at the scenarios' moment.

        The recording rules come first. An alert, which fires here after seconds instead of minutes, would otherwise
        have its text before the series that it names.
        """
        moment_s = self._began_s + BEFORE_S
        self._load([group for group in parsed(rules)["groups"] if not any("alert" in rule for rule in group["rules"])])
        for _ in range(DEPTH):
            began_s = time.time()
            wait_for("each group is evaluated once more", lambda: self._evaluated_since(began_s), 60)  # noqa: B023
        time.sleep(max(0.0, moment_s - time.time()))
        self._load(parsed(rules)["groups"])

    def _load(self, groups: Sequence[Mapping[str, Any]]) -> None:
        (self.prometheus.log.parent / "rules.yml").write_text(json.dumps({"groups": groups}))
        self.prometheus.process.send_signal(signal.SIGHUP)
        names = {group["name"] for group in groups}
        wait_for("the rules are loaded", lambda: {group["name"] for group in self._groups()} == names, 30)

    def _groups(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.prometheus.get("/api/v1/rules")["data"]["groups"]
        return found

    def _evaluated_since(self, began_s: float) -> bool:
        """Return whether each group was evaluated, and that began after this unix time."""
        last = (re.sub(r"\.\d+", "", group["lastEvaluation"]).replace("Z", "+00:00") for group in self._groups())
        return all(datetime.fromisoformat(each).timestamp() > began_s for each in last)

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Write what the nodes measure, each second."""
        done = threading.Event()

        def player() -> None:
            while not done.wait(1.0):
                self._write(self._written_s, time.time())

        thread = threading.Thread(target=player, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join(10)

    def _write(self, after_s: float, until_s: float) -> None:
        write(self.prometheus, [one for each in self.scenarios for one in each.due(after_s, until_s, self.is_over)])
        self._written_s = until_s


def _ends(samples: Sequence[tuple[float, float]], step_s: int, now_s: float) -> list[tuple[float, float]]:
    """Return the markers that a rule writes when it no longer has a series; now, Prometheus itself goes on."""
    times = {at for at, _ in samples}
    return [(min(at + step_s, now_s + 0.001), STALE) for at in sorted(times) if at + step_s not in times]


def write(prometheus: Server, series: Sequence[Series]) -> None:
    """Write series. Raises OSError when Prometheus takes them not. https://prometheus.io/docs/concepts/remote_write_spec/"""
    if not series:
        return
    body = b"".join(_field(1, _series(labels, samples)) for labels, samples in series)
    # Snappy's block format with the whole as one literal: it need not be small.
    packed = _varint(len(body)) + b"\xfc" + struct.pack("<I", len(body) - 1) + body
    headers = {
        "Content-Encoding": "snappy",
        "Content-Type": "application/x-protobuf",
        "X-Prometheus-Remote-Write-Version": "0.1.0",
    }
    urllib.request.urlopen(
        urllib.request.Request(prometheus.url + "/api/v1/write", packed, headers), timeout=30
    ).close()


def _series(labels: Labels, samples: Sequence[tuple[float, float]]) -> bytes:
    named = (_field(1, name.encode()) + _field(2, labels[name].encode()) for name in sorted(labels) if labels[name])
    measured = (struct.pack("<Bd", 0x09, value) + b"\x10" + _varint(round(1000 * at)) for at, value in samples)
    return b"".join(_field(1, each) for each in named) + b"".join(_field(2, each) for each in measured)


def _field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])
