"""Copies in usual steps: each is timed, and nothing else is. The "device" is torch's `meta`."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gpuwatch.hook.watch import Watch
from tests.unit.hook.fakes import MS, Clock, fake_watch, turn

torch = pytest.importorskip("torch")
STEPS = 100
"""Most of which are usual ones."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock on which every `.to` takes 3 ms."""
    clock = Clock()
    original = torch._C.TensorBase.to

    def to(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        clock.sleep_ms(3)
        return original(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", to)
    return clock


def transferred_ms(body: Callable[[Watch, int, Any], Any], clock: Clock, monkeypatch: pytest.MonkeyPatch) -> float:
    """Return what is reported as transfer of a loop with this body."""
    watch = fake_watch(clock, monkeypatch)
    usual = 0
    for number, batch in enumerate(watch.steps(torch.ones(4) for _ in range(STEPS))):
        usual += watch._recorder.steady is not None
        body(watch, number, batch)
        clock.sleep_ms(1)
    assert usual > 0.9 * STEPS
    turn(watch)
    reported = watch._publisher.accounts.timeline.counts.phases_ns["transfer"] / MS
    watch.close()
    return reported


def test_all_copies_of_a_step_are_summed(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(watch: Watch, number: int, batch: Any) -> None:
        batch.to("meta")
        batch.to("meta", non_blocking=True)
        batch.to(device="meta", dtype=torch.float64)

    assert transferred_ms(body, clock, monkeypatch) == 9 * STEPS


def test_what_stays_where_it_is_is_no_copy(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = torch.ones(4, device="meta")

    def body(watch: Watch, number: int, batch: Any) -> None:
        assert batch.to("cpu") is batch
        assert batch.to(torch.float64).dtype is torch.float64
        assert elsewhere.to("meta", torch.float16).dtype is torch.float16

    assert transferred_ms(body, clock, monkeypatch) == 0


def test_another_threads_copies_are_not_the_steps(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(watch: Watch, number: int, batch: Any) -> None:
        thread = threading.Thread(target=batch.to, args=("meta",))
        thread.start()
        thread.join()

    assert transferred_ms(body, clock, monkeypatch) == 0


def test_copies_in_a_phase_are_the_phases(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(watch: Watch, number: int, batch: Any) -> None:
        if number % 40 == 30:
            with watch.phase("eval"):
                batch.to("meta")

    assert transferred_ms(body, clock, monkeypatch) == 0


def test_a_declared_copy_is_counted_once(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(watch: Watch, number: int, batch: Any) -> None:
        if number % 40 == 30:
            with watch.transfer():
                batch.to("meta")

    assert transferred_ms(body, clock, monkeypatch) == 6


def test_errors_are_the_users_and_their_time_is_no_copys(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(watch: Watch, number: int, batch: Any) -> None:
        with pytest.raises(RuntimeError, match="nowhere"):
            batch.to("nowhere")
        with pytest.raises(TypeError):
            torch.Tensor.to()
        with pytest.raises(TypeError):
            batch.to(place="meta")
        with pytest.raises(TypeError):
            torch.Tensor.to(tensor=batch, device="meta")

    assert transferred_ms(body, clock, monkeypatch) == 0


def test_the_method_is_copied_and_pickled_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = fake_watch(Clock(), monkeypatch)
    for batch in watch.steps(torch.ones(4) for _ in range(3)):
        moves = functools.partial(torch.Tensor.to, device="meta")
        assert copy.deepcopy(moves)(batch).is_meta and copy.copy(torch.Tensor.to)(batch, "meta").is_meta
        assert copy.deepcopy(batch.to)("meta").is_meta and pickle.loads(pickle.dumps(batch.to))("meta").is_meta
    watch.close()


def test_an_interrupt_while_a_device_is_asked_for_is_the_users(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    class Strange(torch.Tensor):  # type: ignore[misc]
        __torch_function__ = torch._C._disabled_torch_function_impl
        error: BaseException = AttributeError("no device")

        @property
        def is_cpu(self) -> bool:
            raise self.error

    strange = torch.ones(4).as_subclass(Strange)

    def body(watch: Watch, number: int, batch: Any) -> None:
        Strange.error = AttributeError("no device")
        assert strange.to("meta").is_meta
        if number == 80:
            Strange.error = KeyboardInterrupt()
            with pytest.raises(KeyboardInterrupt):
                strange.to("meta")

    assert transferred_ms(body, clock, monkeypatch) == 0


def test_tensors_are_released(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[weakref.ref[Any]] = []

    def body(watch: Watch, number: int, batch: Any) -> None:
        seen.extend(map(weakref.ref, (batch, batch.to("meta"), batch.to(torch.float64))))

    transferred_ms(body, clock, monkeypatch)
    assert len(seen) == 3 * STEPS and sum(each() is not None for each in seen) == 0


def test_a_watch_that_has_timed_copies_is_collected(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    def steps(watch: Watch) -> Iterator[None]:
        for batch in watch.steps(torch.ones(4) for _ in range(STEPS)):
            batch.to("meta")
            yield

    watch = fake_watch(clock, monkeypatch)
    for _ in steps(watch):
        pass
    gone = weakref.ref(watch.session.torch_hooks)
    watch.close()
    del watch
    gc.collect()
    assert gone() is None
