"""Receives hooks' messages in a thread: checks them, and keeps them until the sampler drains them.

Every process, and every user, has a quota of messages and of bytes; what is beyond it is dropped before it is decoded.
While the sampler has not drained enough, nothing is read: messages then wait in each sender's own queue.
"""

import logging
import resource
import socket
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from gpuwatch import wire
from gpuwatch.errors import ProtocolError
from gpuwatch.wire.endpoint import is_tcp
from gpuwatch.wire.sockets import Peer, ZmqReceiver
from gpuwatch_agent.deadline import Background, Rarely

logger = logging.getLogger(__name__)

_KEPT = 20_000
_KEPT_BYTES = 16 << 20
_POLL_MS = 500
_PAUSE_S = 0.02  # after messages: those that others send in this time are received together
_HELLO_WEIGHT = 8  # so much more memory than on the wire a Hello may take: its many small numbers and texts


class _Rates(NamedTuple):
    """A quota, and its reserve."""

    messages_per_s: int
    messages: int
    bytes_per_s: int
    bytes: int


_OF_PROCESS = _Rates(500, 2000, 4 << 20, 16 << 20)
"""A hook sends four messages a second, and 120 with 4 MiB at once after an agent's absence."""
_OF_USER = _Rates(4000, 20_000, 8 << 20, 32 << 20)  # all processes of a user together: 160 hooks after an absence
_MOST_PEERS = 4096
UNKNOWN = Peer()


@dataclass(frozen=True)
class Arrival:
    """A message, and when it was received from whom."""

    message: wire.Message
    monotonic_ns: int
    time_s: float
    peer: Peer = UNKNOWN


class _Quota:
    """What a process, or a user, may still send now."""

    def __init__(self, rates: _Rates, now_s: float) -> None:
        self._rates, self._at_s = rates, now_s
        self._messages, self._bytes = float(rates.messages), float(rates.bytes)

    def take(self, size: int, now_s: float) -> bool:
        """Return whether one more message of this size is within the quota, and count it."""
        rates, passed_s, self._at_s = self._rates, now_s - self._at_s, now_s
        self._messages = min(rates.messages, self._messages + passed_s * rates.messages_per_s)
        self._bytes = min(rates.bytes, self._bytes + passed_s * rates.bytes_per_s)
        if self._messages < 1 or self._bytes < size:
            return False
        self._messages -= 1
        self._bytes -= size
        return True


MOST_OF_PROCESS, MOST_OF_USER = 32, 256  # connections; a hook has one
_WAITING = 1300
"""For others than hooks: ZeroMQ accepts 1016 connections before one is counted here; without descriptors it aborts."""


class Connections:
    """Closes the newest connection of who has too many: each takes a descriptor, and may keep 16 of the largest frames.

    Those of all users together take at most half of the agent's file descriptors.
    """

    def __init__(self, endpoints: Iterable[str]) -> None:
        self._own = {int(e.rpartition(":")[2]) if is_tcp(e) else e.removeprefix("ipc://") for e in endpoints}
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = max(files // 4, min(files // 2, files - _WAITING))
        self._peers: dict[int, Peer] = {}  # by file descriptor, oldest first

    def note(self, event: str, descriptor: int) -> str | None:
        """Count what has happened to a connection; return why one is closed for it, None where none is."""
        self._peers.pop(descriptor, None)
        if event != "opened" or (peer := self._peer(descriptor)) is None:
            return "over TCP, with a wrong token" if event == "refused" else None
        self._peers[descriptor] = peer
        everyone = list(reversed(self._peers.values()))
        of_user = [one for one in everyone if (one.uid, one.address) == (peer.uid, peer.address)]
        of_process = [one for one in of_user if one == peer and peer.pid]
        for those, most in ((of_process, MOST_OF_PROCESS), (of_user, MOST_OF_USER), (everyone, self._most)):
            if len(those) > most:
                greedy = Counter(those).most_common(1)[0][0]
                newest = next(each for each in reversed(self._peers) if self._peers[each] == greedy)
                self._peer(newest, close=self._peers.pop(newest))
                return f"more than {most} connections, most of them of {greedy.address or f'uid {greedy.uid} pid {greedy.pid}'}"
        return None

    def _peer(self, descriptor: int, close: Peer | None = None) -> Peer | None:
        """Return who is at the other end, None where it is no hook's connection any more; if that is `close`, end it.

        ZeroMQ's thread may have closed the descriptor, and another file may have its number: a copy stays what it is.
        Source: SO_PEERCRED, unix(7).
        """
        with suppress(OSError, IndexError), socket.fromfd(descriptor, socket.AF_UNIX, socket.SOCK_STREAM) as copy:
            own, peer = copy.getsockname(), None
            if own in self._own:
                pid, uid, _ = struct.unpack("=iII", copy.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
                peer = Peer(uid, pid)
            elif own[1] in self._own:
                peer = Peer(address=copy.getpeername()[0])
            if peer is not None and peer == close:
                copy.shutdown(socket.SHUT_RDWR)
            return peer
        return None


class Receiver(Background):
    """The agent's end of the wire."""

    def __init__(self, socket: ZmqReceiver, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__("receiver", 2.0)
        self._socket, self._clock = socket, clock
        self._arrived: deque[Arrival] = deque()
        self._bytes_kept = 0
        self._quotas: dict[Peer | int, _Quota] = {}  # of processes, and by uid of users
        self._lock = threading.Lock()
        self.received = 0
        self.rejected: Counter[str] = Counter()
        self._may_log = Rarely(60.0, clock)
        self._connections = Connections(socket.endpoints)
        self.polled_s = clock()  # when the thread last asked for messages, on the monotonic clock

    def drain(self) -> list[Arrival]:
        """Return what arrived since the last call, oldest first."""
        drained = [self._arrived.popleft() for _ in range(len(self._arrived))]
        self._bytes_kept = 0
        return drained

    def stop(self) -> None:
        super().stop()
        self._socket.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            self.polled_s = self._clock()
            is_full = len(self._arrived) >= _KEPT // 2 or self._bytes_kept >= _KEPT_BYTES
            try:
                self._count_connections(self._socket.connections())
                received = () if is_full else self._socket.receive(_POLL_MS)
                for frame, peer in received:
                    self.take(frame, peer)
                if not received and not is_full:
                    continue
            except Exception as error:  # without this thread every run would be silent
                self.reject("receiver", error)
            time.sleep(_PAUSE_S)

    def take(self, frame: bytes, peer: Peer = UNKNOWN) -> None:
        """Accept one frame, or reject it: counted by reason, and each reason logged once."""
        try:
            self._check_quota(len(frame), peer)
            message = wire.decode(frame)
            if len(self._arrived) >= _KEPT:
                raise ProtocolError(f"more than {_KEPT} messages are pending: the agent cannot keep up", "overload")
        except Exception as error:  # a frame that breaks the decoder (a million nested lists) must not stop the thread
            self.reject(error.reason if isinstance(error, ProtocolError) else "malformed", error)
            return
        self.received += 1
        self._bytes_kept += len(frame) * (_HELLO_WEIGHT if isinstance(message, wire.Hello) else 1)
        self._arrived.append(Arrival(message, time.monotonic_ns(), time.time(), peer))

    def _count_connections(self, events: Iterable[tuple[str, int]]) -> None:
        """Close the connections of those with too many, count what is refused, and log each reason once a minute."""
        for event, descriptor in events:
            if (why := self._connections.note(event, descriptor)) is None:
                continue
            reason = "wrong_token" if event == "refused" else "too_many_connections"
            with self._lock:
                self.rejected[reason] += 1
            if self._may_log(reason):
                logger.warning("connection refused: %s (%s so far)", why, self.rejected[reason])

    def _check_quota(self, size: int, peer: Peer) -> None:
        now_s = self._clock()
        for sender, rates in ((peer, _OF_PROCESS), (peer.uid, _OF_USER)):
            if sender is None:
                continue
            if sender not in self._quotas:
                if len(self._quotas) >= _MOST_PEERS:  # those of users stay
                    self._quotas = {each: left for each, left in self._quotas.items() if isinstance(each, int)}
                self._quotas[sender] = _Quota(rates, now_s)
            if not self._quotas[sender].take(size, now_s):
                who = f"uid {peer.uid}" if sender is not peer else f"uid {peer.uid} pid {peer.pid}"
                who = peer.address if peer.is_remote else who
                most = f"{rates.messages_per_s} messages or {rates.bytes_per_s >> 20} MiB a second"
                raise ProtocolError(f"{who} sends more than {most}", "rate")

    def reject(self, reason: str, error: Exception) -> None:
        """Count a message that is not accepted, by reason. Any thread may call it."""
        with self._lock:
            first = not self.rejected[reason]
            self.rejected[reason] += 1
        if first:
            logger.warning("message of a hook rejected (%s): %.300s", reason, error)
