"""Ranks that train on devices that are only time: each rank's reported wait for the others is its stream's wait."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.fakes import FakeClock, FakeDevice
from gpuwatch import wire
from gpuwatch.diagnosis.rules.progress import straggler
from gpuwatch.diagnosis.window import MeanStep, RankFacts, Window
from gpuwatch.hook.watch import Watch
from gpuwatch.ledger import device_timeline as device_module
from gpuwatch.ledger.device_timeline import WAIT_TIMED_EVERY_NS, DeviceTimeline
from tests.unit.hook.fakes import MS, Clock, S, connect, fake_watch, reported, turn

BUCKETS = 4
REDUCE_S = 0.004
"""What the all-reduce of one bucket takes."""


class Rank:
    """One rank: its watch, clock and device, and a model whose backward pass ends as DistributedDataParallel's does."""

    def __init__(self, monkeypatch: Any) -> None:
        self.clock = Clock()
        self.device = FakeDevice(self.clock, lambda seconds: self.clock.sleep_ms(seconds * 1e3))
        self.watch: Watch = fake_watch(self.clock, monkeypatch)
        self.agent = connect(self.watch)
        self.watch.session.torch_hooks.communication._devices = (
            True  # as after `watch_communication` of a model on a device
        )
        self.watch.session.torch_hooks.attach(self.device)
        self.module = SimpleNamespace(device_type="cuda", require_backward_grad_sync=True)
        self.weight = torch.zeros(1, requires_grad=True)
        self.reduced_ns = 0
        self.truth_ns = 0
        """For how long the stream has waited for other ranks."""
        self.weight.register_hook(self._last_bucket)

    @property
    def done_ns(self) -> int:
        """When the device is done with all that was launched."""
        return max(self.clock(), self.device._end_ns or 0)

    def forward_and_backward(self, device_s: float) -> list[int]:
        """Launch a third forward, the rest backward, bucket by bucket; return when each is ready to be reduced."""
        self.device.launch(device_s / 3)
        ready = []
        for _ in range(BUCKETS):
            self.device.launch(device_s * 2 / 3 / BUCKETS)
            ready.append(self.done_ns)
        return ready

    def finish_backward(self, reduced_ns: int) -> None:
        """Run autograd's engine: the stream waits at its end until the gradients are reduced."""
        self.reduced_ns = reduced_ns
        output = self.weight * 1.0
        self.watch.session.torch_hooks.communication._forward(self.module, (), output)
        output.backward()

    def _last_bucket(self, gradient: Any) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(self._wait)

    def _wait(self) -> None:
        if self.module.require_backward_grad_sync:
            self.truth_ns += max(0, self.reduced_ns - self.done_ns)
            self.device.wait_until(self.reduced_ns)

    def shares(self) -> dict[str, float]:
        self.device.synchronize()
        self.watch._recorder.poll(self.clock())
        states = self.watch.report().states
        timeline = self.watch._publisher.accounts.timeline
        assert timeline.ledger.sum_ns == timeline.ledger.watermark_ns - timeline.ledger.start_ns
        return {state: seconds / sum(states.values()) for state, seconds in states.items()}


def all_reduced(ready: list[list[int]], reduce_s: float = REDUCE_S) -> int:
    """Return when the last bucket is reduced: each begins when all ranks have it, and the one before it is done."""
    end_ns = 0
    for bucket in zip(*ready, strict=True):
        end_ns = max(end_ns, *bucket) + round(reduce_s * 1e9)
    return end_ns


def train(
    ranks: list[Rank],
    steps: int,
    compute_s: Callable[[int, int], float],
    host_s: float = 0.002,
    data_s: Callable[[int, int], float] = lambda rank, step: 0.001,
    accumulate: int = 1,
    read_back: bool = True,
    reduce_s: float = REDUCE_S,
) -> None:
    """Take steps on all ranks. `compute_s(rank, step)`: device time of forward and backward; `data_s`: the fetch."""
    for step in range(steps):
        reduces = (step + 1) % accumulate == 0
        with ExitStack() as stack:
            ready = []
            for number, rank in enumerate(ranks):
                stack.enter_context(rank.watch.step())
                with rank.watch.data():
                    rank.clock.sleep_ms(data_s(number, step) * 1e3)
                rank.module.require_backward_grad_sync = reduces
                ready.append(rank.forward_and_backward(compute_s(number, step)))
                rank.clock.sleep_ms(host_s * 1e3)
            reduced_ns = all_reduced(ready, reduce_s)
            for rank in ranks:
                rank.finish_backward(reduced_ns)
                if reduces:
                    rank.device.launch(0.001)
                    rank.watch._recorder.launched()
                if read_back:  # of the loss
                    rank.device.synchronize()
                elif rank.done_ns - rank.clock() > S:  # the queue is full
                    rank.clock.now_ns = rank.done_ns - S


def check(ranks: list[Rank], tolerance: float = 0.02) -> list[float]:
    """Check each rank's share of `comm_wait`; return the true ones."""
    truths = []
    for rank in ranks:
        shares = rank.shares()
        truths.append(rank.truth_ns / 1e9 / rank.watch.report().duration_s)
        assert shares.get("comm_wait", 0.0) == pytest.approx(truths[-1], abs=tolerance)
    return truths


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Rank]]:
    four = [Rank(monkeypatch) for _ in range(4)]
    yield four
    for rank in four:
        rank.watch.close()


def test_equal_ranks_wait_for_the_last_bucket_alone(ranks: list[Rank]) -> None:
    """Three of four buckets are reduced while the backward pass goes on: that is hidden, and is no wait."""
    train(ranks, 100, lambda rank, step: 0.060)
    truths = check(ranks, tolerance=0.001)
    assert [rank.truth_ns for rank in ranks] == [100 * round(REDUCE_S * 1e9)] * 4
    assert truths[0] == pytest.approx(0.004 / 0.067, rel=0.05)
    counts = ranks[0].watch._publisher.accounts.timeline.counts
    assert (counts.comm_steps, counts.device_steps) == (100, 100)


@pytest.mark.parametrize("read_back", [True, False])
def test_the_others_wait_for_a_straggler_and_it_waits_least(ranks: list[Rank], read_back: bool) -> None:
    train(ranks, 200, lambda rank, step: 0.090 if rank == 2 else 0.060, read_back=read_back)
    truths = check(ranks, tolerance=0.005)
    assert min(truths) == truths[2] < 0.05 and min(truths[:2]) > 0.3


@pytest.mark.parametrize("read_back", [True, False])
def test_bursts_of_delay_are_measured_where_each_wait_is_timed(ranks: list[Rank], read_back: bool) -> None:
    delays = random.Random(3)
    late = [[0.010 if delays.random() < 0.15 else 0.001 * delays.random() for _ in range(500)] for _ in ranks]
    train(ranks, 500, lambda rank, step: 0.008 + late[rank][step], 0.0005, read_back=read_back, reduce_s=0.0005)
    assert min(check(ranks, tolerance=0.005)) > 0.15


@pytest.mark.parametrize("read_back", [True, False])
def test_random_delays_are_estimated_within_two_points_where_a_part_of_the_waits_is_timed(
    ranks: list[Rank], read_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_module, "WAIT_TIMED_EVERY_NS", 50 * MS)
    delays = random.Random(3)
    late = [[0.010 * delays.random() for _ in range(1000)] for _ in ranks]
    train(ranks, 1000, lambda rank, step: 0.008 + late[rank][step], 0.0005, read_back=read_back, reduce_s=0.0005)
    assert min(check(ranks)) > 0.15
    for rank in ranks:
        timeline = rank.watch._recorder.timeline
        assert timeline is not None and 200 < timeline._reader._waits_timed < 450


def test_a_late_batch_on_one_rank_is_its_input_wait_and_the_others_comm_wait(ranks: list[Rank]) -> None:
    train(ranks, 100, lambda rank, step: 0.050, data_s=lambda rank, step: 0.040 if rank == 0 else 0.001)
    truths = check(ranks, tolerance=0.005)
    assert truths[0] < 0.06 and min(truths[1:]) > 0.4
    assert ranks[0].shares()["input_wait"] == pytest.approx(0.040 / 0.095, abs=0.02)
    assert ranks[1].shares()["input_wait"] < 0.02


@pytest.mark.parametrize("compute_s", [0.060, 0.006])
def test_steps_that_accumulate_gradients_wait_for_no_rank(ranks: list[Rank], compute_s: float) -> None:
    train(ranks, 400, lambda rank, step: compute_s * (1.5 if rank == 1 else 1.0), accumulate=4)
    check(ranks, tolerance=0.01)
    turn(ranks[0].watch)
    columns = [message.columns for message in reported(ranks[0].agent) if isinstance(message, wire.Steps)]
    waits = [wait for each in columns if each for wait in wire.unpack(each["comm_wait_ns"])]
    assert len(waits) == 400
    assert [wait > 0 for wait in waits[:8]] == [False, False, False, True] * 2


def test_a_rest_of_the_timeline_is_estimated_by_the_steps_before(ranks: list[Rank]) -> None:
    train(ranks, 100, lambda rank, step: 0.060 if rank else 0.040)
    for rank in ranks:
        rank.watch._recorder.rest_device(True)
    train(ranks, 100, lambda rank, step: 0.060 if rank else 0.040)
    truths = check(ranks, tolerance=0.005)
    assert truths[0] > 0.3 > 0.1 > truths[1]


def test_the_straggler_rule_sees_what_devices_waited(ranks: list[Rank]) -> None:
    train(ranks, 100, lambda rank, step: 0.090 if rank == 2 else 0.060)
    facts = []
    for number, rank in enumerate(ranks):
        rank.shares()
        turn(rank.watch)
        messages = [message for message in reported(rank.agent) if isinstance(message, wire.Steps) and message.columns]
        (message,) = messages
        assert message.totals.comm_steps == 100
        steps = {name: [ns / 1e9 for ns in wire.unpack(column)] for name, column in message.columns.items()}
        mean = {name: sum(seconds) / len(seconds) for name, seconds in steps.items()}
        step = MeanStep(100, mean["data_wait_ns"], mean["transfer_ns"], mean["compute_ns"])
        facts.append(RankFacts(number, step, mean["comm_wait_ns"]))
    found = straggler(Window(duration_s=10.0, states_s={"compute": 10.0}, ranks=tuple(facts), rank=2))
    assert found is not None
    assert next(each.value for each in found.evidence if each.what == "excess") == pytest.approx(0.030, rel=0.02)


# The timeline alone ---------------------------------------------------------------------------------------------------


def many_waits(timeline: DeviceTimeline, device: FakeDevice, clock: FakeClock, steps: int, waits: int) -> list[Any]:
    pieces = []
    for _ in range(steps):
        timeline.begin(clock())
        for _ in range(waits):
            device.launch(0.001)
            token = timeline.wait_begins()
            device.wait_until((device._end_ns or 0) + MS // 2)
            timeline.wait_ends(token)
        timeline.launched(clock())
        clock.sleep(waits * 0.0015)
        pieces.append(timeline.end(clock()))
        timeline.harvest(clock())
    clock.sleep(10)
    timeline.harvest(clock())
    return pieces


def watched(clock: FakeClock) -> tuple[FakeDevice, DeviceTimeline]:
    device = FakeDevice(clock, clock.sleep)
    timeline = DeviceTimeline(device)
    timeline.watches_ranks = True
    timeline.start(clock())
    return device, timeline


def test_many_waits_a_step_are_timed_in_some_steps_only() -> None:
    """FSDP waits twice and more for each of its layers."""
    clock = FakeClock()
    device, timeline = watched(clock)
    pieces = many_waits(timeline, device, clock, 300, 100)
    timed = sum(len(piece.waits) for piece in pieces)
    assert 0.5 < timed / 300 / (150 * MS / WAIT_TIMED_EVERY_NS) < 1.1
    assert {piece.times.comm_ns for piece in pieces} == {100 * MS // 2}
    assert device.events_made < 1000 and len({id(event) for event in device._free}) == len(device._free)


def test_a_piece_with_too_many_waits_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "_WAITS_A_PIECE", 50)
    clock = FakeClock()
    device, timeline = watched(clock)
    pieces = many_waits(timeline, device, clock, 3, 100)
    assert [piece.times.comm_ns for piece in pieces] == [None] * 3
    assert device.events_made < 200


def test_what_is_not_watched_is_not_measured_and_without_a_wait_it_is_none() -> None:
    clock = FakeClock()
    device, timeline = watched(clock)
    timeline.watches_ranks = False
    (piece,) = many_waits(timeline, device, clock, 1, 2)
    assert piece.times.comm_ns is None
    timeline.watches_ranks = True
    (piece,) = many_waits(timeline, device, clock, 1, 0)
    assert piece.times.comm_ns == 0


def test_a_wait_over_the_end_of_a_step_is_left_out() -> None:
    clock = FakeClock()
    device, timeline = watched(clock)
    many_waits(timeline, device, clock, 1, 1)
    timeline.begin(clock())
    token = timeline.wait_begins()
    ended = timeline.end(clock())
    timeline.begin(clock())
    timeline.wait_ends(token)
    timeline.end(clock())
    clock.sleep(1)
    timeline.harvest(clock())
    assert ended is not None and ended.times is not None and ended.waits == []
    assert ended.times.comm_ns == 0, "the mean says half a millisecond, and the step had no work at all"


@pytest.mark.parametrize("call", ["record", "usable"])
def test_an_error_of_an_event_around_a_wait_ends_the_timeline_alone(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    device, timeline = watched(clock)
    timeline.begin(clock())

    def fails(*_: Any) -> Any:
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(device, call, fails)
    assert timeline.wait_begins() is None
    assert str(timeline.error) == "CUDA error" and timeline.attention
    timeline.wait_ends(None)
    assert timeline.end(clock()) is None
