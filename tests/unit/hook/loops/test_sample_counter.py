"""Samples of usual batches: the right number for any batch, and nothing kept of it."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from gpuwatch.hook.batches import sample_counter
from gpuwatch.ledger.events import UNKNOWN_SAMPLES


class Tensor:
    def __init__(self, *shape: Any) -> None:
        self.shape = shape


class Odd:
    """A container that raises something else."""

    def __getitem__(self, key: Any) -> Any:
        raise ZeroDivisionError


def counter_of(first: Any) -> Callable[..., int]:
    counter = sample_counter(first)
    assert counter is not None
    return counter


@pytest.mark.parametrize(
    ("first", "later", "count"),
    [
        ([Tensor(8, 3), Tensor(8)], [Tensor(5, 3), Tensor(5)], 5),
        ([Tensor(8, 3), Tensor(8)], (Tensor(7, 3),), 7),
        ({"x": Tensor(8), "y": 1}, {"x": Tensor(3)}, 3),
        ({"x": Tensor(8)}, {"other": Tensor(4)}, 4),
        ([Tensor(8)], Tensor(6), 6),
        ([Tensor(8)], [[Tensor(9)]], 9),
        ([Tensor(8)], [Tensor()], UNKNOWN_SAMPLES),
        ([Tensor(8)], [], UNKNOWN_SAMPLES),
        ([Tensor(8)], None, UNKNOWN_SAMPLES),
        ([Tensor(8)], [Tensor(4.0)], 4),
        ([Tensor(8)], [Tensor(None)], UNKNOWN_SAMPLES),
        ([Tensor(True)], [Tensor(True)], 1),
    ],
)
def test_any_batch_after_a_first_one(first: Any, later: Any, count: int) -> None:
    counted = counter_of(first)(later)
    assert counted == count and type(counted) is int


def test_what_else_a_batch_raises_is_raised() -> None:
    count = counter_of([Tensor(8)])
    with pytest.raises(ZeroDivisionError):
        count(Odd())
    with pytest.raises(TypeError):
        count()


def test_nothing_of_a_batch_is_kept() -> None:
    big = 1 << 40
    tensor = Tensor(big)
    count, gone = counter_of([Tensor(8)]), weakref.ref(tensor)
    held = sys.getrefcount(big)
    for _ in range(10):
        count([tensor])
        count([])
        count([[tensor]])
    assert sys.getrefcount(big) == held
    del tensor
    assert gone() is None
