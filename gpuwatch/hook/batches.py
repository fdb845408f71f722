"""What batches and loaders reveal, without importing torch: they bring their own methods and attributes.

A batch may be any container; tensors are anything with `shape`, `nbytes` and `to`.
"""

import gc
import threading
from collections import ChainMap, UserDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from copy import copy
from itertools import islice
from types import FunctionType, GeneratorType, MappingProxyType, ModuleType
from typing import Any

from gpuwatch.errors import pass_on
from gpuwatch.ledger.events import UNKNOWN_SAMPLES
from gpuwatch.wire import MAX_TEXT, Loader

_DEPTH = 16
_PLAIN = dict.__getitem__, MappingProxyType.__getitem__
"""Of mappings that only keep their items, as a UserDict does: others may make or decode an item at each access."""
_MAX_WRAPPED, _DEPTH_WRAPPED, _MOST_MEMBERS = 500, 5, 16
_MAX_ITEMS = 10_000  # items of a batch that are visited: training waits meanwhile


def sample_count(batch: Any) -> int:
    """Return the length of the batch's first tensor, -1 without one."""
    found = _first_tensor(batch)
    return UNKNOWN_SAMPLES if found is None else int(found[1].shape[0])


def sample_counter(batch: Any) -> Callable[[Any], int] | None:
    """Return a faster `sample_count` (0.3 µs, not 1.5) for batches shaped like this one; None without a tensor."""
    found = _first_tensor(batch)
    if found is None:
        return None
    path = found[0]

    def count(batch: Any) -> int:
        try:
            tensor = batch
            for key in path:
                tensor = tensor[key]
            return int(tensor.shape[0])
        except (AttributeError, IndexError, KeyError, TypeError):  # shaped differently, such as a last batch
            return sample_count(batch)

    return count


def _first_tensor(batch: Any) -> tuple[tuple[Any, ...], Any] | None:
    """Return the first item with a length, depth first, after the keys that lead to it; None where there is none."""
    return next(_walk(batch, lambda item: int(item.shape[0])), None)


def tensors(batch: Any) -> Iterator[Any]:
    return (item for _, item in _walk(batch, lambda item: (item.shape, item.nbytes)))


def _works(test: Callable[[Any], Any], item: Any) -> bool:
    """Whether this raises nothing: an absent attribute may raise anything, such as the KeyError of a dict behind it."""
    try:
        test(item)
    except Exception as error:
        pass_on(error)
        return False
    return True


def _walk(batch: Any, ask: Callable[[Any], Any]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the items of a batch of which this can be asked, with the keys that lead to them, depth first."""
    budget = _MAX_ITEMS
    todo: list[tuple[tuple[Any, ...], Any]] = [((), batch)]
    while todo and budget:
        budget -= 1
        path, item = todo.pop()
        if _works(ask, item):
            yield path, item
        elif len(path) < _DEPTH:
            if isinstance(item, (UserDict, ChainMap)) or getattr(type(item), "__getitem__", None) in _PLAIN:
                keyed: Iterable[tuple[Any, Any]] = item.items()
            else:
                keyed = enumerate(item) if isinstance(item, (tuple, list)) else ()
            todo += reversed([((*path, key), value) for key, value in islice(keyed, budget)])


def size_bytes(batch: Any) -> int | None:
    """Return the bytes of all tensors in a batch, None where it holds none."""
    sizes = [int(tensor.nbytes) for tensor in tensors(batch)]
    return sum(sizes) if sizes else None


def move(batch: Any, device: Any) -> Any:
    """Return the batch with its tensors on `device`; pinned memory is copied without waiting for the copy."""
    if _works(lambda item: item.to.__call__, batch):
        if _works(lambda item: item.is_pinned.__call__, batch):
            return batch.to(device, non_blocking=batch.is_pinned())
        return batch.to(device)  # BatchEncoding, PackedSequence and the like
    if isinstance(batch, Mapping):
        moved = {key: move(value, device) for key, value in batch.items()}
        if type(batch) is not dict and isinstance(batch, MutableMapping):
            clone = copy(batch)  # defaultdict and others cannot be made from a mapping alone
            clone.update(moved)
            return clone
        return moved
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move(item, device) for item in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(move(item, device) for item in batch)
    return batch


def loader_settings(loader: Any, iterator: Any, search: bool = True) -> Loader:
    """Return the settings of a DataLoader or the one inside an iterable, and its workers' pids; None for what it lacks.

    `search` False: none is looked for inside.
    """
    batches = None
    index = getattr(loader, "_index_sampler", None)
    samplers = [type(each).__module__ for each in (index, getattr(index, "sampler", None)) if each is not None]
    are_torchs = all(module.startswith(("torch.", "torchdata.")) for module in samplers)
    if getattr(loader, "_dataset_kind", None) == 0 and are_torchs:  # any other length is the user's code, maybe slow
        try:
            batches = len(loader)
        except Exception as error:
            pass_on(error)
    if search and not isinstance(getattr(loader, "num_workers", None), int):
        # Compared with None: of an endless data set neither a loader nor its iterator has a truth value.
        inside = loader_inside(loader, iterator)
        inside = loader_of_a_thread() if inside is None else inside
        loader = loader if inside is None else inside
        begun = loader if hasattr(loader, "_workers") else getattr(loader, "_iterator", None)
        iterator = iterator if begun is None else begun

    def setting(name: str, kind: type) -> Any:
        value = getattr(loader, name, getattr(loader, f"_{name}", None))
        return value if type(value) is kind else None

    workers = getattr(iterator, "_workers", ())
    return Loader(
        **{name: setting(name, int) for name in ("num_workers", "prefetch_factor", "batch_size")},
        **{name: setting(name, bool) for name in ("pin_memory", "persistent_workers")},
        batches=batches,
        dataset=type(getattr(loader, "dataset", getattr(loader, "_dataset", loader))).__name__[:MAX_TEXT],
        worker_pids=tuple(pid for worker in workers if (pid := getattr(worker, "pid", None)) is not None),
    )


def loader_of_a_thread() -> Any | None:
    """Return the DataLoader that another thread's function, such as one that feeds a queue, was given or refers to."""
    given: list[Any] = []
    for thread in threading.enumerate():
        target = getattr(thread, "_target", None)
        if target is not None and not thread.name.startswith("gpuwatch"):
            names, known = getattr(target, "__code__", None), getattr(target, "__globals__", {})
            used = map(known.get, getattr(names, "co_names", ()))
            given += target, *getattr(thread, "_args", ()), *used  # gone with its end
    return loader_inside(*given)  # one search, so that many threads take no longer


def loader_inside(*things: Any) -> Any | None:
    """Return the DataLoader, or its iterator, that iterables such as tqdm, zip or a generator read; None if not found.

    It is looked for in attributes, in a generator's frame, and in what a method or a built-in iterator (zip) refers to;
    large containers are data. Nothing is called. Training waits: at most `_MAX_WRAPPED` things are visited.
    """
    todo, seen = deque((thing, 0) for thing in things[:_MAX_WRAPPED]), set[int]()
    while todo and len(seen) < _MAX_WRAPPED:
        thing, depth = todo.popleft()
        if id(thing) in seen or isinstance(thing, (type, ModuleType)):
            continue
        seen.add(id(thing))
        known = getattr(thing, "__dict__", None) or {}
        if {"num_workers", "dataset"} <= known.keys() or {"_num_workers", "_dataset"} <= known.keys():
            return thing  # a DataLoader, or one's iterator
        if depth >= _DEPTH_WRAPPED:
            continue
        inner = list(islice(known.values(), _MAX_WRAPPED))
        if isinstance(thing, GeneratorType) and thing.gi_frame is not None:
            # Not by `f_locals`: up to Python 3.12 the frame keeps that, with the batch in it.
            inner += [thing.gi_yieldfrom, *gc.get_referents(thing), *gc.get_referents(thing.gi_frame)]
        elif isinstance(thing, FunctionType):
            inner += gc.get_referents(*(thing.__closure__ or ()))
        elif hasattr(type(thing), "__slots__") or type(thing).__module__ in ("itertools", "builtins"):
            is_data = isinstance(thing, (list, tuple, set, frozenset)) and len(thing) > _MOST_MEMBERS
            inner += () if is_data or isinstance(thing, Mapping) else gc.get_referents(thing)
        todo += ((each, depth + 1) for each in inner if not isinstance(each, (str, bytes, int, float, type(None))))
    return None
