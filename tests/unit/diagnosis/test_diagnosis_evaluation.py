"""What the benchmark of the diagnosis counts as a fault: it must be able to fail."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")  # its programs train
from benchmarks.diagnosis.evaluation import Evaluated
from benchmarks.diagnosis.page import page
from benchmarks.diagnosis.program import Clock, Program
from benchmarks.diagnosis.stage import Outcome


def nothing(_: Clock) -> None:
    pass


def finding(cause: str, root: str | None = None, severity: str = "warning") -> dict[str, Any]:
    return {"cause": cause, "root": root, "severity": severity, "ratio": 0.5}


def evaluated(
    causes: tuple[str, ...], *agent: dict[str, Any], hook: tuple[str, ...] | None = None, **facts: Any
) -> Evaluated:
    hooks = causes if hook is None else hook
    ever = facts.pop("ever", {})
    return Evaluated(
        Outcome(Program("a", nothing, causes, **facts), list(agent), ever, [finding(cause) for cause in hooks])
    )


def test_a_cause_that_is_named_first_is_right_with_what_hangs_under_it() -> None:
    assert evaluated(("input_cpu",), finding("input_cpu"), finding("burst_every_n", root="input_cpu")).ok
    assert evaluated(("input_cpu",), finding("input_cpu"), finding("gpu_saturated", severity="info")).ok


@pytest.mark.parametrize(
    ("outcome", "fault"),
    [
        (evaluated(("input_cpu",)), "input_cpu was not named"),
        (evaluated(("input_cpu",), finding("input_disk"), finding("input_cpu")), "input_disk was named first"),
        (evaluated(("input_cpu",), finding("input_cpu"), finding("eval_share")), "eval_share was named"),
        (evaluated(("input_cpu", "eval_share"), finding("input_cpu"), mixed=True), "eval_share was not named"),
        (evaluated(("input_cpu",), finding("input_cpu"), hook=()), "the hook alone did not name input_cpu"),
        (evaluated((), finding("input_cpu")), "input_cpu was named"),
        (evaluated((), ever={"input_cpu": 7.0}), "input_cpu alarmed"),
        (evaluated((), hook=("eval_share",)), "the hook alone named eval_share"),
    ],
)
def test_faults(outcome: Evaluated, fault: str) -> None:
    assert fault in outcome.faults and not outcome.ok
    assert f"**{'; '.join(outcome.faults)}**" in outcome.row()


def test_a_miss_is_off_the_diagonal_of_the_matrix() -> None:
    text = page([evaluated(("input_cpu",), finding("input_disk")), evaluated(())], "today")
    assert "**0 of 1 programs with something wrong were understood" in text and "0 of 1 healthy ones alarmed" in text
    assert "| 1 | `input_cpu` |  | 1 |  |" in text and "| 3 | nothing |  |  | 1 |" in text


def test_a_program_that_did_not_end_well_is_no_success() -> None:
    broken = Evaluated(Outcome(Program("a", nothing, ()), failed="the agent did not start"))
    assert not broken.ok and broken.faults == ["the agent did not start"]
