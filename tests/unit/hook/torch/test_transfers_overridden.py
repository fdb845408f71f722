"""Tensor subclasses, function modes and several watches: torch tells them what was called; a copy is timed once."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from gpuwatch.hook.watch import Watch
from tests.unit.hook.fakes import MS, Clock, fake_watch, turn

torch = pytest.importorskip("torch")

TABLE = {getattr(torch.Tensor, name) for name in ("to", "item", "cpu", "tolist")}
"""Made before any loop begins, as libraries do."""


class Recording(torch.Tensor):
    """Notes whether each function is in the table, as torchvision's `tv_tensors` do to keep their type in `.to`."""

    known: list[bool] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "as_subclass" not in str(func):
            cls.known.append(func in TABLE)
        return super().__torch_function__(func, types, args, kwargs or {})


class Mode(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
    def __init__(self, known: list[bool]) -> None:
        self.known = known

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.device:
            self.known.append(func in TABLE)
        return func(*args, **(kwargs or {}))


class Slow(torch.Tensor):
    """Each call takes 3 ms on the test's clock."""

    clock: Clock

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "to":
            cls.clock.sleep_ms(3)
        return super().__torch_function__(func, types, args, kwargs or {})


def of_type(kind: Any) -> Any:
    return torch.ones(1).as_subclass(kind)


def transferred_ms(watch: Watch) -> float:
    turn(watch)
    return watch._publisher.accounts.timeline.counts.phases_ns["transfer"] / MS


def test_a_subclass_receives_torchs_own_function(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = fake_watch(Clock(), monkeypatch)
    Recording.known.clear()
    for batch in watch.steps([of_type(Recording) for _ in range(3)]):
        Recording.known.clear()
        batch.to("cpu")
        batch.to(torch.float64)
        batch.item()
        batch.tolist()
        batch.cpu()
        assert Recording.known == [True] * 5
    watch.close()
    assert "to" not in torch.Tensor.__dict__


def test_modes_inside_modes_receive_torchs_own_function(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = fake_watch(Clock(), monkeypatch)
    known: list[bool] = []
    for batch in watch.steps([torch.ones(1)] * 3):
        with Mode(known), torch.device("cpu"), Mode(known):
            batch.to("cpu")
            batch.item()
    assert known == [True] * 12
    watch.close()


@pytest.mark.parametrize("kind", [Recording, torch.Tensor])
def test_a_copy_that_torch_dispatches_again_is_timed_once(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    watch = fake_watch(clock, monkeypatch)
    reads = 0

    def ticking() -> int:
        nonlocal reads
        reads += 1
        return clock.now_ns + reads * MS  # a copy is timed by two looks: 1 ms each

    watch._recorder.clock = ticking
    for batch in watch.steps([of_type(kind) for _ in range(4)]):
        with torch.device("cpu") if kind is torch.Tensor else contextlib.nullcontext():
            batch.to("meta")
    assert transferred_ms(watch) == 4
    watch.close()


def test_a_subclass_that_copies_slowly_is_timed_in_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    Slow.clock = clock = Clock()
    watch = fake_watch(clock, monkeypatch)
    for batch in watch.steps([of_type(Slow) for _ in range(4)]):
        batch.to("meta")
    assert transferred_ms(watch) == 12
    watch.close()


@pytest.mark.parametrize("meets_subclass", [False, True])
def test_two_watches_whose_loops_end_in_any_order_leave_torch_as_it_was(
    meets_subclass: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = fake_watch(Clock(), monkeypatch), fake_watch(Clock(), monkeypatch)
    for _ in range(3):
        one, two = iter(first.steps([torch.ones(1)] * 2)), iter(second.steps([torch.ones(1)] * 2))
        next(one), next(two)
        if meets_subclass:
            Recording.known.clear()
            of_type(Recording).to("cpu")
            assert Recording.known[-1:] == [True]
        del one
        assert "to" in torch.Tensor.__dict__
        del two
        assert not {"to", "cuda", "item", "cpu", "tolist", "__float__", "__int__", "__bool__"} & set(
            torch.Tensor.__dict__
        )
    first.close()
    second.close()


def test_a_loop_that_begins_again_under_another_watchs_times_a_copy_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    first, second = fake_watch(clock, monkeypatch), fake_watch(clock, monkeypatch)
    one, two = iter(first.steps([torch.ones(1)] * 2)), iter(second.steps([torch.ones(1)] * 2))
    next(one), next(two)
    del one
    reads = 0

    def ticking() -> int:
        nonlocal reads
        reads += 1
        return clock.now_ns + reads * MS

    first._recorder.clock = ticking
    for batch in first.steps([torch.ones(1)] * 4):
        batch.to("meta")
    assert transferred_ms(first) == 4
    del two
    assert "to" not in torch.Tensor.__dict__
    first.close()
    second.close()
