"""Takes frames off the socket in a thread of its own, checks them, and keeps them until the sampler asks."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass

from gpuwatch import wire
from gpuwatch.errors import ProtocolError
from gpuwatch.transport import ZmqReceiver

logger = logging.getLogger(__name__)

_KEPT = 100_000
_POLL_MS = 200


@dataclass(frozen=True)
class Arrival:
    """A message with the moment at which it was taken."""

    message: wire.Message
    monotonic_ns: int
    time_s: float


class Receiver:
    """The agent's end of the wire."""

    def __init__(self, socket: ZmqReceiver) -> None:
        self._socket = socket
        self._arrived: deque[Arrival] = deque()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="receiver", daemon=True)
        self.received = 0
        self.rejected: Counter[str] = Counter()

    @property
    def endpoints(self) -> tuple[str, ...]:
        return self._socket.endpoints

    def start(self) -> None:
        self._thread.start()

    def drain(self) -> list[Arrival]:
        """Return what has arrived since the last call, oldest first."""
        return [self._arrived.popleft() for _ in range(len(self._arrived))]

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=2.0)
        self._socket.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            for frame in self._socket.receive(_POLL_MS):
                self.take(frame)

    def take(self, frame: bytes) -> None:
        """Take one frame, or reject it: counted by reason, and each reason said once."""
        try:
            message = wire.decode(frame)
        except ProtocolError as error:
            if not self.rejected[error.reason]:
                logger.warning("a hook's message is not used (%s): %s", error.reason, error)
            self.rejected[error.reason] += 1
            return
        if len(self._arrived) >= _KEPT:
            self.rejected["overload"] += 1
            return
        self.received += 1
        self._arrived.append(Arrival(message, time.monotonic_ns(), time.time()))
