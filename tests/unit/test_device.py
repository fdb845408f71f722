"""The device timeline against a device that is only time: what it says must be what the stream did."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwatch.device import RING, DeviceTimeline, DeviceTimes, Piece
from gpuwatch.testing import FakeClock, FakeDevice

MS = 1_000_000


class Loop:
    """A training loop on a fake device, told by hand."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.device = FakeDevice(self.clock, self.clock.sleep)
        self.timeline = DeviceTimeline(self.device)
        self.pieces: list[Piece] = []
        self.timeline.start(self.clock())

    def step(
        self,
        wait_s: float,
        device_s: float,
        host_s: float = 0.0,
        copy_s: float = 0.0,
        after_s: float = 0.0,
        optimizer: bool = True,
    ) -> None:
        """Fetch for `wait_s`, copy, launch, take `host_s` of Python, launch the optimizer, then `after_s` of something else."""
        self.clock.sleep(wait_s)
        self.timeline.begin(self.clock())
        if copy_s:
            token = self.timeline.copy_begins(self.clock(), follows=True)
            self.device.launch(copy_s)
            self.timeline.copy_ends(token)
        self.device.launch(device_s)
        self.clock.sleep(host_s)
        if optimizer:
            self.timeline.launched(self.clock())
        self.clock.sleep(after_s)
        self.end()

    def end(self) -> Piece | None:
        piece = self.timeline.end(self.clock())
        if piece is not None:
            self.pieces.append(piece)
        self.timeline.harvest(self.clock())
        return piece

    def finish(self) -> list[DeviceTimes]:
        self.clock.sleep(1000.0)
        self.timeline.harvest(self.clock())
        return [piece.times for piece in self.pieces if piece.times is not None]


def test_a_wait_that_starves_the_device_is_a_gap() -> None:
    loop = Loop()
    for _ in range(5):
        loop.step(wait_s=0.030, device_s=0.010, host_s=0.001)
    times = loop.finish()
    # the device works on for 9 ms after the host has gone to fetch: of 30 ms of wait 21 leave it idle
    assert [t.gap_ns for t in times] == [30 * MS, *[21 * MS] * 4]
    assert [t.compute_ns for t in times] == [10 * MS] * 5


def test_a_wait_behind_queued_work_is_no_gap() -> None:
    loop = Loop()
    for _ in range(20):
        loop.step(wait_s=0.008, device_s=0.010, host_s=0.001)
    times = loop.finish()
    assert [t.gap_ns for t in times[1:]] == [0] * 19
    assert sum(t.gap_ns or 0 for t in times[1:]) == loop.device.idle_ns == 0
    assert [t.done_ns - piece.end_ns for t, piece in zip(times, loop.pieces, strict=True)][:3] == [
        9 * MS,
        10 * MS,
        11 * MS,
    ]


def test_while_the_device_lags_the_end_of_a_step_is_the_next_ones_batch_event(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, recorded = Loop(), 0
    record = loop.device.record

    def counted(event: object) -> object:
        nonlocal recorded
        recorded += 1
        return record(event)  # type: ignore[arg-type]

    monkeypatch.setattr(loop.device, "record", counted)
    for _ in range(20):
        loop.step(wait_s=0.001, device_s=0.010, host_s=0.001, copy_s=0.002)
    times = loop.finish()
    in_detail = sum(piece.detailed for piece in loop.pieces)
    assert in_detail == 16
    assert recorded == 1 + 20 + 2 * in_detail  # the first batch; each end; in detail the copy and the last launch
    assert {(t.gap_ns, t.transfer_ns, t.compute_ns) for t in times[1:]} == {(0, 2 * MS, 10 * MS)}


def test_a_second_batch_before_any_launch_moves_the_moment_and_leaves_the_step_before_alone() -> None:
    loop = Loop()
    loop.step(wait_s=0.001, device_s=0.010)
    loop.timeline.begin(loop.clock())  # the device works on: its event is the last step's end
    loop.clock.sleep(0.020)  # a second loader is waited for
    loop.timeline.begin(loop.clock())
    loop.device.launch(0.005)
    loop.timeline.launched(loop.clock())
    assert loop.end() is not None
    first, second = loop.finish()
    assert (first.compute_ns, second.gap_ns, second.compute_ns) == (10 * MS, 10 * MS, 5 * MS)
    assert loop.device.events_made == 7


def test_work_after_the_last_known_launch_is_no_gap_while_the_device_lags() -> None:
    loop = Loop()
    for _ in range(5):
        loop.step(wait_s=0.001, device_s=0.010)
        loop.device.launch(0.003)  # a metric, say
    times = loop.finish()
    assert [(t.gap_ns, t.compute_ns) for t in times] == [(MS, 10 * MS), *[(0, 13 * MS)] * 4]


def test_host_work_after_the_last_launch_is_host_wait() -> None:
    loop = Loop()
    for _ in range(4):
        loop.step(wait_s=0.001, device_s=0.005, host_s=0.005, after_s=0.030)
    times = loop.finish()
    assert [(t.gap_ns, t.compute_ns, t.host_wait_ns, t.lag_ns) for t in times] == [(MS, 5 * MS, 30 * MS, 0)] * 4


@pytest.mark.parametrize("device_s", [0.002, 0.010, 0.019])
def test_a_busy_device_has_no_host_wait_when_measuring_in_detail_ends(device_s: float) -> None:
    loop = Loop()
    for _ in range(60):
        loop.step(wait_s=0.0, device_s=device_s, after_s=device_s)
    assert sum(not piece.detailed for piece in loop.pieces) >= 30
    assert [time.host_wait_ns for time in loop.finish()] == [0] * 60


def test_without_an_optimizer_the_step_ends_when_the_host_asks_for_the_next_batch() -> None:
    loop = Loop()
    for _ in range(4):
        loop.step(wait_s=0.003, device_s=0.005, host_s=0.005, after_s=0.030, optimizer=False)
    times = loop.finish()
    assert [t.gap_ns for t in times[1:]] == [3 * MS] * 3  # no more than the wait itself
    assert all(t.host_wait_ns is None for t in times)
    assert times[1].compute_ns == 35 * MS


def test_copies_that_follow_each_other_are_one_transfer_and_a_late_one_is_added() -> None:
    loop = Loop()
    line = loop.timeline
    line.begin(loop.clock())
    for seconds in (0.003, 0.002):
        token = line.copy_begins(loop.clock(), follows=True)
        loop.device.launch(seconds)
        line.copy_ends(token)
    loop.device.launch(0.010)
    token = line.copy_begins(loop.clock(), follows=False)
    loop.device.launch(0.001)
    line.copy_ends(token)
    line.launched(loop.clock())
    assert loop.end() is not None
    (times,) = loop.finish()
    assert (times.transfer_ns, times.compute_ns) == (6 * MS, 10 * MS)


def test_nothing_is_touched_while_a_graph_is_captured() -> None:
    loop = Loop()
    loop.step(wait_s=0.001, device_s=0.005)
    loop.device.capturing = True  # recording or querying raises now
    loop.timeline.begin(loop.clock())
    loop.timeline.launched(loop.clock())
    assert loop.end() is None
    loop.device.capturing = False
    loop.step(wait_s=0.001, device_s=0.005)
    times = loop.finish()
    assert len(times) == 2
    assert times[1].gap_ns is None  # what came in between was not seen


def test_a_device_that_falls_far_behind_is_left_to_the_host_s_clock_and_events_are_bounded() -> None:
    loop = Loop()
    for _ in range(3 * RING):
        loop.step(wait_s=0.0, device_s=1.0)
    assert loop.timeline.pending == RING
    assert loop.timeline.given_up == 2 * RING
    assert loop.device.events_made <= 3 * (RING + 2)


def test_events_are_reused() -> None:
    loop = Loop()
    for _ in range(10_000):
        loop.step(wait_s=0.002, device_s=0.001, copy_s=0.001)
    assert loop.device.events_made < 20
    assert loop.device.synchronized == 0


@given(
    st.lists(
        st.tuples(*[st.integers(0, 50)] * 5, st.booleans()),
        min_size=2,
        max_size=40,
    )
)
def test_the_parts_are_the_device_s_whole_time_from_first_batch_to_last_end(
    steps: list[tuple[int, int, int, int, int, bool]],
) -> None:
    loop = Loop()
    for wait, device, host, copy, after, optimizer in steps:
        loop.step(wait / 1e3, device / 1e3, host / 1e3, copy / 1e3, after / 1e3, optimizer)
    times = loop.finish()
    assert len(times) == len(steps)
    whole = sum(t.transfer_ns + t.compute_ns + (t.host_wait_ns or 0) + (t.gap_ns or 0) for t in times) - (
        times[0].gap_ns or 0
    )
    assert all(t.transfer_ns >= 0 and t.compute_ns >= 0 for t in times)
    # measured once more by the stream alone: from the first batch in hand to the last end
    host_end = sum(wait + host + after for wait, _, host, _, after, _ in steps) - steps[0][0]
    assert whole >= host_end * MS
    busy = sum(device + copy for _, device, _, copy, _, _ in steps)
    assert whole >= busy * MS


def test_the_fake_itself_knows_its_idle_time() -> None:
    clock = FakeClock()
    device = FakeDevice(clock, clock.sleep)
    device.launch(0.010)
    clock.sleep(0.030)
    device.launch(0.010)
    assert device.idle_ns == 20 * MS
    device.synchronize()
    assert clock() == 1_000_000_000 + 40 * MS
    with pytest.raises(RuntimeError, match="completed"):
        late = device.record(None)
        device.launch(1.0)
        device.elapsed_ns(late, device.record(None))
