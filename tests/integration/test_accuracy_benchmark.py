"""A short run of `benchmarks/accuracy.py`: the same bound of 2 points as in the full table."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SECONDS = 1.5
ROWS = [
    ("constant wait", "host"),
    ("constant wait", "device"),
    ("hidden wait", "device"),
    ("partly hidden wait", "device"),
    ("burst every 4th", "device"),
    ("slow first batch", "device"),
    ("evaluation, declared", "host"),
    ("host work in the loop", "device"),
    ("host work between steps", "host"),
    ("pageable copies", "device"),
    ("`.item()` every step", "device"),
    ("gradient accumulation", "device"),
    ("early break", "host"),
    ("two nested loops", "device"),
    ("checkpoint and other", "host"),
]


@pytest.fixture
def accuracy(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import accuracy

    return accuracy


@pytest.mark.alone
@pytest.mark.parametrize(("name", "ledger"), ROWS)
def test_injected_time_is_reported_within_two_points(name: str, ledger: str, accuracy: Any) -> None:
    row = accuracy.measure(name, ledger, SECONDS)
    if not row.holds:  # a pause of the machine between two clocks is no error of the ledger: it does not come twice
        row = accuracy.measure(name, ledger, 2 * SECONDS)
    state, error = row.worst
    assert abs(error) <= accuracy.BOUND_POINTS, (
        f"{state}: {accuracy.shares(row.truth)} was {accuracy.shares(row.reported)}"
    )
    assert sum(row.reported.values()) == pytest.approx(100, abs=accuracy.BOUND_CLOSURE)
    assert row.steps > 0


def test_the_page_names_every_scenario_and_the_command_runs_one() -> None:
    page = (BENCHMARKS.parent / "docs" / "accuracy.md").read_text()
    command = [sys.executable, str(BENCHMARKS / "accuracy.py"), "--only", "constant wait", "--seconds", "0.5"]
    done = subprocess.run([*command, "--ledger", "host"], capture_output=True, text=True, timeout=60, check=False)
    assert "constant wait" in done.stdout and "rows hold" in done.stderr
    scenarios = (BENCHMARKS / "accuracy_scenarios.py").read_text().count("\n    Scenario(")
    assert page.count("| host clock |") == page.count("| device (model) |") == scenarios
    assert "python benchmarks/accuracy.py --write" in page
