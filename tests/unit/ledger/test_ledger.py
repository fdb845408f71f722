"""A ledger's sum is the time it covers, and what is final stays."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwatch.ledger.states import COMPUTE, INPUT_WAIT, RUN_STATES, UNKNOWN, Ledger, phase_state, shares

times = st.integers(0, 10**12)


@given(times, st.lists(st.tuples(st.sampled_from(RUN_STATES), times)))
def test_booking_closes_and_never_goes_back(start: int, bookings: list[tuple[str, int]]) -> None:
    ledger = Ledger(start)
    for state, until in bookings:
        before, watermark = dict(ledger.totals_ns), ledger.watermark_ns
        booked = ledger.book(state, until)
        assert booked == max(0, until - watermark)
        assert ledger.watermark_ns == max(watermark, until)
        assert ledger.sum_ns == ledger.watermark_ns - start
        assert all(ledger.totals_ns[s] >= before[s] for s in RUN_STATES)


@given(st.dictionaries(st.sampled_from(RUN_STATES), times), times)
def test_a_mixture_closes_to_the_nanosecond(parts: dict[str, int], open_ns: int) -> None:
    ledger = Ledger(5)
    ledger.book_mixture(parts, 5 + open_ns)
    assert ledger.sum_ns == open_ns == ledger.watermark_ns - 5
    whole = sum(parts.values())
    if whole and open_ns == whole:
        assert {s: ns for s, ns in ledger.totals_ns.items() if ns} == {s: ns for s, ns in parts.items() if ns}
    for state, ns in parts.items():
        assert (
            abs(ledger.totals_ns[state] - (open_ns * ns / whole if whole else ledger.totals_ns[state]))
            <= 1 + open_ns * 1e-9
        )


def test_a_late_end_counts_only_after_the_watermark() -> None:
    ledger = Ledger(0)
    ledger.book("stalled", 100)
    assert ledger.book(COMPUTE, 90) == 0
    assert ledger.book(COMPUTE, 130) == 30
    assert (ledger.totals_ns["stalled"], ledger.totals_ns[COMPUTE]) == (100, 30)


def test_a_mixture_of_nothing_is_unknown() -> None:
    ledger = Ledger(0)
    ledger.book_mixture({}, 40)
    assert ledger.totals_ns[UNKNOWN] == 40


def test_time_between_two_processes_belongs_to_none() -> None:
    ledger = Ledger(10)
    ledger.book(COMPUTE, 30)
    ledger.shift(1000)
    ledger.book(INPUT_WAIT, 1040)
    assert (ledger.start_ns, ledger.watermark_ns, ledger.sum_ns) == (1010, 1040, 30)


@pytest.mark.parametrize(
    ("name", "state"), [("eval", "eval"), ("checkpoint", "checkpoint"), ("compile", "compile"), ("logging", "other")]
)
def test_phases_have_states(name: str, state: str) -> None:
    assert phase_state(name) == state


def test_shares_are_of_the_sum_largest_first_and_without_zeros() -> None:
    assert shares({"compute": 1.0, "input_wait": 3.0, "eval": 0.0}) == {"input_wait": 0.75, "compute": 0.25}
    assert shares({"compute": 0.0}) == {} == shares({})
