"""Predicted gains and those that were achieved, of recorded trainings: no change of the arithmetic may lose them.

tests/fixtures/predictions/programs.jsonl: programs of benchmarks/programs on two cores that others loaded too (load
average 5 to 14). Each was measured by gpuwatch and then trained twice without it: as it is, and with the number of
workers that the plan had. A row has what the plan is made of.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from gpuwatch.diagnosis.prediction import WORTH, Plan, plan
from gpuwatch.diagnosis.window import HostFacts, StepColumns, Window
from gpuwatch.wire import Loader

ROWS = Path(__file__).parents[2] / "fixtures" / "predictions" / "programs.jsonl"
RECORDED: list[dict[str, Any]] = [json.loads(line) for line in ROWS.read_text().splitlines()]
NOISE = 0.05
"""Two trainings of the same program differ by that much."""


def planned(row: dict[str, Any]) -> Plan:
    """Return the plan that is made of a row's evidence."""
    facts = dict(row["window"])
    for name, kind in (("host", HostFacts), ("loader", Loader), ("steps", StepColumns)):
        facts[name] = msgspec.convert(facts[name], kind)
    window = Window(**facts)
    return plan(window, row["wait_s"], row["rest_s"], on_cpu=row["on_cpu"], hidden_s=row["hidden_s"])


def is_within(row: dict[str, Any]) -> bool:
    """Return whether the achieved gain is in the predicted range."""
    low, high = planned(row).speedup
    return bool(low * (1 - NOISE) <= row["achieved"] <= high * (1 + NOISE))


def test_the_recorded_number_of_workers_is_planned() -> None:
    assert [planned(row).workers for row in RECORDED] == [row["workers"] for row in RECORDED]


def test_nine_of_ten_recorded_gains_are_within_their_range() -> None:
    outside = [(row["program"], planned(row).speedup, row["achieved"]) for row in RECORDED if not is_within(row)]
    assert len(outside) <= 0.1 * len(RECORDED), outside


def test_every_recorded_gain_that_is_promised_was_achieved() -> None:
    promised = [row for row in RECORDED if planned(row).speedup[0] >= WORTH]
    assert promised and all(is_within(row) for row in promised)
    slower = [row for row in RECORDED if row["achieved"] < 1 - NOISE]
    assert slower and not any(row in promised for row in slower)
