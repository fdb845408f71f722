"""Whatever a training loop does, in whatever order: every nanosecond is in one state, and none goes back."""

from __future__ import annotations

import threading
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwatch.hook.account import Accounts
from gpuwatch.hook.recorder import Recorder
from gpuwatch.ledger.events import (
    BETWEEN,
    CLOSED,
    DATA_WAIT,
    IN_STEP,
    LOOSE,
    STARTUP,
    STEP,
    TRANSFERRING,
)
from tests.unit.hook.fakes import MS, BlindWatcher, Clock, S

OPERATIONS = (
    "begin_a", "begin_b", "end_step", "data", "transfer", "end_part", "enter_eval", "enter_other", "enter_loop",
    "exit_inner", "exit_outer", "exit_gone", "abandon", "no_batch", "apply", "report", "delta",
)  # fmt: skip

steps_of_time = st.one_of(
    st.integers(0, 5 * MS), st.integers(0, 3 * S), st.sampled_from([0, 1, 31 * S, 45 * S, 400 * S])
)
scripts = st.lists(st.tuples(st.sampled_from(OPERATIONS), steps_of_time), max_size=60)


class Bench:
    """A recorder and its accounts, driven like the loops and the background thread drive them."""

    def __init__(self) -> None:
        self.clock = Clock(0)
        self.recorder = Recorder(self.clock)
        self.recorder.claim_thread()
        self.accounts = Accounts(self.recorder, BlindWatcher())
        self.opened: list[int] = []
        self.steps_expected = 0
        self.seen: dict[str, int] = {}
        self.watermark = 0

    def do(self, operation: str) -> None:
        recorder, now = self.recorder, self.clock()
        if operation == "begin_a":
            recorder.begin_step("a", now)
        elif operation == "begin_b":
            recorder.begin_step("b", now)
        elif operation == "end_step":
            recorder.end_step(now)
        elif operation == "data":
            recorder.begin_part(DATA_WAIT, now)
        elif operation == "transfer":
            recorder.begin_part(TRANSFERRING, now)
        elif operation == "end_part":
            recorder.end_part(now)
        elif operation.startswith("enter_"):
            name = {"eval": "eval", "other": "logging", "loop": None}[operation.partition("_")[2]]
            self.opened.append(recorder.enter(name, now))
        elif operation.startswith("exit_"):
            which = {"inner": recorder.level, "outer": (self.opened or [0])[0], "gone": (self.opened or [0])[-1]}
            recorder.exit(which[operation.partition("_")[2]], now)
        elif operation == "abandon":
            recorder.abandon(now)
        elif operation == "no_batch":
            recorder.lacks_batch = recorder.in_step
        elif operation == "apply":
            self.accounts.apply(now)
        elif operation == "delta":
            self.accounts.take_delta()
        elif operation == "report":
            self.report()

    def report(self) -> None:
        now = self.clock()
        self.accounts.apply(now)
        window, tail = self.accounts.window(now)
        line = self.accounts.timeline
        assert sum(line.ledger.totals_ns.values()) + sum(tail.values()) == now - line.start_ns
        assert all(ns >= 0 for ns in tail.values())
        assert all(seconds >= 0 for seconds in window.states_s.values())

    def check(self) -> None:
        ledger = self.accounts.timeline.ledger
        assert ledger.sum_ns == ledger.watermark_ns - ledger.start_ns
        assert self.watermark <= ledger.watermark_ns <= self.clock()
        for state, ns in ledger.totals_ns.items():
            assert ns >= self.seen.get(state, 0), f"{state} went back"
        self.watermark, self.seen = ledger.watermark_ns, dict(ledger.totals_ns)


@settings(max_examples=300, deadline=None)
@given(scripts)
def test_the_ledger_closes_after_any_sequence_of_operations(script: list[tuple[str, int]]) -> None:
    bench = Bench()
    for operation, elapsed in script:
        bench.clock.now_ns += elapsed
        bench.do(operation)
        bench.check()
    bench.report()
    bench.accounts.finish(bench.clock())
    bench.check()
    line = bench.accounts.timeline
    assert line.ledger.watermark_ns == bench.clock() and line.ledger.sum_ns == bench.clock()
    assert sum(line.counts.phases_ns.values()) <= bench.clock(), "no moment is in two steps"
    assert min(line.counts.phases_ns.values()) >= 0


@settings(max_examples=200, deadline=None)
@given(scripts, st.randoms(use_true_random=False))
def test_when_the_log_is_folded_changes_no_total(script: list[tuple[str, int]], chance: Any) -> None:
    """Stalls apart, which commit time early on purpose: the script's long pauses are cut to 3 s."""
    benches = Bench(), Bench()
    for operation, elapsed in script:
        for bench in benches:
            bench.clock.now_ns += min(elapsed, 300 * MS)
            if operation not in ("apply", "report"):
                bench.do(operation)
        if chance.random() < 0.3:
            benches[1].accounts.apply(benches[1].clock())
    for bench in benches:
        bench.accounts.finish(bench.clock())
    often, once = benches[1].accounts.timeline, benches[0].accounts.timeline
    assert often.ledger.totals_ns == once.ledger.totals_ns
    assert (often.counts.steps, often.counts.phases_ns) == (once.counts.steps, once.counts.phases_ns)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20), st.integers(0, 50), st.integers(0, 9)), max_size=40))
def test_each_step_is_counted_once_with_its_own_times(steps: list[tuple[int, int, int, int]]) -> None:
    bench = Bench()
    recorder, clock = bench.recorder, bench.clock
    for wait, copy, compute, pause in steps:
        recorder.begin_step("loop", clock())
        recorder.begin_part(DATA_WAIT, clock())
        clock.sleep_ms(wait)
        recorder.end_part(clock())
        recorder.begin_part(TRANSFERRING, clock())
        clock.sleep_ms(copy)
        recorder.end_part(clock())
        clock.sleep_ms(compute)
        recorder.end_step(clock())
        clock.sleep_ms(pause)
    bench.accounts.finish(clock())
    line = bench.accounts.timeline
    assert line.counts.steps == len(steps)
    assert line.counts.phases_ns == {
        "data_wait": sum(s[0] for s in steps) * MS,
        "transfer": sum(s[1] for s in steps) * MS,
        "compute": sum(s[2] for s in steps) * MS,
    }
    assert line.ledger.totals_ns["other"] == sum(s[3] for s in steps) * MS


def test_a_copy_inside_a_wait_is_a_copy_and_counted_once() -> None:
    bench = Bench()
    recorder, clock = bench.recorder, bench.clock
    recorder.begin_step("loop", clock())
    recorder.begin_part(DATA_WAIT, clock())
    clock.sleep_ms(3)
    recorder.begin_part(TRANSFERRING, clock())
    clock.sleep_ms(2)
    recorder.end_part(clock())
    clock.sleep_ms(1)
    recorder.end_part(clock())
    clock.sleep_ms(4)
    recorder.end_step(clock())
    bench.accounts.finish(clock())
    assert bench.accounts.timeline.counts.phases_ns == {"data_wait": 4 * MS, "transfer": 2 * MS, "compute": 4 * MS}


def test_a_phase_inside_a_wait_pauses_the_wait() -> None:
    bench = Bench()
    recorder, clock = bench.recorder, bench.clock
    recorder.begin_step("loop", clock())
    recorder.begin_part(DATA_WAIT, clock())
    clock.sleep_ms(3)
    level = recorder.enter("checkpoint", clock())
    clock.sleep_ms(10)
    recorder.exit(level, clock())
    clock.sleep_ms(2)
    recorder.end_part(clock())
    clock.sleep_ms(5)
    recorder.end_step(clock())
    bench.accounts.finish(clock())
    totals = bench.accounts.timeline.ledger.totals_ns
    assert (totals["input_wait"], totals["checkpoint"], totals["compute"]) == (5 * MS, 10 * MS, 5 * MS)
    assert bench.accounts.timeline.counts.steps == 1


def test_a_wait_outside_of_any_step_belongs_to_the_next_step() -> None:
    bench = Bench()
    recorder, clock = bench.recorder, bench.clock
    recorder.begin_part(DATA_WAIT, clock())
    assert recorder.step_owner is LOOSE and recorder.activity is DATA_WAIT
    clock.sleep_ms(8)
    bench.accounts.apply(clock())  # while it is open: not start-up
    recorder.end_part(clock())
    assert recorder.activity == STARTUP and not recorder.in_step
    recorder.begin_step("loop", clock())
    clock.sleep_ms(2)
    recorder.end_step(clock())
    bench.accounts.finish(clock())
    line = bench.accounts.timeline
    assert (line.ledger.totals_ns["input_wait"], line.ledger.totals_ns["startup"]) == (8 * MS, 0)
    assert line.counts.phases_ns["data_wait"] == 8 * MS and line.counts.steps == 1


def test_a_level_that_is_closed_late_closes_no_other_level() -> None:
    bench = Bench()
    old = bench.recorder.enter("eval", bench.clock())
    bench.recorder.exit(old, bench.clock())
    new = bench.recorder.enter("eval", bench.clock())
    bench.recorder.exit(old, bench.clock())
    assert bench.recorder.level == new and bench.recorder.is_open(new)


def test_the_activity_says_what_the_training_thread_does() -> None:
    bench = Bench()
    recorder, now = bench.recorder, bench.clock()
    seen = [recorder.activity]
    recorder.begin_step("loop", now)
    seen.append(recorder.activity)
    recorder.end_step(now)
    seen.append(recorder.activity)
    level = recorder.enter("eval", now)
    recorder.begin_step("eval loop", now)
    recorder.end_step(now)
    seen.append(recorder.activity)
    recorder.exit(level, now)
    seen.append(recorder.activity)
    assert seen == [STARTUP, IN_STEP, BETWEEN, "phase eval", BETWEEN]


def in_thread(call: Any) -> Any:
    result: list[Any] = []
    thread = threading.Thread(target=lambda: result.append(call()))
    thread.start()
    thread.join()
    return result[0]


def test_the_main_threads_steps_win_over_a_thread_that_prefetches() -> None:
    recorder = Recorder(Clock())
    started, done = threading.Event(), threading.Event()

    def prefetch() -> None:
        assert recorder.claim_thread()
        recorder.begin_step("prefetcher", 1)
        started.set()
        done.wait(60)

    thread = threading.Thread(target=prefetch)
    thread.start()
    started.wait(60)
    assert not recorder.claim_thread(steps=False), "a phase takes nothing over"
    assert recorder.claim_thread() and not recorder.in_step
    done.set()
    thread.join()
    assert [entry[0] for entry in recorder.log if entry[0] == STEP] == []


def test_a_threads_phase_takes_nothing_from_a_training_thread_between_steps() -> None:
    recorder = Recorder(Clock())
    assert recorder.claim_thread()
    assert not in_thread(lambda: recorder.claim_thread(steps=False))
    assert recorder.claim_thread()


def test_training_may_happen_in_another_thread() -> None:
    recorder = Recorder(Clock())
    recorder.claim_thread(steps=False)
    assert in_thread(recorder.claim_thread)


def test_nothing_is_recorded_after_the_end() -> None:
    recorder = Recorder(Clock())
    recorder.thread = CLOSED
    assert not recorder.claim_thread() and not recorder.claim_thread(steps=False)
