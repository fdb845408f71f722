"""Which place a process has in a distributed run, as it becomes known: torch.distributed may come up after the Watch."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from msgspec.structs import replace

from gpuwatch.hook.identity import MAX_NAME, Identity, identify, is_declared
from gpuwatch.hook.interrupts import pass_on
from gpuwatch.hook.run_agreement import agreed_run

_ASKED_AT_MOST = 120
"""Times that a rank of several nodes asks for the run's id, twice a second, before it speaks under its own."""
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class Membership:
    """A process's identity: by the environment at first, by torch.distributed once that is initialised.

    It is settled then, or when the first training step was made, and does not change any more. torch is never imported and
    rank and world size are read from what this process knows. Only the id of a run on several nodes that nobody has named is asked of
    torch's own store.
    """

    def __init__(
        self,
        suffix: str = "",
        forked: bool = False,
        environ: Mapping[str, str] = os.environ,
        procfs: Path = Path("/proc"),
    ) -> None:
        """`suffix` tells a second run of this process; `forked`: its parent has a run of its own, whose id it must not take."""
        self._suffix = suffix
        self._environ = environ
        self._procfs = procfs
        self._settled = False
        self._child = _parent() is not None
        own = f"-fork{os.getpid()}" if forked else ""
        who = identify(environ, procfs)
        self._run = who.run
        """Without what tells a second one of this process."""
        self._asked = 0
        self._agreed = is_declared(environ)
        self.identity = _suffixed(who, own + suffix)

    def look(self, stepping: bool, stepped: bool, ask: bool = False) -> bool:
        """Look once more, and return whether the process may speak for a run by now. `ask`: this thread may wait for the network.

        A child that multiprocessing made may be a rank, a loader's worker or anything: it is nobody before torch.distributed is up or
        a step is open (`stepping`) or made (`stepped`).
        """
        if self._settled and self._agreed:
            return True
        if not self._settled:
            world = _world()
            if world is not None and world[1] > 1:
                self.identity = self._in_world(*world)
            self._settled = stepped or world is not None
        if ask and not self._agreed:
            self._agree()
        if not self._agreed and self._spans_nodes and "TORCHELASTIC_RUN_ID" in self._environ:
            return False  # it is known that the others will be there
        return self._settled or stepping or not self._child

    def stop_asking(self) -> None:
        """Speak under the id that there is: the process ends."""
        self._agreed = True

    @property
    def _spans_nodes(self) -> bool:
        """Whether other nodes have ranks too, by what the launcher says of this one's."""
        local = self._environ.get("LOCAL_WORLD_SIZE", "")
        return self.identity.world_size > (int(local) if local.isdigit() else 1)

    def _agree(self) -> None:
        self._asked += 1
        world = _world()
        if world is None or not self._spans_nodes:
            self._agreed = self._settled or self._asked >= _ASKED_AT_MOST
            return
        try:
            found = agreed_run(world[0], self._run)
        except Exception as error:  # no store, or one that is torn down meanwhile
            pass_on(error)
            self._agreed = True
            return
        self._agreed = found is not None or self._asked >= _ASKED_AT_MOST
        if found is not None:
            self.identity = _suffixed(replace(self.identity, run=found), self._suffix)

    def _in_world(self, rank: int, world_size: int) -> Identity:
        who = identify(self._environ, self._procfs, launcher=_parent())
        here = world_size if self._environ.get("MASTER_ADDR", "") in _LOOPBACK else who.local_world_size
        self._run = who.run
        local_rank = rank if here == world_size and "LOCAL_RANK" not in self._environ else who.local_rank
        return _suffixed(
            replace(who, rank=rank, world_size=world_size, local_rank=local_rank, local_world_size=here), self._suffix
        )


def _suffixed(who: Identity, suffix: str) -> Identity:
    return replace(who, run=who.run[: MAX_NAME - len(suffix)] + suffix)


def _world() -> tuple[int, int] | None:
    """Return (rank, world size) of torch.distributed's default group; None while there is none."""
    distributed = sys.modules.get("torch.distributed")
    try:
        if distributed is None or not distributed.is_available() or not distributed.is_initialized():
            return None
        rank, world_size = int(distributed.get_rank()), int(distributed.get_world_size())
    except Exception as error:  # still being imported, or torn down meanwhile
        pass_on(error)
        return None
    return (rank, world_size) if 0 <= rank < world_size else None


def _parent() -> int | None:
    """Return the pid of the process that made this one by multiprocessing, None for any other process."""
    multiprocessing = sys.modules.get("multiprocessing.process")
    parent = multiprocessing.parent_process() if multiprocessing is not None else None
    return None if parent is None else parent.pid
