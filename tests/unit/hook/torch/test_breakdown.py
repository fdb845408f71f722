"""Compute by section, on request: forward, backward and optimizer, by the host's clock or by the device's events."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch.utils.checkpoint import checkpoint  # noqa: E402

from benchmarks.fakes import FakeDevice  # noqa: E402
from gpuwatch import wire  # noqa: E402
from gpuwatch.hook.torch import breakdown as breakdown_module  # noqa: E402
from gpuwatch.ledger.states import BACKWARD, FORWARD, MOST_MARKS, OPTIMIZER, sections_ns  # noqa: E402
from tests.unit.hook.fakes import MS, Clock, connect, fake_watch, reported, turn  # noqa: E402

NOT_MEASURED = "in compute: not measured, as no backward pass was timed after the first step"


class Takes(torch.autograd.Function):  # type: ignore[misc]
    """The identity, with functions that are called in its forward and its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Any, forward: Callable[[], None], backward: Callable[[], None]) -> Any:
        forward()
        ctx.backward = backward
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        ctx.backward()
        return gradient, None, None


class Training:
    """A watch with `breakdown`, on a clock that is set.

    On a device that is only time, calls launch work and return after 0.1 ms.
    """

    def __init__(self, monkeypatch: Any, on_device: bool = False, **options: Any) -> None:
        self.clock = Clock()
        self.watch = fake_watch(self.clock, monkeypatch, **{"breakdown": True, **options})
        self.device = FakeDevice(self.clock, lambda seconds: self.clock.sleep_ms(seconds * 1e3)) if on_device else None
        if self.device is not None:
            self.watch.session.torch_hooks.attach(self.device)
        training, self.optimizer_ms = self, 0.0

        class Sgd(torch.optim.SGD):  # type: ignore[misc]
            def step(self, closure: Any = None) -> Any:
                loss = None if closure is None else closure()
                training.spend(training.optimizer_ms)
                step = torch.optim.SGD.step  # once there has been an SGD in this process, torch calls hooks in it too
                (step.__wrapped__ if getattr(step, "hooked", False) else step)(self)
                return loss

        self.weight = torch.nn.Parameter(torch.ones(1))
        self.optimizers = [Sgd([self.weight], 0.01)]

    def spend(self, ms: float) -> None:
        if self.device is None:
            self.clock.sleep_ms(ms)
        else:
            self.device.launch(ms / 1e3)
            self.clock.sleep_ms(0.1)

    def batches(self, count: int, wait_ms: float = 1.0) -> Iterator[int]:
        for number in range(count):
            if self.device is not None:
                self.device.synchronize()  # as if each loss was read: else the host runs ahead
            self.clock.sleep_ms(wait_ms)
            yield number

    def loss(self, forward_ms: float, backward_ms: float) -> Any:
        return Takes.apply(self.weight * 2, lambda: self.spend(forward_ms), lambda: self.spend(backward_ms)).sum()

    def step(self, forward_ms: float = 30, backward_ms: float = 50, optimizer_ms: float = 20, micro: int = 1) -> None:
        for _ in range(micro):
            self.loss(forward_ms, backward_ms).backward()
        self.optimizer_ms = optimizer_ms
        for each in self.optimizers:
            each.step()

    def ms(self) -> dict[str, float]:
        """Return the ms of each section that was measured, once the device has done all."""
        if self.device is not None:
            self.device.synchronize()
            self.watch._recorder.poll(self.clock())
        found = self.watch.report().breakdown
        assert found is not None
        return {section: round(spent_s * 1e3, 3) for section, spent_s in found.items()}

    def text(self) -> str:
        self.ms()
        return str(self.watch.report())


def hooks_left() -> list[Any]:
    optimizer: Any = sys.modules["torch.optim.optimizer"]
    return [*optimizer._global_optimizer_pre_hooks, *optimizer._global_optimizer_post_hooks]


@pytest.fixture(params=["host", "device"])
def training(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Training]:
    """One that measures by the host's clock, or by a device."""
    own = torch.autograd.backward
    made = Training(monkeypatch, on_device=request.param == "device")
    yield made
    assert made.watch._publisher.accounts.failures == 0
    made.watch.close()
    assert torch.autograd.backward is own and not hooks_left()


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Training]:
    made = Training(monkeypatch)
    yield made
    made.watch.close()
    assert not hooks_left()


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Training]:
    made = Training(monkeypatch, on_device=True)
    yield made
    made.watch.close()


def test_the_sections_of_a_step_are_forward_backward_and_the_optimizer(training: Training) -> None:
    agent = connect(training.watch)
    for _ in training.watch.steps(training.batches(11)):
        training.step(30, 50, 20)
    assert training.ms() == {FORWARD: 300, BACKWARD: 500, OPTIMIZER: 200}, "of all but the first"
    assert "\n        in compute: forward and the rest 30%, backward 50%, optimizer 20%\n" in training.text()
    metrics = training.watch.report().metrics()
    assert [round(metrics[f"gpuwatch/compute_{name}_ratio"], 6) for name in (FORWARD, BACKWARD)] == [0.3, 0.5]
    turn(training.watch)
    sent = next(message for message in reversed(reported(agent)) if isinstance(message, wire.Steps))
    assert sent.totals.breakdown_ns == {FORWARD: 300 * MS, BACKWARD: 500 * MS, OPTIMIZER: 200 * MS}


def test_a_part_of_the_run_has_its_own_shares(on_host: Training) -> None:
    for _ in on_host.watch.steps(on_host.batches(11)):
        on_host.step(30, 50, 20)
    earlier = on_host.watch.report()
    for _ in on_host.watch.steps(on_host.batches(10)):
        on_host.step(80, 10, 10)
    since = on_host.watch.report().metrics(since=earlier)
    assert since["gpuwatch/compute_forward_ratio"] == pytest.approx(0.8)


def test_a_declared_step_and_one_bounded_by_the_optimizer_have_them_too(on_host: Training) -> None:
    for _ in range(11):
        with on_host.watch.step():
            on_host.step(30, 50, 20)
    assert on_host.ms() == {FORWARD: 300, BACKWARD: 500, OPTIMIZER: 200}


def test_steps_that_an_optimizer_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under `gpuwatch run`: the hook that ends the step comes after ours."""
    made = Training(monkeypatch)
    model = torch.nn.Linear(1, 1)
    handle = sys.modules["torch.optim.optimizer"].register_optimizer_step_post_hook(  # type: ignore[attr-defined]
        lambda optimizer, *_: (
            None
            if made.watch.session.torch_hooks.optimizer.is_installed
            else made.watch.session.torch_hooks.optimizer.stepped(optimizer)
        )
    )
    for _ in range(12):
        made.clock.sleep_ms(7)
        model(torch.ones(1))
        made.step(30, 50, 20)
    assert made.ms() == {FORWARD: 300, BACKWARD: 500, OPTIMIZER: 200}
    assert made.watch.report().states["input_wait"] == pytest.approx(0.077)
    handle.remove()
    made.watch.close()
    assert not hooks_left()


@pytest.mark.parametrize("in_one_step", [True, False], ids=["in a step", "over several steps"])
def test_gradients_that_are_accumulated_add_up(training: Training, in_one_step: bool) -> None:
    for number in training.watch.steps(training.batches(41)):
        if in_one_step:
            training.step(30, 50, 20, micro=4)
        elif number % 4 == 0:
            training.step(30, 50, 80)
        else:
            training.loss(30, 50).backward()
    whole = training.ms()
    assert {name: round(ms / sum(whole.values()), 3) for name, ms in whole.items()} == {
        FORWARD: pytest.approx(120 / 340 if in_one_step else 0.3, abs=0.001),
        BACKWARD: pytest.approx(200 / 340 if in_one_step else 0.5, abs=0.001),
        OPTIMIZER: pytest.approx(20 / 340 if in_one_step else 0.2, abs=0.001),
    }


def test_several_optimizers_add_up_and_one_inside_another_counts_once(training: Training) -> None:
    class Around(torch.optim.Optimizer):  # type: ignore[misc]
        def __init__(self, inner: Any) -> None:
            super().__init__(inner.param_groups, {})
            self.inner = inner

        def step(self, closure: Any = None) -> None:
            training.spend(5)
            self.inner.step()
            training.spend(5)

    first = training.optimizers[0]
    training.optimizers = [first, Around(type(first)([training.weight], 0.1))]
    for _ in training.watch.steps(training.batches(11)):
        training.step(30, 50, 10)
    assert training.ms() == {FORWARD: 300, BACKWARD: 500, OPTIMIZER: 300}


def test_the_closure_of_an_optimizer_is_forward_and_backward(training: Training) -> None:
    """Lightning trains so, and LBFGS."""

    def closure() -> Any:
        loss = training.loss(30, 50)
        loss.backward()
        return loss

    training.optimizer_ms = 20
    for _ in training.watch.steps(training.batches(11)):
        training.optimizers[0].step(closure)
    assert training.ms() == {FORWARD: 300, BACKWARD: 500, OPTIMIZER: 200}


def test_an_optimizer_that_steps_inside_the_backward_pass_is_a_part_of_that(on_host: Training) -> None:
    on_host.weight.register_post_accumulate_grad_hook(lambda _: on_host.optimizers[0].step())
    on_host.optimizer_ms = 20
    for _ in on_host.watch.steps(on_host.batches(11)):
        on_host.loss(30, 50).backward()
    assert on_host.ms() == {FORWARD: 300, BACKWARD: 700}
    assert "in compute: forward and the rest 30%, backward 70% (no optimizer step was seen)" in on_host.text()


def test_a_checkpoint_that_runs_backward_inside_of_it_counts_once(on_host: Training) -> None:
    for _ in on_host.watch.steps(on_host.batches(11)):
        checkpoint(lambda x: on_host.loss(15, 35) + x.sum(), on_host.weight * 1, use_reentrant=True).backward()
    assert on_host.ms() == {FORWARD: 150, BACKWARD: 500}, "the backward pass computes forward once more"


def test_errors_of_a_backward_pass_or_an_optimizer_pass_and_the_next_steps_are_right(training: Training) -> None:
    def fails() -> None:
        training.spend(10)
        raise ValueError("in backward")

    class Failing(torch.optim.Optimizer):  # type: ignore[misc]
        def step(self, closure: Any = None) -> None:
            raise KeyError("in the optimizer")

    failing = Failing([training.weight], {})
    for number in training.watch.steps(training.batches(13)):
        if number == 4:
            with pytest.raises(ValueError, match="in backward"):
                Takes.apply(training.weight * 2, lambda: None, fails).sum().backward()
        if number == 8:
            with pytest.raises(KeyError):
                failing.step()
        training.step(30, 50, 20)
    # Of 11 steps, and the pass that failed: the step in which an optimizer has failed has no end of that.
    assert training.ms() == {FORWARD: 330, BACKWARD: 560, OPTIMIZER: 220}


def test_a_second_thread_is_no_part_of_the_step(on_host: Training) -> None:
    other = torch.nn.Parameter(torch.ones(1))

    def elsewhere() -> None:
        (other * 2).sum().backward()
        torch.optim.SGD([other], 0.1).step()

    for _ in on_host.watch.steps(on_host.batches(11)):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        on_host.step(30, 50, 20)
    assert on_host.ms() == {FORWARD: 300, BACKWARD: 500, OPTIMIZER: 200}


def test_what_is_no_training_step_is_left_out(training: Training) -> None:
    """A backward pass in an evaluation, between steps, or in a step that compiles in it."""
    for number in training.watch.steps(training.batches(12)):
        if number == 3:
            with training.watch.phase("eval"):
                training.loss(100, 700).backward()
        if number == 6:
            level = 0

            def compiles() -> None:
                nonlocal level
                recorder = training.watch._recorder
                level = recorder.enter("compile", training.clock())
                training.clock.sleep_ms(900)
                recorder.exit(level, training.clock())

            Takes.apply(training.weight * 2, lambda: None, compiles).sum().backward()
        training.step(30, 50, 20)
    training.loss(100, 700).backward()
    found = training.ms()
    assert {name: ms / sum(found.values()) for name, ms in found.items()} == {
        FORWARD: pytest.approx(0.3), BACKWARD: pytest.approx(0.5), OPTIMIZER: pytest.approx(0.2),
    }  # fmt: skip
    assert sum(found.values()) in (900, 1000), "without the step that compiled, and on a host that with the phase"


def test_without_a_backward_call_nothing_is_measured(training: Training) -> None:
    for _ in training.watch.steps(training.batches(11)):
        (gradient,) = torch.autograd.grad(training.loss(30, 50), [training.weight])
        training.weight.grad = gradient
        training.optimizers[0].step()
    assert training.ms() == {} and NOT_MEASURED in training.text()
    assert not [name for name in training.watch.report().metrics() if "forward" in name or "backward" in name]


def test_without_the_request_torch_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    own = torch.autograd.backward
    made = Training(monkeypatch, breakdown=False)
    for _ in made.watch.steps(made.batches(4)):
        assert torch.autograd.backward is own
        assert len(hooks_left()) == 1, "that of the optimizer's steps"
        made.step()
    assert made.watch.report().breakdown is None and "in compute" not in str(made.watch.report())
    assert not made.watch._publisher.accounts.timeline.counts.breakdown_ns
    made.watch.close()


def test_it_is_requested_by_a_variable_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUWATCH_BREAKDOWN", "1")
    made = Training(monkeypatch, breakdown=None)
    assert made.watch.report().breakdown == {}
    made.watch.close()


def test_two_watches_leave_torch_as_it_was_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    own = torch.autograd.backward
    outer, inner = Training(monkeypatch), Training(monkeypatch)
    for _ in zip(outer.watch.steps(outer.batches(11)), inner.watch.steps(inner.batches(11)), strict=True):
        assert torch.autograd.backward is not own and torch.autograd.backward.__doc__ == own.__doc__
        outer.step(30, 50, 20)
    assert outer.ms() == {FORWARD: 300, BACKWARD: 500, OPTIMIZER: 200}
    outer.watch.close()
    inner.watch.close()
    assert torch.autograd.backward is own and not hooks_left()


# On a device --------------------------------------------------------------------------------------------------------


def test_launches_of_a_device_without_events_are_not_presented_as_its_work(
    on_host: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(breakdown_module, "device_in_use", lambda torch: "cuda")
    for _ in on_host.watch.steps(on_host.batches(11)):
        on_host.step()
    assert on_host.ms() == {}


def test_a_loss_on_a_device_that_torch_does_not_list_is_not_timed_by_the_host(on_host: Training) -> None:
    for _ in on_host.watch.steps(on_host.batches(4)):
        torch.ones(1, device="meta", requires_grad=True).sum().backward()
    assert on_host.ms() == {}


def test_while_the_devices_timeline_rests_nothing_is_measured(on_device: Training) -> None:
    for _ in on_device.watch.steps(on_device.batches(11)):
        on_device.watch._recorder.rest_device(True)
        on_device.step()
    assert on_device.ms() == {}


def test_quick_steps_are_sampled_whole_and_events_are_reused(on_device: Training) -> None:
    """Four micro-batches with a wait for each, of 5 ms: in a step all of its pieces are measured, or none."""
    chance, truth = random.Random(3), dict.fromkeys((FORWARD, BACKWARD, OPTIMIZER), 0.0)
    watch, device = on_device.watch, on_device.device
    assert device is not None
    for _ in range(2000):
        with watch.step():
            for micro in range(4):
                with watch.data():
                    on_device.clock.sleep_ms(0.2)
                ms = [chance.uniform(0.5, 2.5), chance.uniform(1.0, 5.0), chance.uniform(0.5, 1.5) * (micro == 3)]
                on_device.loss(ms[0], ms[1]).backward()
                if micro == 3:
                    on_device.optimizer_ms = ms[2]
                    on_device.optimizers[0].step()
                truth = {name: spent + new for (name, spent), new in zip(truth.items(), ms, strict=True)}
            device.synchronize()
    found = on_device.ms()
    assert sum(found.values()) / sum(truth.values()) == pytest.approx(1 / 16, rel=0.35), "one in sixteen"
    for name, spent in truth.items():
        assert found[name] / sum(found.values()) == pytest.approx(spent / sum(truth.values()), abs=0.02)
    assert device.events_made < 200


def test_while_a_graph_is_captured_no_event_is_recorded_and_nothing_is_measured(on_device: Training) -> None:
    device = on_device.device
    assert device is not None
    for number in on_device.watch.steps(on_device.batches(20)):
        device.capturing = number % 2 == 0
        on_device.loss(30, 50).backward()
        device.capturing = False
        on_device.optimizer_ms = 20
        on_device.optimizers[0].step()
    assert on_device.ms() == {FORWARD: 300, BACKWARD: 500, OPTIMIZER: 200}, "of the steps without a capture"


def test_work_that_ends_on_another_stream_is_not_measured_and_its_events_are_reused(on_device: Training) -> None:
    device = on_device.device
    assert device is not None
    for _ in on_device.watch.steps(on_device.batches(400)):
        loss = on_device.loss(30, 50)
        loss.register_hook(lambda gradient: setattr(device, "elsewhere", True))
        loss.backward()
        device.elsewhere = False
    assert on_device.ms() == {} and device.events_made < 200


def test_an_event_that_fails_ends_the_measuring_and_not_the_training(
    on_device: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = on_device.device
    assert device is not None

    def fails(event: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    for number in on_device.watch.steps(on_device.batches(20)):
        if number == 10:
            monkeypatch.setattr(device, "record", fails)
        on_device.step()
        if number == 10:
            monkeypatch.undo()
    assert on_device.watch.report().steps == 20 and on_device.watch._publisher.accounts.failures == 1


# The arithmetic -----------------------------------------------------------------------------------------------------


def spent(*marks: tuple[str, int | None], compute_ns: int = 2000) -> dict[str, int] | None:
    return sections_ns(marks, lambda begin, end: end - begin, compute_ns)


def test_the_sections_between_marks() -> None:
    assert spent() == {FORWARD: 2000}
    whole = {FORWARD: 1975, BACKWARD: 20, OPTIMIZER: 5}
    assert spent((BACKWARD, 10), (FORWARD, 30), (OPTIMIZER, 35), (FORWARD, 40)) == whole
    assert spent((OPTIMIZER, 0), (BACKWARD, 10), (OPTIMIZER, 30), (FORWARD, 35)) == whole, "10 of its closure's forward"
    assert spent((BACKWARD, 10), (FORWARD, None)) is None, "its end was not measured"
    assert spent((BACKWARD, 10)) is None and spent((BACKWARD, 10), (OPTIMIZER, 20)) is None, "one goes on"
    assert spent((BACKWARD, 30), (FORWARD, 10)) == {FORWARD: 2000, BACKWARD: 0}, "clocks that go back"
    assert spent((BACKWARD, 10), (FORWARD, 20), compute_ns=9) is None, "more than there was"
    many = [(BACKWARD, 0), (FORWARD, 1)] * (MOST_MARKS // 2)
    assert spent(*many) == {FORWARD: 2000 - MOST_MARKS // 2, BACKWARD: MOST_MARKS // 2}
    assert spent(*many, (FORWARD, 2)) is None


def test_a_step_with_too_many_backward_passes_is_not_measured_and_keeps_no_memory(training: Training) -> None:
    for number in training.watch.steps(training.batches(4)):
        training.step(30, 50, 20, micro=2000 if number == 2 else 1)
    assert training.ms() == {FORWARD: 60, BACKWARD: 100, OPTIMIZER: 40}
    if training.device is not None:
        assert training.device.events_made < 1.1 * MOST_MARKS
