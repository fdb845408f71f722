"""What gpuwatch knows of its own process: the watches that are open in it, what it was told to leave, and what a fork leaves of all that."""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpuwatch.diagnosis.thresholds import Thresholds
    from gpuwatch.hook.watch import Watch

open_watches: list[Watch] = []
"""Innermost last."""
opening = threading.RLock()
"""Held while the Watch that ends with the process is opened."""
parent_trained = False
"""This process was forked by one that had a Watch."""
importing = threading.RLock()
"""Held while modules are imported that a training does not need at once. A fork waits for it: in the child, a module that another thread was
importing could never be imported."""
made = 0
"""Watches that were made in this process so far."""
site_thresholds: Thresholds | None = None
"""Those of the file that GPUWATCH_CONFIG named when the first Watch was made; None: the defaults."""


def thresholds() -> Thresholds:
    """Return what this process's own diagnosis compares with."""
    from gpuwatch.diagnosis.thresholds import THRESHOLDS

    return site_thresholds or THRESHOLDS


def next_suffix() -> str:
    """Return what gives a second Watch of the same process a run id of its own."""
    global made
    made += 1
    return "" if made == 1 else f"-{made}"


def is_set(name: str) -> bool:
    """Whether a variable of the environment says yes."""
    return os.environ.get(name, "").strip().lower() not in ("", "0", "false", "no")


def is_loader_worker() -> bool:
    """Whether this process is a DataLoader's worker: what it does is a part of somebody else's wait."""
    data = sys.modules.get("torch.utils.data")
    return data is not None and data.get_worker_info() is not None


def import_diagnosis() -> None:
    """Import what only a report, a diagnosis or an agent needs. `import gpuwatch` leaves it to the background thread, which needs it first."""
    with importing:
        import gpuwatch.diagnosis.report
        import gpuwatch.hook.evidence
        import gpuwatch.wire.sockets  # noqa: F401


def forget_in_child() -> None:
    """A forked child (a loader worker, say) records nothing, sends nothing and prints nothing."""
    global opening, importing, parent_trained, made
    opening, importing = threading.RLock(), threading.RLock()
    parent_trained = parent_trained or made > 0
    made = 0
    for each in list(open_watches):
        each._abandon()
    open_watches.clear()


def _before_fork() -> None:
    importing.acquire()


def _after_fork_in_parent() -> None:
    importing.release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=forget_in_child)
