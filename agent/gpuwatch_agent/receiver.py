"""Receives hooks' messages in a thread: checks them, and keeps them until the sampler drains them.

Every process has a quota of messages and of bytes; what is beyond it is dropped before it is decoded. While the sampler has not drained
enough, nothing is read: messages then wait at their senders, in a queue of each sender's own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from gpuwatch import wire
from gpuwatch.errors import ProtocolError
from gpuwatch.wire.sockets import Peer, ZmqReceiver

logger = logging.getLogger(__name__)

_KEPT = 20_000
_KEPT_BYTES = 16 << 20
_POLL_MS = 200
_PAUSE_S = 0.02
_MESSAGES_PER_S, _MESSAGES = 500, 2000
_BYTES_PER_S, _BYTES = 4 << 20, 16 << 20
"""A process's quota and its reserve: a hook sends four messages a second, and 120 with 4 MiB at once after an agent's absence."""
_MOST_PEERS = 4096
UNKNOWN = Peer()


@dataclass(frozen=True)
class Arrival:
    """A message, and when it was received from whom."""

    message: wire.Message
    monotonic_ns: int
    time_s: float
    peer: Peer = UNKNOWN


@dataclass(slots=True)
class _Quota:
    """What a process may still send now."""

    at_s: float
    messages: float = _MESSAGES
    bytes: float = _BYTES

    def take(self, size: int, now_s: float) -> bool:
        """Return whether one more message of this size is within the quota, and count it."""
        passed_s, self.at_s = now_s - self.at_s, now_s
        self.messages = min(_MESSAGES, self.messages + passed_s * _MESSAGES_PER_S) - 1
        self.bytes = min(_BYTES, self.bytes + passed_s * _BYTES_PER_S) - size
        if self.messages >= 0 and self.bytes >= 0:
            return True
        self.messages += 1
        self.bytes += size
        return False


class Receiver:
    """The agent's end of the wire."""

    def __init__(self, socket: ZmqReceiver, clock: Callable[[], float] = time.monotonic) -> None:
        self._socket = socket
        self._clock = clock
        self._arrived: deque[Arrival] = deque()
        self._bytes_kept = 0
        self._quotas: dict[Peer, _Quota] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="receiver", daemon=True)
        self._lock = threading.Lock()
        self.received = 0
        self.rejected: Counter[str] = Counter()
        self.polled_s = clock()
        """When the thread last asked for messages, on the monotonic clock."""

    def start(self) -> None:
        self._thread.start()

    def drain(self) -> list[Arrival]:
        """Return what arrived since the last call, oldest first."""
        drained = [self._arrived.popleft() for _ in range(len(self._arrived))]
        self._bytes_kept = 0
        return drained

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=2.0)
        self._socket.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            self.polled_s = self._clock()
            if len(self._arrived) >= _KEPT // 2 or self._bytes_kept >= _KEPT_BYTES:
                self._stop.wait(_PAUSE_S)
                continue
            try:
                for frame, peer in self._socket.receive(_POLL_MS):
                    self.take(frame, peer)
            except Exception as error:  # without this thread every run would be silent
                self.reject("receiver", error)
                self._stop.wait(_PAUSE_S)

    def take(self, frame: bytes, peer: Peer = UNKNOWN) -> None:
        """Accept one frame, or reject it: counted by reason, and each reason logged once."""
        try:
            self._check_quota(len(frame), peer)
            message = wire.decode(frame)
            if len(self._arrived) >= _KEPT:
                raise ProtocolError(f"more than {_KEPT} messages are pending: the agent cannot keep up", "overload")
        except ProtocolError as error:
            self.reject(error.reason, error)
            return
        except Exception as error:  # a frame that breaks the decoder (a million nested lists) must not stop the thread
            self.reject("malformed", error)
            return
        self.received += 1
        self._bytes_kept += len(frame)
        self._arrived.append(Arrival(message, time.monotonic_ns(), time.time(), peer))

    def _check_quota(self, size: int, peer: Peer) -> None:
        now_s = self._clock()
        quota = self._quotas.get(peer)
        if quota is None:
            if len(self._quotas) >= _MOST_PEERS:
                self._quotas.clear()
            quota = self._quotas[peer] = _Quota(now_s)
        if not quota.take(size, now_s):
            raise ProtocolError(
                f"uid {peer.uid} pid {peer.pid} sends more than {_MESSAGES_PER_S} messages or {_BYTES_PER_S >> 20} MiB a second",
                "rate",
            )

    def reject(self, reason: str, error: Exception) -> None:
        """Count a message that is not accepted, by reason. Any thread may call it."""
        with self._lock:
            first = not self.rejected[reason]
            self.rejected[reason] += 1
        if first:
            logger.warning("a hook's message is rejected (%s): %.300s", reason, error)
