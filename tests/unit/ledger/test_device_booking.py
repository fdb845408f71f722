"""A training on a device that is only time, booked by its own timeline: the ledger must say what the stream did."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.fakes import FakeClock, FakeDevice
from gpuwatch.ledger.device_booking import DeviceBooking, Exposed
from gpuwatch.ledger.device_pieces import Piece
from gpuwatch.ledger.device_timeline import DeviceTimeline
from gpuwatch.ledger.states import OTHER, Ledger

MS = 1_000_000


class Training:
    """Steps on a fake device, each described by (wait, host, launch, after), in ms."""

    def __init__(self) -> None:
        self.clock = FakeClock(0)
        self.device = FakeDevice(self.clock, self.clock.sleep)
        self.timeline = DeviceTimeline(self.device)
        self.ledger = Ledger(0)
        self.booking = DeviceBooking(self.ledger)
        self.open: list[tuple[int, int, int, Piece]] = []
        self.timeline.start(0)
        self.exposed: list[Exposed] = []

    def step(self, wait: int, host: int, launch: int, after: int, copy: int = 0, optimizer: bool = True) -> None:
        begin = self.clock()
        self.clock.sleep(wait / 1e3)
        self.timeline.begin(self.clock())
        if copy:
            token = self.timeline.copy_begins(self.clock(), follows=True)
            self.device.launch(copy / 1e3)
            self.timeline.copy_ends(token)
        self.device.launch(launch / 1e3)
        self.clock.sleep(host / 1e3)
        if optimizer:
            self.timeline.launched(self.clock())
        self.clock.sleep(after / 1e3)
        piece = self.timeline.end(self.clock())
        assert piece is not None
        self.open.append((begin, self.clock(), wait * MS, piece))
        self.harvest()

    def harvest(self) -> None:
        self.timeline.harvest(self.clock())
        while self.open and (times := self.open[0][3].times) is not None:
            begin, end, data, _ = self.open.pop(0)
            self.exposed.append(self.booking.book(begin, end, data, OTHER, times))

    def finish(self) -> dict[str, float]:
        """Return ms by state when the device has done all."""
        self.device.synchronize()
        self.harvest()
        assert not self.open
        assert self.ledger.sum_ns == self.ledger.watermark_ns - self.ledger.start_ns
        return {state: ns / MS for state, ns in self.ledger.totals_ns.items() if ns}


def test_a_constant_wait_is_starvation_less_what_runs_behind_it() -> None:
    training = Training()
    for _ in range(10):
        training.step(wait=30, host=1, launch=10, after=0)
    # the first wait is felt whole; of each later one the device works 9 ms and idles 21
    assert training.finish() == {"input_wait": 30 + 9 * 21, "compute": 100}


def test_a_wait_that_is_hidden_whole_is_never_called_starvation() -> None:
    training = Training()
    for _ in range(100):
        training.step(wait=8, host=1, launch=10, after=0)
    states = training.finish()
    assert states == {"input_wait": 8, "compute": 1000}  # the first batch's, before anything ran
    assert sum(e.input_wait_ns for e in training.exposed[1:]) == 0


def test_host_work_after_the_last_launch_is_host_wait() -> None:
    training = Training()
    for _ in range(10):
        training.step(wait=1, host=7, launch=7, after=30)
    states = training.finish()
    assert states == {"input_wait": 10, "compute": 70, "host_wait": 300}
    assert [e.host_wait_ns for e in training.exposed[1:]] == [30 * MS] * 9


def test_without_an_optimizer_host_time_is_in_compute_and_host_wait_is_absent() -> None:
    training = Training()
    for _ in range(10):
        training.step(wait=5, host=7, launch=7, after=30, optimizer=False)
    assert training.finish() == {"input_wait": 50, "compute": 370}
    assert all(e.host_wait_ns is None for e in training.exposed)


def test_a_copy_is_exposed_for_as_long_as_the_device_takes() -> None:
    training = Training()
    for _ in range(10):
        training.step(wait=1, host=12, launch=8, after=0, copy=4)
    assert training.finish() == {"input_wait": 10, "transfer": 40, "compute": 80}


def test_a_burst_every_fourth_step_shows_what_the_queue_could_not_hide() -> None:
    training = Training()
    for number in range(40):
        training.step(wait=25 if number % 4 == 3 else 0, host=1, launch=10, after=0)
    # four steps of 10 ms are queued in 4 ms: 36 ms of work hide the 25 ms
    assert training.finish() == {"compute": 400}


steps = st.tuples(
    st.integers(0, 40), st.integers(0, 10), st.integers(0, 20), st.integers(0, 10), st.integers(0, 5), st.booleans()
)


@given(st.lists(steps, min_size=1, max_size=30))
def test_any_loop_closes_and_never_calls_more_starvation_than_the_stream_was_empty(
    reported: list[tuple[int, int, int, int, int, bool]],
) -> None:
    training = Training()
    for wait, host, launch, after, copy, optimizer in reported:
        training.step(wait, host, launch, after, copy, optimizer)
    states = training.finish()
    whole = max(training.clock(), max(e.compute_ns for e in training.exposed)) / MS
    assert sum(states.values()) == pytest.approx(whole)
    waited = sum(wait for wait, *_ in reported)
    assert states.get("input_wait", 0) <= waited
    # the device's idle time between launches, and the first batch's wait, bound what may be called starvation
    assert states.get("input_wait", 0) <= reported[0][0] + training.device.idle_ns / MS + 1e-6
