"""The compiled hot path: what it takes hold of it lets go of, what goes wrong in it goes wrong as in Python, and nobody needs it."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuwatch import compiled, hook, watched_iterator
from gpuwatch.entries import USUAL
from gpuwatch.hook import Watch
from gpuwatch.loops import Loop
from tests.unit.hook_fakes import Clock, compiled_iterator, fake_watch

ROOT = Path(__file__).parents[2]


class Batch:
    """Something that can be seen to be gone."""


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    compiled_iterator()
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


def test_batches_and_loops_are_let_go_of(watch: Watch) -> None:
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


def test_what_each_step_makes_and_calls_is_let_go_of(watch: Watch) -> None:
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
    assert entry[0] == USUAL and sys.getrefcount(entry) == 3  # the log, `entry` and the call's own


def test_a_batch_in_whose_fetch_something_else_went_on_is_let_go_of(watch: Watch) -> None:
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


def test_another_thread_is_not_measured_by_it(watch: Watch) -> None:
    iterator = iter(watch.steps(range(100)))
    for _ in range(50):
        next(iterator)
    got: list[int] = []
    thread = threading.Thread(target=lambda: got.extend(next(iterator) for _ in range(3)))
    thread.start()
    thread.join()
    assert got == [50, 51, 52]
    assert next(iterator) == 53


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (lambda hot, recorder: hot.Steps(object(), 3), AttributeError),
        (lambda hot, recorder: hot.Steps(), TypeError),
        (lambda hot, recorder: hot.TimedCopy(object(), len, len, len), TypeError),
        (lambda hot, recorder: setattr(recorder, "begin_ns", "now"), TypeError),
        (lambda hot, recorder: delattr(recorder, "fed_ns"), TypeError),
    ],
)
def test_wrong_use_is_an_error_and_no_crash(
    wrong: Callable[[Any, Any], Any], error: type[Exception], watch: Watch
) -> None:
    with pytest.raises(error):
        wrong(compiled.hot, watch._recorder)


def test_a_recorder_that_is_half_made_or_taken_apart_takes_no_usual_step(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    iterator = iter(watch.steps(range(100)))
    for _ in range(50):
        next(iterator)
    monkeypatch.setattr(Loop, "ask", lambda self, usual: "asked")
    recorder = watch._recorder
    thread = recorder.thread
    for strange in (None, -1, "me", 1 << 80):
        recorder.thread = strange  # type: ignore[assignment]
        assert next(iterator) == "asked"
    del recorder.thread
    assert next(iterator) == "asked"
    recorder.thread = thread
    assert next(iterator) == 50


class Failing:
    """Numbers; every sixtieth one fails."""

    def __init__(self, every: int = 60) -> None:
        self.every = every
        self.count = 0

    def __iter__(self) -> Failing:
        return self

    def __next__(self) -> int:
        self.count += 1
        if self.count % self.every == 0:
            raise KeyError("a sample")
        return self.count


@pytest.mark.parametrize("kind", [watched_iterator.InPython, watched_iterator.WatchedIterator])
def test_an_interrupt_while_the_loop_is_told_of_a_failure_shows_both(
    kind: Any, watch: Watch, monkeypatch: pytest.MonkeyPatch
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

    monkeypatch.setattr(hook, "WatchedIterator", kind)
    monkeypatch.setattr(Loop, "cannot_count", interrupted)
    with pytest.raises(KeyboardInterrupt) as raised:
        for _ in watch.steps(range(100), samples=lambda batch: 1 // (50 - batch)):
            pass
    assert contexts(raised.value) == ["KeyboardInterrupt", "ValueError", "ZeroDivisionError"]

    iterator = iter(watch.steps(Failing()))
    for _ in range(59):
        next(iterator)
    monkeypatch.setattr(Loop, "nothing_came", interrupted)
    with pytest.raises(KeyboardInterrupt) as raised:
        next(iterator)
    assert contexts(raised.value) == ["KeyboardInterrupt", "ValueError", "KeyError"]
    for _ in range(59):
        next(iterator)
    monkeypatch.setattr(Loop, "nothing_came", raised_again)
    with pytest.raises(KeyError) as failed:
        next(iterator)
    assert contexts(failed.value) == ["KeyError"]


def test_the_iterator_cannot_be_called(watch: Watch) -> None:
    assert not callable(iter(watch.steps(range(3))))  # `data() if callable(data) else data` is common


COLLECTED = """
import gc, sys
from collections import deque
import gpuwatch

watch = gpuwatch.Watch(quiet=True)
recorder = watch._recorder

class Forgotten:
    def __init__(self):
        self.itself = self

    def __del__(self):
        recorder.samples = 7_000_000 + recorder.begin_ns % 1000

usual = 0
gc.set_threshold(3)
for batch in watch.steps(iter(range(20_000)), samples=lambda batch: 5_000_000 + batch):
    for _ in range(batch % 5):
        Forgotten()
    log = recorder.log
    if log and log[-1][0] == 11:
        usual += 1
        _, begin, end, fed, transfer, samples = log[-1]
        assert begin <= fed <= end and transfer == 0 and 5_000_000 <= samples < 7_001_000, log[-1]
assert usual > 5_000, usual
print("whole")
"""


def test_what_a_finalizer_changes_while_a_step_is_logged_is_no_dangling_number() -> None:
    assert in_fresh_python(COLLECTED) == "whole"


def test_of_a_hundred_thousand_failures_nothing_is_kept(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    def told(self: Loop[Any], error: BaseException) -> list[int]:
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

    iterator = iter(watch.steps(Failing(2)))
    for react in (told, interrupted):
        monkeypatch.setattr(Loop, "nothing_came", react)
        monkeypatch.setattr(Loop, "cannot_count", react)
        before = blocks_of(500)
        assert blocks_of(2000) - before < 200


def test_an_error_whose_telling_was_interrupted_is_let_go_of(watch: Watch) -> None:
    alive: list[weakref.ref[KeyError]] = []
    recorder = watch._recorder

    class Bare:
        def __init__(self) -> None:
            self.recorder, self.owner, self.samples = recorder, object(), None

        def fetch(self) -> None:
            error = Missing()
            alive.append(weakref.ref(error))
            raise error

        def nothing_came(self, error: BaseException) -> None:
            raise KeyboardInterrupt

    class Missing(KeyError):
        pass

    loop = Bare()
    steps = compiled.hot.Steps(loop, 1000)
    recorder.steady, recorder.thread = loop.owner, threading.get_ident()
    for _ in range(10):
        with contextlib.suppress(KeyboardInterrupt):
            next(steps)
    gc.collect()
    assert len(alive) == 10 and not any(each() for each in alive)


def test_an_interrupt_while_samples_are_counted_is_the_users(watch: Watch) -> None:
    def count(batch: int) -> int:
        if batch == 60:
            raise KeyboardInterrupt
        return 4

    with pytest.raises(KeyboardInterrupt):
        for _ in watch.steps(range(100), samples=count):
            pass


def in_fresh_python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.strip()


KIND = "from gpuwatch.watched_iterator import WatchedIterator; print(WatchedIterator.__name__)"


def test_it_is_left_alone_where_that_is_asked_for() -> None:
    compiled_iterator()
    assert in_fresh_python(KIND) == "Compiled"
    assert in_fresh_python(KIND, GPUWATCH_COMPILED="0") == "InPython"


def test_one_of_another_version_is_left_alone() -> None:
    older = "import sys, types; old = types.ModuleType('gpuwatch._hot'); old.INTERFACE = 0; sys.modules['gpuwatch._hot'] = old\n"
    assert in_fresh_python(older + KIND) == "InPython"


LEFT_OVER = """
import sys

class Finder:
    def find_spec(name, path=None, target=None):
        if name == "gpuwatch._hot":
            raise RuntimeError("of another gpuwatch")

sys.meta_path.insert(0, Finder)
"""


def test_one_that_cannot_be_loaded_or_is_something_else_is_left_alone() -> None:
    assert in_fresh_python(LEFT_OVER + KIND) == "InPython"
    nameless = "import sys, types; sys.modules['gpuwatch._hot'] = types.ModuleType('gpuwatch._hot')\n"
    assert in_fresh_python(nameless + KIND) == "InPython"


def test_the_hook_is_the_same_without_it() -> None:
    files = [f"tests/unit/test_{name}.py" for name in ("hook", "loops", "recorder", "transfers", "usual_step")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files],
        env={**os.environ, "GPUWATCH_COMPILED": "0"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
