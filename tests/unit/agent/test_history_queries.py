"""Ledgers between two moments, from the counters that a history keeps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpuwatch.metrics import Sample
from gpuwatch_agent.history import History, Tick
from gpuwatch_agent.history.queries import growth, ledger

BEGIN_S = 1_790_000_000.0
GPU = ("0", "GPU-a")


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    history = History(tmp_path / "history.db")
    yield history
    history.close()


def between(history: History, start_s: float, end_s: float) -> Any:
    return msgspec.to_builtins(ledger(history.reader, {"start": str(start_s), "end": str(end_s)}))


def keep(history: History, second: int, *samples: Sample) -> None:
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


def test_an_agent_that_lost_its_state_began_at_0_again() -> None:
    assert growth([10.0, 14.0, 1.0, 3.0], born=False) == 4.0 + 1.0 + 2.0
    assert growth([10.0, 14.0], born=True) == 14.0
    assert growth([], born=True) == 0.0
