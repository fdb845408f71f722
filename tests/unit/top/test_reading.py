"""What is read of a source, and how often."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from urllib.parse import parse_qs, parse_qsl, urlsplit

import pytest

from gpuwatch.api import Gpu, Run, Series
from gpuwatch.api.client import Reply
from gpuwatch_dashboards.panels import live_panels
from gpuwatch_dashboards.query import Node, Query, Scope, Span, by_number
from gpuwatch_dashboards.selection import in_order
from gpuwatch_dashboards.sources import AgentSource
from gpuwatch_dashboards.top import Reader, Sampled, queries
from tests.unit.top.screens import NOW, RUN_TRACES, facts, run, trace


class FakeSource:
    """A Source: one run, and as many GPUs as are put in; counts the queries of each evaluation."""

    label = "fake"

    def __init__(self, *runs: Run, gpus: Sequence[str] = ()) -> None:
        self.known, self.gpus = list(runs), [Gpu(gpu, f"GPU-{gpu}") for gpu in gpus]
        self.asked: list[tuple[Sequence[Query], Scope, Span]] = []

    def runs(self, node: str | None = None, run: str | None = None) -> list[Run]:
        return self.known

    def node(self, run: Run | None, node: str | None = None) -> Node:
        return Node("node-17", (), gpus=tuple(self.gpus))

    def evaluate(self, queries: Sequence[Query], scope: Scope, span: Span) -> list[list[Series]]:
        self.asked.append((queries, scope, span))
        return [[] for _ in queries]


def reader(source: FakeSource) -> tuple[Reader, list[float]]:
    clock = [NOW]
    return Reader(source, lambda: clock[0]), clock  # type: ignore[arg-type]


def test_series_are_read_again_after_three_seconds_or_for_another_run() -> None:
    source = FakeSource(run("a"), run("b"))
    read, clock = reader(source)
    for advance_s, wanted, reads in ((0.0, None, 1), (2.9, None, 1), (0.1, None, 2), (0.0, "b/0", 3), (-9.0, "b/0", 4)):
        clock[0] += advance_s
        read.read(wanted)
        assert len(source.asked) == reads
    asked, scope, span = source.asked[2]
    assert (scope.run, scope.rank, span.end_s - span.start_s) == ("b", "0", 300.0)
    assert set(asked) == set(queries("run", "node").values())


def test_only_what_there_is_and_what_is_shown_is_asked_for() -> None:
    source = FakeSource(gpus=("2", "10"))
    read, _ = reader(source)
    known = read.read()
    assert set(source.asked[0][0]) == set(queries("gpu", "node").values()) and len(source.asked[0][0]) < 40
    assert [gpu.gpu for gpu in known.gpus] == ["2", "10"] and known.series.run == ""
    read.read(panels=True)
    panel_curves = {curve.query for panel in live_panels("gpu", "node", "agent") for curve in panel.curves}
    assert panel_curves <= set(source.asked[1][0])
    source.known.append(run("a"))
    read.read(panels=True)
    panel_curves |= {curve.query for panel in live_panels("run") for curve in panel.curves}
    assert panel_curves <= set(source.asked[2][0])


def test_runs_that_run_come_first_the_newest_before_and_ranks_together() -> None:
    old, new = run("old", started_s=NOW - 900), run("new", started_s=NOW - 60, rank=1, world_size=2)
    late, over = run("new", started_s=NOW - 50, world_size=2), run("over", status="ended", started_s=NOW - 5)
    assert [(each.run, each.rank) for each in in_order([over, old, new, late])] == [
        ("new", 0), ("new", 1), ("old", 0), ("over", 0),
    ]  # fmt: skip


def test_the_mean_step_is_of_the_last_minute_and_leaves_empty_phases_out() -> None:
    early = tuple((NOW - 300 + 3 * n, 5.0 if n <= 80 else 0.64) for n in range(1, 101))  # before the last minute: 5
    traces = {**RUN_TRACES, "phases": [Series({"phase": "data_wait"}, early), *trace(0.0, phase="transfer")]}
    known = Sampled("r/0", NOW - 300, NOW, traces)
    assert known.phases_s() == {"data_wait": pytest.approx(0.064)}
    assert replace(known, traces={**traces, "steps": trace(0.0)}).phases_s() == {}


def test_the_share_of_dev_shm_is_of_samples_of_the_same_times() -> None:
    """Extremes of two series are at different times: hardly any of them can be divided."""

    def reply(path: str, timeout_s: float) -> Reply:
        asked = [dict(parse_qsl(text)) for text in parse_qs(urlsplit(path).query).get("q", ())]
        answers = []
        for each in asked:
            value, at_s = (64.0, 0.0) if each["metric"] == "gpuwatch_shm_size_bytes" else (16.0, 2.0)
            points = [[NOW - 300 + 6 * n + at_s * ("pick" in each), value] for n in range(1, 50)]
            answers.append({"series": [{"labels": {"mount": "host"}, "points": points}] * ("shm" in each["metric"])})
        return Reply(200, json.dumps({"runs": [], "host": "n", "collectors": [], "answers": answers}).encode())

    known = Reader(AgentSource("http://agent", reply), lambda: NOW).read().series
    assert [value for _, value in known.shm().points] == [0.25] * 49
    assert known.shm("shm used ({mount})").last == 16.0


def test_a_gpu_s_shares_are_of_the_last_minute() -> None:
    known = facts(run(), gpus=2)
    assert known.series.gpu_shares(known.gpus[1]) == {"compute": pytest.approx(0.25), "input_wait": pytest.approx(0.75)}
    assert known.series.gpu_shares(Gpu("9", "GPU-9")) == {}


def test_gpus_are_by_number_each_followed_by_its_mig_instances() -> None:
    gpus = [Gpu(gpu=label, uuid=f"GPU-{label}") for label in ("10", "", "1:10", "2", "1:2", "1", "0")]
    assert [gpu.gpu for gpu in sorted(gpus, key=by_number)] == ["0", "1", "1:2", "1:10", "2", "10", ""]
