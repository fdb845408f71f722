"""Whether a loader's full queues will fit into /dev/shm, said before the bus error: as soon as the size of a batch is known.

What decides and what is advised is the rule `shm_exhaustion`'s, as in a diagnosis.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from gpuwatch.errors import NoData
from gpuwatch.formatting import size as text_of
from gpuwatch.hook import process_state as this_process
from gpuwatch.hook.batches import tensors
from gpuwatch.host.shm import shm_bytes
from gpuwatch.wire import Loader


def shared_bytes(batch: Any) -> int | None:
    """Return what a worker puts into /dev/shm for a batch: its torch tensors. None: it has none, and goes through a pipe."""
    sizes = [int(each.nbytes) for each in tensors(batch) if hasattr(each, "share_memory_")]
    return sum(sizes) if sizes else None


def bytes_ahead_of(loader: Any) -> int | None:
    """Return a batch's bytes where the loader tells them before it has made any: a TensorDataset's tensors are there."""
    batch_size, held = getattr(loader, "batch_size", None), getattr(getattr(loader, "dataset", None), "tensors", None)
    if not isinstance(batch_size, int) or not isinstance(held, tuple):
        return None
    sizes = [each.nbytes / each.shape[0] for each in held if hasattr(each, "share_memory_") and each.shape[0]]
    return int(batch_size * sum(sizes)) if sizes else None


class ShmWarning:
    """Looks once for each setting of the loader."""

    def __init__(self, read: Callable[[], tuple[int, int]] = shm_bytes) -> None:
        self._read = read
        self.said = False
        self._looked_at: set[tuple[int | None, int | None, int]] = set()

    def look(self, loader: Loader | None, batch_bytes: int | None, ranks: int) -> str | None:
        """Return the warning; None where all is well, was said before, or is not known."""
        if loader is None or not loader.num_workers or not batch_bytes:
            return None
        key = (loader.num_workers, loader.prefetch_factor, batch_bytes)
        if key in self._looked_at:
            return None
        self._looked_at.add(key)
        try:
            size, used = self._read()
        except NoData:
            return None
        from gpuwatch.diagnosis.rules.shm_exhaustion import shm_exhaustion
        from gpuwatch.diagnosis.window import HostFacts, Window

        window = Window(
            duration_s=0.0,
            loader=msgspec.structs.replace(loader, batch_bytes=batch_bytes),
            host=HostFacts(shm_size_bytes=size, shm_used_bytes=used),
            local_world_size=ranks,
        )
        found = shm_exhaustion(window, this_process.thresholds())
        if found is None:
            return None
        self.said = True
        return f"{found.title}: {'; '.join(each.text for each in found.evidence)}. {found.advice}"

    def room(self) -> str:
        """Return e.g. " (64 MiB, 60 MiB of it used)"; empty where it cannot be read."""
        try:
            size, used = self._read()
        except NoData:
            return ""
        return f" ({text_of(size)}, {text_of(used)} of it used)"
