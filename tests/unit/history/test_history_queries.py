"""Ledgers between two moments, from the counters that a history keeps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpuwatch.metrics import Sample
from gpuwatch_agent.history import History, Tick
from gpuwatch_agent.history.queries import BadRequest, ledger, many_series, series
from tests.unit.agent.hooks import FakeHook, S, wall_s
from tests.unit.agent.whole_agent import WholeAgent

BEGIN_S = 1_790_000_000.0
GPU, RUN = ("0", "GPU-a"), ("run-a", "0", "compute")


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    history = History(tmp_path / "history.db")
    yield history
    history.close()


def between(history: History, start_s: float, end_s: float) -> Any:
    return msgspec.to_builtins(ledger(history.reader, {"start": str(start_s), "end": str(end_s)}))


def keep(history: History, second: float, *samples: Sample) -> None:
    tick = Sample("gpuwatch_sample_timestamp_seconds", BEGIN_S + second)
    assert history.commit(Tick(BEGIN_S + second, [*samples, tick], {}, [], [], []))


def gpu(compute_s: float, idle_s: float) -> list[Sample]:
    name = "gpuwatch_gpu_seconds_total"
    return [Sample(name, compute_s, (*GPU, "compute")), Sample(name, idle_s, (*GPU, "held_idle"))]


def test_a_gpu_and_a_run_that_came_and_went(history: History) -> None:
    """The run is there from second 3 to 7, and its totals begin at 2 s of start-up."""
    for second in range(11):
        run = min(second, 7) - 3
        there = [Sample("gpuwatch_run_seconds_total", 2.0 + run, ("run-a", "1", "startup"))] if 3 <= second < 9 else []
        used = Sample("gpuwatch_gpu_state_energy_joules_total", 1e4 + 600.0 * second, ("0", "GPU-a", "compute"))
        keep(history, second, *gpu(100.0 + second * 0.75, 50.0 + second * 0.25), used, *there)
    found = between(history, BEGIN_S, BEGIN_S + 10)
    states = {"compute": 7.5, "held_idle": 2.5}
    joules = {"compute": 6000.0}
    assert found["gpus"] == [{"gpu": "0", "UUID": "GPU-a", "states": states, "seconds": 10.0, "energy_joules": joules}]
    assert found["runs"] == [{"run": "run-a", "rank": "1", "states": {"startup": 6.0}, "seconds": 6.0}]
    part = between(history, BEGIN_S + 4, BEGIN_S + 6)
    assert part["gpus"][0]["seconds"] == 2.0 and part["runs"][0]["states"] == {"startup": 2.0}
    assert between(history, BEGIN_S + 100, BEGIN_S + 200) == {
        "start_s": BEGIN_S + 100, "end_s": BEGIN_S + 200, "gpus": [], "runs": [],
    }  # fmt: skip


def test_an_agent_that_lost_its_state_began_at_0_again(history: History) -> None:
    for second, (gpu_s, run_s) in enumerate([(10.0, None), (14.0, 5.0), (1.0, 2.0), (3.0, 2.0)]):
        run = [] if run_s is None else [Sample("gpuwatch_run_seconds_total", run_s, RUN)]
        keep(history, second, *gpu(gpu_s, 0.0), *run)
    found = between(history, BEGIN_S, BEGIN_S + 10)
    assert found["gpus"][0]["states"] == {"compute": 4.0 + 1.0 + 2.0}
    assert found["runs"][0]["states"] == {"compute": 5.0 + 2.0}


def test_a_run_that_goes_on_after_a_pause_counts_with_what_it_did_since(history: History) -> None:
    """Its series end two minutes after its end; its next process continues its totals."""
    for second in range(10):
        there = [Sample("gpuwatch_run_seconds_total", 7200.0 + second, RUN)] if second >= 5 else []
        keep(history, second, *there)
    assert between(history, BEGIN_S, BEGIN_S + 10)["runs"][0]["seconds"] == 4.0


def test_rows_of_a_clock_that_was_set_back_count_no_second_twice(history: History) -> None:
    """The clock was two hours ahead for a while; two hours later right rows lie between those."""
    for number in range(5):
        keep(history, 7200 + number, *gpu(3610.0 + number, 0.0))
    keep(history, 5, *gpu(3615.0, 0.0))
    for number in range(10):
        keep(history, 7197.5 + number, *gpu(10_807.5 + number, 0.0))
    assert 0.0 < between(history, BEGIN_S + 7190, BEGIN_S + 7210)["gpus"][0]["seconds"] <= 10.0


def test_a_run_whose_loss_was_told_before_the_agent_s_restart_is_not_served_and_counted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.unit.agent.whole_agent.SERIES", "standard")
    hook = FakeHook().spend("compute", 100 * S)
    agent = WholeAgent(tmp_path, monkeypatch, hook.at_ns)
    agent.hear(hook.hello(), hook.message())
    for second in [*range(6), *range(400, 403)]:  # lost in the first ones; it is served for five minutes
        agent.tick(hook.at_ns + second * S)
    agent.close()
    now_ns = hook.at_ns + 405 * S
    again = WholeAgent(tmp_path, monkeypatch, now_ns)
    pages = []
    for second in range(3):
        again.tick(now_ns + second * S)
        pages.append(again.page().get(('gpuwatch_run_up{rank="0",run="run-a"}',)))
    span = {"start": str(wall_s(hook.at_ns) + 399), "end": str(wall_s(now_ns) + 10)}
    found = ledger(again.history.reader, span).runs
    again.close()
    assert (pages, found) == ([None] * 3, [])


@pytest.mark.parametrize("pick", ["last", "extremes"])
def test_an_answer_of_very_many_series_has_fewer_points_of_each(history: History, pick: str) -> None:
    for second in range(100):
        runs = [Sample("gpuwatch_loader_workers", float(second), (f"run-{n}", "0")) for n in range(1200)]
        keep(history, second, *runs)
    query = {"metric": "gpuwatch_loader_workers", "start": f"{BEGIN_S}", "end": f"{BEGIN_S + 99}", "pick": pick}
    found = series(history.reader, {**query, "points": "100"}).series
    assert len(found) == 1200 and 10_000 < sum(len(each.points) for each in found) <= 100_000
    for each in found:
        times = [time_s for time_s, _ in each.points]
        assert times == sorted(times) and all(value == round(time_s - BEGIN_S) for time_s, value in each.points)
        assert each.points[-1][1] == 99.0 and (pick == "last" or each.points[0][1] == 0.0)
    with pytest.raises(BadRequest, match="more than 20000 series"):
        many_series(history.reader, ["metric=gpuwatch_loader_workers&start=0"] * 20)
