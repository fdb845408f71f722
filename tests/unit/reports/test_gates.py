"""Limits for CI: read strictly, broken with the number by which."""

from __future__ import annotations

import msgspec
import pytest

from gpuwatch.errors import ConfigError
from gpuwatch.tools.reports.comparison import Comparison, broken, compare, parse_gate
from gpuwatch.tools.reports.gather import gather
from tests.unit.reports.fake_source import START_S, FakeSource, run, steps

REPORT = gather(FakeSource(), "resnet", START_S)


def test_a_broken_limit_says_by_how_much() -> None:
    found = broken(REPORT, [parse_gate("input_wait=0.1"), parse_gate("compute=0.5")])
    assert found == ["input_wait is 60%, 50.0 points over the limit of 10%"]


def test_the_step_has_a_limit_too() -> None:
    assert broken(REPORT, [parse_gate("step_s=0.2")]) == []
    assert broken(REPORT, [parse_gate("step_s=0.09")]) == ["step_s is 100 ms, 10 ms over the limit of 90 ms"]


def test_a_state_that_never_was_passes_and_what_was_not_measured_does_not() -> None:
    assert broken(REPORT, [parse_gate("stalled=0")]) == []
    empty = gather(FakeSource(runs=[run(states={})], taken=steps(0, 0.0, 0.0)), "resnet", START_S)
    assert broken(empty, [parse_gate("step_s=1"), parse_gate("eval=0.2")]) == [
        "step_s was not measured (limit 1.0 s)",
        "eval was not measured (limit 20%)",
    ]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("inputwait=0.1", "did you mean input_wait"),
        ("nonsense=1", "give one of startup, compile"),
        ("input_wait", "a share from 0 to 1"),
        ("input_wait=ten", "a share from 0 to 1"),
        ("input_wait=10", "a share from 0 to 1"),
        ("input_wait=-0.1", "a share from 0 to 1"),
        ("input_wait=nan", "a share from 0 to 1"),
        ("step_s=fast", "seconds, e.g. step_s=0.05"),
    ],
)
def test_a_limit_that_cannot_be_is_named(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse_gate(text)


def comparison(speedup: float | None, interval: tuple[float, float] | None) -> Comparison:
    report = gather(FakeSource(), "resnet", START_S + 100)
    return msgspec.structs.replace(compare(report, report), speedup=speedup, speedup_interval=interval)


@pytest.mark.parametrize(
    ("speedup", "interval", "slower"),
    [
        (0.8, (0.75, 0.85), "18%"),  # proven: 1 / 0.85 - 1 at least
        (0.8, None, "25%"),
        (0.8, (0.60, 0.99), None),  # at best 1% slower, which is within 5%
        (1.2, (1.1, 1.3), None),
    ],
)
def test_a_second_run_may_be_slower_by_no_more_than_is_allowed(
    speedup: float, interval: tuple[float, float] | None, slower: str | None
) -> None:
    both = comparison(speedup, interval)
    found = broken(both.b, [parse_gate("slower=0.05", of_two=True)], both)
    assert found == ([] if slower is None else [f"it is {slower} slower, which is over the limit of 5.0%"])


def test_what_cannot_be_compared_passes_no_limit_and_the_limits_of_one_run_hold_for_the_second() -> None:
    gates = [parse_gate(text, of_two=True) for text in ("slower=0.05", "input_wait=0.1")]
    both = comparison(None, None)
    found = broken(both.b, gates, both)
    assert found == [
        "slower was not measured (limit 5.0%)",
        "input_wait is 60%, 50.0 points over the limit of 10%",
    ]
    with pytest.raises(ConfigError, match="is not a state"):
        parse_gate("slower=0.05")
