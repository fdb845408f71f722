"""Sources over canned answers: what is decoded, what is asked, and what is reported when it fails."""

from __future__ import annotations

import json
import re
import threading
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, parse_qsl, urlsplit

import msgspec
import pytest

from gpuwatch.api import Run
from gpuwatch.api.client import Reply
from gpuwatch.errors import SourceError
from gpuwatch_dashboards.panels import BY_KEY
from gpuwatch_dashboards.query import Scope, Span
from gpuwatch_dashboards.sources import AgentSource, Once, SharedSource
from gpuwatch_dashboards.sources.prometheus import PrometheusSource, ScrapedRun, _findings

NOW = 1_790_000_100.0
RUN: dict[str, Any] = {
    "run": "node-17-4711-88123", "rank": 0, "name": "resnet50-a", "job": "", "host": "node-17", "pid": 4711,
    "user": "alice", "status": "running", "world_size": 1, "timeline": "host", "device": "cpu",
    "started_s": 1790000000.0, "watermark_s": 1790000100.0, "last_message_s": 1790000100.2,
    "steps": 812, "samples": 51968, "records_lost": 0, "activity": "step",
    "states": {"startup": 1.2, "input_wait": 61.0, "compute": 37.8},
    "recent": {"duration_s": 60.0, "states": {"input_wait": 37.2}, "step_s_p50": 0.10, "step_s_p95": 0.13,
               "data_wait_s_p50": 0.06, "steps_per_s": 9.7, "samples_per_s": 622.0},
    "verdict": {"state": "input", "ratio": 0.62, "sentence": "input-bound: 62% of the time training waited for data"},
    "findings": [{"cause": "input_single_process", "severity": "warning", "title": "t", "ratio": 0.62,
                  "evidence": [{"what": "w", "value": 0.62, "unit": "ratio", "text": "data wait 62%"}],
                  "advice": "num_workers 0 → 8", "predicted_speedup": 2.6, "since_s": 1790000010.0, "gpu": None}],
    "loader": {"num_workers": 0, "prefetch_factor": None, "batch_size": 64, "pin_memory": False}, "tags": {},
}  # fmt: skip

Handler = Callable[[str, float], Reply]


def agent(handler: Handler) -> AgentSource:
    return AgentSource("http://node-17:9478/", handler)


def answering(body: Any, status: int = 200) -> Handler:
    return lambda path, timeout_s: Reply(status, body if isinstance(body, bytes) else json.dumps(body).encode())


def test_agent_runs() -> None:
    [run] = agent(answering({"runs": [RUN]})).runs()
    assert (run.run, run.name, run.status, run.steps) == ("node-17-4711-88123", "resnet50-a", "running", 812)
    assert run.states == {"startup": 1.2, "input_wait": 61.0, "compute": 37.8}
    assert run.recent is not None and run.recent.step_s_p95 == 0.13
    assert run.verdict is not None and run.verdict.ratio == 0.62
    assert run.findings[0].evidence[0].text == "data wait 62%"
    assert run.loader is not None and run.loader.num_workers == 0


def test_runs_to_compare_are_those_that_are_kept_as_well() -> None:
    asked: list[str] = []

    def handler(path: str, timeout_s: float) -> Reply:
        asked.append(path)
        kept = {
            name: RUN[name] for name in ("run", "rank", "name", "started_s", "watermark_s", "last_message_s", "states")
        }
        return Reply(200, json.dumps({"runs": [{**kept, "status": "ended"}]}).encode())

    [run] = agent(handler).runs(kept=True)
    assert (run.name, run.status, run.recent) == ("resnet50-a", "ended", None)
    assert asked == ["/api/v1/runs?kept=all"]


def test_agent_run_that_has_nothing_to_say_yet() -> None:
    young = {**RUN, "recent": None, "verdict": None, "findings": [], "samples": None, "loader": None, "states": {}}
    [run] = agent(answering({"runs": [young]})).runs()
    assert run.recent is None and run.verdict is None and run.findings == ()


def test_agent_status() -> None:
    status = {
        "version": "0.1.0", "host": "node-17", "time_s": NOW, "started_s": 0.0, "listen": [], "gpus": [],
        "collectors": [{"name": "gpu", "success": None, "duration_s": 0.1, "message": "no NVIDIA driver"}],
        "history": {"path": "/h", "bytes": 1, "failures": 2},
    }  # fmt: skip
    node = agent(answering(status)).node(None)
    assert (node.host, node.gpus, node.history.failures) == ("node-17", (), 2)
    assert node.collectors[0].success is None


def test_agent_fetches_each_metric_once_and_names_run_and_rank_where_they_count() -> None:
    asked: list[dict[str, str]] = []

    def handler(path: str, timeout_s: float) -> Reply:
        assert urlsplit(path).path == "/api/v1/series/many"
        points = [[NOW - 2, 0.0], [NOW - 1, 0.5], [NOW, 1.0]]
        answers = []
        for text in parse_qs(urlsplit(path).query)["q"]:
            asked.append(dict(parse_qsl(text, keep_blank_values=True)))
            labels = {"mode": "user"} if "cpu" in asked[-1]["metric"] else {"state": "compute"}
            answers.append({"metric": "m", "series": [{"labels": labels, "points": points}]})
        return Reply(200, json.dumps({"answers": answers}).encode())

    queries = [curve.query for key in ("ledger", "cpu") for curve in BY_KEY[key].curves]
    traces = agent(handler).evaluate(queries, Scope("r", "0"), Span(NOW - 60, NOW, 30))
    assert [a["metric"] for a in asked] == ["gpuwatch_run_seconds_total", "gpuwatch_cpu_seconds_total"]
    assert asked[0]["run"] == "r" and asked[0]["rank"] == "0" and "run" not in asked[1]
    assert asked[0]["points"] == "30"
    assert [[t.last for t in of_query] for of_query in traces] == [[1.0], [1.0], []]


@pytest.mark.parametrize(("rank", "how"), [(None, {"by": ""}), ("0", {"rank": "0", "pick": "extremes"})])
def test_the_ranks_of_a_run_are_counted_at_the_same_times(rank: str | None, how: dict[str, str]) -> None:
    """Of the extremes of 8 ranks, one of which had just stopped, the last one alone was shown: 0 running ranks."""
    asked: list[dict[str, str]] = []

    def handler(path: str, timeout_s: float) -> Reply:
        asked.extend(dict(parse_qsl(text, True)) for text in parse_qs(urlsplit(path).query)["q"])
        return Reply(200, json.dumps({"answers": [{"metric": "m", "series": []}] * len(asked)}).encode())

    agent(handler).evaluate([curve.query for curve in BY_KEY["up"].curves], Scope("r", rank), Span(NOW - 60, NOW, 30))
    assert [{name: value for name, value in each.items() if name in ("by", "pick", "rank")} for each in asked] == [how]


@pytest.mark.parametrize("key", ["gpu_memory", "node_shm"])
def test_agent_is_asked_for_both_parts_of_a_quotient_at_the_same_times(key: str) -> None:
    asked: list[dict[str, str]] = []

    def handler(path: str, timeout_s: float) -> Reply:
        asked.extend(dict(parse_qsl(text)) for text in parse_qs(urlsplit(path).query)["q"])
        return Reply(200, json.dumps({"answers": [{"metric": "m", "series": []}] * len(asked)}).encode())

    agent(handler).evaluate([curve.query for curve in BY_KEY[key].curves], Scope(), Span(NOW - 60, NOW, 30))
    used, size = ({name: each.get(name) for name in ("by", "pick", "points")} for each in asked)
    assert used == size and used["pick"] is None


def test_away_names_the_url_and_the_remedy() -> None:
    def refuse(path: str, timeout_s: float) -> Reply:
        raise ConnectionRefusedError(111, "Connection refused")

    with pytest.raises(SourceError) as caught:
        agent(refuse).runs()
    assert str(caught.value) == (
        "the agent at http://node-17:9478 does not answer: start it with `gpuwatch up` or `gpuwatch agent`"
    )


def test_slow_says_how_long() -> None:
    def slow(path: str, timeout_s: float) -> Reply:
        raise TimeoutError("timed out")

    with pytest.raises(SourceError, match="did not answer within 3 s"):
        agent(slow).runs()


def test_refusal_gives_the_servers_reason() -> None:
    with pytest.raises(SourceError, match="status 503: history is closed"):
        agent(answering({"error": "history is closed"}, 503)).runs()


@pytest.mark.parametrize("body", [b"<html>", {"runs": [{"run": 1}]}, {"something": []}])
def test_other_server_on_that_port(body: Any) -> None:
    with pytest.raises(SourceError, match="an unexpected reply"):
        agent(answering(body)).runs()


def test_a_report_of_a_run_that_was_forgotten_meanwhile_is_a_source_s_error() -> None:
    source = SharedSource(agent(answering({"runs": []})))
    run = msgspec.convert(RUN, Run)
    with pytest.raises(SourceError, match=r"has no report of resnet50-a: the agent at .* has no run yet"):
        source.report(run)


def test_unusable_url() -> None:
    with pytest.raises(SourceError, match="does not answer"):
        AgentSource("nonsense").runs()


def test_a_value_is_made_once_and_held_and_a_failure_for_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    once, clock = Once(), [0.0]
    monkeypatch.setattr("gpuwatch_dashboards.sources.time", SimpleNamespace(monotonic=lambda: clock[0]))
    made: list[float] = []

    def make(took_s: float = 0.0) -> float:
        clock[0] += took_s
        made.append(clock[0])
        return clock[0]

    for at_s, expected in ((0.0, 0.0), (4.9, 0.0), (5.0, 5.0), (5.1, 5.0)):
        clock[0] = at_s
        assert once.get("a", make, 5.0) == expected
    assert once.get("b", lambda: make(2.0), 5.0, 10.0) == pytest.approx(7.1)
    clock[0] = 27.0
    assert once.get("b", make) == pytest.approx(7.1), "ten times as long as it took"
    assert len(made) == 3

    def fail() -> float:
        raise SourceError("it", str(clock[0]))

    for at_s, said in ((30.0, "30.0"), (30.9, "30.0"), (31.0, "31.0")):
        clock[0] = at_s
        with pytest.raises(SourceError) as caught:
            once.get("c", fail, 60.0, 10.0)
        assert caught.value.remedy == said and len(traceback.extract_tb(caught.value.__traceback__)) == 2
    clock[0] = 32.0
    assert once.get("c", make) == 32.0


def test_a_second_caller_waits_for_the_value_that_is_being_made() -> None:
    once, begun, go, found = Once(), threading.Event(), threading.Event(), list[str]()

    def slow() -> str:
        begun.set()
        assert go.wait(60)
        return "slow"

    first = threading.Thread(target=lambda: found.append(once.get("a", slow)), daemon=True)
    second = threading.Thread(target=lambda: found.append(once.get("a", lambda: "another")), daemon=True)
    first.start()
    assert begun.wait(60)
    second.start()
    assert once.get("b", lambda: "b") == "b"  # other values do not wait
    go.set()
    for thread in (first, second):
        thread.join(60)
    assert found == ["slow", "slow"]


WHO = {"run": "r1", "rank": "0"}
VECTORS: dict[str, list[tuple[dict[str, str], float]]] = {
    "topk(100, gpuwatch_ledger_watermark": [(WHO, NOW)],
    "last_over_time(gpuwatch_run_info": [
        ({**WHO, "name": "resnet50-a", "user": "alice", "timeline": "host", "device": "cpu", "world_size": "2",
          "instance": "node-17:9478"}, 1),
    ],
    "gpuwatch_run_up": [(WHO, 1)],
    "last_over_time(gpuwatch_steps_total": [(WHO, 812)],
    "last_over_time(gpuwatch_ledger_watermark": [(WHO, NOW)],
    "last_over_time(gpuwatch_run_seconds_total": [({**WHO, "state": "input_wait"}, 61), ({**WHO, "state": "compute"}, 39)],
    "increase(gpuwatch_run_seconds_total": [({**WHO, "state": "input_wait"}, 37.2), ({**WHO, "state": "compute"}, 22.8)],
    "increase(gpuwatch_step_phase_seconds_total": [({**WHO, "phase": "data_wait"}, 37.2)],
    "rate(gpuwatch_steps_total": [(WHO, 9.7)],
    'gpuwatch_step_percentile_seconds{run=~"r1", percentile="p50"}': [(WHO, 0.1)],
    'gpuwatch_step_percentile_seconds{run=~"r1", percentile="p95"}': [(WHO, float("nan"))],
    "gpuwatch_run_mfu_ratio": [(WHO, 0.41)],
    "max by (run, cause) (gpuwatch_finding_evidence_ratio": [({"run": "r1", "cause": "input_single_process"}, 0.62)],
}  # fmt: skip


def prometheus(vectors: dict[str, list[tuple[dict[str, str], float]]]) -> PrometheusSource:
    def handler(path: str, timeout_s: float) -> Reply:
        expr = parse_qs(urlsplit(path).query)["query"][0]
        found = next((vector for start, vector in vectors.items() if expr.startswith(start)), [])
        result = [{"metric": labels, "value": [NOW, str(value)]} for labels, value in found]
        return Reply(
            200, json.dumps({"status": "success", "data": {"resultType": "vector", "result": result}}).encode()
        )

    return PrometheusSource("http://prom:9090", handler, now=lambda: NOW)


def test_prometheus_runs() -> None:
    [run] = prometheus(VECTORS).runs()
    assert (run.run, run.rank, run.name, run.status, run.world_size) == ("r1", 0, "resnet50-a", "running", 2)
    assert run.instance == "node-17:9478"
    assert run.started_s == NOW - 100
    assert run.recent is not None and (run.recent.step_s_p50, run.recent.step_s_p95) == (0.1, None)
    assert run.recent.mfu_ratio == 0.41 and run.recent.samples_per_s is None
    assert run.verdict is not None
    assert run.verdict.state == "input" and run.verdict.ratio == pytest.approx(0.62)
    assert "62%" in run.verdict.sentence
    [finding] = run.findings
    assert (finding.cause, finding.ratio, finding.evidence) == ("input_single_process", 0.62, ())
    assert "gpuwatch dashboard" in finding.advice
    assert finding.advice.startswith("Set num_workers: the training process prepares the batches. ")


def test_prometheus_findings_of_a_run_on_many_nodes_are_one_each() -> None:
    """Each node of a run exports what it found there; Prometheus is asked for the largest share."""
    vector = [({"run": "r1", "cause": "input_cpu"}, 0.5)]
    [run] = prometheus({**VECTORS, "max by (run, cause) (gpuwatch_finding_evidence_ratio": vector}).runs()
    assert [(finding.cause, finding.ratio) for finding in run.findings] == [("input_cpu", 0.5)]


def test_prometheus_findings_advise_what_the_agent_exported_and_without_it_what_is_known_of_the_cause() -> None:
    advice = "num_workers 0 → 8 (1.20× to 2.60× the throughput)"
    info = [({"run": "r1", "cause": "input_single_process", "advice": advice}, 1.0)]
    [run] = prometheus({**VECTORS, "gpuwatch_finding_info": info}).runs()
    assert run.findings[0].advice.startswith("num_workers 0 → 8 (1.20× to 2.60× the throughput). ")


def test_prometheus_run_that_is_over_is_evaluated_as_a_whole() -> None:
    gone = {
        k: v for k, v in VECTORS.items() if not k.startswith(("increase", "gpuwatch_run_up", "max by (run, cause)"))
    }
    [run] = prometheus(gone).runs()
    assert run.status == "gone"
    assert run.verdict is not None and run.verdict.ratio == pytest.approx(0.61)


class Served:
    """A Prometheus that has ended runs, and asks itself for how long."""

    def __init__(self, served: list[str], recorded: list[str]) -> None:
        self.served, self.recorded, self.now_s, self.asked = served, recorded, NOW, list[str]()
        self.source = PrometheusSource("http://prom:9090", self.get, now=lambda: self.now_s)

    def get(self, path: str, timeout_s: float) -> Reply:
        expr = parse_qs(urlsplit(path).query)["query"][0]
        self.asked.append(expr)
        names: list[str] = []
        if expr.startswith("topk(100, gpuwatch_ledger"):
            names = self.served
        elif expr.startswith("topk(100, last_over_time("):
            names = self.recorded
        elif expr.startswith("last_over_time(gpuwatch_run_info"):
            names = [name for name in self.recorded if f'"{name}"' in expr or f"{name}|" in expr or f"|{name}" in expr]
        result = [{"metric": {"run": name, "rank": "0"}, "value": [NOW, "1"]} for name in names]
        body = {"status": "success", "data": {"resultType": "vector", "result": result}}
        return Reply(200, json.dumps(body).encode())

    def runs(self, **of: Any) -> list[str]:
        self.asked = []
        return sorted(run.run for run in self.source.runs(**of))


def test_a_site_s_runs_are_asked_for_as_they_are_now_and_ended_ones_twice_a_minute() -> None:
    """All of a site's ranks over six hours, every two seconds, took a Prometheus with 1,000 nodes up to 4 s each."""
    site = Served(["a", "b"], ["a", "b", "old"])
    assert site.runs() == ["a", "b", "old"]
    assert "topk(100, last_over_time(run:gpuwatch_ledger_watermark_timestamp_seconds:max[6h]))" in site.asked
    site.now_s += 2
    assert site.runs() == ["a", "b", "old"]
    assert site.asked[0] == "topk(100, gpuwatch_ledger_watermark_timestamp_seconds)" and not [
        e for e in site.asked if "[6h]" in e
    ]
    site.served = ["a"]  # b has ended, and is on the page all the time
    assert site.runs() == ["a", "b", "old"]
    assert [e for e in site.asked if "[6h]" in e]
    assert site.runs() == ["a", "b", "old"] and not [e for e in site.asked if "[6h]" in e]
    site.recorded = ["a", "b", "old", "elsewhere"]
    site.now_s += 30
    assert site.runs() == ["a", "b", "elsewhere", "old"]


def test_of_many_running_ranks_the_ended_runs_are_left_out_but_for_the_one_of_the_link() -> None:
    site = Served([f"r{n:03}" for n in range(100)], [*(f"r{n:03}" for n in range(100)), "old", "older"])
    found = site.runs(run="older")
    assert len(found) == 101 and found[0] == "older"
    site.served = [f"r{n:03}" for n in range(1, 101)]  # others of many: that one is not shown says nothing of its end
    site.runs(run="older")
    assert not [expr for expr in site.asked if "[6h]" in expr]


def test_a_node_s_ended_runs_are_those_of_its_own_series() -> None:
    node = Served(["a"], ["a", "old"])
    assert node.runs(node="n1:9478") == ["a", "old"]
    assert (
        'topk(100, last_over_time(gpuwatch_ledger_watermark_timestamp_seconds{instance="n1:9478"}[6h]))' in node.asked
    )


def test_an_agent_is_asked_where_it_says_that_it_is_reached() -> None:
    """On Kubernetes `instance` is the node's name: nothing listens there, and there is no port."""
    by_node = 'gpuwatch_build_info{instance="gpu-node-17"}'
    source = prometheus({by_node: [({"instance": "gpu-node-17", "version": "0.1.0", "address": "10.1.2.3:9478"}, 1)]})
    agents = [
        source.agent_of(ScrapedRun("r", 0, "r", "running", 0, 0, 0, instance=i)) for i in ("gpu-node-17", "n:9478")
    ]
    assert [agent.url for agent in agents] == ["http://10.1.2.3:9478", "http://n:9478"]


def test_prometheus_stalled_run_says_for_how_long() -> None:
    stalled: list[tuple[dict[str, str], float]] = [({"run": "r1", "cause": "stalled"}, 0.4)]
    whole = {
        "last_over_time(gpuwatch_run_seconds_total": [
            ({**WHO, "state": "compute"}, 58.0),
            ({**WHO, "state": "stalled"}, 42.0),
        ]
    }
    [run] = prometheus({**VECTORS, **whole, "max by (run, cause) (gpuwatch_finding_evidence_ratio": stalled}).runs()
    assert run.verdict is not None and run.verdict.sentence == "stalled: no training step for 42.0 s"


def test_prometheus_knows_which_rank_is_late() -> None:
    other = {"run": "r1", "rank": "1"}
    series: dict[str, list[tuple[dict[str, str], float]]] = {
        **VECTORS,
        "last_over_time(gpuwatch_run_info": [({**who, "world_size": "2"}, 1) for who in (WHO, other)],
        "increase(gpuwatch_run_seconds_total": [({**WHO, "state": "compute"}, 60), ({**other, "state": "compute"}, 45),
                                                ({**other, "state": "comm_wait"}, 15)],
        "max by (run, cause) (gpuwatch_finding_evidence_ratio": [({"run": "r1", "cause": "straggler"}, 0.3)],
        "gpuwatch_straggler_excess_ratio": [(WHO, 0.3)],
    }  # fmt: skip
    late, waiting = sorted(prometheus(series).runs(), key=lambda run: run.rank)
    assert late.verdict is not None and waiting.verdict is not None
    assert (late.verdict.state, late.verdict.ratio, late.findings[0].rank) == ("straggler", 0.3, 0)
    assert (waiting.verdict.state, waiting.verdict.ratio, waiting.findings) == ("comm", 0.25, ())


def test_prometheus_lines_have_gaps_where_nothing_was_scraped() -> None:
    def handler(path: str, timeout_s: float) -> Reply:
        values = [[NOW - 60, "0.5"], [NOW - 45, "0.5"], [NOW - 30, "NaN"], [NOW, "0.7"]]
        result = [{"metric": {"state": "compute"}, "values": values}] if "query_range" in path else []
        return Reply(200, json.dumps({"data": {"resultType": "matrix", "result": result}}).encode())

    source = PrometheusSource("http://prom:9090", handler)
    [[trace]] = source.evaluate([BY_KEY["ledger"].curves[0].query], Scope("r1", "0"), Span(NOW - 60, NOW))
    assert trace.labels == {"state": "compute"}
    assert [value for _, value in trace.points] == [0.5, 0.5, None, 0.7]


def test_prometheus_is_asked_by_a_panel_s_own_promql_and_a_figure_is_one_value() -> None:
    asked: dict[str, str] = {}

    def handler(path: str, timeout_s: float) -> Reply:
        url = urlsplit(path)
        asked[parse_qs(url.query)["query"][0]] = url.path.rpartition("/")[2]
        return Reply(200, json.dumps({"data": {"result": []}}).encode())

    panels = [BY_KEY[key] for key in ("gpu_throttled", "node_shm", "cpu")]
    source = SharedSource(PrometheusSource("http://prom:9090", handler))
    found = source.answers(panels, Scope(), Span(NOW - 900, NOW))
    assert [(panel.key, len(lines)) for panel, lines in found] == [("gpu_throttled", 1), ("node_shm", 1), ("cpu", 2)]
    _interval, throttled, shm, *cpu = asked.items()
    assert throttled[0].startswith("avg_over_time(gpuwatch_gpu_throttled{") and throttled[1] == "query_range"
    assert shm[0].startswith("max(gpuwatch_shm_used_bytes{") and shm[1] == "query"
    assert len(cpu) == 2 and all("gpuwatch_cpu_seconds_total" in expr for expr, _ in cpu)
    source.answers([BY_KEY["up"]], Scope("r", instance="n1:9478"), Span(NOW - 900, NOW))
    assert [*asked][-1] == 'sum(gpuwatch_run_up{run="r", rank=~".*", instance=~".*"})'  # on all of the run's nodes


class Minutes:
    """A Prometheus that scrapes once a minute, as is its default: a rate over less than two minutes is empty."""

    def __init__(self, interval_s: float | None = 59.8) -> None:
        self.now_s, self.interval_s, self.measured, self.windows_s = NOW, interval_s, 0, list[int]()
        self.source = PrometheusSource("http://prom:9090", self.get, now=lambda: self.now_s)

    def get(self, path: str, timeout_s: float) -> Reply:
        url = urlsplit(path)
        expr = parse_qs(url.query)["query"][0]
        found: list[tuple[dict[str, str], float]] = []
        if "gpuwatch_sample_timestamp_seconds" in expr:
            self.measured += 1
            found = [] if self.interval_s is None else [({}, self.interval_s)]
        elif "gpuwatch_ledger_watermark" in expr or "gpuwatch_run_info" in expr or expr.startswith("gpuwatch_run_up"):
            found = [({**WHO, "instance": "n1:9478"}, NOW)]
        self.windows_s += [int(each) for each in re.findall(r"(?:rate|increase)\(\w+\{[^}]*\}\[(\d+)s\]", expr)]
        values = [] if url.path.endswith("query_range") else found
        result = [{"metric": labels, "value": [NOW, str(value)]} for labels, value in values]
        return Reply(200, json.dumps({"data": {"result": result}}).encode())


@pytest.mark.parametrize("key", ["ledger", "throughput", "cpu", "loader_ready"])
def test_charts_of_a_prometheus_that_scrapes_once_a_minute_are_of_four_minutes(key: str) -> None:
    prometheus = Minutes()
    prometheus.source.answers(BY_KEY[key], Scope("r1", "0", "n1:9478"), Span(NOW - 900, NOW))
    assert {*prometheus.windows_s} == {240}


def test_how_often_prometheus_scrapes_is_asked_once_in_five_minutes() -> None:
    prometheus = Minutes()
    for _ in range(2):
        [run] = prometheus.source.runs()
        assert run.recent is not None and run.recent.duration_s == 240
    assert {*prometheus.windows_s} == {240} and prometheus.measured == 1
    prometheus.now_s += 301
    prometheus.source.runs()
    assert prometheus.measured == 2


def test_where_nothing_says_how_often_prometheus_scrapes_it_is_not_asked_for_each_rank() -> None:
    """As after the last agent has gone: each rank of each run that has ended asked again, and each chart."""
    prometheus = Minutes(interval_s=None)
    for _ in range(3):
        [run] = prometheus.source.runs()
        assert run.recent is not None and run.recent.duration_s == 60
    assert prometheus.measured == 1
    prometheus.now_s += 31
    prometheus.source.runs()
    assert prometheus.measured == 2


def test_prometheus_refusal_gives_its_reason() -> None:
    refusal = answering({"status": "error", "errorType": "bad_data", "error": "invalid parameter"}, 400)
    with pytest.raises(SourceError, match=r"Prometheus at http://prom:9090 answered .* invalid parameter"):
        PrometheusSource("http://prom:9090", refusal).runs()


@pytest.mark.parametrize(
    ("cause", "severity"),
    [
        ("input_cpu_saturated", "warning"),
        ("gpu_saturated", "info"),
        ("compute_bound", "info"),
        ("unheard_of", "warning"),
    ],
)
def test_a_finding_from_prometheus_is_for_information_where_its_rule_says_that_all_is_well(
    cause: str, severity: str
) -> None:
    """By its name `input_cpu_saturated` was for information, and `compute_bound` a warning."""
    (finding,) = _findings([({"run": "r", "cause": cause}, 0.9)], [])["r"]
    assert (finding.cause, finding.severity) == (cause, severity)
