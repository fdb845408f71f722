"""Several runs on one GPU: at each instant the state that comes first, compared with a count of every millisecond."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwatch import wire
from gpuwatch.ledger.states import RUN_STATES
from gpuwatch_agent.gpus import PRIORITY, GpuLedgers, GpuReading, GpuRecord, fuse
from gpuwatch_agent.runs import Run, read_record
from gpuwatch_agent.runs.timeline import Stretch, Trace, arrange, parts_of
from tests.unit.agent.hooks import BOOT, MS, FakeHook, S, wall_s

UUID = "GPU-1"
BEGIN_NS = 1000 * S


def test_every_state_of_a_run_has_its_place() -> None:
    assert sorted(PRIORITY) == sorted(RUN_STATES)


@pytest.mark.parametrize(("first", "then"), list(itertools.pairwise(PRIORITY)))
def test_first_in_the_order_wins(first: str, then: str) -> None:
    timelines = [[(0, 10, then)], [(4, 6, first)]]
    assert list(fuse(timelines, 0, 10)) == [(then, 4), (first, 6), (then, 10)]
    assert list(fuse(timelines[::-1], 0, 10)) == [(then, 4), (first, 6), (then, 10)]


def test_time_that_no_run_explains_is_none() -> None:
    assert list(fuse([[(2, 4, "compute")], [(6, 8, "eval")]], 0, 10)) == [
        (None, 2),
        ("compute", 4),
        (None, 6),
        ("eval", 8),
        (None, 10),
    ]
    assert list(fuse([], 3, 5)) == [(None, 5)]
    assert list(fuse([[(0, 9, "eval")]], 5, 5)) == []


def test_records_say_where_in_a_message_the_steps_lay() -> None:
    columns = {
        "start_ns": wire.pack([120, 170]),
        "data_wait_ns": wire.pack([20, 10]),
        "transfer_ns": wire.pack([5, 0]),
        "compute_ns": wire.pack([15, 10]),
    }
    parts = {"input_wait": 30, "transfer": 5, "compute": 25, "other": 40}
    assert arrange(Stretch(1100, 1200, parts, columns, offset_ns=1000)) == [
        (1100, 1120, "other"),
        (1120, 1140, "input_wait"),
        (1140, 1145, "transfer"),
        (1145, 1160, "compute"),
        (1160, 1170, "other"),
        (1170, 1180, "input_wait"),
        (1180, 1190, "compute"),
        (1190, 1200, "other"),
    ]


def test_device_times_lie_where_the_device_had_them() -> None:
    """A wait of 30, of which the device felt 10 at its end; it had idled for 5 before that."""
    columns = {
        "start_ns": wire.pack([100]),
        "data_wait_ns": wire.pack([30]),
        "transfer_ns": wire.pack([0]),
        "compute_ns": wire.pack([2]),
        "input_wait_ns": wire.pack([10]),
        "host_wait_ns": wire.pack([5]),
        "device_transfer_ns": wire.pack([4]),
        "device_compute_ns": wire.pack([26]),
    }
    parts = {"compute": 15 + 26, "host_wait": 5, "input_wait": 10, "transfer": 4}
    assert arrange(Stretch(100, 160, parts, columns)) == [
        (100, 115, "compute"),
        (115, 120, "host_wait"),
        (120, 130, "input_wait"),
        (130, 134, "transfer"),
        (134, 160, "compute"),
    ]


COLUMN = st.lists(st.integers(-1, 300), min_size=3, max_size=3)


@given(st.dictionaries(st.sampled_from(RUN_STATES), st.integers(0, 200)), st.lists(COLUMN, min_size=8, max_size=8))
@settings(max_examples=300, deadline=None)
def test_records_never_change_what_was_booked(parts: dict[str, int], columns: list[list[int]]) -> None:
    """Whatever a sender puts into its records, each state has its part, in order and without a gap."""
    names = ("start_ns", "data_wait_ns", "transfer_ns", "compute_ns", *wire.DEVICE_COLUMNS)
    packed = {name: wire.pack(column) for name, column in zip(names, columns, strict=True)}
    found = arrange(Stretch(100, 100 + sum(parts.values()), parts, packed))
    assert parts_of(found) == {state: ns for state, ns in parts.items() if ns}
    edges = [100, *(end for _, end, _ in found)]
    assert [begin for begin, _, _ in found] == edges[:-1]


def test_old_stretches_are_joined_and_their_sums_stay() -> None:
    trace = Trace()
    for number in range(5000):
        trace.add(Stretch(10 * number, 10 * number + 10, {"compute": 4, "eval": 6}))
    assert parts_of(trace.segments(0)) == {"compute": 20_000, "eval": 30_000}
    assert parts_of(trace.segments(49_990)) == {"compute": 4, "eval": 6}
    assert trace.begin_ns() == 0
    assert len(trace._stretches) == 128


class Site:
    """One GPU, several hooks on one clock, and what each of them did in every millisecond."""

    def __init__(self, hooks: int) -> None:
        self.hooks = [FakeHook(BEGIN_NS, run=f"run-{n}", sender=f"s-{n}", pid=n + 1) for n in range(hooks)]
        self.did: list[list[str]] = [[] for _ in range(hooks)]
        self.runs = {n + 1: Run(f"run-{n}", 0, BOOT) for n in range(hooks)}
        self.book = GpuLedgers()
        self.now_ns = BEGIN_NS
        for number in range(hooks):
            self.message(number)
        self.update()

    def spend(self, number: int, state: str, ms: int) -> None:
        self.hooks[number].spend(state, ms * MS)
        self.did[number] += [state] * ms

    def step(self, number: int, data_ms: int, compute_ms: int) -> None:
        self.hooks[number].step(data_ms * MS, compute_ms * MS)
        self.did[number] += ["input_wait"] * data_ms + ["compute"] * compute_ms

    def message(self, number: int) -> None:
        hook = self.hooks[number]
        self.now_ns = max(self.now_ns, hook.at_ns)
        self.runs[number + 1].apply(hook.message(), self.now_ns, wall_s(self.now_ns))

    def update(self) -> None:
        pids = tuple(self.runs)
        self.book.advance([GpuReading("0", UUID, pids, 0.9)], self.runs, self.now_ns)
        ledger = self.book.accounts[UUID].ledger
        assert ledger.sum_ns == ledger.watermark_ns - ledger.start_ns

    def restart(self) -> None:
        records = [account.record(BOOT) for account in self.book.accounts.values()]
        kept = [msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=GpuRecord) for record in records]
        for pid, run in self.runs.items():
            record = read_record(run.record())
            self.runs[pid] = record.restore(BOOT, self.now_ns, wall_s(self.now_ns))
            self.runs[pid].status = "running"
        self.book = GpuLedgers()
        self.book.restore(kept, BOOT, self.now_ns)

    def meet(self) -> None:
        """Let all hooks come to the same moment."""
        last_ns = max(hook.at_ns for hook in self.hooks)
        for number, hook in enumerate(self.hooks):
            self.spend(number, "other", (last_ns - hook.at_ns) // MS)
            self.message(number)
        self.update()

    def expected_ms(self) -> dict[str, int]:
        counted: dict[str, int] = {}
        for states in zip(*self.did, strict=True):
            state = min(states, key=PRIORITY.index)
            counted[state] = counted.get(state, 0) + 1
        return counted

    def booked_ms(self) -> dict[str, float]:
        return {s: ns / MS for s, ns in self.book.accounts[UUID].ledger.totals_ns.items() if ns}


MOVE = st.tuples(st.integers(0, 2), st.sampled_from(RUN_STATES), st.integers(1, 400), st.sampled_from(["tell", "keep"]))
STEPS = st.tuples(st.integers(0, 2), st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), max_size=6))
LOOK = st.sampled_from(["look", "look", "restart"])


@given(st.lists(st.one_of(MOVE, STEPS, LOOK), max_size=40))
@settings(max_examples=300, deadline=None)
def test_every_millisecond_of_three_runs_has_the_state_that_comes_first(moves) -> None:
    site = Site(3)
    for move in moves:
        if move == "look":
            site.update()
        elif move == "restart":
            site.meet()  # of time that is still open on the GPU, an agent that is killed takes the order with it
            site.restart()
        elif len(move) == 2:
            number, steps = move
            for data_ms, compute_ms in steps:
                site.step(number, data_ms, compute_ms)
            site.message(number)
        else:
            number, state, ms, _ = move
            site.spend(number, state, ms)
            site.message(number)  # a message of one state: where in it the state lay is no question
    site.meet()
    assert site.booked_ms() == site.expected_ms()


def test_open_time_of_a_run_outlives_the_agent() -> None:
    site = Site(2)
    site.spend(0, "compute", 900)
    site.message(0)
    site.spend(1, "input_wait", 300)
    site.message(1)
    site.update()  # 600 ms of the first run wait for the second one
    site.restart()
    site.spend(1, "checkpoint", 1100)
    site.message(1)
    site.spend(0, "eval", 500)
    site.message(0)
    site.update()
    assert site.booked_ms() == {"compute": 900, "eval": 500}


def test_run_that_ends_counts_to_its_last_moment_next_to_one_that_goes_on() -> None:
    site = Site(2)
    site.spend(0, "compute", 700)
    site.spend(1, "input_wait", 200)
    site.message(1)
    site.runs[1].apply(site.hooks[0].bye(), site.now_ns, wall_s(site.now_ns))
    site.update()
    site.spend(1, "input_wait", 800)
    site.message(1)
    site.update()
    assert site.booked_ms() == {"compute": 700, "input_wait": 300}
    assert site.book.accounts[UUID].owner == "run-1"


def test_run_that_joins_counts_from_its_own_begin() -> None:
    site = Site(1)
    site.spend(0, "input_wait", 500)
    site.message(0)
    site.update()
    late = FakeHook(site.now_ns, run="run-late", sender="late", pid=9)
    site.runs[9] = Run("run-late", 0, BOOT)
    late.spend("startup", 300 * MS)
    site.spend(0, "input_wait", 400)
    site.message(0)
    site.runs[9].apply(late.message(), site.now_ns, wall_s(site.now_ns))
    site.update()
    assert site.booked_ms() == {"input_wait": 500, "startup": 300}
    late.spend("compute", 100 * MS)
    site.runs[9].apply(late.message(), site.now_ns, wall_s(site.now_ns))
    site.update()
    assert site.booked_ms() == {"input_wait": 500, "startup": 300, "compute": 100}


def test_silent_run_does_not_hold_up_the_other_for_ever() -> None:
    site = Site(2)
    site.spend(0, "compute", 20_000)
    site.message(0)
    site.update()
    assert site.booked_ms() == {}  # the other's time is still open
    for run in site.runs.values():
        run.pass_time(site.now_ns, wall_s(site.now_ns), True)
    site.update()
    assert site.booked_ms() == {"compute": 20_000}
