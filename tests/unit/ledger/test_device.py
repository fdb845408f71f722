"""The device timeline against a device that is only time: what it says must be what the stream did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.fakes import FakeClock, FakeDevice, FakeEvent
from gpuwatch.ledger.device_pieces import DeviceTimes, Piece
from gpuwatch.ledger.device_timeline import RING, DeviceTimeline

MS = 1_000_000


class Loop:
    """A training loop on a fake device, driven by hand."""

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
        """Fetch for `wait_s`, copy, launch, take `host_s` of Python, launch the optimizer.

        Then do something else for `after_s`.
        """
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


@pytest.mark.parametrize(("pause_s", "host_wait_ns"), [(0.0005, 0), (0.030, 30 * MS)])
def test_a_short_pause_before_more_work_is_a_gap_between_launches(pause_s: float, host_wait_ns: int) -> None:
    """After the optimizer's step the host waits for a copy, then launches a metric.

    A pause of 0.5 ms in between belongs to the step itself.
    """
    loop = Loop()
    for _ in range(4):
        loop.clock.sleep(0.010)
        loop.timeline.begin(loop.clock())
        loop.device.launch(0.005)
        loop.timeline.launched(loop.clock())
        loop.clock.sleep(0.005 + pause_s)  # the device is done after 5 ms
        loop.device.launch(0.004)
        loop.end()
    assert [t.host_wait_ns for t in loop.finish()] == [host_wait_ns] * 4


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


@pytest.mark.parametrize(
    ("pause_ms", "call_us", "copy_us", "is_blocking", "transfer_us"),
    [
        (0, 40, 3, False, (2, 8)),  # small and pinned: an idle device waits for two launches, as for any kernel's
        (0, 40, 4000, False, (7900, 8040)),  # pinned: the host does not wait
        (0, 40, 4000, True, (7900, 8000)),  # pageable: it does
        (9, 40, 4000, True, (7900, 8100)),  # the batch before was freed first: 9 ms in which nothing was copied
    ],
    ids=["small", "pinned", "pageable", "late"],
)
def test_on_an_idle_device_a_transfer_is_the_copy_and_not_its_launch(
    pause_ms: int, call_us: int, copy_us: int, is_blocking: bool, transfer_us: tuple[int, int]
) -> None:
    loop = Loop()
    timeline, device, clock = loop.timeline, loop.device, loop.clock
    timeline.begin(clock())
    clock.sleep(pause_ms / 1e3)
    for first in (True, False):
        begin = clock()
        token = timeline.copy_begins(begin, follows=not (first and pause_ms))
        clock.sleep(call_us / 1e6)
        device.launch(copy_us / 1e6)
        if is_blocking:
            device.synchronize()
        timeline.copy_ends(token, clock() - begin)
    device.launch(0.010)
    timeline.launched(clock())
    loop.end()
    (times,) = loop.finish()
    low, high = transfer_us
    assert low * 1000 <= times.transfer_ns <= high * 1000


def test_a_wait_for_copies_on_another_stream_is_transfer_and_so_is_the_gap_while_they_run() -> None:
    """Copies of 12 ms, one batch ahead of 8 ms of work: whenever the stream is empty, a copy runs.

    In most steps no copy is measured.
    """
    loop = Loop()
    timeline, device, clock = loop.timeline, loop.device, loop.clock
    for step in range(400):
        clock.sleep(0.004)
        timeline.begin(clock())
        token = timeline.awaits_asides(clock())
        device.wait_aside()
        timeline.copy_ends(token)
        device.elsewhere = True
        token = timeline.copy_begins(clock(), follows=False)
        device.launch_aside(0.012)
        timeline.copy_ends(token)
        device.elsewhere = False
        device.launch(0.008)
        timeline.launched(clock())
        if step % 10 == 9:
            begin = clock()
            device.synchronize()
            timeline.read_back(begin, clock())
        loop.end()
    wall_ns, idle_ns = clock() - 1_000_000_000, device.idle_ns
    times = loop.finish()
    assert idle_ns > 0.3 * wall_ns
    assert sum(time.transfer_ns for time in times) == pytest.approx(idle_ns, abs=0.02 * wall_ns)
    assert sum(time.gap_ns or 0 for time in times) < 0.02 * wall_ns
    assert sum(time.transfer_ns - time.aside_ns for time in times[1:10]) == pytest.approx(9 * 4 * MS, abs=4.1 * MS)


def test_a_wait_where_nothing_was_copied_on_another_stream_is_work() -> None:
    loop = Loop()
    for _ in range(20):
        loop.clock.sleep(0.002)
        loop.timeline.begin(loop.clock())
        loop.device.launch_aside(0.004)
        assert not loop.timeline.copied_aside  # so that the wait is not announced
        loop.device.wait_aside()
        loop.end()
    assert sum(time.transfer_ns for time in loop.finish()) == 0


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
    assert len(loop.timeline._pending) == RING
    assert sum(piece.times is not None for piece in loop.pieces) == 2 * RING
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


class Counted(Loop):
    """Counts the calls of events, and reads the device as seldom as the recorder does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        for name in ("record", "ready", "elapsed_ns"):
            monkeypatch.setattr(self.device, name, self._counted(name))

    def _counted(self, name: str) -> Callable[..., Any]:
        call = getattr(FakeDevice, name)

        def counted(*events: FakeEvent | None) -> Any:
            self.calls[name] += 1
            before = self.calls["ready"]
            result = call(self.device, *events)
            self.calls["ready"] = before  # what the fake asks itself
            return result

        return counted

    def end(self) -> Piece | None:
        piece = self.timeline.end(self.clock())
        assert piece is not None
        self.pieces.append(piece)
        if self.timeline.attention:
            self.timeline.harvest(self.clock())
        return piece

    def gap_error_points(self) -> float:
        """Return how much more of the time is reported as gaps than the stream was empty, in points of the whole."""
        times = self.finish()
        assert len(times) == len(self.pieces) and self.timeline.error is None
        gaps_ns = sum(each.gap_ns or 0 for each in times[1:])
        return 100 * (gaps_ns - self.device.idle_ns) / (self.pieces[-1].end_ns - self.pieces[0].begin_ns)


def test_quick_steps_of_a_starved_device_take_few_calls_and_their_gaps_are_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = Counted(monkeypatch)
    for _ in range(60):
        loop.step(wait_s=0.005, device_s=0.003, host_s=0.0005, copy_s=0.0001)
    loop.calls.clear()
    for _ in range(1600):
        loop.step(wait_s=0.005, device_s=0.003, host_s=0.0005, copy_s=0.0001)
    calls = {name: count / 1600 for name, count in loop.calls.items()}
    # two events a step, and two more in each 16th; the stream's state at each batch; the time of a step in 8, or of the
    # one before a 16th
    assert calls["record"] == pytest.approx(2 + 2 / 16, abs=0.01)
    assert calls["ready"] < 1.2
    assert calls["elapsed_ns"] < 0.35
    # by medians of real GPUs, in µs: a record with its capture check, a query, the time between two events
    assert 2.45 * calls["record"] + 2.0 * calls["ready"] + 3.7 * calls["elapsed_ns"] < 9
    assert abs(loop.gap_error_points()) < 0.01
    assert {piece.times.gap_ns for piece in loop.pieces[1:] if piece.times is not None} == {24 * MS // 10}


def _varying(random: Random, step: int) -> tuple[float, float]:
    return 0.005, random.uniform(0, 0.0054)


def _two_kinds(random: Random, step: int) -> tuple[float, float]:
    return 0.005, 0.005 if random.random() < 0.1 else 0.0005


def _growing(random: Random, step: int) -> tuple[float, float]:
    return 0.005, 0.001 + 0.004 * step / 2000


def _in_bursts(random: Random, step: int) -> tuple[float, float]:
    return (0.015, 0.0014) if step % 4 == 0 else (0.0005, 0.0014)


def _changing_at_once(random: Random, step: int) -> tuple[float, float]:
    return 0.005, 0.005 if step // 100 % 2 else 0.001


def _both_varying(random: Random, step: int) -> tuple[float, float]:
    return random.uniform(0, 0.010), random.uniform(0, 0.008)


@pytest.mark.parametrize(
    ("kind", "most_elapsed"),
    [
        (_varying, 1.3),
        (_two_kinds, 1.3),
        (_growing, 0.4),
        (_in_bursts, 0.5),
        (_changing_at_once, 1.1),
        (_both_varying, 0.7),
    ],
)
def test_the_gaps_of_quick_steps_that_vary_are_right_in_all(
    kind: Callable[[Random, int], tuple[float, float]], most_elapsed: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The more the steps vary, the more of them are measured."""
    errors = []
    for seed in range(3):
        random, loop = Random(seed), Counted(monkeypatch)
        for step in range(2000):
            wait_s, device_s = kind(random, step)
            loop.step(wait_s, device_s, host_s=0.0003)
        errors.append(loop.gap_error_points())
        assert loop.calls["elapsed_ns"] / 2000 < most_elapsed
    assert max(map(abs, errors)) < 1.0
    assert abs(fmean(errors)) < 0.4


def test_an_estimated_gap_lies_within_its_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    random, loop = Random(1), Counted(monkeypatch)
    for _ in range(1000):
        loop.step(random.uniform(0, 0.004), 0.005 if random.random() < 0.02 else 0.0005, host_s=0.0003)
    times = loop.finish()
    for before, piece, its in zip(loop.pieces, loop.pieces[1:], times[1:], strict=False):
        assert 0 <= (its.gap_ns or 0) <= piece.begin_ns - before.end_ns
    assert any(each.lag_ns is None for each in times)  # not measured is not 0


def test_slow_steps_are_measured_each(monkeypatch: pytest.MonkeyPatch) -> None:
    random, loop = Random(0), Counted(monkeypatch)
    lasts = [random.uniform(0.001, 0.030) for _ in range(200)]
    for device_s in lasts:
        loop.step(wait_s=0.035, device_s=device_s)
    times = loop.finish()
    assert [each.compute_ns for each in times] == [round(device_s * 1e9) for device_s in lasts]


def test_copies_on_another_stream_that_go_on_when_measuring_restarts_belong_to_no_batch_after_it() -> None:
    loop = Loop()

    def aside(seconds: float) -> None:
        loop.device.elsewhere = True
        token = loop.timeline.copy_begins(loop.clock(), follows=False)
        loop.device.launch_aside(seconds)
        loop.timeline.copy_ends(token)
        loop.device.elsewhere = False

    loop.step(wait_s=0.001, device_s=0.001)
    aside(0.040)  # for a later batch: the next one does not wait for it
    loop.step(wait_s=0.005, device_s=0.001, host_s=0.002)
    aside(0.040)  # in no batch's wait yet
    loop.timeline.start(loop.clock())  # an evaluation came in between
    loop.clock.sleep(0.100)
    loop.step(wait_s=0.005, device_s=0.001, host_s=0.002)
    loop.step(wait_s=0.005, device_s=0.001, host_s=0.002)
    times = loop.finish()
    assert [each.aside_ns for each in times] == [0] * 4
    assert [each.gap_ns for each in times[2:]] == [105 * MS, 5 * MS]
    assert len(loop.device._free) == loop.device.events_made - 1  # all events are back, but the last end


@pytest.mark.parametrize("device_s", [0.001, 0.004], ids=["the device is idle", "the device lags"])
def test_events_are_reused_where_measuring_begins_again(device_s: float) -> None:
    loop = Loop()
    for _ in range(1000):
        loop.step(wait_s=0.002, device_s=device_s)
        loop.timeline.start(loop.clock())  # a phase begins
        loop.clock.sleep(0.010)
        loop.timeline.start(loop.clock())  # and ends
    assert len(loop.finish()) == 1000 and loop.timeline.error is None
    assert len({id(event) for event in loop.device._free}) == len(loop.device._free), "none is given back twice"
    assert loop.device.events_made < 20


@pytest.mark.parametrize("device_s", [0.001, 0.004], ids=["the device is idle", "the device lags"])
def test_events_of_a_piece_in_which_a_rest_begins_are_reused(device_s: float) -> None:
    loop = Loop()
    for _ in range(1000):
        loop.step(wait_s=0.002, device_s=device_s, copy_s=0.001)
        loop.timeline.begin(loop.clock())
        loop.timeline.copy_ends(loop.timeline.copy_begins(loop.clock(), follows=True))
        loop.timeline.launched(loop.clock())
        loop.clock.sleep(0.010)
        loop.timeline.start(loop.clock())
    assert len(loop.finish()) == 1000 and loop.timeline.error is None
    assert len({id(event) for event in loop.device._free}) == len(loop.device._free), "none is given back twice"
    assert loop.device.events_made < 20


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
