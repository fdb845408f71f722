"""Runs of whole steps are booked at once, for speed: that must be the same as booking each entry by itself."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gpuwatch.ledger.events import ENTER, EXIT, PART, SPAN, STEP, TOKENS
from gpuwatch.ledger.step_records import StepRecord
from gpuwatch.ledger.timeline import Timeline


class OneByOne(Timeline):
    def _book_whole_steps(self, entries: list[tuple[Any, ...]], at: int, steps: list[StepRecord]) -> int:
        return 0


pieces = st.lists(
    st.tuples(
        st.sampled_from([STEP] * 12 + [PART, SPAN, TOKENS, ENTER, EXIT, "stall"]),
        st.integers(-3, 20),  # pause before it; contexts may overlap
        st.integers(0, 60_000_000_000),
        st.integers(0, 40),
        st.integers(0, 40),
        st.integers(-1, 5),
    ),
    max_size=60,
)


@given(pieces, st.integers(1, 7))
def test_any_log_is_booked_alike_in_runs_and_one_by_one(reported: list[tuple[Any, ...]], at_once: int) -> None:
    lines = (Timeline(0), OneByOne(0))
    logs: list[list[Any]] = [[]]
    now, levels, stalls = 0, 0, []
    for kind, pause, length, data, transfer, samples in reported:
        begin, now = max(0, now + pause), max(0, now + pause) + length
        if kind in (STEP, PART):
            logs[-1].append((kind, begin, now, data, transfer, samples, samples == 5))
        elif kind == SPAN:
            logs[-1].append((SPAN, begin, now, "input_wait", 0, False))
        elif kind == TOKENS:
            logs[-1].append((TOKENS, data))
        elif kind == ENTER:
            logs[-1].append((ENTER, now, "eval" if data % 2 else None))
            levels += 1
        elif kind == EXIT and levels:
            logs[-1].append((EXIT, now))
            levels -= 1
        elif kind == "stall":
            stalls.append(now + length)
        if len(logs[-1]) >= at_once:
            logs.append([])
    for number, log in enumerate(logs):
        records = [line.apply(log) for line in lines]
        assert records[0] == records[1]
        if number < len(stalls):
            assert lines[0].book_quiet(stalls[number]) == lines[1].book_quiet(stalls[number])
        quick, slow = lines
        assert quick.ledger.totals_ns == slow.ledger.totals_ns
        assert quick.ledger.watermark_ns == slow.ledger.watermark_ns
        assert (quick.counts.steps, quick.counts.samples) == (slow.counts.steps, slow.counts.samples)
        assert quick.counts.phases_ns == slow.counts.phases_ns
        assert quick.counts.median_ns == slow.counts.median_ns and quick.last_progress_ns == slow.last_progress_ns
        assert quick.ledger.sum_ns == quick.ledger.watermark_ns
