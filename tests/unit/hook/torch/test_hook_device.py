"""A `Watch` on a device that is only time: real loops, real contexts, the device's own account of them."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from benchmarks.fakes import FakeDevice
from gpuwatch import wire
from gpuwatch.hook.watch import Watch
from tests.unit.hook.fakes import MS, Clock, connect, fake_watch, in_autograds_thread, reported, turn


class Rig:
    """A watch, its clock and its device; `train` is a loop's body."""

    def __init__(self, monkeypatch: Any) -> None:
        self.clock = Clock()
        self.device = FakeDevice(self.clock, lambda seconds: self.clock.sleep_ms(seconds * 1e3))
        self.watch: Watch = fake_watch(self.clock, monkeypatch)
        self.watch.session.torch_hooks.attach(self.device)

    def batches(self, waits_ms: list[float]) -> Iterator[int]:
        for number, wait in enumerate(waits_ms):
            self.clock.sleep_ms(wait)
            yield number

    def train(self, host_ms: float, launch_ms: float, after_ms: float = 0.0) -> None:
        self.device.launch(launch_ms / 1e3)
        self.clock.sleep_ms(host_ms)
        self.watch._recorder.launched()
        self.clock.sleep_ms(after_ms)

    def states(self) -> dict[str, float]:
        """Return ms by state once the device has done all, and check that they close."""
        self.device.synchronize()
        self.watch._recorder.poll(self.clock())
        report = self.watch.report()
        timeline = self.watch._publisher.accounts.timeline
        assert timeline.ledger.sum_ns == timeline.ledger.watermark_ns - timeline.ledger.start_ns
        assert sum(report.states.values()) == pytest.approx(report.duration_s)
        return {state: round(seconds * 1e3, 6) for state, seconds in report.states.items() if seconds > 0}


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch)


def test_a_hidden_wait_is_never_called_starvation(rig: Rig) -> None:
    for _ in rig.watch.steps(rig.batches([8.0] * 50)):
        rig.train(host_ms=1, launch_ms=10)
    states = rig.states()
    assert states["input_wait"] == pytest.approx(8)  # the first, before anything was launched
    assert states["compute"] == pytest.approx(500)
    accounts = rig.watch._publisher.accounts
    assert accounts.timeline.counts.hidden_ns == 49 * 8 * MS
    assert rig.watch.report().timeline == "device"


def test_a_wait_that_is_partly_hidden_is_booked_for_what_the_device_felt(rig: Rig) -> None:
    for _ in rig.watch.steps(rig.batches([30.0] * 20)):
        rig.train(host_ms=1, launch_ms=10)
    states = rig.states()
    assert states["input_wait"] == pytest.approx(30 + 19 * 21)
    assert states["compute"] == pytest.approx(200)


def test_host_work_between_launch_and_fetch_is_host_wait(rig: Rig) -> None:
    for _ in rig.watch.steps(rig.batches([1.0] * 20)):
        rig.train(host_ms=6, launch_ms=6, after_ms=30)
    states = rig.states()
    assert states["host_wait"] == pytest.approx(20 * 30)
    assert states["input_wait"] == pytest.approx(20)


def test_an_evaluation_inside_a_loop_is_neither_gap_nor_starvation(rig: Rig) -> None:
    for number in rig.watch.steps(rig.batches([2.0] * 10)):
        rig.train(host_ms=5, launch_ms=5)
        if number == 4:
            with rig.watch.phase("eval"):
                for _ in rig.watch.steps(rig.batches([50.0] * 3)):
                    rig.device.launch(0.001)
                    rig.clock.sleep_ms(1)
    states = rig.states()
    assert states["eval"] == pytest.approx(153)
    assert states["input_wait"] == pytest.approx(20)
    assert states["compute"] == pytest.approx(50)
    assert rig.watch.report().steps == 10


def test_steps_without_a_loader_are_measured_too(rig: Rig) -> None:
    def fetch_then_copy() -> None:
        with rig.watch.data():
            rig.clock.sleep_ms(20)
        copy(rig)

    assert states_of_steps(rig, fetch_then_copy) == OF_TEN_STEPS


def test_a_declared_step_finds_the_device_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    device = FakeDevice(clock, lambda seconds: clock.sleep_ms(seconds * 1e3))
    watch = fake_watch(clock, monkeypatch)
    found: list[FakeDevice] = []
    monkeypatch.setattr("gpuwatch.hook.torch.install.torch_events", lambda _: found[0] if found else None)
    for number in range(20):
        with watch.step():
            with watch.data():
                clock.sleep_ms(8)
            device.launch(0.010)
            clock.sleep_ms(1)
            watch._recorder.launched()
        if number == 1:  # the model is moved to the device in the first steps
            found.append(device)
    device.synchronize()
    watch._recorder.poll(clock())
    report = watch.report()
    assert (report.timeline, report.coverage) == ("device", 0.9)
    assert report.states["input_wait"] == pytest.approx(2 * 0.008)  # of the steps before; all later waits were hidden


def test_a_loader_that_copies_by_itself_is_distinguished_from_the_wait(rig: Rig) -> None:
    def fetch_with_copy() -> None:
        with rig.watch.data():
            rig.clock.sleep_ms(20)
            copy(rig)

    assert states_of_steps(rig, fetch_with_copy) == OF_TEN_STEPS


OF_TEN_STEPS = pytest.approx({"input_wait": 20 + 9 * 11, "transfer": 40, "compute": 80})
"""12 ms of device work are launched over 3 ms: 9 of the 20 ms of each wait but the first are hidden."""


def test_a_copy_inside_a_copy_is_measured_once(rig: Rig) -> None:
    for _ in rig.watch.steps(rig.batches([0.0] * 10)):
        with rig.watch.transfer(), rig.watch.transfer():
            rig.device.launch(0.004)
        rig.train(host_ms=2, launch_ms=8)
    assert rig.states() == pytest.approx({"transfer": 40, "compute": 80})


@pytest.mark.parametrize("by_loader", [True, False])
def test_a_tensor_that_is_copied_inside_a_measured_copy_is_measured_once(
    by_loader: bool, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = torch.Tensor.to

    def to(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        rig.device.launch(0.004)
        return original(tensor, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "to", to)
        for batch in rig.watch.steps([torch.zeros(2)] * 10, to="meta" if by_loader else None):
            if not by_loader:
                with rig.watch.transfer():
                    batch.to("meta")
            rig.train(host_ms=2, launch_ms=8)
    assert rig.states() == pytest.approx({"transfer": 40, "compute": 80})


def test_a_copy_that_a_phase_interrupts_is_measured_in_no_other_piece(rig: Rig) -> None:
    for _ in rig.watch.steps(rig.batches([1.0] * 10)):
        with rig.watch.transfer():
            rig.device.launch(0.001)
            with rig.watch.phase("eval"):
                rig.clock.sleep_ms(5)
            rig.device.launch(0.002)
        rig.train(host_ms=15, launch_ms=10)
    states = rig.states()
    assert rig.watch._publisher.accounts.failures == 0
    assert states["eval"] == pytest.approx(40)  # the copy before it takes the device 1 ms of each
    assert "transfer" not in states


def test_a_wait_outside_of_a_step_is_felt_as_far_as_the_device_was_idle(rig: Rig) -> None:
    for _ in range(10):
        with rig.watch.data():
            rig.clock.sleep_ms(20)
        with rig.watch.step():
            rig.train(host_ms=2, launch_ms=10)
    assert rig.states() == pytest.approx({"input_wait": 20 + 9 * 12, "compute": 100})
    recent = rig.watch._publisher.accounts._recent
    assert [step.exposed.input_wait_ns for step in recent if step.exposed] == [20 * MS, *[12 * MS] * 9]


def test_each_wait_of_a_step_with_two_optimizers_is_measured(rig: Rig) -> None:
    for _ in range(10):
        with rig.watch.step():
            for _ in range(2):
                with rig.watch.data():
                    rig.clock.sleep_ms(30)
                rig.train(host_ms=1, launch_ms=11)
    assert rig.states() == pytest.approx({"input_wait": 30 + 19 * 20, "compute": 220})


def test_a_second_wait_behind_work_of_the_same_step_is_hidden(rig: Rig) -> None:
    for _ in range(10):
        with rig.watch.step():
            with rig.watch.data():
                rig.clock.sleep_ms(5)
            rig.device.launch(0.050)
            rig.clock.sleep_ms(1)
            with rig.watch.data():
                rig.clock.sleep_ms(40)
            rig.train(host_ms=1, launch_ms=10)
    assert rig.states() == pytest.approx({"input_wait": 5, "compute": 600})


def test_work_queued_before_the_first_batch_makes_no_later_wait_starvation(rig: Rig) -> None:
    rig.device.launch(0.2)
    for _ in rig.watch.steps(rig.batches([1.0] * 600)):  # quick ones, most of which are not measured in detail
        rig.train(host_ms=0.5, launch_ms=0.5)
    starved_ms = rig.device.idle_ns / MS
    assert rig.states().get("input_wait", 0.0) <= starved_ms


def test_an_odd_capture_takes_no_unfinished_piece_for_finished(rig: Rig) -> None:
    ends_captured, begins_captured = {1, 3}, {2, 4}
    for number in rig.watch.steps(rig.batches([3.0] * 10)):
        rig.device.capturing = number in begins_captured
        rig.train(host_ms=1, launch_ms=50)
        rig.device.capturing = number in ends_captured
    rig.states()
    assert rig.watch._publisher.accounts.failures == 0


def test_in_a_stall_steps_that_have_ended_are_booked_as_such(rig: Rig) -> None:
    for number in rig.watch.steps(rig.batches([1.0] * 3)):
        with rig.watch.transfer():
            rig.device.launch(3.0)
            rig.clock.sleep_ms(3000)
        if number == 2:
            for _ in range(80):
                rig.clock.sleep_ms(500)
                turn(rig.watch)
        rig.device.launch(0.01)
    states = rig.states()
    assert states["stalled"] == pytest.approx(43_001, abs=2)
    assert rig.watch._publisher.accounts.timeline.ledger.watermark_ns <= rig.clock()


def test_copies_that_never_end_make_a_bounded_number_of_events(rig: Rig) -> None:
    recorder = rig.watch._recorder
    for _ in rig.watch.steps(rig.batches([1.0] * 3)):
        for elsewhere in (False, True):
            rig.device.elsewhere = elsewhere
            for _ in range(5000):
                rig.clock.sleep_ms(0.2)
                with rig.watch.transfer():
                    rig.device.launch(0.0001)
        rig.device.elsewhere = False
    assert recorder.active_timeline is not None
    assert rig.device.events_made < 1000


def test_a_phase_in_each_step_makes_no_more_events(rig: Rig) -> None:
    for _ in rig.watch.steps(rig.batches([1.0] * 1000)):
        rig.train(host_ms=1, launch_ms=1)
        with rig.watch.phase("rollout"):
            rig.clock.sleep_ms(1)
    rig.states()
    assert rig.device.events_made <= 100


def test_rests_make_no_more_events(rig: Rig) -> None:
    recorder = rig.watch._recorder
    for _ in rig.watch.steps(rig.batches([1.0] * 4000)):
        recorder.countdown = min(recorder.countdown, 4)
        recorder.meter.device_one_in = 2
        rig.train(host_ms=1, launch_ms=1)
    rig.states()
    assert rig.device.events_made <= 100


def test_a_device_whose_clock_is_fast_is_not_booked_into_the_future(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    elapsed = rig.device.elapsed_ns
    monkeypatch.setattr(rig.device, "elapsed_ns", lambda first, second: 3 * elapsed(first, second))
    for _ in rig.watch.steps(rig.batches([1.0] * 50)):
        rig.train(host_ms=2, launch_ms=9)
        turn(rig.watch)
        assert rig.watch._publisher.accounts.timeline.ledger.watermark_ns <= rig.clock()
    assert sum(rig.states().values()) == pytest.approx(451)


def test_a_forked_child_goes_on_without_events(rig: Rig) -> None:
    for number in rig.watch.steps(rig.batches([1.0] * 6)):
        rig.train(host_ms=2, launch_ms=9)
        if number == 2:
            child = os.fork()
            if not child:
                break
    if not child:
        code = 3
        try:
            rig.device.faults = True
            monkey: Any = rig.device
            monkey.record = monkey.ready = monkey.usable = monkey.elapsed_ns = None  # a call raises
            for _ in rig.watch.steps(rig.batches([1.0] * 6)):
                rig.watch._recorder.launched()
            rig.watch.close()
            code = 7
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert rig.states()["compute"] == pytest.approx(54)


def copy(rig: Rig) -> None:
    with rig.watch.transfer():
        rig.device.launch(0.004)
        rig.clock.sleep_ms(1)


def states_of_steps(rig: Rig, feed: Callable[[], None]) -> dict[str, float]:
    """Return ms by state of ten declared steps, each fed so."""
    for _ in range(10):
        with rig.watch.step():
            feed()
            rig.train(host_ms=2, launch_ms=8)
    return rig.states()


def test_the_wire_carries_what_the_device_felt(rig: Rig) -> None:
    sender = connect(rig.watch)
    for _ in rig.watch.steps(rig.batches([30.0] * 5)):
        rig.train(host_ms=1, launch_ms=10)
    rig.states()
    turn(rig.watch, hello=True)
    steps = [message for message in reported(sender) if isinstance(message, wire.Steps)][-1]
    assert list(wire.unpack(steps.columns["data_wait_ns"])) == [30 * MS] * 5
    assert list(wire.unpack(steps.columns["input_wait_ns"])) == [30 * MS, *[21 * MS] * 4]
    assert steps.totals.device_steps == 5 and steps.totals.hidden_ns == 4 * 9 * MS


def test_while_the_device_works_on_the_ledger_waits_and_the_report_is_provisional(rig: Rig) -> None:
    for _ in rig.watch.steps(rig.batches([0.0] * 5)):
        rig.train(host_ms=1, launch_ms=100)
    report = rig.watch.report()
    assert report.steps == 0  # none is done by the device
    assert sum(report.states.values()) == pytest.approx(report.duration_s)
    assert report.provisional["compute"] == pytest.approx(0.005)


def test_closing_does_not_wait_for_the_device_and_loses_no_second(rig: Rig) -> None:
    for _ in rig.watch.steps(rig.batches([0.0] * 5)):
        rig.train(host_ms=1, launch_ms=100)
    before = rig.clock()
    rig.watch.close()
    assert rig.clock() == before and rig.device.synchronized == 0
    report = rig.watch.report()
    assert report.steps == 5
    assert sum(report.states.values()) == pytest.approx(report.duration_s)


def test_a_graph_capture_in_the_middle_leaves_events_alone(rig: Rig) -> None:
    for number in rig.watch.steps(rig.batches([5.0] * 9)):
        rig.device.capturing = number in (3, 4)  # recording or querying an event raises then
        rig.train(host_ms=2, launch_ms=2)
    rig.device.capturing = False
    states = rig.states()
    assert states["compute"] == pytest.approx(18, abs=3)
    assert rig.watch.report().steps == 9


def test_the_optimizer_s_step_is_the_last_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    hooks = sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks  # type: ignore[attr-defined]
    before = len(hooks)
    rig = Rig(monkeypatch)
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in rig.watch.steps(rig.batches([1.0] * 5)):
        rig.device.launch(0.005)
        rig.clock.sleep_ms(5)
        optimizer.step()
        rig.clock.sleep_ms(30)
    assert rig.states()["host_wait"] == pytest.approx(150)
    rig.watch.close()
    assert len(hooks) == before  # nothing stays behind


@pytest.mark.parametrize("logs", [False, True])
def test_the_last_launch_in_the_backward_pass_is_known(logs: bool, rig: Rig) -> None:
    for _ in rig.watch.steps(rig.batches([1.0] * 20)):
        rig.device.launch(0.006)
        rig.clock.sleep_ms(6)
        in_autograds_thread(rig.watch._recorder.launched, logs)
        rig.clock.sleep_ms(30)
    assert rig.states()["host_wait"] == pytest.approx(600)


def test_host_work_after_the_last_launch_of_all_is_host_wait_too(rig: Rig) -> None:
    for number in rig.watch.steps(rig.batches([1.0] * 9)):
        rig.train(host_ms=6, launch_ms=6, after_ms=30)
        if number == 1:
            break
    assert rig.states()["host_wait"] == pytest.approx(60)
    rig.clock.sleep_ms(5)
    rig.watch.close()
    states = rig.watch.report().states
    assert states["host_wait"] == pytest.approx(0.060)
    assert states["other"] == pytest.approx(0.005)


def ends(rig: Rig) -> tuple[float | None, float | None]:
    """Return the shares of steps at whose end the device had drained, and in which a result was read back."""
    rig.device.synchronize()
    rig.watch._recorder.poll(rig.clock())
    accounts = rig.watch._publisher.accounts
    with accounts.lock:
        accounts.apply(rig.clock())
        window = accounts.window(rig.clock())[0]
    return window.drained_ratio, window.read_back_ratio


@pytest.mark.parametrize(
    "read", [lambda loss: loss.item(), float, int, bool, lambda loss: loss.tolist(), lambda loss: loss.cpu()]
)
def test_how_often_the_device_has_drained_and_results_are_read_back_is_reported(rig: Rig, read: Any) -> None:
    class OnDevice(torch.Tensor):
        is_cpu = False  # type: ignore[assignment]

    loss = torch.zeros(()).as_subclass(OnDevice)
    for number, _ in enumerate(rig.watch.steps(rig.batches([0.0] * 20))):
        rig.train(host_ms=1, launch_ms=10)
        if number % 2:
            rig.device.synchronize()
            read(loss)
    assert ends(rig) == (0.5, 0.5)
    assert not {"item", "__float__", "__bool__"} & set(torch.Tensor.__dict__)


def test_a_host_that_works_on_after_its_last_launch_reads_nothing_back(rig: Rig) -> None:
    for _ in rig.watch.steps(rig.batches([0.0] * 20)):
        rig.train(host_ms=1, launch_ms=10, after_ms=15)
    assert ends(rig) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("step_ms", "launch_ms"), [(0.1, 0.05), (0.1, 10.0), (60.0, 1.0)], ids=["quick", "far behind", "slow"]
)
def test_quick_steps_are_read_many_at_a_time_and_slow_ones_at_once(
    step_ms: float, launch_ms: float, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeline, at = rig.watch._recorder.timeline, []
    assert timeline is not None
    harvest = type(timeline).harvest

    def noted(self: Any, now_ns: int) -> Any:
        at.append(now_ns)
        return harvest(self, now_ns)

    monkeypatch.setattr(type(timeline), "harvest", noted)
    reported = []
    for number in rig.watch.steps(range(160)):
        rig.train(host_ms=step_ms, launch_ms=launch_ms)
        turn(rig.watch)
        reported.append(rig.watch._publisher.accounts.timeline.counts.steps)
        if launch_ms < step_ms:
            assert number - reported[-1] <= (16 if step_ms < 50 else 0)
    assert len(at) <= (160 / 16 + 160 / 32 + 2 if step_ms < 50 else 160 + 2)
    states = rig.states()
    assert rig.watch.report().steps == 160
    assert states["compute"] == pytest.approx(160 * max(step_ms, launch_ms), rel=0.01)


def test_the_last_steps_of_a_loop_are_read_when_it_ends(rig: Rig) -> None:
    for _ in rig.watch.steps(range(5)):
        rig.train(host_ms=0.1, launch_ms=0.05)
    assert rig.watch.report().steps == 5
    for number in rig.watch.steps(range(9)):
        rig.train(host_ms=0.1, launch_ms=0.05)
        if number == 6:
            break
    assert rig.watch.report().steps == 12


WAITS_MS: dict[str, Callable[[int, random.Random], float]] = {
    "bursts": lambda number, _: 60.0 if number % 4 == 3 else 1.0,
    "mild bursts": lambda number, _: 38.0 if number % 4 == 3 else 1.0,
    "at random": lambda _, chance: chance.expovariate(1 / 12),
    "constant": lambda *_: 25.0,
}


@pytest.mark.parametrize("waits", WAITS_MS)
@pytest.mark.parametrize("one_in", [2, 4, 16])
def test_steps_that_rest_are_estimated_within_2_points(rig: Rig, waits: str, one_in: int) -> None:
    """The device's timeline measures one stretch of four steps in so many; queued pieces of it stand for the rest."""
    recorder, chance = rig.watch._recorder, random.Random(1)
    waits_ms = [WAITS_MS[waits](number, chance) for number in range(800)]
    for _ in rig.watch.steps(rig.batches(waits_ms)):
        recorder.countdown = min(recorder.countdown, 4)
        recorder.meter.device_one_in = one_in
        rig.train(host_ms=1, launch_ms=10)
    states = rig.states()
    whole = sum(states.values())
    truth_ms = rig.device.idle_ns / MS + waits_ms[0]
    assert rig.watch.report().coverage < 0.6
    assert 100 * states["input_wait"] / whole == pytest.approx(100 * truth_ms / whole, abs=2)


def test_waits_of_a_device_that_fell_far_behind_are_not_taken_for_starvation(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past 256 unfinished pieces all of them are given up: the device was busy."""
    timeline, given_up = rig.watch._recorder.timeline, list[int]()
    assert timeline is not None
    give_up = timeline._give_up_busy
    monkeypatch.setattr(timeline, "_give_up_busy", lambda: (given_up.append(len(timeline._pending)), give_up()))
    for number in rig.watch.steps(rig.batches([1.0] * 400)):
        rig.train(host_ms=0.5, launch_ms=2000 if number == 20 else 0.5)
    states = rig.states()
    assert sum(given_up) >= 256
    assert states["input_wait"] <= rig.device.idle_ns / MS + 1.0 + 1.0


def test_nor_is_the_host_s_work_then_a_wait_for_it(rig: Rig) -> None:
    for number in rig.watch.steps(rig.batches([1.0] * 400)):
        rig.train(host_ms=0.5, launch_ms=20_000 if number == 20 else 0.5, after_ms=3)
    assert rig.states()["host_wait"] == pytest.approx(20 * 3), "before it fell behind"


@pytest.mark.parametrize(
    ("fails_at", "one_in", "clock"), [(20, 1, "host"), (380, 1, "device"), (380, 4, "device")], ids=str
)
def test_after_an_error_of_an_event_the_verdict_is_of_the_clock_that_most_steps_are_measured_by(
    fails_at: int, one_in: int, clock: str, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device is never idle; by the host's clock 89% is a wait. At rest its steps are estimated."""
    monkeypatch.setattr("gpuwatch.hook.account.device", lambda: "cuda")

    def broken(event: Any) -> Any:
        raise RuntimeError("CUDA error: out of memory")

    recorder = rig.watch._recorder
    for number in rig.watch.steps(rig.batches([8.0] * 400)):
        recorder.countdown = min(recorder.countdown, 4)
        recorder.meter.device_one_in = one_in
        if number == fails_at:
            monkeypatch.setattr(rig.device, "record", broken)
        rig.train(host_ms=1, launch_ms=10)
    rig.states()
    report = rig.watch.report()
    assert recorder.device_failed and report.timeline == clock
    assert ("by the host clock" in report.verdict.sentence) == (clock == "host")


def test_the_driver_is_asked_about_the_gpu_that_is_trained_on_now(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cells of a notebook, the second one after `torch.cuda.set_device(1)`."""
    asked: list[str] = []

    class Own:
        def __init__(self, uuid: str) -> None:
            self.uuid = uuid

        def sample(self) -> None:
            asked.append(self.uuid)

        def facts(self) -> tuple[Any, ...]:
            return ()

    monkeypatch.setattr("gpuwatch.hook.evidence.OwnGpu", Own)
    for uuid in ("GPU-0", "GPU-1"):
        device: Any = FakeDevice(rig.clock)
        device.uuid = uuid
        rig.watch.session.torch_hooks.attach(device)
        for _ in rig.watch.steps(rig.batches([1.0] * 300)):
            device.launch(0.001)
            rig.clock.sleep_ms(2)
        turn(rig.watch)
        rig.watch._publisher.accounts.sample_host()
    assert asked == ["GPU-0", "GPU-1"]


@pytest.mark.parametrize("compute_ms", [8.0, 20.0])
def test_one_slow_first_step_does_not_decide_a_short_run_s_verdict(rig: Rig, compute_ms: float) -> None:
    """2 s of tuning in the first of 20 steps: what decides is what the others do."""
    for number, _ in enumerate(rig.watch.steps(rig.batches([12.0] * 20))):
        launch_ms = 2000.0 if number == 0 else compute_ms
        rig.train(host_ms=launch_ms, launch_ms=launch_ms)
    rig.states()
    report = rig.watch.report()
    assert report.states["compute"] == pytest.approx(2 + 19 * compute_ms / 1e3)  # the ledger leaves nothing out
    assert report.verdict.state == "input"
    assert report.verdict.ratio == pytest.approx(12 / (12 + compute_ms), abs=0.01)
    assert report.verdict.sentence.startswith("start: the first step took 2")


def test_copies_that_copy_nothing_record_no_event(rig: Rig) -> None:
    there = torch.zeros(2, device="meta")
    for _ in rig.watch.steps(rig.batches([1.0] * 100)):
        for _ in range(50):
            assert there.to("meta") is there
        torch.zeros(2).to("cpu")
        rig.train(host_ms=1, launch_ms=1)
    rig.states()
    assert rig.device.events_made <= 60  # those of the pieces that wait to be read together


@pytest.mark.parametrize("pinned", [False, True])
def test_whether_batches_are_pinned_is_seen_in_their_copies(
    pinned: bool, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a DataLoader, or where that cannot pin what it makes, no setting says so: slow copies had no cause."""
    asked: list[int] = []
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: asked.append(tensor.numel()) or pinned)
    original = torch.Tensor.to

    def slow(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        rig.device.launch(0.004)
        rig.clock.sleep_ms(4)
        return original(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", slow)
    for _ in rig.watch.steps(rig.batches([1.0] * 40)):
        torch.ones(1 << 20).to("meta")
        torch.ones(4).to("meta")
        rig.train(host_ms=5, launch_ms=5)
    rig.states()
    assert set(asked) == {1 << 20}
    found = [each.cause for each in rig.watch.report().findings]
    assert ("transfer_pageable" in found) is not pinned, found
