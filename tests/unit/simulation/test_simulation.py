"""Simulated nodes: deterministic, in the catalogue's names, with ledgers that close and counters that never fall."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Mapping

import pytest

from benchmarks.simulation.page import Fleet, NodePages
from benchmarks.simulation.story import GROUP, MIXES, Node
from gpuwatch.ledger.states import GPU_STATES
from gpuwatch.metrics import BY_NAME

EPOCH_S = 1_790_000_000.0
Series = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


def parse(body: bytes) -> Series:
    found = {}
    for line in body.decode().splitlines():
        if not line.startswith("#"):
            match = re.fullmatch(r"(\w+)(?:\{(.*)\})? (\S+)", line)
            assert match is not None, line
            labels = frozenset(re.findall(r'(\w+)="([^"]*)"', match[2] or ""))
            assert (match[1], labels) not in found, line
            found[match[1], labels] = float(match[3])
    return found


def pages(number: int, seed: int = 1) -> NodePages:
    return NodePages(Node(seed, number, 8), EPOCH_S)


def up(number: int, time_s: float, seed: int = 1) -> Series:
    """Return a node's page at the first moment from `time_s` on at which its agent answers."""
    node = pages(number, seed)
    while (body := node.body(time_s)) is None:
        time_s += 60
    return parse(body)


def test_the_same_seed_gives_the_same_page_however_often_it_was_asked_for() -> None:
    often = pages(3)
    for time_s in range(0, 20_000, 500):
        often.body(time_s)
    assert often.body(20_000) == pages(3).body(20_000)
    assert pages(3).body(20_000) != pages(3, seed=2).body(20_000)


@pytest.mark.parametrize("number", range(12))
def test_every_gpu_s_ledger_closes_at_its_watermark(number: int) -> None:
    node = Node(1, number, 8)
    for time_s in (0.0, 4321.5, 40_000.0):
        series = up(number, time_s)
        watermarks = {labels: value for (name, labels), value in series.items()
                      if name == "gpuwatch_gpu_ledger_watermark_timestamp_seconds"}  # fmt: skip
        assert len(watermarks) in (7, 8)
        for key, watermark in watermarks.items():
            states = [series.get(("gpuwatch_gpu_seconds_total", key | {("state", state)}), 0.0) for state in GPU_STATES]
            whole_s, first_hour = watermark - EPOCH_S - node.begin_s, time_s == 0 and node.begin_s > -900
            assert sum(states) == pytest.approx(whole_s, abs=0.02) if first_hour else 0 < sum(states) < whole_s + 0.02


def test_counters_never_fall_and_runs_ledgers_close() -> None:
    node, before = pages(0), {}
    checked = 0
    for time_s in range(0, 40_000, 97):
        body = node.body(time_s)
        if body is None:
            continue
        now = parse(body)
        for key, value in now.items():
            kind = BY_NAME.get(key[0])
            if kind is not None and kind.kind == "counter" and key in before:
                assert value >= before[key] - 0.002, key
                checked += 1
        before = dict(now)
    assert checked > 50_000


@pytest.mark.parametrize("number", range(0, 40, 3))
def test_names_and_labels_are_the_catalogue_s(number: int) -> None:
    for (name, labels), _ in up(number, 5000).items():
        metric = BY_NAME.get(name) or BY_NAME[re.sub("_(bucket|count|sum)$", "", name)]
        assert {key for key, _ in labels} - {"le"} <= set(metric.labels), name


_PARTS = ("_mig_", "_engine_active_", "_gpu_shared_", "_notification", "_otlp_", "_breakdown_", "_job_over")
NOT_SIMULATED = {name for name in BY_NAME if any(part in name for part in _PARTS)}
"""Metrics of GPUs split by MIG or shared by several owners, and of agents with `--notify` or `--otlp`.

Also those of hooks with `breakdown`, and of runs whose job is cancelled.
"""


def test_a_fleet_makes_every_metric_of_a_real_agent() -> None:
    made = {name for number in range(300) for name, _ in up(number, 30_000.0)}
    made |= {name.removesuffix("_count") for name in made}
    node = next(node for n in range(500) if (node := Node(1, n, 8)).gpu_lost_s is not None)
    made |= {name for name, _ in up(node.number, (node.gpu_lost_s or 0.0) + 1)}
    expected = {metric.name for metric in BY_NAME.values() if metric.when not in ("history", "full")} - NOT_SIMULATED
    assert expected - made == set() and made <= BY_NAME.keys() - {
        m for m in BY_NAME if BY_NAME[m].when in ("history", "full")
    }


def test_a_fleet_has_every_kind_of_job_faults_and_agents_that_are_down() -> None:
    nodes = [Node(1, number, 8) for number in range(300)]
    kinds = {next(node.jobs()).kind for node in nodes}
    assert kinds >= {*MIXES, "no_hook", "held_idle", "free"}
    assert 1 <= sum(node.gpu_lost_s is not None for node in nodes) <= 15
    assert 1 <= sum(node.agent_is_down(9_999) for node in nodes) <= 20
    for node in nodes[:20]:
        for _, piece in zip(range(20), node.pieces(), strict=False):
            assert sum(piece.mix.values()) == pytest.approx(1)


def test_neighbours_share_their_runs_in_every_other_group() -> None:
    run = {number: next(job for job in Node(1, number, 8).jobs() if job.run).run for number in range(2 * GROUP)}
    assert len({run[number] for number in range(GROUP)}) == 1
    assert len({run[number] for number in range(GROUP, 2 * GROUP)}) == GROUP
    assert [Node(1, number, 8).first_rank for number in (0, 1, 4, 5)] == [0, 8, 0, 0]


def test_a_lost_gpu_s_series_vanish_and_its_xid_appears() -> None:
    node = next(node for n in range(500) if (node := Node(1, n, 8)).gpu_lost_s is not None)
    assert node.gpu_lost_s is not None
    series = up(node.number, node.gpu_lost_s + 1)
    assert series["gpuwatch_gpus_seen", frozenset()] == 7
    assert series["gpuwatch_gpus_expected", frozenset()] == 8
    assert [value for (name, _), value in series.items() if name == "gpuwatch_gpu_last_xid"] == [79]


def test_discovery_lists_every_node_by_its_path_and_the_rest_is_refused() -> None:
    fleet = Fleet(3, 2, 1, EPOCH_S, lambda: EPOCH_S + 100, "127.0.0.1:9477")
    status, _, body = fleet.answer("/sd")
    assert status == 200
    assert json.loads(body)[2] == {
        "targets": ["127.0.0.1:9477"],
        "labels": {"__metrics_path__": "/node/2/metrics", "instance": "sim-00002:9478"},
    }
    assert {fleet.answer(f"/node/{n}/metrics")[0] for n in range(3)} <= {200, 503}
    assert [fleet.answer(path)[0] for path in ("/node/3/metrics", "/node/x/metrics", "/metrics", "/")] == [404] * 4


def test_an_8_gpu_node_serves_500_series_and_never_more_than_600() -> None:
    """With InfiniBand, loaders with workers, device events, its job's ledger; also of language models, tokens and MFU.

    Busy: a run has trained for a quarter of an hour. Before that there are also the states of its start, and of what
    was before it.
    """
    busy, ever = [], []
    for number in range(0, 80, 2):
        node, jobs = pages(number), Node(1, number, 8).jobs()
        job = next(jobs)
        for time_s in range(3000, 20_000, 170):
            if (body := node.body(time_s)) is None:
                continue
            counts = sum(not line.startswith("#") for line in body.decode().splitlines())
            ever.append(counts)
            while job.end_s <= time_s:
                job = next(jobs)
            if job.run and time_s >= job.begin_s + 900:
                busy.append(counts)
    assert 1000 < len(busy) < len(ever)
    assert statistics.median(busy) <= 480 and max(busy) <= 500 and max(ever) <= 600


def test_a_sweep_s_trials_are_one_job_and_end_one_after_another() -> None:
    node = next(node for n in range(500) if next((node := Node(1, n, 8)).jobs()).kind == "sweep")
    jobs = node.jobs()
    trials = [next(jobs) for _ in range(3)]
    assert len({each.run for each in trials}) == 3 and len({(each.id, each.user) for each in trials}) == 1
    assert trials[0].end_s == trials[1].begin_s and 120 < trials[0].end_s - trials[0].begin_s < 400
