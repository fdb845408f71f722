"""One run id for ranks on several nodes that nobody has named: rank 0's, left in the store that torch.distributed made for its own start."""

from __future__ import annotations

import sys

_KEY = "gpuwatch/run"


def agreed_run(rank: int, own: str) -> str | None:
    """Return the run id that all ranks use: rank 0 tells its own, the others ask for it; None while it has not been told.

    Nothing waits: a key that is not there is not waited for. No collective runs. Asked by the background thread alone, for it may go over the network.
    Raises: whatever the store does, also where there is none.
    """
    store = sys.modules["torch.distributed.distributed_c10d"]._get_default_store()
    if rank == 0:
        store.set(_KEY, own)
        return own
    return str(store.get(_KEY).decode()) if store.check([_KEY]) else None
