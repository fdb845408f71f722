"""What a batch tells of itself, whatever its container: tensors are anything with `shape`, `nbytes` and `to`.

torch is not imported: a batch that holds torch tensors brings its own methods.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gpuwatch.recorder import UNKNOWN_SAMPLES


def sample_count(batch: Any) -> int:
    """Return the length of the batch's first tensor, -1 where none is found."""
    try:
        return int(batch.shape[0])
    except (AttributeError, IndexError, TypeError):
        pass
    for item in _items(batch):
        count = sample_count(item)
        if count >= 0:
            return count
    return UNKNOWN_SAMPLES


def tensors(batch: Any) -> Iterator[Any]:
    """Yield the tensors in a batch."""
    if hasattr(batch, "shape") and hasattr(batch, "nbytes"):
        yield batch
        return
    for item in _items(batch):
        yield from tensors(item)


def size_bytes(batch: Any) -> int | None:
    """Return the bytes of all tensors in a batch, None where it holds none."""
    sizes = [int(tensor.nbytes) for tensor in tensors(batch)]
    return sum(sizes) if sizes else None


def move(batch: Any, device: Any) -> Any:
    """Return the batch with its tensors on `device`; pinned memory is copied without waiting for the copy."""
    if hasattr(batch, "to") and hasattr(batch, "is_pinned"):
        return batch.to(device, non_blocking=batch.is_pinned())
    if hasattr(batch, "to"):  # BatchEncoding, PackedSequence and the like
        return batch.to(device)
    if isinstance(batch, Mapping):
        moved = {key: move(value, device) for key, value in batch.items()}
        return moved if type(batch) is dict else type(batch)(moved)  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move(item, device) for item in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(move(item, device) for item in batch)
    return batch


def _items(batch: Any) -> Iterator[Any]:
    if isinstance(batch, Mapping):
        yield from batch.values()
    elif isinstance(batch, (tuple, list)):
        yield from batch
