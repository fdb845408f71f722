"""Limits the hooks' connections, by process and by user: each takes a file descriptor, and may keep 16 of the largest frames in memory."""

import resource
import socket
import struct
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress

from gpuwatch.wire.endpoint import is_tcp
from gpuwatch.wire.sockets import Peer

MOST_OF_PROCESS, MOST_OF_USER = 32, 256  # a hook has one
_WAITING = 1300
"""Descriptors that are not hooks': ZeroMQ accepts 1016 connections before the first one is counted here, and without a descriptor it aborts."""


class Connections:
    """Closes the newest connection of who has too many. Those of all users together take at most half of the agent's file descriptors."""

    def __init__(self, endpoints: Iterable[str]) -> None:
        self._own = {int(e.rpartition(":")[2]) if is_tcp(e) else e.removeprefix("ipc://") for e in endpoints}
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = max(files // 4, min(files // 2, files - _WAITING))
        self._peers: dict[int, Peer] = {}  # by file descriptor, oldest first

    def note(self, event: str, descriptor: int) -> str | None:
        """Count what has happened to a connection; return why one is closed for it, None where none is."""
        self._peers.pop(descriptor, None)
        if event != "opened" or (peer := self._peer(descriptor)) is None:
            return "over TCP, its token is another one" if event == "refused" else None
        self._peers[descriptor] = peer
        everyone = list(reversed(self._peers.values()))
        of_user = [one for one in everyone if (one.uid, one.address) == (peer.uid, peer.address)]
        of_process = [one for one in of_user if one == peer and peer.pid]
        for those, most in ((of_process, MOST_OF_PROCESS), (of_user, MOST_OF_USER), (everyone, self._most)):
            if len(those) > most:
                greedy = Counter(those).most_common(1)[0][0]
                newest = next(each for each in reversed(self._peers) if self._peers[each] == greedy)
                self._peer(newest, close=self._peers.pop(newest))
                return f"{greedy.address or f'uid {greedy.uid} pid {greedy.pid}'} has the most of more than {most}"
        return None

    def _peer(self, descriptor: int, close: Peer | None = None) -> Peer | None:
        """Return who is at the other end, None where this is no hook's connection any more; if it is `close`, end the connection.

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
