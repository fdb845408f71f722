"""What waits for the agent: finds its socket, keeps messages while nobody takes them, lets the oldest go and counts them."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from gpuwatch.wire import endpoint

if TYPE_CHECKING:
    from gpuwatch.wire.sockets import Sender

MOST_MESSAGES = 120
MOST_BYTES = 4 << 20
"""Messages kept while an agent is away: a minute, or 4 MiB. Older ones go, counted; their time stays in the totals."""
_LOOK_AGAIN_TURNS = 20
"""An agent that has taken nothing for so many turns may have come back elsewhere."""

_not_ours: list[object] = []
"""Sockets that a fork copied into this process: kept, because even to collect them would touch them."""


class Outbox:
    """Frames on their way to an agent. Used by one thread of one process."""

    def __init__(self, where: str | None = None, connect: Callable[[str], Sender] | None = None) -> None:
        self.sender: Sender | None = None
        self.frames: deque[tuple[bytes, int]] = deque()
        """Each with the number of steps in it, oldest first."""
        self.bytes = 0
        self.steps_dropped = 0
        self.connect = connect or _zmq_sender
        self._where = where
        self._connected_to: str | None = None
        self._refused_turns = 0

    def find_agent(self) -> None:
        """Connect once an agent's socket is there. ZeroMQ connects again by itself when an agent comes back there.

        Raises: ConfigError if the endpoint asked for is none.
        """
        if self.sender is not None and self._refused_turns < _LOOK_AGAIN_TURNS:
            return
        where = endpoint.checked(self._where, "endpoint") if self._where else endpoint.find()
        if where is None or where == self._connected_to:
            return
        old, self.sender, self._connected_to = self.sender, None, None
        if old is not None:
            old.close()
        self.sender = self.connect(where)
        self._connected_to = where
        self._refused_turns = 0

    def post(self, frame: bytes, steps: int = 0) -> None:
        """Put a message at the end; what is too old for the bounds goes."""
        self.frames.append((frame, steps))
        self.bytes += len(frame)
        while len(self.frames) > MOST_MESSAGES or self.bytes > MOST_BYTES:
            old, lost = self.frames.popleft()
            self.bytes -= len(old)
            self.steps_dropped += lost

    def flush(self) -> None:
        """Send as much as the agent takes at once."""
        self._refused_turns += 1
        while self.frames and self.sender is not None and self.sender.send(self.frames[0][0]):
            self.bytes -= len(self.frames.popleft()[0])
            self._refused_turns = 0

    def close(self) -> None:
        """Close the socket; what still waits in it has a moment to leave."""
        if self.sender is not None:
            with contextlib.suppress(Exception):
                self.sender.close()
            self.sender = None

    def abandon(self) -> None:
        """Forget everything without touching it: called in a forked child, where the socket is the parent's."""
        _not_ours.append(self.sender)
        self.sender = None
        self.frames.clear()
        self.bytes = 0


def _zmq_sender(where: str) -> Sender:
    from gpuwatch.wire.sockets import ZmqSender

    return ZmqSender(where)
