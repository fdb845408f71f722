"""Evaluations on tensors inside a loader's loop; and what each step does without gradients, which is none."""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from copy import deepcopy
from itertools import pairwise
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.hook.fakes import in_autograds_thread
from tests.unit.hook.torch.test_optimizer_steps import Training, compiled, training

torch = pytest.importorskip("torch")


__all__ = ["training"]  # a fixture


class Loop:
    """A loop over a loader that waits 2 ms a batch, with steps of 10 ms."""

    def __init__(self, training: Training) -> None:
        self.training, self.model = training, training.model
        self.x = torch.ones(1, 2)

    def call(self, ms: float = 5, model: Any = None) -> None:
        (model or self.model)(self.x)
        self.training.clock.sleep_ms(ms)

    def run(
        self, after: Callable[[int], None], before: Callable[[int], None] = lambda number: None
    ) -> dict[str, float]:
        for number in self.training.watch.steps(self.training.batches(25, 2)):
            before(number)
            self.training.step(0, 10)
            after(number)
        return self.training.states_ms()


@pytest.fixture
def loop(training: Training) -> Loop:
    return Loop(training)


def each(number: int, steps: int = 5) -> bool:
    return number % steps == steps - 1


def in_mode(loop: Loop) -> None:
    loop.model.eval()
    loop.call()
    loop.call(15)
    loop.model.train()


def without_gradients(loop: Loop) -> None:
    with torch.no_grad():
        loop.call()
        loop.call(15)


def in_both(loop: Loop) -> None:
    loop.model.eval()
    with torch.no_grad():
        loop.call()
        loop.call(15)
    loop.model.train()


@torch.inference_mode()
def decorated(loop: Loop) -> None:
    loop.call()
    loop.call(15)


def mode_is_left(loop: Loop) -> None:
    loop.model.eval()
    loop.call()
    loop.call(15)  # the next step begins with `model.train()`


@pytest.mark.parametrize("evaluate", [in_mode, without_gradients, in_both, decorated])
@pytest.mark.parametrize("first", [False, True], ids=["after the step", "before it"])
def test_what_is_evaluated_every_five_steps_is_an_evaluation(loop: Loop, evaluate: Any, first: bool) -> None:
    def now_and_then(number: int) -> None:
        if each(number):
            evaluate(loop)

    states = loop.run(
        now_and_then if not first else lambda number: None, now_and_then if first else lambda number: None
    )
    assert states == {"input_wait": 50, "compute": 250, "eval": 100}
    assert loop.training.watch.report().steps == 25


@pytest.mark.parametrize("evaluate", [in_mode, without_gradients])
def test_one_where_optimizers_step_in_the_backward_pass_on_a_device(loop: Loop, evaluate: Any) -> None:
    (optimizer,) = loop.training.optimizers
    in_backward: Any = SimpleNamespace(step=functools.partial(in_autograds_thread, optimizer.step))
    loop.training.optimizers = [in_backward]
    states = loop.run(lambda number: evaluate(loop) if each(number) else None)
    assert states == {"input_wait": 50, "compute": 250, "eval": 100}


def test_one_after_which_only_the_next_step_begins_to_train_ends_with_its_step(loop: Loop) -> None:
    def evaluate(number: int) -> None:
        if each(number):
            mode_is_left(loop)

    states = loop.run(evaluate, before=lambda number: loop.model.train() and None)
    assert states == {"input_wait": 50, "compute": 250, "eval": 100}


def teacher(loop: Loop, number: int) -> None:
    with torch.no_grad():
        loop.call(model=loop.frozen)


def own_targets(loop: Loop, number: int) -> None:
    """TRADES and MeanTeacher: the mode changes in each step."""
    loop.model.eval()
    loop.call()
    loop.model.train()


def average(loop: Loop, number: int) -> None:
    with torch.no_grad():
        for mine, its in zip(loop.frozen.parameters(), loop.model.parameters(), strict=True):
            mine.lerp_(its, 0.1)
    loop.training.clock.sleep_ms(5)


@torch.no_grad()
def decorated_average(loop: Loop, number: int) -> None:
    average(loop, number)


def seldom_average(loop: Loop, number: int) -> None:
    if each(number):
        with torch.no_grad():
            loop.frozen.load_state_dict(loop.model.state_dict())
            loop.training.clock.sleep_ms(25)


def clipped(loop: Loop, number: int) -> None:
    torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)
    loop.training.clock.sleep_ms(5)


@pytest.mark.parametrize("habit", [teacher, own_targets, average, decorated_average, seldom_average, clipped])
def test_what_each_step_does_is_none_nor_what_calls_no_model(loop: Any, habit: Any) -> None:
    loop.frozen = deepcopy(loop.model)
    states = loop.run(functools.partial(habit, loop), before=functools.partial(habit, loop))
    assert states == {"input_wait": 50, "compute": 500}


def test_a_teacher_does_not_hide_an_evaluation(loop: Any) -> None:
    loop.frozen = deepcopy(loop.model)

    def both(number: int) -> None:
        teacher(loop, number)
        if each(number):
            in_both(loop)

    assert loop.run(both) == {"input_wait": 50, "compute": 375, "eval": 100}


@pytest.mark.parametrize("evaluate", [in_mode, without_gradients, mode_is_left])
def test_a_loop_that_is_left_in_an_evaluation_ends_it(loop: Loop, evaluate: Any) -> None:
    """Early stopping: what follows belongs to the training again."""
    for number in loop.training.watch.steps(loop.training.batches(25, 2)):
        loop.training.step(0, 10)
        if number == 9:
            evaluate(loop)
            break
    loop.training.clock.sleep_ms(100)
    loop.model.train()
    states = loop.run(lambda number: None)
    assert states == {"input_wait": 70, "compute": 350, "eval": 20, "other": 100}


@pytest.mark.parametrize("evaluate", [in_mode, without_gradients, in_both, decorated, mode_is_left])
def test_one_on_tensors_after_each_pass(loop: Loop, evaluate: Any) -> None:
    for _ in range(3):
        loop.model.train()
        loop.run(lambda number: None)
        loop.training.clock.sleep_ms(1)  # `model.train()` comes with the next pass, or not at all
        evaluate(loop)
    assert loop.training.states_ms() == {"input_wait": 150, "compute": 750, "eval": 60, "other": 3}
    assert loop.training.watch.report().steps == 75


def test_a_declared_phase_is_not_divided(loop: Loop) -> None:
    for _ in range(2):
        loop.run(lambda number: None)
        with loop.training.watch.phase("plot"):
            in_both(loop)
            for _ in loop.training.watch.steps(loop.training.batches(2, 3)):
                without_gradients(loop)
    states = loop.training.watch.report()
    assert states.states["other"] == pytest.approx(2 * (20 + 6 + 40) / 1e3) and "eval" not in states.states


def test_one_in_which_the_optimizer_makes_a_step_was_none_and_there_are_no_more(loop: Loop) -> None:
    """Layers that are frozen every five steps, which is `eval()` too: one step is booked wrongly."""

    def freeze(number: int) -> None:
        if each(number):
            loop.model.eval()

    states = loop.run(lambda number: loop.model.train() and None, before=freeze)
    assert states == {"input_wait": 50, "compute": 240, "eval": 10}


def test_another_model_that_is_made_in_a_step_is_none(loop: Loop) -> None:
    """A teacher is loaded at some time: the rest of the step was an evaluation, and none was found from then on."""
    made: list[Any] = []

    def load(number: int) -> None:
        if number == 7:
            made.append(torch.nn.Linear(2, 2).eval())
            loop.training.clock.sleep_ms(20)

    def evaluate(number: int) -> None:
        if number == 15:
            in_mode(loop)

    assert loop.run(evaluate, before=load) == {"input_wait": 50, "compute": 270, "eval": 20}


def test_an_evaluation_by_a_compiled_function_is_known_and_compiled_once(loop: Loop) -> None:
    """A hook of modules would have torch compile it again each time."""
    call, graphs = compiled(lambda x: loop.model(x))

    def evaluate(number: int) -> None:
        if each(number):
            with torch.no_grad():
                call(loop.x)
                loop.training.clock.sleep_ms(3)

    assert loop.run(evaluate) == {"input_wait": 50, "compute": 250, "eval": 15}
    for _ in loop.training.watch.steps(loop.training.batches(4, 2)):
        with torch.no_grad():
            call(loop.x)
            loop.training.clock.sleep_ms(5)
    # The first batch's wait comes before it is known what the pass is for.
    assert loop.training.states_ms() == {"input_wait": 52, "compute": 250, "eval": 15 + 26}
    assert len(graphs) == 1


def test_a_loader_in_an_evaluation_is_a_part_of_it(loop: Loop) -> None:
    def validate(number: int) -> None:
        if each(number):
            loop.model.eval()
            loop.training.clock.sleep_ms(3)
            for _ in loop.training.watch.steps(loop.training.batches(3, 4)):
                loop.call()
            loop.training.clock.sleep_ms(5)
            loop.model.train()

    states = loop.run(validate)
    assert states == {"input_wait": 50, "compute": 250, "eval": 5 * 35}
    window, _, _ = loop.training.watch._publisher._window(closed=True)
    assert window.eval_wait_ratio == pytest.approx(12 / 35)


def random_programs(random: Random) -> Iterator[tuple[str, int, dict[int, str], dict[int, str]]]:
    """Yield passes over a quick loader, and steps without a loader.

    Of each: what it does, its number of steps, and what is done before and after single steps.
    """
    for _ in range(random.randint(2, 4)):
        count = random.choice([3, 20, 90])
        habits = [random.choice([1, 3, 5, 40]), random.choice([2, 7, 33])]
        names = random.choices(["in_mode", "without_gradients", "in_both", "decorated", "teacher", "mode_is_left"], k=2)
        done = [
            {number: name for number in range(count) if number % every == every - 1}
            for every, name in zip(habits, names, strict=True)
        ]
        yield random.choice(["to its end", "left", "without a loader", "without training"]), count, done[0], done[1]


@pytest.mark.parametrize("seed", range(30))
def test_the_ledger_is_the_same_as_if_each_step_of_an_optimizer_were_counted(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ledger(counts_all: bool) -> tuple[dict[str, float], int, int]:
        random, training = Random(seed), Training(monkeypatch)
        optimizer = training.watch.session.torch_hooks.optimizer
        if counts_all:
            monkeypatch.setattr(optimizer, "stepped", lambda of, *_: optimizer.guarded(optimizer._stepped, of))
        loop: Any = Loop(training)
        loop.frozen = deepcopy(loop.model)
        made = {each.__name__: each for each in (in_mode, without_gradients, in_both, decorated, mode_is_left)}
        calls = {**made, "teacher": functools.partial(teacher, number=0)}
        for kind, count, before, after in random_programs(random):
            loop.model.train()
            batches: Any = range(count)
            for number in batches if kind == "without a loader" else training.watch.steps(batches):
                if number in before:
                    calls[before[number]](loop)
                if kind == "without training":
                    loop.call(1)
                    continue
                training.step(0.25, 1)
                if number in after:
                    calls[after[number]](loop)
                if kind == "left" and number == count - 2:
                    break
            training.clock.sleep_ms(2)
        states, count, steps = training.states_ms(), optimizer.count, training.watch.report().steps
        training.watch.close()
        return states, steps, count

    (states, steps, counted), (expected, of_all, all_counted) = ledger(False), ledger(True)
    assert (states, steps) == (expected, of_all) and counted <= all_counted


def test_in_a_loops_ordinary_steps_neither_optimizers_nor_compilers_are_asked(loop: Loop) -> None:
    optimizer, enters = loop.training.watch.session.torch_hooks.optimizer, sys.modules["torch._dynamo.eval_frame"]
    own, counted = enters._maybe_set_eval_frame, []
    for _ in range(3):
        for number in loop.training.watch.steps(range(300)):
            loop.training.step(0, 1)
            if number == 20:
                assert enters._maybe_set_eval_frame is own
        counted.append(optimizer.count)
    each_pass = [after - before for before, after in pairwise(counted)]
    assert all(each < 100 for each in each_pass), each_pass
    kept = iter(loop.training.watch.steps(range(300)))
    for _ in range(40):
        next(kept)
        loop.training.step(0, 1)
    before = optimizer.count
    for _ in loop.training.watch.steps(range(1)):  # while the first iterator is there
        loop.training.step(0, 1)
    assert optimizer.count == before + 1
    del kept
    counted = [optimizer.count]
    loop.training.step(0, 1, loops=20)
    assert optimizer.count == counted[-1] + 20 and loop.training.watch.report().steps == 3 * 300 + 40 + 1 + 19


def test_a_model_that_was_evaluated_last_is_released(loop: Loop) -> None:
    """A sweep had two models in the GPU's memory while it made the next one."""
    loop.run(lambda number: None)
    loop.model.eval()
    loop.call()
    gone = weakref.ref(loop.model)
    del loop.model, loop.training.model
    gc.collect()
    assert gone() is None


def test_torch_is_left_as_it_was(loop: Loop) -> None:
    places: list[tuple[Any, str]] = [(torch.nn.Module, "eval"), (torch.nn.Module, "train")]
    places += [(each, name) for each in (torch.no_grad, torch.inference_mode) for name in ("__enter__", "__exit__")]
    before = [vars(owner)[name] for owner, name in places]

    def passes() -> Iterator[None]:
        for _ in range(6):
            yield
            loop.run(lambda number: in_mode(loop) if each(number) else None)

    for _ in passes():
        pass
    loop.training.watch.close()
    assert [vars(owner)[name] for owner, name in places] == before
