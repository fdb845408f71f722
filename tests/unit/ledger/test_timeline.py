"""A log becomes a ledger: stalls, pauses, first batches and long runs."""

from __future__ import annotations

import pytest

from gpuwatch.diagnosis.rules.input_rhythm import epoch_start_pause
from gpuwatch.hook.account import Accounts
from gpuwatch.hook.recorder import Recorder
from gpuwatch.ledger.events import DATA_WAIT, PART, STEP
from gpuwatch.ledger.timeline import Timeline
from tests.unit.hook.fakes import MS, BlindWatcher, Clock, S


def step(begin: int, end: int, data: int = 0, transfer: int = 0, samples: int = -1) -> tuple[object, ...]:
    return (STEP, begin, end, data, transfer, samples, False)


def test_a_run_is_stalled_after_30_s_without_a_step_and_not_before() -> None:
    line = Timeline(0)
    line.apply([step(0, S)])
    assert line.book_quiet(31 * S) is None
    assert line.book_quiet(31 * S + 1) == "stalled"
    assert line.ledger.totals_ns["stalled"] == 30 * S + 1


def test_slow_steps_stall_only_after_ten_of_their_medians() -> None:
    line = Timeline(0)
    line.apply([step(0, 20 * S), step(20 * S, 40 * S), step(40 * S, 45 * S)])
    assert line.counts.median_ns == 20 * S
    assert line.book_quiet(45 * S + 200 * S) is None
    assert line.book_quiet(45 * S + 200 * S + 1) == "stalled"


def test_no_run_is_stalled_before_its_first_step_or_in_a_declared_phase() -> None:
    line = Timeline(0)
    assert line.quiet(3600 * S) is None
    line.apply([step(0, S), (3, 2 * S, "eval")])
    assert line.quiet(3600 * S) is None
    line.book_certain(3600 * S, in_step=False)
    assert line.ledger.totals_ns["eval"] == 3598 * S


def test_the_late_end_of_a_stalled_step_counts_only_after_the_watermark() -> None:
    line = Timeline(0)
    line.apply([step(0, S)])
    line.book_quiet(101 * S)
    steps = line.apply([step(S, 120 * S, data=10 * S), step(120 * S, 121 * S)])
    assert line.ledger.totals_ns == {
        **line.ledger.totals_ns,
        "stalled": 100 * S,
        "compute": S + 19 * S + S,
        "input_wait": 0,
    }
    assert line.ledger.sum_ns == 121 * S
    assert (steps[0].data_wait_ns, steps[0].total_ns) == (10 * S, 119 * S), "the record keeps what the step took"
    assert line.quiet(122 * S) is None


def test_a_stall_inside_a_wait_is_reported_while_it_lasts_and_training_goes_on_after_it() -> None:
    clock = Clock(0)
    recorder = Recorder(clock)
    recorder.claim_thread()
    accounts = Accounts(recorder, BlindWatcher())
    recorder.begin_step("loop", clock())
    clock.sleep_ms(1000)
    recorder.begin_step("loop", clock())
    recorder.begin_part(DATA_WAIT, clock())
    for _ in range(100):
        clock.sleep_ms(500)
        accounts.apply(clock())
    window, tail = accounts.window(clock())
    assert (window.stalled_s, window.activity, tail) == (50.0, "data_wait", {})
    assert window.states_s == {"compute": 1.0, "stalled": 50.0}
    recorder.end_part(clock())
    clock.sleep_ms(1000)
    recorder.end_step(clock())
    accounts.apply(clock())
    window, _ = accounts.window(clock())
    assert window.stalled_s is None
    assert window.states_s == {"compute": 2.0, "stalled": 50.0}


def test_an_interrupted_step_is_one_record_without_the_pause() -> None:
    line = Timeline(0)
    log = [(PART, 0, 10, 4, 1, -1, False), (3, 10, "eval"), (4, 60), (STEP, 60, 80, 0, 0, 8, True)]
    steps = line.apply(log)
    [record] = steps
    assert (record.start_ns, record.data_wait_ns, record.transfer_ns, record.compute_ns) == (0, 4, 1, 25)
    assert (record.samples, record.epoch_start, line.counts.samples) == (8, True, 8)
    assert line.ledger.totals_ns["eval"] == 50


def test_overlapping_claims_are_counted_once() -> None:
    line = Timeline(0)
    steps = line.apply([step(0, 10), step(5, 20, data=12), step(18, 15)])
    assert [record.total_ns for record in steps] == [10, 10, 0]
    assert line.ledger.sum_ns == 20 and sum(line.counts.phases_ns.values()) == 20


def long_run(passes: int, length: int, pause_ms: float, wait_ms: float = 0.0, compute_ms: float = 5) -> Accounts:
    """Return the accounts of `passes` passes of `length` steps, each beginning with a pause."""
    clock = Clock(0)
    recorder = Recorder(clock)
    accounts = Accounts(recorder, BlindWatcher())
    for _ in range(passes):
        for index in range(length):
            begin, wait = clock(), pause_ms if index == 0 else wait_ms
            clock.sleep_ms(wait + compute_ms)
            recorder.log.append((STEP, begin, clock(), int(wait * MS), 0, 1, index == 0))
        accounts.apply(clock())
    return accounts


@pytest.mark.parametrize(
    ("passes", "length", "pause_ms"),
    [(300, 10, 20), (300, 50, 1000), (20, 500, 1000), (100, 400, 2000), (4, 5000, 20_000)],
)
def test_pauses_between_passes_have_their_true_share_however_long_the_passes(
    passes: int, length: int, pause_ms: float
) -> None:
    accounts = long_run(passes, length, pause_ms)
    window, _ = accounts.window(accounts.recorder.clock())
    true = pause_ms / (pause_ms + length * 5)
    steps = window.steps
    seen = sum(steps.data_wait_s) / (sum(steps.data_wait_s) + sum(steps.compute_s))
    assert seen == pytest.approx(true, rel=0.12)
    if pause_ms >= 1000:
        finding = epoch_start_pause(window)
        assert finding is not None and finding.ratio == pytest.approx(true, rel=0.12)


def test_pauses_that_do_not_matter_are_not_made_to_by_what_is_kept() -> None:
    """1 s in passes of 2,000 steps of 50 ms is 1% of the time; all 20 pauses with the last 2,048 steps would be 16%."""
    accounts = long_run(20, 2000, pause_ms=1000, compute_ms=50)
    window, _ = accounts.window(accounts.recorder.clock())
    assert epoch_start_pause(window) is None
    assert sum(window.steps.data_wait_s) / sum(window.steps.compute_s) < 0.02


def test_what_is_kept_of_a_long_run_is_bounded() -> None:
    accounts = long_run(3, 20_000, pause_ms=1)
    accounts.take_delta()
    assert len(accounts._recent) == 2048 and len(accounts.recorder.log) == 0
    assert accounts.timeline.counts.steps == 60_000
    assert len(accounts.window(accounts.recorder.clock())[0].steps) <= 20_002
