"""What a run's messages consist of, and how they reach an agent: they are buffered while none takes them."""

from __future__ import annotations

import contextlib
import platform
import sys
from collections import deque
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import asdict

from gpuwatch import wire
from gpuwatch.errors import ConfigError
from gpuwatch.hook.account import Accounts, device
from gpuwatch.hook.identity import Identity
from gpuwatch.ledger.step_records import StepRecord
from gpuwatch.version import __version__
from gpuwatch.wire import endpoint

if TYPE_CHECKING:
    from gpuwatch.wire.sockets import ZmqSender


class RunFacts(msgspec.Struct, frozen=True):
    """What the user declared about the run."""

    name: str
    job: str
    tags: dict[str, str]
    flops: wire.Flops | None = None
    breakdown: bool = False  # compute is divided into sections


def hello(origin: wire.Origin, identity: Identity, facts: RunFacts, accounts: Accounts) -> wire.Hello:
    """Return the message that identifies the run. Call with the accounts' lock held."""
    torch = sys.modules.get("torch")
    versions = {"gpuwatch": __version__, "python": platform.python_version()}
    if torch is not None:
        versions["torch"] = str(getattr(torch, "__version__", ""))[:64]
    known = {**asdict(identity), **asdict(facts)}
    return wire.Hello(
        origin=origin,
        timeline=accounts.which_clock,
        device=device(),
        loader=accounts.loader_with_batch(),
        versions=versions,
        worker_deaths=accounts.worker_deaths,
        first_step=accounts.first_step,
        rewinds=accounts.rewinds,
        **{name: value for name, value in known.items() if name in wire.Hello.__struct_fields__},
    )


def columns(steps: list[StepRecord]) -> dict[str, bytes]:
    """Return the steps as packed columns; a column without a value is left out."""
    if not steps:
        return {}
    rows: dict[str, list[int | None]] = {name: [getattr(of, name) for of in steps] for name in wire.HOST_COLUMNS[:5]}
    if any(step.epoch_start for step in steps):
        rows["epoch_start"] = [int(step.epoch_start) for step in steps]
    if any(step.exposed is not None for step in steps):
        for name in wire.DEVICE_COLUMNS:
            rows[name] = [getattr(step.exposed, name.removeprefix("device_"), None) for step in steps]
    if any(step.comm_wait_ns is not None for step in steps):
        rows["comm_wait_ns"] = [step.comm_wait_ns for step in steps]
    return {name: wire.pack([wire.MISSING if n is None else n for n in column]) for name, column in rows.items()}


MOST_MESSAGES = 120
MOST_BYTES = 4 << 20  # a minute without an agent; older ones are dropped and counted, their time is in the totals
_FIND_AGAIN_AFTER = 20  # an agent that has taken nothing in so many attempts may have come back at another endpoint

_not_ours: list[object] = []  # sockets that a fork copied: collecting them would touch the parent's


class SendBuffer:
    """Frames on their way to an agent. Used by one thread of one process."""

    def __init__(self, where: str | None = None) -> None:
        self.sender: ZmqSender | None = None
        self.frames: deque[tuple[bytes, int]] = deque()  # each with the number of steps in it, oldest first
        self.steps_dropped = 0
        self._where = where
        self._connected_to: tuple[str, str | None] | None = None
        self._refused = 0

    def find_agent(self) -> None:
        """Connect once an agent's socket exists. Raises: ConfigError if the endpoint, token or user is not accepted."""
        if self.sender is not None and self._refused < _FIND_AGAIN_AFTER:
            if self._refused and self.sender.is_accepted() is False:
                raise ConfigError("the agent refuses this token; GPUWATCH_TOKEN is not the one of its --token-file")
            return
        where = endpoint.checked(self._where, "endpoint") if self._where else endpoint.find()
        over_tcp = where is not None and endpoint.is_tcp(where)
        token = endpoint.token("GPUWATCH_TOKEN") if over_tcp else None
        if over_tcp and token is None:
            raise ConfigError(f"{where}: TCP needs the agent's token; set GPUWATCH_TOKEN, or GPUWATCH_TOKEN_FILE")
        if where is not None and (where, token) == self._connected_to:
            return
        if not over_tcp and (refused := endpoint.refused(where)):
            raise ConfigError(refused)
        if where is not None:
            from gpuwatch.wire.sockets import ZmqSender

            self.close()
            self._connected_to = None
            self.sender = ZmqSender(where, token)
            self._connected_to = where, token
            self._refused = 0

    def append(self, frame: bytes, steps: int = 0) -> None:
        """Append a message; the oldest ones beyond the bounds are dropped."""
        self.frames.append((frame, steps))
        while len(self.frames) > MOST_MESSAGES or sum(len(each) for each, _ in self.frames) > MOST_BYTES:
            self.steps_dropped += self.frames.popleft()[1]

    def flush(self, held: bool = False) -> None:
        """Send as much as the agent takes without waiting; nothing while `held` back, for a Hello that was refused."""
        self._refused += 1
        while self.frames and not held and self.sender is not None and self.sender.send(self.frames[0][0]):
            self.frames.popleft()
            self._refused = 0

    def close(self) -> None:
        """Close the socket; what is queued in it has a moment to leave."""
        sender, self.sender = self.sender, None
        if sender is not None:
            with contextlib.suppress(Exception):
                sender.close()

    def abandon(self) -> None:
        """Forget everything without touching it: called in a forked child, whose socket is the parent's."""
        _not_ours.append(self.sender)
        self.sender = None
        self.frames.clear()
