"""The watched iterator keeps no batch, no loop and no error alive, and raises what the loader raises."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gpuwatch.hook.loop import Loop
from gpuwatch.hook.watch import Watch
from gpuwatch.ledger.events import FAST_STEP
from tests.unit.hook.fakes import Clock, fake_watch


class Batch:
    """Something that can be seen to be gone."""


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    watch = fake_watch(Clock(), monkeypatch)
    yield watch
    watch.close()


def batches(count: int, seen: list[weakref.ref[Batch]]) -> Iterator[Batch]:
    def made() -> Batch:
        batch = Batch()
        seen.append(weakref.ref(batch))
        return batch

    for _ in range(count):
        yield made()


def test_batches_and_loops_are_released(watch: Watch) -> None:
    seen: list[weakref.ref[Batch]] = []
    iterator = iter(watch.steps(batches(200, seen)))
    loop = weakref.ref(iterator._loop)  # type: ignore[attr-defined]
    for _ in range(100):
        next(iterator)
    assert sum(each() is not None for each in seen) == 0
    owner, before = iterator._loop.owner, sys.getrefcount(iterator._loop.owner)  # type: ignore[attr-defined]
    for _ in range(90):
        next(iterator)
    assert sys.getrefcount(owner) == before
    del iterator
    assert loop() is None  # without a garbage collection


def test_what_each_step_makes_and_calls_is_released(watch: Watch) -> None:
    def count(batch: Batch) -> int:
        return 4

    seen: list[weakref.ref[Batch]] = []
    iterator = iter(watch.steps(batches(200, seen), samples=count))
    for _ in range(100):
        next(iterator)
    counts = iterator._loop.samples  # type: ignore[attr-defined]
    held = sys.getrefcount(counts)
    for _ in range(20):
        next(iterator)
    assert counts is not None and sys.getrefcount(counts) == held
    entry = watch._recorder.log[-1]
    assert entry[0] == FAST_STEP and sys.getrefcount(entry) == 3  # the log, `entry` and the call's own


def test_a_batch_is_released_when_something_else_ran_in_its_fetch(watch: Watch) -> None:
    seen: list[weakref.ref[Batch]] = []
    plain = batches(200, seen)

    class Loader:
        def __iter__(self) -> Loader:
            return self

        def __next__(self) -> Batch:
            if len(seen) % 20 == 19:
                with watch.data():
                    pass
            return next(plain)

    for _ in watch.steps(Loader()):
        pass
    del _
    assert len(seen) == 200 and sum(each() is not None for each in seen) == 0


def test_a_cycle_through_the_iterator_is_collected(watch: Watch) -> None:
    class Loader:
        held: Any = None

        def __iter__(self) -> Loader:
            return self

        def __next__(self) -> int:
            return 1

    loader = Loader()
    loader.held = iter(watch.steps(loader))
    for _ in range(50):
        next(loader.held)
    gone = weakref.ref(loader)
    del loader
    gc.collect()
    assert gone() is None


class Raising:
    """Numbers from 1 on; in place of some there is an error."""

    def __init__(self, error_at: Callable[[int], BaseException | None]) -> None:
        self._error_at = error_at
        self._count = 0

    def __iter__(self) -> Raising:
        return self

    def __next__(self) -> int:
        self._count += 1
        error = self._error_at(self._count)
        try:
            if error is not None:
                raise error
            return self._count
        finally:
            del error  # its traceback holds this frame


@pytest.mark.parametrize("error", [KeyError("a sample"), KeyboardInterrupt(), SystemExit(3)])
def test_what_the_loader_raises_is_raised_with_its_traceback(error: BaseException, watch: Watch) -> None:
    iterator = iter(watch.steps(Raising(lambda number: error if number == 60 else None)))
    for _ in range(59):
        next(iterator)
    with pytest.raises(type(error)) as raised:
        next(iterator)
    assert raised.value is error
    assert [entry.name for entry in raised.traceback][-1] == "__next__"
    assert next(iterator) == 61
    assert watch.report().steps == 59


def test_many_failed_fetches_leave_nothing_behind(watch: Watch) -> None:
    class Failure(Exception):
        pass

    alive: list[weakref.ref[Failure]] = []

    def failure_at(number: int) -> Failure | None:
        if number % 40:
            return None
        failure = Failure()
        alive.append(weakref.ref(failure))
        return failure

    iterator = iter(watch.steps(Raising(failure_at)))
    for _ in range(2000):
        with contextlib.suppress(Failure):
            next(iterator)
    gc.collect()
    assert len(alive) == 50 and sum(each() is not None for each in alive) == 0


def test_samples_that_cannot_be_counted_do_not_reach_the_training(watch: Watch) -> None:
    calls = 0

    def count(batch: int) -> int:
        nonlocal calls
        calls += 1
        if calls == 30:
            raise ValueError("not a batch of mine")
        return 4

    assert len(list(watch.steps(range(100), samples=count))) == 100
    assert calls == 30
    report = watch.report()
    assert report.steps == 100


def test_another_thread_gets_its_batches_and_is_not_measured(watch: Watch) -> None:
    iterator = iter(watch.steps(range(100)))
    for _ in range(50):
        next(iterator)
    got: list[int] = []
    thread = threading.Thread(target=lambda: got.extend(next(iterator) for _ in range(3)))
    thread.start()
    thread.join()
    assert got == [50, 51, 52]
    assert next(iterator) == 53


def failing(every: int) -> Raising:
    """Return a loader whose every `every`-th fetch raises a KeyError."""
    return Raising(lambda number: None if number % every else KeyError("a sample"))


def test_an_interrupt_while_the_loop_handles_a_failure_shows_both(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Loop[Any], error: BaseException) -> None:
        try:
            raise ValueError("on the way")
        except ValueError:
            raise KeyboardInterrupt from None

    def raised_again(self: Loop[Any], error: BaseException) -> None:
        raise error

    def contexts(error: BaseException | None) -> list[str]:
        kinds = []
        while error is not None and len(kinds) < 5:
            kinds.append(type(error).__name__)
            error = error.__context__
        return kinds

    monkeypatch.setattr(Loop, "cannot_count", interrupted)
    with pytest.raises(KeyboardInterrupt) as raised:
        for _ in watch.steps(range(100), samples=lambda batch: 1 // (50 - batch)):
            pass
    assert contexts(raised.value) == ["KeyboardInterrupt", "ValueError", "ZeroDivisionError"]

    iterator = iter(watch.steps(failing(60)))
    for _ in range(59):
        next(iterator)
    monkeypatch.setattr(Loop, "got_no_batch", interrupted)
    with pytest.raises(KeyboardInterrupt) as raised:
        next(iterator)
    assert contexts(raised.value) == ["KeyboardInterrupt", "ValueError", "KeyError"]
    for _ in range(59):
        next(iterator)
    monkeypatch.setattr(Loop, "got_no_batch", raised_again)
    with pytest.raises(KeyError) as failed:
        next(iterator)
    assert contexts(failed.value) == ["KeyError"]


def test_the_iterator_cannot_be_called(watch: Watch) -> None:
    assert not callable(iter(watch.steps(range(3))))  # `data() if callable(data) else data` is common


def test_of_thousands_of_failures_nothing_is_kept(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    def handled(self: Loop[Any], error: BaseException) -> list[int]:
        return [1]

    def interrupted(self: Loop[Any], error: BaseException) -> None:
        raise KeyboardInterrupt

    def fail(batch: int) -> int:
        raise ValueError(batch)

    def blocks_of(count: int) -> int:
        for _ in range(count):
            with contextlib.suppress(KeyError, KeyboardInterrupt):
                next(iterator)
            iterator._loop.samples = fail  # type: ignore[attr-defined]
            watch._recorder.log.clear()
        gc.collect()
        return sys.getallocatedblocks()

    iterator = iter(watch.steps(failing(2)))
    for react in (handled, interrupted):
        monkeypatch.setattr(Loop, "got_no_batch", react)
        monkeypatch.setattr(Loop, "cannot_count", react)
        before = blocks_of(500)
        assert blocks_of(2000) - before < 200


def test_an_interrupt_while_samples_are_counted_is_the_users(watch: Watch) -> None:
    def count(batch: int) -> int:
        if batch == 60:
            raise KeyboardInterrupt
        return 4

    with pytest.raises(KeyboardInterrupt):
        for _ in watch.steps(range(100), samples=count):
            pass


def test_what_is_sent_to_a_generator_is_its_and_the_batch_it_yields_a_step_s(watch: Watch) -> None:
    clock: Any = watch._recorder.clock

    def sampler() -> Iterator[int]:
        sent = 0
        while True:
            clock.sleep_ms(6)
            sent = yield sent + 1  # type: ignore[misc]

    iterator: Any = iter(watch.steps(sampler()))
    assert next(iterator) == 1
    for number in range(40):
        clock.sleep_ms(4)
        assert iterator.send(10 * number) == 10 * number + 1
    clock.sleep_ms(4)
    with pytest.raises(TypeError):
        iterator.send()
    iterator.close()
    with pytest.raises(StopIteration):
        next(iterator)
    report = watch.report()
    assert report.steps == 41
    assert report.states == {"input_wait": pytest.approx(0.246), "compute": pytest.approx(0.164)}


def test_another_send_is_the_iterator_s_own_and_a_generator_that_has_not_begun_takes_none(watch: Watch) -> None:
    class Own:
        def __iter__(self) -> Own:
            return self

        def __next__(self) -> int:
            return 1

        def send(self, one: int, other: int) -> int:
            return one + other

    assert iter(watch.steps(Own())).send(1, 2) == 3  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="just-started generator"):
        iter(watch.steps(each for each in "ab")).send(5)  # type: ignore[attr-defined]
