"""One workload, every way in, the same ledger."""

from __future__ import annotations

import importlib
import time
from pathlib import Path

import pytest

import gpuwatch
from tests.integration.integrations import workload as w
from tests.integration.integrations.loops import LOOPS

pytestmark = pytest.mark.alone


def check(states: dict[str, float], truth: w.Truth, wall_s: float) -> None:
    """Demand the truth of a ledger: what a framework adds itself is compute, or outside of the steps."""
    spent = truth.spent_s
    table = w.table(states, truth, wall_s)
    bound_s = truth.bound_s(wall_s)
    rest_s = wall_s - sum(spent.values()) - states.get("startup", 0.0)
    assert states["input_wait"] == pytest.approx(spent["input_wait"], abs=bound_s), table
    for state in ("eval", "checkpoint"):  # what the framework itself does there belongs to them
        assert spent[state] - bound_s <= states[state] <= spent[state] + rest_s / 2 + bound_s, table
    assert states["compute"] >= spent["compute"] - bound_s, table
    assert states["compute"] <= spent["compute"] + rest_s + bound_s, table
    assert states.get("transfer", 0.0) <= bound_s


@pytest.mark.parametrize("name", w.INTEGRATIONS)
def test_every_integration_has_its_loop(name: str) -> None:
    assert name in LOOPS, "add the workload in that framework to `LOOPS` in loops.py"


@pytest.mark.parametrize("name", LOOPS)
def test_every_way_in_gives_the_same_ledger(name: str, truth: w.Truth, tmp_path: Path) -> None:
    if name in w.INTEGRATIONS:  # imports take seconds, which two points of which would hide a lot
        w.require(name)
        importlib.import_module(f"gpuwatch.integrations.{name}")
    begin = time.perf_counter()
    with gpuwatch.Watch(run=name, quiet=True) as watch:
        made = time.perf_counter()
        LOOPS[name](truth, watch, tmp_path)
        asked = time.perf_counter()
        report = watch.report()
        wall_s = time.perf_counter() - begin
    # All of the time, whatever delays this program.
    assert asked - made - 0.001 <= sum(report.states.values()) <= wall_s + 0.001
    print(name, w.table(dict(report.states), truth, wall_s))
    check(dict(report.states), truth, wall_s)
    assert sum(report.states.values()) == pytest.approx(report.duration_s, rel=0.002)
    assert report.steps == w.STEPS
    assert report.samples == w.SAMPLES
