"""What a loader tells of its settings. torch is not imported: a DataLoader brings its own attributes."""

from __future__ import annotations

from typing import Any

from gpuwatch.wire import Loader


def loader_facts(loader: Any, iterator: Any) -> Loader:
    """Return the loader's settings and, once it iterates, its workers' pids. What it does not tell is None.

    An iterable that is no DataLoader has no workers to be known: all but the number of batches stays None.
    """
    workers = getattr(loader, "num_workers", None)
    return Loader(
        num_workers=workers if isinstance(workers, int) else None,
        prefetch_factor=_integer(loader, "prefetch_factor"),
        batch_size=_integer(loader, "batch_size"),
        pin_memory=_flag(loader, "pin_memory"),
        persistent_workers=_flag(loader, "persistent_workers"),
        batches=_length(loader),
        worker_pids=tuple(
            pid for process in getattr(iterator, "_workers", ()) if (pid := getattr(process, "pid", None)) is not None
        ),
    )


def _integer(loader: Any, name: str) -> int | None:
    value = getattr(loader, name, None)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _flag(loader: Any, name: str) -> bool | None:
    value = getattr(loader, name, None)
    return value if isinstance(value, bool) else None


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError, AttributeError):
        return None
