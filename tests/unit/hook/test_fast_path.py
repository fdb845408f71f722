"""The hot path and the general path agree: for any loop both give the same ledger and the same steps."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.fakes import FakeDevice
from gpuwatch.hook.loader import WatchedIterator
from gpuwatch.hook.loop import Loop
from gpuwatch.hook.metering import SAMPLE_QUICK_EVERY, Sampling
from gpuwatch.hook.watch import Watch
from tests.unit.hook.fakes import Clock, fake_watch, turn

BODY = (
    "work", "work", "work", "work", "work", "data", "transfer", "phase", "checkpoint_open", "step", "inner", "inner_broken", "zip", "apply",
    "report", "kept", "device", "raise", "nap", "to", "to",
)  # fmt: skip
FETCH = ("come", "come", "come", "come", "data", "inner", "raise", "slow")
programs = st.lists(
    st.tuples(st.sampled_from(BODY), st.sampled_from(FETCH), st.integers(0, 900_000)), min_size=1, max_size=40
)


class Program:
    """A loop whose body and whose fetches do what a script says, on a clock of its own."""

    def __init__(self, watch: Watch, clock: Clock) -> None:
        self.watch = watch
        self.clock = clock
        self.kept: list[Any] = []

    def run(self, script: list[tuple[str, str, int]]) -> None:
        # The script many times over: a step becomes a usual one after some like it.
        for _ in range(2):
            with contextlib.suppress(ZeroDivisionError):
                loop = iter(self.watch.steps(Fetches(self, script)))
                for index in range(len(script) * 2 + 1):
                    try:
                        next(loop)
                    except StopIteration:
                        break
                    except KeyError:
                        continue
                    action, _, ns = script[index % len(script)]
                    self.clock.now_ns += ns
                    self.do(action)
            loop = None  # type: ignore[assignment]

    def few(self, count: int) -> Iterator[int]:
        for number in range(count):
            self.clock.now_ns += 70_000
            yield number

    def do(self, action: str) -> None:
        watch, clock = self.watch, self.clock
        if action in ("data", "transfer"):
            with getattr(watch, action)():
                clock.now_ns += 30_000
        elif action == "to":  # as the watch on Tensor.to does
            clock.now_ns += 5_000
            watch._recorder.transfer_ns += 5_000
        elif action == "phase":
            with watch.phase("eval"):
                for _ in watch.steps(self.few(40)):
                    clock.now_ns += 20_000
        elif action == "checkpoint_open":
            watch.phase("checkpoint").__enter__()  # left open by a careless user
        elif action == "step":
            with watch.step():
                clock.now_ns += 10_000
        elif action == "inner":
            for _ in watch.steps(self.few(5)):
                clock.now_ns += 11_000
        elif action == "inner_broken":
            for number in watch.steps(self.few(50)):
                clock.now_ns += 11_000
                if number == 44:
                    break
        elif action == "zip":
            for _ in zip(watch.steps(self.few(4)), watch.steps(self.few(3)), strict=False):
                clock.now_ns += 13_000
        elif action == "apply":
            turn(watch)
        elif action == "report":
            watch.report()
        elif action == "kept":
            self.kept.append(iter(watch.steps(self.few(3))))
            next(self.kept[-1])
        elif action == "device" and watch._recorder.timeline is None:
            watch.session.torch_hooks.attach(FakeDevice(clock, lambda seconds: clock.sleep_ms(seconds * 1e3)))
        elif action == "raise":
            raise ZeroDivisionError
        elif action == "nap":
            clock.sleep_ms(400)


class Fetches:
    """Batches of three samples, each fetched as the script says."""

    def __init__(self, program: Program, script: list[tuple[str, str, int]]) -> None:
        self.program = program
        self.script = script
        self.at = 0

    def __iter__(self) -> Fetches:
        self.at = 0
        return self

    def __next__(self) -> int:
        if self.at == len(self.script) * 2:
            raise StopIteration
        _, action, ns = self.script[self.at % len(self.script)]
        self.at += 1
        self.program.clock.now_ns += ns // 3
        if action == "raise":
            raise KeyError("a sample that cannot be read")
        if action == "slow":
            self.program.clock.sleep_ms(40)
        elif action in ("data", "inner"):
            self.program.do(action)
        return self.at


def reported(script: list[tuple[str, str, int]], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return everything that is reported of the script."""
    clock = Clock()
    watch = fake_watch(clock, monkeypatch)
    Program(watch, clock).run(script)
    with watch._publisher.accounts.lock:
        watch._publisher.accounts.apply(clock())
        steps = watch._publisher.accounts.take_delta()[0]
    watch.close()
    line = watch._publisher.accounts.timeline
    assert line.ledger.sum_ns == line.ledger.watermark_ns - line.ledger.start_ns
    return {"states": dict(line.ledger.totals_ns), "steps": steps, "counts": line.counts.steps}


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(script=programs)
def test_any_loop_is_reported_alike_by_the_hot_path_and_without_it(
    script: list[tuple[str, str, int]],
) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        usual = reported(script, monkeypatch)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Sampling, "is_quick", property(lambda self: False, lambda self, value: None), raising=False)
        assert reported(script, monkeypatch) == usual


def test_most_steps_of_a_plain_loop_are_usual_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    watch = fake_watch(clock, monkeypatch)
    asked = 0
    ask = Loop.ask

    def counted(self: Loop[Any]) -> Any:
        nonlocal asked
        asked += 1
        return ask(self)

    monkeypatch.setattr(Loop, "ask", counted)

    def batches() -> Iterator[int]:
        for number in range(1000):
            clock.now_ns += 10_000
            yield number

    for _ in watch.steps(batches()):
        clock.sleep_ms(1)
    assert 1000 // SAMPLE_QUICK_EVERY <= asked < 1000 / SAMPLE_QUICK_EVERY + 10
    assert watch.report().steps == 1000
    assert watch.report().states["input_wait"] == pytest.approx(1000 * 10e-6)


def test_the_iterator_is_the_loaders_own_in_all_else(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    watch = fake_watch(clock, monkeypatch)

    class Own:
        epoch = 7

        def __init__(self) -> None:
            self.left = 3

        def __iter__(self) -> Own:
            return self

        def __len__(self) -> int:
            return self.left

        def __next__(self) -> int:
            if not self.left:
                raise StopIteration
            self.left -= 1
            return self.left

    iterator: Any = iter(watch.steps(Own()))
    assert isinstance(iterator, WatchedIterator) and iter(iterator) is iterator and bool(iterator)
    assert (len(iterator), iterator.epoch) == (3, 7)
    assert [next(iterator), *iterator] == [2, 1, 0]
    with pytest.raises(StopIteration):
        next(iterator)
    with pytest.raises(AttributeError):
        iterator.nothing_of_the_kind  # noqa: B018


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_a_copy_of_the_iterator_is_what_a_copy_of_the_loaders_own_is(
    duplicate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = fake_watch(Clock(), monkeypatch)
    iterator = iter(watch.steps([1, 2, 3]))
    next(iterator)
    again = duplicate(iterator)
    assert (list(again), list(iterator)) == ([2, 3], [2, 3])
    with pytest.raises(TypeError, match="generator"):
        duplicate(iter(watch.steps(number for number in range(3))))
    watch.close()


def test_an_interrupt_just_before_the_batch_is_noted_is_a_wait_and_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    watch = fake_watch(clock, monkeypatch)

    def batches() -> Iterator[int]:
        for number in range(200):
            clock.sleep_ms(0.1)
            yield number

    now, interrupted = clock.__call__, False

    def read() -> int:
        nonlocal interrupted
        recorder = watch._recorder
        if recorder.steady is not None and not recorder.batch_ready_ns and seen == 100 and not interrupted:
            interrupted = True
            raise KeyboardInterrupt  # as a signal that came while the loader did not return to Python
        return now()

    watch._recorder.clock = read
    loop, seen = iter(watch.steps(batches())), 0
    while True:
        try:
            next(loop)
        except KeyboardInterrupt:
            continue
        except StopIteration:
            break
        clock.sleep_ms(2)
        seen += 1
    assert interrupted and seen == 199
    report = watch.report()
    assert report.steps == 199
    assert report.states["input_wait"] == pytest.approx(0.020)
    assert report.states["compute"] == pytest.approx(0.398)
    assert min(report.states.values()) >= 0
    watch.close()
