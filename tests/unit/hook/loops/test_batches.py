"""What a batch shows, whatever its container; moving it keeps what it is."""

from __future__ import annotations

import gc
import time
from collections import ChainMap, OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import pytest

from gpuwatch.hook.batches import move, sample_count, sample_counter, size_bytes, tensors


class Tensor:
    def __init__(self, *shape: int, pinned: bool = False) -> None:
        self.shape, self.nbytes, self._pinned = shape, 4, pinned
        self.asked: tuple[Any, ...] = ()

    def is_pinned(self) -> bool:
        return self._pinned

    def to(self, device: str, non_blocking: bool = False) -> tuple[str, bool]:
        return device, non_blocking


Pair = namedtuple("Pair", ["x", "y"])

BATCHES: tuple[tuple[Any, int, int | None], ...] = (
    (Tensor(32, 3), 32, 4),
    ([Tensor(32, 3), Tensor(32)], 32, 8),
    ({"x": Tensor(16), "y": [Tensor(16)]}, 16, 8),
    (("name", {"deep": [[Tensor(5)]]}), 5, 4),
    (Pair(Tensor(7), Tensor(7)), 7, 8),
    ([Tensor(), Tensor(9)], 9, 8),  # a scalar has no length
    ("text", -1, None),
    ([], -1, None),
    (None, -1, None),
    (3, -1, None),
    ([[1, 2], [3, 4]], -1, None),
)


@pytest.mark.parametrize(("batch", "samples", "nbytes"), BATCHES)
def test_samples_and_bytes(batch: Any, samples: int, nbytes: int | None) -> None:
    assert sample_count(batch) == samples
    assert size_bytes(batch) == nbytes
    counter = sample_counter(batch)
    assert (counter(batch) if counter else -1) == samples


def test_the_counter_copes_with_batches_of_another_shape() -> None:
    counter = sample_counter({"x": [Tensor(8)]})
    assert counter is not None
    assert counter({"x": [Tensor(3)]}) == 3
    assert counter([Tensor(4)]) == 4
    assert counter({"y": Tensor(2)}) == 2
    assert counter("nothing") == -1


def test_a_batch_of_a_million_numbers_is_not_searched_to_its_end() -> None:
    batch = [[1] * 1000 for _ in range(1000)]
    gc.disable()  # it may take longer than the search
    try:
        begin = time.thread_time_ns()
        assert sample_count(batch) == -1 and list(tensors(batch)) == []
        assert time.thread_time_ns() - begin < 200_000_000
    finally:
        gc.enable()


def test_a_batch_that_contains_itself_ends() -> None:
    batch: list[Any] = []
    batch.append(batch)
    assert sample_count(batch) == -1 and size_bytes(batch) is None


class Attributes(dict[str, Any]):
    """A dict whose keys are its attributes, as in many projects: one that is absent is a KeyError."""

    __getattr__ = dict.__getitem__


class Nested:
    nbytes = 4

    @property
    def shape(self) -> Any:
        raise RuntimeError("NestedTensorImpl doesn't support sizes")


class Sparse(Tensor):
    @property
    def nbytes(self) -> int:
        raise NotImplementedError("nbytes is not defined for sparse tensors")

    @nbytes.setter
    def nbytes(self, value: int) -> None:
        pass


class Encoding(UserDict[str, Any]):
    """As transformers' BatchEncoding."""

    def __getitem__(self, key: Any) -> Any:
        return self.data[key] if isinstance(key, str) else None


class Lazy(Mapping[str, Any]):
    """Makes an item whenever it is asked for."""

    made = 0

    def __getitem__(self, key: str) -> Any:
        Lazy.made += 1
        return Tensor(4)

    def __iter__(self) -> Iterator[str]:
        return iter(("image", "mask"))

    def __len__(self) -> int:
        return 2


@pytest.mark.parametrize(
    ("batch", "samples", "nbytes"),
    [
        (Attributes(x=Tensor(8)), 8, 4),
        (Nested(), -1, None),
        ([Nested(), Tensor(6)], 6, 4),
        (Sparse(5), 5, None),
        ({"sparse": Sparse(5), "y": Tensor(5)}, 5, 4),
        (Encoding(x=Tensor(7)), 7, 4),
        (Lazy(), -1, None),
        ([Lazy(), Tensor(3)], 3, 4),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_batch_whose_attributes_raise_or_whose_items_are_made_on_demand(
    batch: Any, samples: int, nbytes: int | None
) -> None:
    assert sample_count(batch) == samples and size_bytes(batch) == nbytes
    counter = sample_counter(batch)
    assert (counter(batch) if counter else -1) == samples
    assert Lazy.made == 0


def test_a_field_of_the_name_is_no_method() -> None:
    edge = namedtuple("edge", ["x", "to"])
    assert move(edge(Tensor(1), 3), "cuda") == edge(("cuda", False), 3)
    assert sample_count(ChainMap({"x": Tensor(4)}, {})) == 4


def test_a_dict_whose_keys_are_its_attributes_is_moved_as_a_dict() -> None:
    moved = move(Attributes(x=Tensor(1), label="cat"), "cuda")
    assert type(moved) is Attributes and moved == {"x": ("cuda", False), "label": "cat"}


def test_pinned_memory_is_copied_without_waiting() -> None:
    assert move(Tensor(1, pinned=True), "cuda") == ("cuda", True)
    assert move(Tensor(1), "cuda") == ("cuda", False)


def default(**values: Any) -> defaultdict[str, Any]:
    return defaultdict(list, values)


@pytest.mark.parametrize(
    "make", [dict, OrderedDict, UserDict, default], ids=["dict", "OrderedDict", "UserDict", "defaultdict"]
)
def test_mappings_stay_what_they_are(make: Any) -> None:
    batch = make(x=Tensor(1), label="cat")
    moved = move(batch, "cuda")
    assert type(moved) is type(batch)
    assert dict(moved) == {"x": ("cuda", False), "label": "cat"}
    assert isinstance(batch["x"], Tensor), "the user's batch is left alone"


def test_other_containers() -> None:
    assert move(Pair(Tensor(1), 3), "cuda") == Pair(("cuda", False), 3)
    assert move([Tensor(1), (Tensor(1),)], "cuda") == [("cuda", False), (("cuda", False),)]
    assert move(MappingProxyType({"x": Tensor(1)}), "cuda") == {"x": ("cuda", False)}
    assert move("text", "cuda") == "text"
