"""Receives hooks' messages in a thread: checks them, and keeps them until the sampler drains them."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass

from gpuwatch import wire
from gpuwatch.errors import ProtocolError
from gpuwatch.wire.sockets import ZmqReceiver

logger = logging.getLogger(__name__)

_KEPT = 100_000
_POLL_MS = 200
_CLOCK_SLACK_NS = 1_000_000_000


@dataclass(frozen=True)
class Arrival:
    """A message, and when it was received."""

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
        """Return what arrived since the last call, oldest first."""
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
        """Accept one frame, or reject it: counted by reason, and each reason logged once."""
        try:
            message = wire.decode(frame)
            check_times(message)
            if len(self._arrived) >= _KEPT:
                raise ProtocolError(f"more than {_KEPT} messages are pending: the agent cannot keep up", "overload")
        except ProtocolError as error:
            self._reject(error.reason, error)
            return
        except Exception as error:  # a frame that breaks the decoder (a million nested lists) must not stop the thread
            self._reject("malformed", error)
            return
        self.received += 1
        self._arrived.append(Arrival(message, time.monotonic_ns(), time.time()))

    def _reject(self, reason: str, error: Exception) -> None:
        if not self.rejected[reason]:
            logger.warning("a hook's message is rejected (%s): %.300s", reason, error)
        self.rejected[reason] += 1


def check_times(message: wire.Message) -> None:
    """Raise ProtocolError for a ledger that reaches into the sender's future, or ends before its start."""
    if isinstance(message, wire.Hello):
        return
    totals, origin = message.totals, message.origin
    if not totals.start_ns <= totals.watermark_ns <= origin.monotonic_ns + _CLOCK_SLACK_NS:
        raise ProtocolError("totals that end in the future, or before their start", "impossible")
