"""Loops of every shape: the user's objects behave as they did, and each second is where it was spent."""

from __future__ import annotations

import copy
import itertools
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuwatch.hook.loop import Loop
from gpuwatch.hook.watch import Watch
from tests.unit.hook.fakes import Clock, fake_watch, states_ms


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watch(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Watch:
    return fake_watch(clock, monkeypatch)


class Loader:
    """Takes `wait_ms` a batch and `start_ms` for `iter()`."""

    def __init__(self, clock: Clock, batches: int, wait_ms: float = 3, start_ms: float = 0) -> None:
        self.clock, self.batches, self.wait_ms, self.start_ms = clock, batches, wait_ms, start_ms
        self.sampler = self

    def __len__(self) -> int:
        return self.batches

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        return {"at": 7}

    def __iter__(self) -> Iterator[int]:
        self.clock.sleep_ms(self.start_ms)
        return self._batches()

    def _batches(self) -> Iterator[int]:
        for index in range(self.batches):
            self.clock.sleep_ms(self.wait_ms)
            yield index


def train(loop: Any, clock: Clock, ms: float = 7) -> list[Any]:
    seen = []
    for batch in loop:
        clock.sleep_ms(ms)
        seen.append(batch)
    return seen


def steps(watch: Watch) -> int:
    return watch.report().steps


def test_a_plain_loop(watch: Watch, clock: Clock) -> None:
    assert train(watch.steps(Loader(clock, 4)), clock) == [0, 1, 2, 3]
    assert states_ms(watch) == {"input_wait": 12, "compute": 28}
    assert steps(watch) == 4


def test_30_ms_between_7_ms_steps_are_accounted(watch: Watch, clock: Clock) -> None:
    for _ in range(10):
        with watch.step():
            clock.sleep_ms(7)
        clock.sleep_ms(30)
    assert states_ms(watch) == {"compute": 70, "other": 300}
    # In a watched loop the pause is inside the step: 37 ms each, not 7.
    train(watch.steps(Loader(clock, 10, wait_ms=0)), clock, ms=37)
    assert states_ms(watch) == {"compute": 440, "other": 300}
    assert watch.report().step_s == pytest.approx(0.022)  # median of ten steps of 7 ms and ten of 37


def test_starting_the_loader_is_a_wait_of_the_first_step(watch: Watch, clock: Clock) -> None:
    train(watch.steps(Loader(clock, 2, start_ms=5_000)), clock)
    assert states_ms(watch) == {"input_wait": 5_006, "compute": 14}
    first, second = watch._publisher.accounts.window(clock())[0].steps.data_wait_s
    assert (first, second) == (5.003, 0.003)


def test_a_long_start_is_a_wait_whenever_the_thread_looks(watch: Watch, clock: Clock) -> None:
    class Slow(Loader):
        def __iter__(self) -> Iterator[int]:
            for _ in range(10):
                clock.sleep_ms(500)
                watch.report()
            return self._batches()

    train(watch.steps(Slow(clock, 1)), clock)
    assert states_ms(watch) == {"input_wait": 5_003, "compute": 7}


def test_iter_is_eager_as_the_loaders_own(watch: Watch, clock: Clock) -> None:
    started = []

    class Eager(Loader):
        def __iter__(self) -> Iterator[int]:
            started.append(True)
            return super().__iter__()

    iterator = iter(watch.steps(Eager(clock, 2)))
    assert started == [True]
    clock.sleep_ms(2_000)  # the user's head start
    assert train(iterator, clock) == [0, 1]
    assert states_ms(watch) == {"startup": 2_000, "input_wait": 6, "compute": 14}


@pytest.mark.parametrize("is_made_twice", [False, True])
@pytest.mark.parametrize("phase", ["eval", ""])
def test_an_iterator_that_is_made_ahead_interrupts_nothing(
    watch: Watch, clock: Clock, is_made_twice: bool, phase: str
) -> None:
    """Keras makes the next pass's inside the last step, validates, and then makes one more, or takes its batches."""
    loader = watch.steps(Loader(clock, 3, start_ms=4))
    batches = iter(loader)
    for _ in range(2):
        for _ in range(3):
            next(batches)
            clock.sleep_ms(7)
        batches = iter(loader)
        clock.sleep_ms(20)
        if phase:
            with watch.phase(phase):
                train(watch.steps(Loader(clock, 2, 5)), clock, 5)
        if is_made_twice:
            batches = iter(loader)
    states = {"input_wait": 18 + 4 * (5 if is_made_twice else 3), "compute": 42, "other": 40}
    assert states_ms(watch) == (states | {"eval": 40} if phase else states)
    assert steps(watch) == 6 and watch._recorder.levels == []


@pytest.mark.parametrize(
    "wrap",
    [enumerate, lambda loop: itertools.islice(loop, 3), zip, lambda loop: map(lambda x: (x,), loop)],
    ids=["enumerate", "islice", "zip", "map"],
)
def test_loops_inside_other_iterators(watch: Watch, clock: Clock, wrap: Callable[[Any], Any]) -> None:
    train(wrap(watch.steps(Loader(clock, 3))), clock)
    assert states_ms(watch) == {"input_wait": 9, "compute": 21}
    assert steps(watch) == 3


def test_lists_generators_and_their_next(watch: Watch, clock: Clock) -> None:
    assert train(watch.steps(["a", "b"]), clock) == ["a", "b"]
    assert train(watch.steps(x for x in "cd"), clock) == ["c", "d"]
    stream: Any = watch.steps(iter(range(10)))
    assert next(stream) == 0 and next(stream) == 1
    assert next(iter(stream)) == 2
    with pytest.raises(TypeError, match="'list' object is not an iterator"):
        next(watch.steps([1]))  # type: ignore[call-overload]
    assert steps(watch) == 6  # the stream's second batch is still worked on


def test_an_early_break_ends_the_step_and_the_loop_can_run_again(watch: Watch, clock: Clock) -> None:
    loader = watch.steps(Loader(clock, 10))
    for _ in range(2):
        for batch in loader:
            clock.sleep_ms(7)
            if batch == 2:
                break
        clock.sleep_ms(100)
    assert states_ms(watch) == {"input_wait": 18, "compute": 42, "other": 200}
    assert steps(watch) == 6


def test_an_exception_in_the_body_passes_unchanged(watch: Watch, clock: Clock) -> None:
    error = RuntimeError("CUDA out of memory")

    def loop() -> None:
        for batch in watch.steps(Loader(clock, 10)):
            clock.sleep_ms(7)
            if batch == 1:
                raise error

    with pytest.raises(RuntimeError) as caught:
        loop()
    assert caught.value is error and error.__cause__ is None and error.__context__ is None
    frames = [entry.name for entry in caught.traceback]
    assert frames[-1] == "loop" and "__next__" not in frames
    assert steps(watch) == 2 and not watch._recorder.in_step


@pytest.mark.parametrize("kind", [OSError, KeyboardInterrupt, MemoryError])
def test_what_the_loader_raises_passes_unchanged_and_its_time_was_a_wait(
    watch: Watch, clock: Clock, kind: type[BaseException]
) -> None:
    error = kind("worker died")

    def broken() -> Iterator[int]:
        yield 0
        clock.sleep_ms(50)
        raise error

    with pytest.raises(kind) as caught:
        train(watch.steps(broken()), clock)
    assert caught.value is error and error.__context__ is None
    assert [entry.name for entry in caught.traceback][-1] == "broken"
    assert states_ms(watch) == {"input_wait": 50, "compute": 7}
    assert steps(watch) == 1


def test_a_loop_that_skips_bad_batches_stays_measured(watch: Watch, clock: Clock) -> None:
    class SometimesBad(Iterator[int]):
        index = 0

        def __next__(self) -> int:
            self.index += 1
            clock.sleep_ms(3)
            if self.index == 2:
                raise ValueError("bad sample")
            if self.index > 4:
                raise StopIteration
            return self.index

    iterator = iter(watch.steps(SometimesBad()))
    seen = []
    while True:
        try:
            seen.append(next(iterator))
        except ValueError:
            continue
        except StopIteration:
            break
        clock.sleep_ms(7)
    assert seen == [1, 3, 4]
    assert states_ms(watch) == {"input_wait": 15, "compute": 21}
    assert steps(watch) == 3


def test_an_empty_loader(watch: Watch, clock: Clock) -> None:
    assert train(watch.steps(Loader(clock, 0, start_ms=20)), clock) == []
    assert states_ms(watch) == {"input_wait": 20}
    assert steps(watch) == 0


def test_a_loader_that_cannot_be_iterated_raises_what_it_always_raised(watch: Watch) -> None:
    with pytest.raises(TypeError, match="'int' object is not iterable"):
        iter(watch.steps(7))  # type: ignore[arg-type]
    assert not watch._recorder.in_step and watch._recorder.levels == []


@pytest.mark.parametrize(("first", "second"), [(3, 3), (3, 4), (4, 3)])
def test_two_loaders_zipped_wait_for_both_and_count_each_step_once(
    watch: Watch, clock: Clock, first: int, second: int
) -> None:
    pairs = zip(watch.steps(Loader(clock, first, 3)), watch.steps(Loader(clock, second, 2)), strict=False)
    assert len(train(pairs, clock)) == 3
    assert steps(watch) == 3
    del pairs
    states = states_ms(watch)
    assert states["compute"] == 21
    assert states["input_wait"] == 3 * 5 + (3 if first > second else 0)


def test_a_second_loader_that_starts_again_does_not_take_the_firsts_steps(watch: Watch, clock: Clock) -> None:
    source = watch.steps(Loader(clock, 2, 2))
    inner = iter(source)
    for _ in watch.steps(Loader(clock, 5, 3)):
        try:
            next(inner)
        except StopIteration:
            inner = iter(source)
            next(inner)
        clock.sleep_ms(7)
    states = states_ms(watch)
    assert states == {"input_wait": 5 * 5, "compute": 35}
    assert 5 <= steps(watch) <= 7  # a pass that begins inside a step counts as a loop of its own until the next step


def test_a_nested_training_loop_counts_its_steps_and_the_outer_ones(watch: Watch, clock: Clock) -> None:
    for _ in watch.steps(Loader(clock, 2, 10)):
        train(watch.steps(Loader(clock, 3, 1)), clock, ms=5)
        clock.sleep_ms(2)
    assert states_ms(watch) == {"input_wait": 26, "compute": 34}
    assert steps(watch) == 8
    assert watch._recorder.levels == []


def test_a_nested_loop_that_is_broken_off_and_kept(watch: Watch, clock: Clock) -> None:
    kept = []
    for _ in watch.steps(Loader(clock, 2, 10)):
        iterator = iter(watch.steps(Loader(clock, 3, 1)))
        kept.append(iterator)  # never dropped: nothing tells that it has ended
        next(iterator)
        clock.sleep_ms(5)
    assert states_ms(watch) == {"input_wait": 22, "compute": 10}
    assert watch._recorder.levels == []


def test_a_kept_iterator_that_is_dropped_late_closes_nothing_of_its_successor(
    watch: Watch, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Loop, "_is_evaluation", lambda self: self.to is not None and not watch._recorder.in_phase)
    monkeypatch.setattr("gpuwatch.hook.loop.move", lambda batch, device: batch)
    evaluation: Any = None
    for _ in watch.steps(Loader(clock, 3, 1)):
        clock.sleep_ms(5)
        evaluation = iter(watch.steps(Loader(clock, 9, 20), to="cpu"))  # drops the one before
        next(evaluation)
        next(evaluation)
    assert states_ms(watch) == {"input_wait": 3, "compute": 15, "eval": 120}


def test_length_attributes_and_items_are_the_loaders(watch: Watch, clock: Clock) -> None:
    loader = Loader(clock, 4)
    watched: Any = watch.steps(loader)
    assert len(watched) == 4 and bool(watched)
    watched.sampler.set_epoch(3)
    watched.batch_sampler = "mine"
    assert (loader.epoch, loader.batch_sampler) == (3, "mine")  # type: ignore[attr-defined]
    del watched.batch_sampler
    assert not hasattr(loader, "batch_sampler")
    assert watched.state_dict() == {"at": 7}
    assert "state_dict" in dir(watched)
    assert watch.steps([5, 6])[1] == 6  # type: ignore[index]
    assert repr(watch.steps([5])) == "gpuwatch.watch([5])"
    with pytest.raises(AttributeError, match="no_such"):
        _ = watched.no_such
    with pytest.raises(TypeError, match="has no len"):
        len(watch.steps(x for x in "ab"))  # type: ignore[arg-type]
    assert bool(watch.steps(x for x in "ab"))
    assert not watch.steps([])


def test_the_iterators_length_and_attributes_are_its_own(watch: Watch) -> None:
    class Batches(list[int]):
        def __iter__(self) -> Any:
            return Own()

    class Own(Iterator[int]):
        prefetched = 2

        def __next__(self) -> int:
            raise StopIteration

        def __len__(self) -> int:
            return 12

    iterator: Any = iter(watch.steps(Batches()))
    assert len(iterator) == 12 and iterator.prefetched == 2
    assert iter(iterator) is iterator


def test_a_copy_is_watched_and_a_pickle_is_the_bare_loader(watch: Watch) -> None:
    watched = watch.steps([1, 2])
    for clone in (copy.copy(watched), copy.deepcopy(watched)):
        assert type(clone) is type(watched) and list(clone) == [1, 2]
    assert steps(watch) == 4
    assert pickle.loads(pickle.dumps(watched)) == [1, 2]


def test_a_thread_that_prefetches_is_not_the_training(watch: Watch, clock: Clock) -> None:
    """Its loop is watched, the main thread's steps are declared: only the latter count."""
    started, stop = threading.Event(), threading.Event()

    def prefetch() -> None:
        for _ in watch.steps(itertools.count()):
            started.set()
            if stop.wait(0.0):
                break

    thread = threading.Thread(target=prefetch)
    thread.start()
    started.wait(60)
    watch.report()
    for _ in range(5):
        with watch.step():
            with watch.data():
                clock.sleep_ms(2)
            clock.sleep_ms(8)
    stop.set()
    thread.join()
    states = states_ms(watch)
    assert (states["input_wait"], states["compute"]) == (10, 40)


def test_a_watched_loader_inside_another_ones_fetch_is_a_part_of_that_wait(watch: Watch, clock: Clock) -> None:
    def augmented() -> Iterator[int]:
        for batch in watch.steps(Loader(clock, 3, 4)):
            clock.sleep_ms(2)
            yield batch

    train(watch.steps(augmented()), clock)
    assert states_ms(watch) == {"input_wait": 18, "compute": 21}
    assert steps(watch) == 3


def test_a_phase_inside_a_fetch_is_no_wait(watch: Watch, clock: Clock) -> None:
    def saving() -> Iterator[int]:
        for index in range(2):
            clock.sleep_ms(3)
            with watch.phase("checkpoint"):
                clock.sleep_ms(10)
            clock.sleep_ms(2)
            yield index

    train(watch.steps(saving()), clock)
    assert states_ms(watch) == {"input_wait": 10, "checkpoint": 20, "compute": 14}
    assert steps(watch) == 2


def test_steps_with_data_and_transfer(watch: Watch, clock: Clock) -> None:
    for _ in range(3):
        with watch.step(samples=32):
            with watch.data():
                clock.sleep_ms(5)
            with watch.transfer():
                clock.sleep_ms(2)
            clock.sleep_ms(10)
        with watch.phase("checkpoint"):
            clock.sleep_ms(1)
    assert states_ms(watch) == {"input_wait": 15, "transfer": 6, "compute": 30, "checkpoint": 3}
    assert (steps(watch), watch.report().samples) == (3, 96)


def test_next_inside_a_declared_step_or_wait_is_one_step_and_one_wait(watch: Watch, clock: Clock) -> None:
    batches = iter(watch.steps(Loader(clock, 9)))
    for _ in range(2):
        with watch.step():
            next(batches)
            clock.sleep_ms(7)
    for _ in range(2):
        with watch.step():
            with watch.data():
                next(batches)
                clock.sleep_ms(1)
            clock.sleep_ms(7)
    assert states_ms(watch) == {"input_wait": 14, "compute": 28}
    assert steps(watch) == 4


def test_a_declared_step_that_got_no_batch_is_none(watch: Watch, clock: Clock) -> None:
    batches = iter(watch.steps(Loader(clock, 2)))
    with pytest.raises(StopIteration):
        while True:
            with watch.step():
                next(batches)
                clock.sleep_ms(7)
    assert steps(watch) == 2


def test_next_inside_a_declared_wait_without_a_step(watch: Watch, clock: Clock) -> None:
    batches = iter(watch.steps(Loader(clock, 9)))
    for _ in range(3):
        with watch.data():
            next(batches)
            clock.sleep_ms(1)
        clock.sleep_ms(7)
    del batches
    assert states_ms(watch) == {"input_wait": 12, "compute": 21}
    assert steps(watch) == 3


def test_steps_inside_steps_are_one(watch: Watch, clock: Clock) -> None:
    for _ in range(3):
        with watch.step(), watch.step():
            clock.sleep_ms(7)
    for _ in watch.steps(Loader(clock, 2, 3)):
        with watch.step():
            clock.sleep_ms(7)
    assert steps(watch) == 5
    assert states_ms(watch) == {"input_wait": 6, "compute": 35}


def test_another_threads_contexts_do_not_disturb_the_open_step(watch: Watch, clock: Clock) -> None:
    def elsewhere() -> None:
        with watch.step(), watch.data(), watch.transfer(), watch.phase("checkpoint"):
            pass

    for _ in range(2):
        with watch.step():
            with watch.data():
                thread = threading.Thread(target=elsewhere)
                thread.start()
                thread.join()
                clock.sleep_ms(3)
            clock.sleep_ms(7)
    assert states_ms(watch) == {"input_wait": 6, "compute": 14}
    assert steps(watch) == 2


def test_phases_nest_and_their_steps_belong_to_them(watch: Watch, clock: Clock) -> None:
    for _ in watch.steps(Loader(clock, 2, 3)):
        clock.sleep_ms(7)
        with watch.phase("eval"):
            train(watch.steps(Loader(clock, 4, 10)), clock, ms=1)
            with watch.phase("drawing"):
                clock.sleep_ms(5)
    assert states_ms(watch) == {"input_wait": 6, "compute": 14, "eval": 88, "other": 10}
    assert watch._publisher.accounts.timeline.counts.eval_wait_ns == 80_000_000
    assert steps(watch) == 2


def test_phases_left_in_another_order_than_entered(watch: Watch, clock: Clock) -> None:
    evaluation, saving = watch.phase("eval"), watch.phase("checkpoint")
    evaluation.__enter__()
    clock.sleep_ms(1)
    saving.__enter__()
    clock.sleep_ms(2)
    evaluation.__exit__(None, None, None)
    clock.sleep_ms(4)
    with watch.phase("checkpoint"):
        saving.__exit__(None, None, None)
        clock.sleep_ms(8)
    assert states_ms(watch) == {"startup": 4, "eval": 1, "checkpoint": 10}


def test_closing_inside_the_loop_lets_it_go_on(watch: Watch, clock: Clock) -> None:
    seen = []
    for batch in watch.steps(Loader(clock, 4)):
        seen.append(batch)
        clock.sleep_ms(7)
        if batch == 1:
            watch.close()
    assert seen == [0, 1, 2, 3]
    report = watch.report()
    assert report.steps == 2
    assert report.duration_s == pytest.approx(0.020) == sum(report.states.values())


def test_use_after_close_measures_nothing_and_works(watch: Watch, clock: Clock) -> None:
    watch.close()
    watch.close()
    assert train(watch.steps(Loader(clock, 2)), clock) == [0, 1]
    with watch.step(), watch.data(), watch.transfer(), watch.phase("eval"):
        clock.sleep_ms(1)
    assert steps(watch) == 0


def test_the_evaluations_loader_is_not_taken_for_the_trainings(watch: Watch, clock: Clock) -> None:
    training, evaluation = Loader(clock, 3), Loader(clock, 3)
    training.num_workers, evaluation.num_workers = 8, 0  # type: ignore[attr-defined]
    train(watch.steps(training), clock)
    with watch.phase("eval"):
        train(watch.steps(evaluation), clock)
    loader = watch._publisher.accounts.loader
    assert loader is not None and loader.num_workers == 8


# Any program ---------------------------------------------------------------------------------------------------------

sleeps = st.tuples(st.just("sleep"), st.integers(0, 900), st.just(()))
reports = st.tuples(st.sampled_from(["report", "apply"]), st.just(0), st.just(()))
waits = st.recursive(
    st.lists(st.one_of(sleeps, reports), max_size=3),
    lambda inner: st.lists(
        st.one_of(sleeps, st.tuples(st.sampled_from(["data", "transfer", "eval", "logging"]), st.just(0), inner)),
        max_size=3,
    ),
    max_leaves=4,
)
programs = st.recursive(
    waits,
    lambda inner: st.lists(
        st.one_of(
            sleeps,
            reports,
            st.tuples(st.sampled_from(["data", "transfer"]), st.just(0), waits),
            st.tuples(st.sampled_from(["step", "eval", "checkpoint", "logging"]), st.just(0), inner),
            st.tuples(
                st.sampled_from(["loop", "broken loop", "failing loop", "failing loader"]), st.integers(0, 3), inner
            ),
        ),
        max_size=4,
    ),
    max_leaves=12,
)
STATES = {"data": "input_wait", "transfer": "transfer", "eval": "eval", "checkpoint": "checkpoint", "logging": "other"}


class Program:
    """Runs a program and keeps, in a way as simple as can be, what each state must come to."""

    def __init__(self, watch: Watch, clock: Clock) -> None:
        self.watch, self.clock = watch, clock
        self.expected: dict[str, float] = {}
        self.phases: list[str] = []

    def sleep(self, milliseconds: int, state: str) -> None:
        self.clock.sleep_ms(milliseconds)
        state = self.phases[-1] if self.phases else state
        state = "other" if state == "startup" else state  # the first step decides which: taken together here
        self.expected[state] = self.expected.get(state, 0) + milliseconds

    def batches(self, count: int, fails: bool) -> Iterator[int]:
        for index in range(count):
            self.sleep(10 + index, "input_wait")
            yield index
        self.sleep(5, "input_wait")
        if fails:
            raise OSError("the loader")

    def run(self, program: Any, state: str = "startup") -> None:
        for kind, number, inner in program:
            if kind == "sleep":
                self.sleep(number, state)
            elif kind == "report":
                report = self.watch.report()
                assert sum(report.states.values()) == pytest.approx(report.duration_s, abs=1e-9)
                assert min(report.states.values(), default=0) >= 0
            elif kind == "apply":
                accounts = self.watch._publisher.accounts
                accounts.apply(self.clock())
                assert (
                    accounts.timeline.ledger.sum_ns
                    == accounts.timeline.ledger.watermark_ns - accounts.timeline.start_ns
                )
            elif kind == "step":
                with self.watch.step():
                    self.run(inner, "compute")
            elif kind == "data":
                with self.watch.data():
                    self.run(inner, "input_wait")
            elif kind == "transfer":
                with self.watch.transfer():
                    self.run(inner, "transfer")
            elif "loop" in kind or "loader" in kind:
                self.loop(kind, number, inner)
            else:
                with self.watch.phase(kind):
                    self.phases.append(STATES[kind])
                    try:
                        self.run(inner, state)
                    finally:
                        self.phases.pop()

    def loop(self, kind: str, number: int, inner: Any) -> None:
        try:
            for index in self.watch.steps(self.batches(number, kind == "failing loader")):
                self.run(inner, "compute")
                if index == 1 and kind == "broken loop":
                    break
                if index == 1 and kind == "failing loop":
                    raise OSError("the body")
        except OSError:
            pass


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(program=programs)
def test_every_moment_of_any_program_is_in_the_state_it_was_spent_in(
    monkeypatch: pytest.MonkeyPatch, program: Any
) -> None:
    clock = Clock()
    watch = fake_watch(clock, monkeypatch)
    run = Program(watch, clock)
    try:
        run.run(program)
        states = states_ms(watch)
    finally:
        watch.close()
    startup = states.pop("startup", 0)
    if startup:
        states["other"] = states.get("other", 0) + startup
    assert states == {state: milliseconds for state, milliseconds in run.expected.items() if milliseconds}
    assert watch._recorder.levels == [] and watch._recorder.parts == [] and not watch._recorder.in_step


def test_an_iterator_that_another_thread_lets_go_of_leaves_no_step_open(watch: Watch, clock: Clock) -> None:
    iterator = iter(watch.steps(Loader(clock, 9)))
    for _ in range(4):
        next(iterator)
        clock.sleep_ms(7)
    box = [iterator]
    del iterator

    def rest() -> None:
        for _ in box.pop():
            pass

    thread = threading.Thread(target=rest)
    thread.start()
    thread.join()
    assert "to" not in sys.modules["torch"].Tensor.__dict__ if "torch" in sys.modules else True
    clock.sleep_ms(1000)
    assert states_ms(watch) == {"input_wait": 12, "compute": 28 + 15, "other": 1000}
    assert steps(watch) == 4


def test_what_gpuwatch_does_around_a_pass_is_a_part_of_its_waits(
    watch: Watch, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly(call: Callable[..., Any], ms: float) -> Callable[..., Any]:
        def slow(*args: Any) -> Any:
            clock.sleep_ms(ms)
            return call(*args)

        return slow

    session = watch.session
    monkeypatch.setattr(session, "begin_pass", slowly(session.begin_pass, 3))
    monkeypatch.setattr(session, "first_batch", slowly(session.first_batch, 2))
    monkeypatch.setattr(session, "end_pass", slowly(session.end_pass, 5))
    for _ in watch.steps(range(2)):
        clock.sleep_ms(10)
        for _ in watch.steps(range(2)):
            clock.sleep_ms(20)
    assert states_ms(watch) == {"input_wait": 30.0, "compute": 100.0}


def test_a_nested_loader_that_cannot_begin_leaves_the_outer_loops_copies_timed(watch: Watch) -> None:
    class Broken:
        def __iter__(self) -> Any:
            raise OSError

    methods = watch.session.torch_hooks._transfers
    assert methods is not None
    for _ in watch.steps([1]):
        with pytest.raises(OSError):
            iter(watch.steps(Broken()))
        assert methods.loops == 1
    assert methods.loops == 0
