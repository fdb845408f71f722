"""How much of /dev/shm a loader's full queues take, and the size to give in words."""

from __future__ import annotations

from gpuwatch.wire import Loader

PREFETCH = 2
"""Batches that each worker makes ahead where the loader says none: torch's own number."""
_MIB = 1 << 20


def prefetch_of(loader: Loader) -> int:
    """Return the batches that each worker makes ahead."""
    return loader.prefetch_factor or PREFETCH


def queues_bytes(loader: Loader, batch_bytes: int, ranks: int) -> int:
    """Return the bytes that the full queues of all ranks on a node take; 0 without workers."""
    return (loader.num_workers or 0) * prefetch_of(loader) * batch_bytes * ranks


def larger_shm(needed_bytes: int, because: str = "") -> str:
    """Return the advice to give so much, and a quarter more; `because` follows the number."""
    mib = -(-needed_bytes * 5 // 4 // _MIB)
    return f"docker run --shm-size={mib}m{because}, or fewer workers or prefetch_factor=1"
