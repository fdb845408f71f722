"""Steps bounded by the optimizer: loops without a watched loader, loaders in threads, passes that train nothing."""

from __future__ import annotations

import gc
import io
import itertools
import queue
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import gpuwatch
import gpuwatch.hook.batches as reading
from benchmarks.fakes import FakeDevice
from gpuwatch.hook.batches import loader_settings
from gpuwatch.hook.session import Session
from gpuwatch.hook.torch.transfers import TransferWatch
from gpuwatch.ledger.events import FAST_STEP
from tests.unit.hook.fakes import Clock, fake_watch, in_thread_of_c, turn

torch = pytest.importorskip("torch")
from torch.utils.data import DataLoader  # noqa: E402

TRAINED_NOTHING = Session.trained_nothing  # fake_watch replaces it


class Training:
    """A model, and time that passes where it has to."""

    def __init__(self, monkeypatch: Any) -> None:
        self.clock = Clock()
        self.watch = fake_watch(self.clock, monkeypatch)
        self.model = torch.nn.Linear(2, 2)
        self.optimizers = [torch.optim.SGD(self.model.parameters(), 0.1)]

    def step(self, wait_ms: float, compute_ms: float, loops: int = 1) -> None:
        for _ in range(loops):
            self.clock.sleep_ms(wait_ms)
            loss = self.model(torch.ones(1, 2)).sum()
            self.clock.sleep_ms(compute_ms)
            loss.backward()
            for each in self.optimizers:
                each.step()

    def batches(self, count: int, wait_ms: float) -> Iterator[int]:
        for number in range(count):
            self.clock.sleep_ms(wait_ms)
            yield number

    def states_ms(self) -> dict[str, float]:
        turn(self.watch)
        return {state: round(each * 1e3, 3) for state, each in self.watch.report().states.items()}


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = Training(monkeypatch)
    made.watch.session.torch_hooks.optimizer.install()
    yield made
    made.watch.close()
    assert not sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks  # type: ignore[attr-defined]
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_a_step_lasts_from_one_optimizer_step_to_the_next(training: Training) -> None:
    training.step(30, 10, loops=11)
    states = training.states_ms()
    assert states["input_wait"] == pytest.approx(300) and states["compute"] == pytest.approx(100)
    assert states["startup"] == pytest.approx(40), "the first one has no beginning"
    assert training.watch.report().steps == 10
    assert training.watch.session.publisher.accounts.bounded_by_optimizer


@pytest.mark.parametrize("logs", [False, True])
def test_a_training_in_a_thread_of_c_is_measured(logs: bool, training: Training) -> None:
    """Python does not know it, or as a dummy, once anything there has logged: of a Ray actor with several threads."""
    in_thread_of_c(lambda: training.step(30, 10, loops=11), logs)
    assert training.watch.report().steps == 10


def test_what_follows_a_warm_up_step_is_no_wait_of_the_loop_that_comes(training: Training) -> None:
    training.step(30, 10)
    training.clock.sleep_ms(3000)  # imports, a model that is loaded
    for _ in training.watch.steps(training.batches(4, 6)):
        training.step(0, 10)
    states = training.states_ms()
    assert states == {"startup": 40, "other": 3000, "input_wait": 24, "compute": 40}
    assert training.watch.report().steps == 4
    assert not training.watch.session.publisher.accounts.bounded_by_optimizer


def test_a_loop_after_a_warm_up_step_takes_the_fast_path(training: Training) -> None:
    """The wait that the warm-up had left open stayed so: each step of all later loops took the way of a nested one."""
    training.step(0, 10, loops=3)
    for _ in training.watch.steps(training.batches(40, 0.1)):
        training.step(0, 10)
    recorder = training.watch._recorder
    assert recorder.parts == []
    assert [entry[0] for entry in recorder.log].count(FAST_STEP) > 20


def test_a_warm_up_on_noise_says_nothing_about_the_loop_that_follows(training: Training) -> None:
    """ "No DataLoader is watched" was the cause of a starved loop that began with five steps on random tensors."""
    training.step(1, 10, loops=5)
    assert training.watch.session.publisher.accounts.bounded_by_optimizer
    for _ in training.watch.steps(training.batches(20, 30)):
        training.step(0, 10)
    training.states_ms()
    window, _, _ = training.watch._publisher._window(closed=True)
    assert not window.bounded_by_optimizer and window.mean_step.steps == 4 + 20 - 1


def test_passes_without_gradients_are_an_evaluation(training: Training) -> None:
    training.step(5, 10, loops=3)
    with torch.no_grad():
        for _ in range(4):
            training.model(torch.ones(1, 2))
            training.clock.sleep_ms(25)
    training.step(5, 10, loops=2)
    states = training.states_ms()
    assert states["eval"] == pytest.approx(105), "up to the next forward pass that trains"
    assert states["compute"] == pytest.approx(40) and training.watch.report().steps == 4


@pytest.mark.parametrize("inside", [True, False], ids=["in a training step", "after a pass"])
@pytest.mark.parametrize("without_gradients", [True, False], ids=["no_grad in its loop", "eval() alone"])
def test_a_pass_that_only_evaluates_is_an_evaluation(training: Training, inside: bool, without_gradients: bool) -> None:
    def validate() -> None:
        training.model.eval()
        for _ in training.watch.steps(training.batches(4, 6)):
            with torch.set_grad_enabled(not without_gradients):
                training.model(torch.ones(1, 2))
                training.clock.sleep_ms(4)
        training.model.train()

    for _ in range(2):
        for number in training.watch.steps(training.batches(4, 20)):
            training.step(0, 10)
            if inside and number == 2:
                validate()
        if not inside:
            validate()
    states = training.states_ms()
    assert states == {"input_wait": 160, "compute": 80, "eval": 80}
    assert training.watch._publisher._window(closed=True)[0].eval_wait_ratio == pytest.approx(48 / 80)
    assert training.watch.report().steps == 8


@pytest.mark.parametrize("trains", [True, False])
def test_where_torch_has_no_optimizer_a_pass_that_autograd_records_nothing_of_is_an_evaluation(
    training: Training, trains: bool
) -> None:
    """Unless autograd has never recorded anything, as where another framework computes."""

    def a_pass(wait_ms: float, is_validation: bool) -> None:
        for _ in training.watch.steps(training.batches(3, wait_ms)):
            with torch.set_grad_enabled(trains and not is_validation):  # of Keras: not its __call__, which hooks see
                training.model.forward(torch.ones(1, 2))
            training.clock.sleep_ms(10)

    for _ in range(2):
        a_pass(20, False)
        a_pass(5, True)
    states = training.states_ms()
    assert states == {"input_wait": 120, "compute": 60, "eval": 90} if trains else {"input_wait": 150, "compute": 120}
    assert training.watch.report().steps == (6 if trains else 12)


def test_a_pass_with_frozen_weights_or_accumulated_gradients_is_training(training: Training) -> None:
    training.step(0, 10)
    teacher = torch.nn.Linear(2, 2).eval()
    for number in training.watch.steps(training.batches(8, 20)):
        training.clock.sleep_ms(10)
        loss = training.model(torch.ones(1, 2)).sum()
        with torch.no_grad():
            teacher(torch.ones(1, 2))
        loss.backward()
        if number % 4 == 3:
            training.optimizers[0].step()
    assert training.states_ms() == {"startup": 10, "input_wait": 160, "compute": 80}


@pytest.mark.parametrize("to_none", [True, False], ids=["gradients are freed", "and set to 0"])
@pytest.mark.parametrize("first", ["an encoder", "the model in its mode"])
def test_accumulated_gradients_after_a_pass_without_are_training_in_every_pass(
    training: Training, first: str, to_none: bool
) -> None:
    """A pass of a frozen encoder or teacher, or a generation, begins each step; the optimizer steps batches later."""
    encoder, optimizer = torch.nn.Linear(2, 2).eval(), training.optimizers[0]
    if first != "an encoder":
        training.model.eval()  # left on for all the training
    for _ in range(4):
        for number in training.watch.steps(training.batches(8, 20)):
            with torch.no_grad():
                x = encoder(torch.ones(1, 2)) if first == "an encoder" else torch.ones(1, 2)
            training.model(x).sum().backward()
            training.clock.sleep_ms(10)
            if number % 4 == 3:
                optimizer.step()
                optimizer.zero_grad(set_to_none=to_none)
    assert training.states_ms() == {"input_wait": 640, "compute": 320}
    assert training.watch.report().steps == 32


def test_an_evaluation_of_a_loss_that_autograd_records_stays_one(training: Training) -> None:
    """Gradients of the training are there still, and nothing changes them."""
    for _ in range(3):
        for _ in training.watch.steps(training.batches(4, 20)):
            training.step(0, 10)
        training.model.eval()
        for _ in training.watch.steps(training.batches(4, 6)):
            training.model(torch.ones(1, 2)).sum()
            training.clock.sleep_ms(4)
        training.model.train()
    assert training.states_ms() == {"input_wait": 240, "compute": 120, "eval": 120}


def perturb(training: Training) -> None:
    """FGSM, as in PyTorch's tutorial: gradients of the inputs, and of the parameters too."""
    x = torch.ones(1, 2, requires_grad=True)
    loss = training.model(x).sum()
    training.model.zero_grad()
    loss.backward()
    training.model(x + 0.1 * x.grad.sign())  # type: ignore[union-attr]


def set_gradients_to_zero(training: Training) -> None:
    training.optimizers[0].zero_grad(set_to_none=False)
    training.model(torch.ones(1, 2)).sum()


@pytest.mark.parametrize("evaluate", [perturb, set_gradients_to_zero])
def test_an_evaluation_that_changes_gradients_stays_one(training: Training, evaluate: Any) -> None:
    for _ in range(3):
        training.model.train()
        for _ in training.watch.steps(training.batches(4, 20)):
            training.step(0, 10)
        training.model.eval()
        for _ in training.watch.steps(training.batches(4, 6)):
            evaluate(training)
            training.clock.sleep_ms(4)
    assert training.states_ms() == {"input_wait": 240, "compute": 120, "eval": 120}


@pytest.mark.parametrize("frozen", [100, 0], ids=["many parameters without gradients", "two optimizers"])
def test_accumulated_gradients_of_any_parameter_show_that_a_pass_trains(training: Training, frozen: int) -> None:
    others = [torch.nn.Parameter(torch.ones(1), requires_grad=False) for _ in range(frozen)]
    other = torch.nn.Linear(2, 2)
    optimizers = [torch.optim.SGD([*others, *training.model.parameters()], 0.1)]
    optimizers += [] if frozen else [torch.optim.SGD(other.parameters(), 0.1)]
    training.model.eval()
    for _ in range(3):
        for number in training.watch.steps(training.batches(8, 20)):
            training.model(torch.ones(1, 2)).sum().backward()
            training.clock.sleep_ms(10)
            if number % 4 == 3:
                for each in optimizers:
                    each.step()
                    each.zero_grad()
    assert training.states_ms() == {"input_wait": 480, "compute": 240}


def test_a_loop_with_gradients_inside_an_evaluation_is_a_part_of_it(training: Training) -> None:
    """Test-time training: a level stayed open, and all the training that followed was an evaluation."""
    for _ in range(3):
        training.model.train()
        for _ in training.watch.steps(training.batches(4, 20)):
            training.step(0, 10)
        training.model.eval()
        with torch.no_grad():
            for _ in training.watch.steps(training.batches(2, 6)):
                with torch.enable_grad():
                    copied = torch.nn.Linear(2, 2)
                    for _ in training.watch.steps(training.batches(2, 1)):
                        copied(torch.ones(1, 2)).sum().backward()
                        training.clock.sleep_ms(4)
                training.model(torch.ones(1, 2))
                training.clock.sleep_ms(4)
    assert training.states_ms() == {"input_wait": 240, "compute": 120, "eval": 120}
    assert training.watch._recorder.levels == []


def test_a_kept_iterator_evaluates_inside_steps_and_between_passes(training: Training) -> None:
    kept = iter(training.watch.steps(training.batches(100, 6)))

    def evaluate() -> None:
        training.model.eval()
        with torch.no_grad():
            next(kept)
            training.model(torch.ones(1, 2))
            training.clock.sleep_ms(4)
        training.model.train()

    for _ in range(3):
        for number in training.watch.steps(training.batches(20, 20)):
            training.step(0, 10)
            if number % 10 == 9:
                evaluate()
        evaluate()
    assert training.states_ms() == {"input_wait": 1200, "compute": 600, "eval": 90}
    assert training.watch.report().steps == 60


def test_a_kept_iterator_of_an_evaluation_ends_with_the_next_training(training: Training) -> None:
    """`next(val)` a few times after each pass: all the training that followed was booked as evaluation."""

    def forever(loader: Any) -> Iterator[Any]:
        while True:
            yield from loader

    kept = forever(training.watch.steps(training.batches(100, 6)))
    for _ in range(3):
        for _ in training.watch.steps(training.batches(4, 20)):
            training.step(0, 10)
        training.model.eval()
        with torch.no_grad():
            for _ in range(2):
                next(kept)
                training.model(torch.ones(1, 2))
                training.clock.sleep_ms(4)
        training.model.train()
    states = training.states_ms()
    assert states == {"input_wait": 240, "compute": 120, "eval": 60}
    assert training.watch.report().steps == 12


def test_several_optimizers_and_accumulated_gradients_make_one_step(training: Training) -> None:
    training.optimizers += [torch.optim.SGD(training.model.parameters(), 0.1) for _ in range(2)]
    training.step(5, 10, loops=5)
    training.model(torch.ones(1, 2))
    training.step(5, 10)
    assert training.watch.report().steps == 5


def test_optimizers_that_step_in_the_backward_pass_end_the_step_with_it(training: Training) -> None:
    layers = [torch.nn.Linear(2, 2) for _ in range(3)]
    model = torch.nn.Sequential(*layers)
    optimizers = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}

    def stepped(parameter: torch.nn.Parameter) -> None:
        training.clock.sleep_ms(5)
        optimizers[parameter].step()
        parameter.grad = None

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(stepped)
    for _ in range(21):
        training.clock.sleep_ms(20)
        loss = model(torch.ones(1, 2)).sum()
        training.clock.sleep_ms(10)
        loss.backward()
    states = training.states_ms()
    first_ms = 25  # the backward pass goes on after the first step of all, before which nothing is known
    assert (states["input_wait"], states["compute"]) == (400 + first_ms, 800)
    assert training.watch.report().steps == 20


def accumulate(training: Training, batches: int, of_one: int = 1, clip_ms: float = 0) -> None:
    """A step of several batches, each with a wait of 3 ms, and with several backward passes that take 4 ms."""
    for _ in range(batches):
        training.clock.sleep_ms(3)
        loss = training.model(torch.ones(1, 2)).sum()
        for _ in range(of_one):
            training.clock.sleep_ms(4)
            loss.backward(retain_graph=True)
    training.clock.sleep_ms(clip_ms)
    training.optimizers[0].step()


def test_each_batch_of_a_step_is_waited_for(training: Training) -> None:
    """nanoGPT's micro-batches: only the first one's wait was seen."""
    for _ in range(11):
        accumulate(training, 8, clip_ms=1)
    states = training.states_ms()
    of_first = 7 * 3  # before it is known that a step has several
    assert states["input_wait"] == 10 * 24 - of_first and states["compute"] == 10 * 33 + of_first
    assert training.watch.report().steps == 10


def test_steps_of_fewer_batches_than_the_one_before_wait_until_the_optimizer_begins(training: Training) -> None:
    for batches in (4, 4, 4, 2, 4, 4):
        accumulate(training, batches, clip_ms=1)
    states = training.states_ms()
    # After the second batch of the fourth step there is no third: until the optimizer begins it is waited for.
    assert states["input_wait"] == (12 - 9) + 12 + (6 + 1) + (12 - 6) + 12
    assert states["compute"] == (17 + 9) + 17 + 8 + (17 + 6) + 17
    assert training.watch.report().steps == 5


def test_batches_of_a_step_are_noticed_in_the_midst_of_steps_of_one_batch(training: Training) -> None:
    """The first such step shows several backward passes, the second one that a forward pass precedes each."""
    for batches in (*[1] * 6, *[3] * 6, *[1] * 6):
        accumulate(training, batches, clip_ms=1)
    states = training.states_ms()
    first, second, others = (3, 19), (3 + 3, 16), (9, 13)
    last = 3 + 1, 4  # of one batch again: a second one is waited for until the optimizer begins
    steps = [(3, 5)] * 5 + [first, second] + [others] * 4 + [last] + [(3, 5)] * 5
    assert (states["input_wait"], states["compute"]) == tuple(map(sum, zip(*steps, strict=True)))
    assert training.watch.report().steps == 17


def test_usual_steps_take_the_fast_path_and_add_hooks_only_once(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To register and remove hooks of all modules in each step was half of what such a step cost."""
    modules, registered = torch.nn.modules.module, []
    for name in ("register_module_forward_pre_hook", "register_module_forward_hook"):
        register = getattr(modules, name)
        monkeypatch.setattr(modules, name, lambda hook, register=register: registered.append(hook) or register(hook))
    training.optimizers[0].zero_grad()  # imports dynamo
    training.step(5, 10, loops=20)
    kinds = [entry[0] for entry in training.watch._recorder.log]
    assert kinds.count(FAST_STEP) >= 16 and len(registered) == 1
    with torch.no_grad():
        roll_out(training, 3, env_ms=2)
    with training.watch.data():
        training.clock.sleep_ms(4)
    training.step(5, 10, loops=20)
    assert [entry[0] for entry in training.watch._recorder.log].count(FAST_STEP) >= 2 * 16 and len(registered) == 2
    states = training.states_ms()
    assert states == {"startup": 15, "input_wait": 38 * 5, "compute": 390, "eval": 3 * 3 + 4 + 5}
    assert training.watch.report().steps == 39
    assert training.watch.session.publisher.accounts.bounded_by_optimizer


@pytest.mark.parametrize("batches", [1, 3])
def test_several_backward_passes_of_one_batch_are_no_batches(training: Training, batches: int) -> None:
    for _ in range(7):
        accumulate(training, batches, of_one=3)
    states = training.states_ms()
    of_first = (batches - 1) * 3
    assert states["input_wait"] == 6 * batches * 3 - of_first
    assert states["compute"] == 6 * batches * 12 + of_first


def test_a_pass_without_gradients_between_backward_pass_and_optimizer_is_logging(training: Training) -> None:
    for _ in range(7):
        training.clock.sleep_ms(3)
        training.model(torch.ones(1, 2)).sum().backward()
        with torch.no_grad():
            training.model(torch.ones(1, 2))
        training.clock.sleep_ms(5)
        training.optimizers[0].step()
    assert training.states_ms() == {"startup": 8, "input_wait": 18, "compute": 30}


def compiled(call: Callable[..., Any]) -> tuple[Callable[..., Any], list[Any]]:
    """Return the function, compiled, and a list that has an item for each time that torch has compiled it."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    return torch.compile(call, backend=backend), graphs


def test_a_compiled_function_that_calls_the_model_ends_the_wait(training: Training) -> None:
    """Steps of one had no wait, and its model was compiled with hooks before that was known."""
    loss_of, graphs = compiled(lambda x: training.model(x).sum())
    for _ in range(11):
        training.clock.sleep_ms(3)
        loss = loss_of(torch.ones(1, 2))
        training.clock.sleep_ms(5)
        loss.backward()
        training.optimizers[0].step()
    states = training.states_ms()
    assert (states["input_wait"], states["compute"], len(graphs)) == (30, 50, 1)


def test_an_evaluation_and_a_rollout_by_a_compiled_function_are_known(training: Training) -> None:
    """The mode of the model is not changed."""
    loss_of, graphs = compiled(lambda x: training.model(x).sum())
    for number in range(21):
        training.clock.sleep_ms(3)
        loss_of(torch.ones(1, 2)).backward()
        training.optimizers[0].step()
        if number % 5 == 4:
            with torch.no_grad():
                for _ in range(4):
                    loss_of(torch.ones(1, 2))
                    training.clock.sleep_ms(7)
    states = training.states_ms()
    assert (states["input_wait"], gaps_ms(training), states["eval"]) == (20 * 3 - 4 * 3, 4 * 31, 4 * 31)
    assert len(graphs) == 2, "with and without gradients"


@pytest.mark.parametrize("has_modules", [True, False])
def test_a_compiled_optimizer_is_no_forward_pass(training: Training, has_modules: bool) -> None:
    optimizer = training.optimizers[0]
    update, _ = compiled(lambda: optimizer.step())
    for _ in range(11):
        training.clock.sleep_ms(3)
        weight, x = training.model.weight, torch.ones(1, 2)
        (training.model(x) if has_modules else x @ weight).sum().backward()
        training.clock.sleep_ms(5)
        update()
    states = training.states_ms()
    expected = (30, 50) if has_modules else (0, 72)  # of the latter's first step it is not known
    assert (states.get("input_wait", 0), states["compute"]) == expected, states


def test_a_part_of_the_optimizer_that_is_compiled_is_no_forward_pass(training: Training) -> None:
    """As Muon's."""
    of_update, _ = compiled(lambda x: x * 2)
    training.optimizers[0].register_step_pre_hook(lambda *_: of_update(torch.ones(2)).tolist() and None)
    for _ in range(11):
        training.clock.sleep_ms(3)
        (torch.ones(1, 2) @ training.model.weight).sum().backward()
        training.optimizers[0].step()
    assert training.states_ms().get("eval", 0) == 0 and training.states_ms().get("input_wait", 0) == 0


def test_backward_passes_of_a_closure_are_the_optimizers(training: Training) -> None:
    optimizer = torch.optim.LBFGS(training.model.parameters(), 0.01, max_iter=4)
    x = torch.randn(8, 2)

    def closure() -> Any:
        optimizer.zero_grad()
        training.clock.sleep_ms(5)
        loss = (training.model(x) - 3).square().mean()
        loss.backward()
        return loss

    for _ in range(4):
        training.clock.sleep_ms(3)
        training.model(x)
        optimizer.step(closure)
    assert training.states_ms()["input_wait"] == 9


def test_a_model_that_is_no_module_has_steps_that_compute(training: Training) -> None:
    weights = [torch.ones(2, 2, requires_grad=True), torch.ones(2, requires_grad=True)]
    both = [torch.optim.SGD([each], 0.1) for each in weights]
    for _ in range(11):
        training.clock.sleep_ms(10)
        (torch.ones(1, 2) @ weights[0] + weights[1]).sum().backward()
        for each in both:
            each.step()
    states = training.states_ms()
    assert states == {"startup": 10, "other": 10, "compute": 90}, "where the first one began to compute is not known"
    assert training.watch.report().steps == 9
    assert training.watch.session.publisher.accounts.bounded_by_optimizer
    training.step(30, 10, loops=6)
    assert training.states_ms()["input_wait"] == pytest.approx(150), "from the second one on that has a module"


def test_a_watch_that_was_not_closed_counts_no_steps_of_a_later_one(training: Training) -> None:
    earlier = training.watch
    for _ in earlier.steps(training.batches(5, 6)):
        training.step(0, 10)
    later = gpuwatch.Watch(quiet=True)  # the cell of a notebook that is run again, or the next function call of a sweep
    for _ in later.steps(range(7)):
        training.step(0, 10)
    training.step(30, 10, loops=4)
    assert earlier.report().steps == 5
    assert later.report().steps in (10, 11), "what its own loop is followed by"
    later.close()
    training.step(30, 10, loops=4)
    assert earlier.report().steps in (8, 9), "the only one that is open"


def test_what_follows_the_last_step_is_none(training: Training) -> None:
    training.step(5, 10, loops=3)
    training.clock.sleep_ms(500)
    training.watch.close()
    report = training.watch.report()
    assert report.steps == 2 and report.states["other"] == pytest.approx(0.5)


def test_a_loader_that_a_thread_iterates_ahead_is_no_starvation(training: Training) -> None:
    """A prefetching thread's waits were booked as the training's: "input-bound 79%" for a true 16%."""
    loader = training.watch.steps([torch.ones(1, 2)] * 8)
    started, go = threading.Event(), threading.Event()

    def feed() -> None:
        for _ in loader:
            started.set()
            go.wait(60)

    thread = threading.Thread(target=feed)
    thread.start()
    started.wait(60)
    assert training.watch._recorder.thread == thread.ident
    training.step(2, 10, loops=6)
    go.set()
    thread.join()
    assert training.watch._recorder.thread == threading.get_ident()
    training.step(2, 10)
    states = training.states_ms()
    assert states["input_wait"] == pytest.approx(12) and states["compute"] == pytest.approx(60)


def test_a_pass_that_trains_nothing_is_no_evidence(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a mean over the data set 156 workers were advised."""
    for _ in training.watch.steps(training.batches(30, 20)):
        training.clock.sleep_ms(0.01)
    for _ in training.watch.steps(training.batches(10, 20)):
        training.step(0, 30)
    turn(training.watch)
    accounts = training.watch.session.publisher.accounts
    window, _ = accounts.window(training.clock())
    assert len(window.steps) == 10
    assert window.untrained_s == {"input_wait": pytest.approx(0.6), "compute": pytest.approx(0.0003)}
    assert window.share("input_wait") == pytest.approx(0.4, abs=0.01)
    assert training.watch.report().steps == 40, "the ledger counts them all"


def test_the_first_step_of_two_loaders_that_take_turns_trains(training: Training) -> None:
    """It began before the second loader's pass did.

    It was left out twice: as the first step, and as a pass that trains nothing.
    """
    pairs = zip(
        training.watch.steps(training.batches(10, 30)), training.watch.steps(training.batches(10, 1)), strict=True
    )
    for _ in pairs:
        training.step(0, 30)
    turn(training.watch)
    window, _ = training.watch.session.publisher.accounts.window(training.clock())
    assert window.untrained_s == {} and len(window.steps) == 10


def test_workers_that_a_generator_starts_are_known_after_its_first_batch() -> None:
    """timm's prefetcher in `watch(…)`: what its workers do was not measured, and no cause was named."""
    loader = DataLoader(torch.zeros(64, 2), batch_size=4, num_workers=1)
    with gpuwatch.Watch(quiet=True) as watch:
        for _ in watch.steps(batch for batch in loader):
            known = watch.session.publisher.accounts.loader
            break
    assert known is not None and known.num_workers == 1 and len(known.worker_pids) == 1


def test_a_loader_that_a_generator_makes_is_known_after_its_first_batch() -> None:
    def batches() -> Iterator[Any]:
        yield from (batch for batch in map(torch.neg, DataLoader(torch.zeros(64, 2), batch_size=4)))

    with gpuwatch.Watch(quiet=True) as watch:
        for _ in watch.steps(batches()):
            break
        known = watch.session.publisher.accounts.loader
    assert known is not None and (known.num_workers, known.dataset) == (0, "Tensor")


def feed(batches: queue.Queue[Any], loader: Any = None) -> None:
    for batch in loader or FED:
        batches.put(batch)
    batches.put(None)


FED: Any = None


@pytest.mark.parametrize("given", ["argument", "global", "closure"])
def test_the_loader_of_a_thread_that_feeds_a_queue_is_found(
    given: str, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ "Make batches ahead (a DataLoader with num_workers …)" was the advice to a program that has one."""
    batches: queue.Queue[Any] = queue.Queue(2)
    loader = DataLoader(torch.zeros(64, 2), batch_size=4)
    monkeypatch.setitem(globals(), "FED", loader if given == "global" else None)
    targets: dict[str, Any] = {"argument": feed, "global": feed, "closure": lambda batches: feed(batches, loader)}
    thread = threading.Thread(target=targets[given], args=(batches, *[loader] * (given == "argument")))
    thread.start()
    try:
        known = loader_settings(iter(batches.get, None), None)
        assert (known.num_workers, known.dataset) == (0, "Tensor")
        training.step(5, 10, loops=12)
        window, _ = training.watch.session.publisher.accounts.window(training.clock())
        assert window.workers == 0
    finally:
        while batches.get() is not None:
            pass
        thread.join()
    assert loader_settings(iter([1]), None).num_workers is None, "the thread has ended"


def test_the_loader_whose_batches_another_thread_takes_is_known(training: Training) -> None:
    """`pool.submit(next, batches)`, one batch ahead: the iterator was made by the training thread."""
    batches = iter(training.watch.steps(DataLoader(torch.zeros(64, 2), batch_size=4)))
    thread = threading.Thread(target=next, args=(batches,))
    thread.start()
    thread.join()
    training.step(5, 10, loops=12)
    window, _ = training.watch.session.publisher.accounts.window(training.clock())
    assert window.bounded_by_optimizer and (window.workers, window.loader.dataset) == (0, "Tensor")


class Miscounted(torch.utils.data.IterableDataset[Any]):
    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.zeros(8, 2))


@pytest.mark.parametrize("asks", [False, True])
def test_of_a_length_that_is_wrong_torch_warns_only_those_who_ask_for_it(training: Training, asks: bool) -> None:
    """Two workers may each yield all data. The length of such a data set is the user's code, and is not asked for."""
    loader = DataLoader(Miscounted(), batch_size=1)
    watched: Any = training.watch.steps(loader)
    if asks:
        assert len(loader) == 4
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert [sum(1 for _ in watched) for _ in range(2)] == [8, 8]
    assert any("Length of IterableDataset" in str(each.message) for each in warned) == asks
    assert training.watch.session.publisher.accounts.loader.batches is None
    list(training.watch.steps(DataLoader(list(range(12)), batch_size=4)))
    assert training.watch.session.publisher.accounts.loader.batches == 3, "that of a sampler"


def test_the_batches_of_a_generator_are_freed_as_without(training: Training) -> None:
    """Up to Python 3.12 the locals of a frame that were looked at stayed with it.

    The first batch stayed on the device for the whole run.
    """
    made: list[Any] = []

    def batches() -> Iterator[Any]:
        for _ in range(20):
            batch = torch.zeros(3)
            made.append(weakref.ref(batch))
            yield batch
            del batch

    for batch in training.watch.steps(batches()):
        training.step(0, 1)
        del batch
        assert [each() for each in made[:-1] if each() is not None] == []


def test_a_loader_is_not_searched_for_in_each_of_many_short_passes(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: list[Any] = []
    search = reading.loader_inside
    monkeypatch.setattr(reading, "loader_inside", lambda *things: searched.append(things) or search(*things))
    for _ in range(100):
        list(training.watch.steps(training.batches(2, 1)))
    assert 0 < len(searched) <= 40
    for _ in training.watch.steps(each for each in DataLoader(range(4), num_workers=0)):  # type: ignore[arg-type]
        training.step(0, 1)
    assert training.watch.session.publisher.accounts.loader.num_workers == 0, "another generator is"


class Endless(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return itertools.repeat(torch.zeros(2))


@pytest.mark.parametrize("persistent", [False, True])
def test_an_endless_loader_inside_a_wrapper_is_found(persistent: bool) -> None:
    """Neither it nor its iterator has a length, and so no truth value."""
    loader = (
        DataLoader(Endless(), batch_size=4, num_workers=1, persistent_workers=True)
        if persistent
        else DataLoader(Endless())
    )
    iterator = iter(loader)
    known = loader_settings(enumerate(loader) if not persistent else map(torch.neg, loader), None)
    assert (known.num_workers, known.dataset, len(known.worker_pids)) == (int(persistent), "Endless", int(persistent))
    del iterator


def test_the_search_for_a_loader_does_not_grow_with_what_threads_refer_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training waits for it: 20 threads whose function can reach a set of 3 million held it for 6 s at each pass."""
    visited, referents = 0, gc.get_referents

    def get_referents(*things: Any) -> list[Any]:
        nonlocal visited
        found = referents(*things)
        visited += len(found)
        return found

    monkeypatch.setattr("gpuwatch.hook.batches.gc.get_referents", get_referents)
    numbers = list(range(100_000))
    kinds = (set(numbers), frozenset(numbers), numbers, tuple(numbers), dict.fromkeys(numbers))
    ended = threading.Event()
    threads = [threading.Thread(target=lambda *given: ended.wait(), args=kinds) for _ in range(300)]
    for thread in threads:
        thread.start()
    try:
        assert loader_settings(iter([1]), None).num_workers is None
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert visited < 10_000


class Vanishing(threading.Thread):
    """Ends while it is asked for its arguments, or has an attribute that raises."""

    @property
    def _args(self) -> Any:
        raise self.error

    @_args.setter
    def _args(self, value: Any) -> None:
        pass


@pytest.mark.parametrize("error", [AttributeError("the thread has ended"), RuntimeError("a proxy's own error")])
def test_a_thread_that_cannot_be_read_stops_no_steps(
    training: Training, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    thread = Vanishing(target=print)
    monkeypatch.setattr(Vanishing, "error", error, raising=False)
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.main_thread(), thread])
    training.step(30, 10, loops=11)
    assert training.watch.report().steps == 10


def test_a_failure_stops_the_account_and_not_the_training(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    training.step(5, 10, loops=2)
    accounts = training.watch.session.publisher.accounts
    monkeypatch.setattr(training.watch._recorder, "clock", lambda: 1 // 0)
    training.step(5, 10, loops=3)
    assert accounts.failures == 1, "once"
    monkeypatch.setattr(training.watch._recorder, "clock", training.clock)


class Wrapped:
    def __init__(self, loader: Any) -> None:
        self.base = loader


class Slotted:
    __slots__ = ("base",)

    def __init__(self, loader: Any) -> None:
        self.base = loader


class OfSlotted(Slotted):
    __slots__ = ()


@pytest.mark.parametrize(
    "wrap",
    [enumerate, itertools.cycle, itertools.chain, Wrapped, Slotted, OfSlotted, lambda each: zip(each, range(9), strict=False),
     lambda each: itertools.islice(each, 3), lambda each: (x for x in each), lambda each: Wrapped(enumerate(each)),
     lambda each: map(len, each)],
)  # fmt: skip
def test_the_loader_inside_is_found(wrap: Any) -> None:
    loader = DataLoader(torch.zeros(64, 2), batch_size=4, num_workers=0, pin_memory=False)
    wrapped = wrap(loader)
    assert loader_settings(wrapped, wrapped).num_workers == 0
    assert loader_settings(Wrapped([1, 2]), iter([1])).num_workers is None


def test_of_an_iterator_for_each_batch_the_training_is_compute(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`next(iter(loader))` in the loop: the loop's end came before the training, which was `other`."""
    monkeypatch.setattr(Session, "trained_nothing", TRAINED_NOTHING)
    loader = training.watch.steps(Slow(training.clock, wait_ms=30, end_ms=5))
    for _ in range(10):
        training.clock.sleep_ms(2)  # the last step's loss is logged
        next(iter(loader))
        training.step(0, 10)
    # of the first one it is not known yet that others follow
    assert training.states_ms() == {"startup": 2, "input_wait": 345, "compute": 90, "other": 33}
    assert training.watch.report().steps == 9, "and the open one"
    assert not training.watch.session.publisher.accounts.bounded_by_optimizer


def test_what_follows_a_batch_that_was_only_inspected_is_no_step(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Session, "trained_nothing", TRAINED_NOTHING)
    next(iter(training.watch.steps(Slow(training.clock, wait_ms=30))))
    training.clock.sleep_ms(5000)  # a model is built
    for _ in training.watch.steps(training.batches(20, 6)):
        training.step(0, 10)
    assert training.states_ms() == {"other": 5000, "input_wait": 150, "compute": 200}
    next(iter(training.watch.steps(Slow(training.clock, wait_ms=30))))
    training.step(30, 10, loops=30)  # a loop without a loader
    report = training.watch.report()
    assert report.steps == 1 + 20 + 1 + 29 and training.watch.session.publisher.accounts.bounded_by_optimizer
    with training.watch.phase("eval"):
        training.clock.sleep_ms(1000)
    assert training.states_ms()["eval"] == 1000


@pytest.mark.parametrize("wait_ms", [0.2, 5])
@pytest.mark.parametrize("steps", [4, 7, 9, 20, 90])
def test_a_batch_inspected_between_two_passes_is_a_loop_s_only_after_few_steps(
    monkeypatch: pytest.MonkeyPatch, steps: int, wait_ms: float
) -> None:
    """Those of a pass were no longer counted after a few, which then looked like a loop of `next(iter(loader))`."""
    monkeypatch.setattr(Session, "trained_nothing", TRAINED_NOTHING)

    def ledger() -> tuple[int, dict[str, float]]:
        training = Training(monkeypatch)
        for _ in range(2):
            next(iter(training.watch.steps(training.batches(1, 5))))
            for _ in training.watch.steps(training.batches(steps, wait_ms)):
                training.step(0, 10)
        next(iter(training.watch.steps(training.batches(1, 5))))
        training.step(30, 10, loops=30)
        states = training.states_ms()
        number = training.watch.report().steps
        training.watch.close()
        return number, states

    found = ledger()
    monkeypatch.setattr("gpuwatch.hook.torch.optimizer_steps.APART", 1 << 60)  # all are counted
    assert found == ledger()


@pytest.mark.parametrize("fetch_ms", [0.2, 5])
def test_torch_has_no_hook_in_most_steps_of_a_loop_over_a_loader(training: Training, fetch_ms: float) -> None:
    hooks = sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks  # type: ignore[attr-defined]
    counts = []
    for _ in training.watch.steps(training.batches(2000, fetch_ms)):
        training.step(0, 10)
        counts.append(len(hooks))
    assert set(counts) == {0, 1} and sum(counts) < 500, "it comes back now and then"
    assert len(hooks) == 1, "what follows may be steps that no loader bounds"
    assert training.states_ms() == {"input_wait": 2000 * fetch_ms, "compute": 20_000}


def test_torch_s_hooks_stay_while_there_are_others(training: Training) -> None:
    """Another thread may be going through them, and torch would raise in it."""
    hooks = sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks  # type: ignore[attr-defined]
    register = sys.modules["torch.optim.optimizer"].register_optimizer_step_post_hook  # type: ignore[attr-defined]
    other = register(lambda *_: None)
    for number, _ in enumerate(training.watch.steps(training.batches(600, 0.2))):
        training.step(0, 10)
        if number <= 300:
            assert len(hooks) == 2
        if number == 300:
            other.remove()
        if number > 300 and not hooks:
            break
    added = register(lambda *_: None)
    assert len(hooks) == 2
    added.remove()


def test_time_between_a_pass_that_only_reads_and_the_training_is_excluded_with_it(training: Training) -> None:
    """A mean over the data set, then ten seconds of building a model: "54% passed outside of training steps"."""
    for _ in training.watch.steps(training.batches(10, 6)):
        training.clock.sleep_ms(1)
    training.clock.sleep_ms(10_000)
    for _ in training.watch.steps(training.batches(10, 6)):
        training.step(0, 10)
    training.states_ms()
    excluded = training.watch.session.publisher.accounts.untrained_s
    assert excluded == {"input_wait": 0.06, "compute": 0.01, "other": 10.0}


class Slow:
    """A loader whose iterator takes time to make a batch, and to be given back."""

    def __init__(self, clock: Clock, wait_ms: float, end_ms: float = 0) -> None:
        self.clock, self.wait_ms, self.end_ms = clock, wait_ms, end_ms

    def __iter__(self) -> Iterator[int]:
        try:
            self.clock.sleep_ms(self.wait_ms)
            yield 1
        finally:
            self.clock.sleep_ms(self.end_ms)


# on a device ---------------------------------------------------------------------------------------------------------


def on_device(training: Training) -> FakeDevice:
    device = FakeDevice(training.clock, lambda seconds: training.clock.sleep_ms(seconds * 1e3))
    training.watch.session.torch_hooks.attach(device)
    return device


def step_on(device: FakeDevice, training: Training, wait_ms: float) -> None:
    """A step of 10 ms on the device, which the host launches in 1 ms after a wait."""
    training.clock.sleep_ms(wait_ms)
    loss = training.model(torch.ones(1, 2)).sum()
    device.launch(0.010)
    training.clock.sleep_ms(1)
    loss.backward()
    training.optimizers[0].step()


def test_a_wait_without_a_loader_starves_the_device_where_it_is_longer_than_the_queued_work(training: Training) -> None:
    """On a GPU it was all `other`: 70% of a training that tokenizes before each forward pass, without a named cause."""
    device = on_device(training)
    for _ in range(21):
        step_on(device, training, 30)
    device.synchronize()
    training.watch._recorder.poll(training.clock())
    states = training.states_ms()
    assert states["input_wait"] == pytest.approx(21 * 20, abs=10) and states["compute"] == pytest.approx(210, abs=15)
    assert "host_wait" not in states and states.get("other", 0) <= 30
    assert training.watch.report().timeline == "device"


class Saved:
    """Takes 50 ms to pickle."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def __reduce__(self) -> tuple[Any, ...]:
        self.clock.sleep_ms(50)
        return int, ()


class OnDevice:
    """A training whose batches are copied: the copies take time on the device, and its results are read back."""

    def __init__(self, training: Training) -> None:
        self.training, self.clock = training, training.clock
        self.device, self.copies = on_device(training), TransferWatch(training.watch._recorder)
        self.copies.loops = 1
        self.to = self.copies._timed(torch, "to", self._copied)

    def _copied(self, tensor: Any, *place: Any) -> Any:
        self.device.launch(0.002)
        self.clock.sleep_ms(0.1)
        return SimpleNamespace(is_cpu=False)

    def copy(self) -> None:
        self.to(torch.ones(2), "meta")

    def item(self) -> None:
        result = SimpleNamespace(is_cpu=False)
        self.copies._reads_back(lambda _: self.device.synchronize(), result, (), {})

    def train(self) -> None:
        loss = self.training.model(torch.ones(1, 2)).sum()
        self.device.launch(0.010)
        self.clock.sleep_ms(1)
        loss.backward()
        self.training.optimizers[0].step()

    def states_ms(self, steps: int) -> dict[str, float]:
        """Return the states of one of so many steps, the first two of which were not measured alike."""
        self.device.synchronize()
        self.training.watch._recorder.poll(self.clock())
        return {state: round(ms / steps, 1) for state, ms in self.training.states_ms().items()}


def test_a_wait_without_a_loader_goes_on_after_a_copy_where_more_of_the_batch_comes_later(training: Training) -> None:
    """Half of the wait was `compute` in a loop that copies a mask first, and then tokenizes."""
    on = OnDevice(training)
    for _ in range(100):
        on.clock.sleep_ms(6)
        on.copy()
        on.clock.sleep_ms(7)
        on.copy()
        on.train()
        on.item()
    states = on.states_ms(100)
    assert states["input_wait"] == pytest.approx(11, abs=0.3) and states["transfer"] == pytest.approx(4, abs=0.3)
    assert states["compute"] == pytest.approx(10, abs=0.3) and "host_wait" not in states


def test_copies_right_after_each_other_make_no_more_pieces_of_a_step(training: Training) -> None:
    on = OnDevice(training)
    for _ in range(3):
        on.train()
    on.item()
    events = on.device.events_made
    for _ in range(20):
        on.clock.sleep_ms(6)
        on.copy()
        on.copy()
        on.train()
        on.item()
    assert on.device.events_made <= events + 6, "those of one step at a time"
    assert not training.watch._recorder._pauses


def test_a_copy_on_a_stream_of_its_own_ends_no_wait(training: Training) -> None:
    """The training's stream was taken for one that had moved there, and all of its copies for compute."""
    on = OnDevice(training)
    for _ in range(40):
        on.train()
        on.item()
        on.clock.sleep_ms(6)
        on.device.elsewhere = True
        on.copy()
        on.device.elsewhere = False
        assert training.watch._recorder.doing() == "data_wait"
    assert training.watch._recorder.timeline is not None and not training.watch._recorder.timeline.is_astray
    assert not on.device.foreign and on.states_ms(40)["input_wait"] > 3


def test_what_the_device_computes_after_the_optimizer_is_no_wait_where_a_result_of_it_is_read_back(
    training: Training,
) -> None:
    """Averaged weights, and metrics: 4 of 10 ms of a step were a wait for data."""
    on = OnDevice(training)
    for _ in range(40):
        on.train()
        on.item()
        on.device.launch(0.004)
        on.item()
        on.clock.sleep_ms(6)
    states = on.states_ms(40)
    assert states["input_wait"] == pytest.approx(6, abs=0.3) and states["compute"] == pytest.approx(14, abs=0.4)


def test_what_is_saved_before_the_next_forward_pass_is_a_checkpoint(training: Training) -> None:
    """It was a wait for data; in an evaluation it was a part of that, and of the time between its passes."""
    training.watch.session.torch_hooks.phases.install()
    saved = Saved(training.clock)
    training.step(5, 10, loops=3)
    torch.save(saved, io.BytesIO())
    training.step(5, 10, loops=3)
    with torch.no_grad():
        training.model(torch.ones(1, 2))
        training.clock.sleep_ms(7)
        torch.save(saved, io.BytesIO())
        training.clock.sleep_ms(3)
    training.step(0, 10)
    states = training.states_ms()
    assert states["checkpoint"] == 100 and states["eval"] == 10 and gaps_ms(training) == 7
    assert states["input_wait"] == pytest.approx(25), "of five steps: the first one has no beginning"
    with training.watch.phase("eval"):
        torch.save(saved, io.BytesIO())
    assert training.states_ms()["checkpoint"] == 100, "in a declared evaluation it is a part of that"


def test_functions_without_a_module_wait_until_the_copy_and_their_device_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They had no timeline of the device, and 70% of waits were `compute`: only a module's pass looked for a device."""
    training = Training(monkeypatch)
    bounds, weight = training.watch.session.torch_hooks.optimizer, torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], 0.1)
    hook = optimizer.register_step_post_hook(lambda of, *_: None if bounds.is_installed else bounds.stepped(of))
    found = list[bool]()
    training.watch.session.torch_hooks.on_first = lambda: found.append(True)
    on = OnDevice(training)
    for _ in range(40):
        on.clock.sleep_ms(3)
        on.copy()
        on.clock.sleep_ms(3)
        on.copy()
        on.device.launch(0.010)
        weight.sum().backward()
        optimizer.step()
        on.item()
    states = on.states_ms(40)
    assert found and training.watch.report().steps == 38
    assert states["input_wait"] == pytest.approx(3, abs=0.3), "up to the first copy: the work may have begun then"
    assert states["transfer"] == pytest.approx(4, abs=0.3)
    for _ in range(3):  # and without copies all of a step computes
        on.clock.sleep_ms(6)
        optimizer.step()
    assert training.watch._recorder.doing() == "step"
    training.watch.close()
    hook.remove()
    assert not sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks  # type: ignore[attr-defined]


def test_steps_are_those_that_plain_calls_mark_from_the_first_call_on(training: Training) -> None:
    """The marks and their samples were ignored: an optimizer's step came before the first, and bounded all steps."""
    for _ in range(4):
        training.step(5, 10)
        training.clock.sleep_ms(3)
        training.watch.step(samples=8, tokens=100)
    states, report = training.states_ms(), training.watch.report()
    assert (report.steps, report.samples, report.tokens) == (3, 24, 300)
    assert states == {"startup": 15, "other": 3, "compute": 3 * 18}, "no data() is declared"


def test_a_gap_between_passes_on_a_device_begins_when_a_result_is_read_back(training: Training) -> None:
    recorder, read = training.watch._recorder, TransferWatch(training.watch._recorder)._reads_back
    on_device(training)
    result = SimpleNamespace(is_cpu=False)

    def reads(ms: float) -> Any:
        return read(lambda _: training.clock.sleep_ms(ms), result, (), {})

    training.step(0, 10, loops=2)
    with torch.no_grad():
        for _ in range(4):
            training.model(torch.ones(1, 2))
            training.clock.sleep_ms(7)  # what the device may compute in
        assert gaps_ms(training) == 0
        for _ in range(4):
            training.model(torch.ones(1, 2))
            reads(3)
            training.clock.sleep_ms(5)
            reads(0)
            training.clock.sleep_ms(2)
    training.step(0, 10)
    assert gaps_ms(training) == 4 * 7 and recorder.gap_since_ns == 0


# between two forward passes ------------------------------------------------------------------------------------------


def gaps_ms(training: Training) -> float:
    return training.watch._recorder.gaps_ns / 1e6


def roll_out(training: Training, steps: int, env_ms: float, pass_ms: float = 1.0) -> None:
    """An environment that is stepped after each pass."""
    handle = training.model.register_forward_pre_hook(lambda *_: training.clock.sleep_ms(pass_ms))
    for _ in range(steps):
        training.model(torch.ones(1, 2))
        training.clock.sleep_ms(env_ms)
    handle.remove()


def test_what_passes_between_forward_passes_of_a_rollout_is_known(training: Training) -> None:
    """A rollout was "evaluation takes 80% of the time"."""
    training.step(0, 10, loops=2)
    for _ in range(3):
        with torch.no_grad():
            roll_out(training, 20, env_ms=5)
        training.step(0, 10, loops=4)
    assert gaps_ms(training) == 300
    assert training.states_ms()["eval"] == pytest.approx(3 * 20 * 6)


def test_a_pass_without_gradients_that_raises_does_not_hide_the_training_that_follows(training: Training) -> None:
    training.step(0, 10, loops=2)
    with torch.no_grad(), pytest.raises(RuntimeError):
        torch.nn.Linear(2, 2)(torch.ones(1, 99))
    training.step(0, 10, loops=2)
    assert training.states_ms()["compute"] == pytest.approx(3 * 10)


def test_a_teachers_pass_in_each_step_is_no_evaluation(training: Training) -> None:
    """Distillation was "evaluation takes 52% of the time"."""
    for _ in range(40):
        with torch.no_grad():
            roll_out(training, 1, env_ms=0, pass_ms=10)
        training.step(0, 10)
    states = training.states_ms()
    assert states["eval"] == pytest.approx(5 * 10) and states["compute"] == pytest.approx(39 * 20 - 50)


@pytest.mark.parametrize("steps", [5, 1], ids=["every five steps", "in each step"])
def test_passes_with_gradients_in_the_mode_of_an_evaluation(training: Training, steps: int) -> None:
    """In each step they are a part of it, as adversarial examples are."""
    training.model = torch.nn.Sequential(training.model)
    for number in range(21):
        training.step(5, 10)
        if number % steps == steps - 1:
            training.model.eval()
            for _ in range(4):
                training.model(torch.ones(1, 2))
                training.clock.sleep_ms(5)
            training.model.train()
    states = training.states_ms()
    if steps == 5:
        assert states["eval"] == 4 * 25, "up to the next forward pass that trains"
        assert states["compute"] == 200 and states["input_wait"] == 16 * 5
    else:
        assert states == {"startup": 15, "compute": 20 * 35 + 20}
    assert training.watch.report().steps == 20


@pytest.mark.parametrize("reentrant", [True, False])
def test_activations_that_are_computed_again_are_no_evaluation(training: Training, reentrant: bool) -> None:
    """A forward pass without gradients comes first, and a function calls the blocks.

    17% of such a training was `eval`.
    """
    from torch.utils.checkpoint import checkpoint

    def block(x: Any) -> Any:
        training.clock.sleep_ms(2)
        return torch.nn.Sequential(training.model)(x)

    for _ in range(11):
        training.clock.sleep_ms(3)
        x = torch.ones(1, 2, requires_grad=True)
        for _ in range(4):
            x = checkpoint(block, x, use_reentrant=reentrant)
        x.sum().backward()
        training.optimizers[0].step()
    assert training.states_ms() == {"startup": 19, "input_wait": 50, "compute": 140}


def test_an_action_in_each_step_is_no_teachers_pass(training: Training) -> None:
    for _ in range(40):
        with torch.no_grad():
            roll_out(training, 1, env_ms=10, pass_ms=1)
        training.step(0, 10)
    assert gaps_ms(training) == pytest.approx(39 * 10)


def test_a_declared_phase_between_two_steps_is_no_gap_and_leaves_the_wait(training: Training) -> None:
    for _ in range(5):
        training.clock.sleep_ms(5)
        with training.watch.phase("eval"), torch.no_grad():
            roll_out(training, 20, env_ms=5)
        training.step(5, 10)
    states = training.states_ms()
    assert states["input_wait"] == pytest.approx(4 * 10) and states["compute"] == pytest.approx(4 * 10)
    assert gaps_ms(training) == 0


def test_torch_is_left_as_it_was(training: Training) -> None:
    modules = torch.nn.modules.module
    training.step(0, 10, loops=2)
    assert modules._global_forward_pre_hooks, "the next pass is waited for"
    with torch.no_grad():
        training.model(torch.ones(1, 2))
    assert modules._global_forward_pre_hooks and modules._global_forward_hooks, "its end is"
    training.model(torch.ones(1, 2))
    assert not modules._global_forward_pre_hooks and not modules._global_forward_hooks, "none stays in a step"
    training.step(0, 10)
    training.watch.close()
    assert not modules._global_forward_hooks and not modules._global_forward_pre_hooks


def test_without_a_loader_too_device_events_rest_where_they_cost_more_than_the_budget(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was metered there: each step had its events, whatever they cost."""
    device = on_device(training)
    record = device.record
    monkeypatch.setattr(device, "record", lambda event: training.clock.sleep_ms(0.5) or record(event))
    for _ in range(40):
        for _ in range(32):
            step_on(device, training, 20)
        turn(training.watch)
        training.watch._publisher.accounts.settle_cost()
    report = training.watch.report()
    assert training.watch._recorder.meter.device_one_in > 1
    assert report.hook_s is not None and 0.02 < report.coverage < 0.9
    assert report.shares["input_wait"] == pytest.approx(11 / 21, abs=0.05), report.shares
    assert sum(report.states.values()) == pytest.approx(report.duration_s)
