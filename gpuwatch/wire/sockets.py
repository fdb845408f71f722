"""ZeroMQ sockets that carry hooks' frames to the agent. Sending never blocks. A sender is one thread's, in one process.

Over TCP both ends have one token. The agent's CURVE key is made of it and known to no one else, so that without the
token no handshake succeeds, and what is sent is encrypted.
"""

import fcntl
import hashlib
import logging
import os
import shutil
import stat
import struct
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import IO, NamedTuple

import zmq

from gpuwatch.errors import ConfigError, usable
from gpuwatch.wire import MAX_MESSAGE_BYTES
from gpuwatch.wire.endpoint import is_listened_to, is_tcp

logger = logging.getLogger(__name__)

_SEND_QUEUE = 64
_RECEIVE_QUEUE = 16
"""Frames that wait for the agent from one connection; more wait at their sender, whose memory it is. A process that
ends while the agent is away for some seconds still sends its last message."""
_BATCH_FRAMES, _BATCH_BYTES = 1000, 4 << 20
_LINGER_MS = 300
_HANDSHAKE_MS = 5000
_CLOSED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


class ZmqSender:
    """PUSH socket that queues at most 64 frames for a connected agent, and none without one."""

    def __init__(self, endpoint: str, token: str | None = None) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._monitor: zmq.Socket[bytes] | None = None
        self._seen = 0
        if token is not None:
            self._socket.curve_serverkey, _ = _curve_keys(token)
            self._socket.curve_publickey, self._socket.curve_secretkey = zmq.curve_keypair()
            self._socket.ipv6 = True
            self._monitor = self._socket.get_monitor_socket(_REFUSED | _CLOSED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.SNDHWM, _SEND_QUEUE)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._socket.connect(endpoint)

    def send(self, frame: bytes) -> bool:
        """Return at once whether the frame is queued."""
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def is_accepted(self) -> bool | None:
        """Return whether the agent has ever accepted the token; None before the first answer, and without a token."""
        for event, _, _ in _events(self._monitor):
            self._seen |= event
        return bool(self._seen & zmq.EVENT_HANDSHAKE_SUCCEEDED) if self._seen else None

    def close(self) -> None:
        """Close; queued frames get at most 0.3 s to be sent."""
        if self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close(0)
        self._socket.close()
        self._context.term()


def _curve_keys(token: str) -> tuple[bytes, bytes]:
    """Return the agent's public and secret key. Raises: ConfigError without CURVE in this libzmq."""
    from zmq.utils import z85

    if not zmq.has("curve"):
        raise ConfigError("TCP needs a libzmq with CURVE, as pyzmq's wheels have; pip install --force-reinstall pyzmq")
    secret = z85.encode(hashlib.blake2b(token.encode(), digest_size=32, person=b"gpuwatch").digest())
    return zmq.curve_public(secret), secret


class Peer(NamedTuple):
    """The process at the other end, by the kernel. `uid` None: unknown (TCP, libzmq < 4.3.5); `pid` 0: not visible."""

    uid: int | None = None
    pid: int = 0
    address: str = ""  # over TCP the IP address

    @property
    def is_remote(self) -> bool:
        """Whether it sends over TCP: nothing names its process or user, only the token lets it send."""
        return self.uid is None and bool(self.address)


class ZmqReceiver:
    """PULL socket bound to one or more endpoints; a lock file keeps a second agent off an ipc socket."""

    def __init__(self, endpoints: list[str], token: str | None = None) -> None:
        self.endpoints = tuple(sorted(endpoints, key=is_tcp))  # TCP's options are those of what is bound after them
        self._locks: dict[Path, IO[str]] = {}
        self._context = zmq.Context()
        self._context.setsockopt(zmq.RCVHWM, _RECEIVE_QUEUE)  # the monitor's too, which may have 1000 events more
        self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._monitor = self._socket.get_monitor_socket(_REFUSED | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._has_events = True
        self._poller = zmq.Poller()
        for each in (self._socket, self._monitor):
            self._poller.register(each, zmq.POLLIN)
        try:
            for endpoint in self.endpoints:
                if is_tcp(endpoint) and not self._socket.curve_server:
                    self._require(token)
                self._bind(endpoint)
        except BaseException:
            self.close()
            raise

    def _require(self, token: str | None) -> None:
        if token is None:
            raise ConfigError("--listen tcp://…: TCP needs a token; give --token-file FILE, hooks GPUWATCH_TOKEN_FILE")
        self._socket.curve_publickey, self._socket.curve_secretkey = _curve_keys(token)
        self._socket.curve_server = True
        self._socket.ipv6 = True
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)

    def connections(self) -> Iterator[tuple[str, int]]:
        """Yield connections' events and file descriptors: "opened", "closed"; over TCP "refused" for its token (-1)."""
        for event, value, endpoint in islice(_events(self._monitor), _BATCH_FRAMES) if self._has_events else ():
            if event in (zmq.EVENT_ACCEPTED, zmq.EVENT_DISCONNECTED):
                yield "opened" if event == zmq.EVENT_ACCEPTED else "closed", value
            elif is_tcp(endpoint):
                yield "refused", -1

    def _bind(self, endpoint: str) -> None:
        path = Path(endpoint.removeprefix("ipc://")) if endpoint.startswith("ipc://") else None
        if path is not None:
            if path.exists() and not path.is_socket():  # binding would delete it
                raise ConfigError(f"--listen {endpoint}: that is a file or folder, not a socket; choose another path")
            lock = _lock(path)
            if is_listened_to(path):  # binding would take its clients
                lock.close()
                raise ConfigError(f"--listen {endpoint}: another program listens there; choose another path")
            self._locks[path] = lock
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"--listen {endpoint}: cannot be bound ({error.strerror}): another program has it, it is no address of this machine, or the folder cannot be written; choose another endpoint"
            ) from error
        if path is not None:
            _permit(path)

    def receive(self, timeout_ms: int) -> list[tuple[bytes, Peer]]:
        """Return arrived frames, oldest first; wait at most `timeout_ms` for one or for a connection. [] for none."""
        self._has_events = any(each is self._monitor for each, _ in self._poller.poll(timeout_ms))
        frames: list[tuple[bytes, Peer]] = []
        size = 0
        while len(frames) < _BATCH_FRAMES and size < _BATCH_BYTES:
            try:
                frame = self._socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            frames.append((frame.bytes, _peer(frame)))
            size += len(frame)
        return frames

    def close(self) -> None:
        self._monitor.close(0)  # not disabled: that waits for ZeroMQ's thread, which may wait for room among the events
        self._socket.close()
        self._context.term()
        for path, lock in self._locks.items():
            path.unlink(missing_ok=True)
            lock.close()


def _events(monitor: zmq.Socket[bytes] | None) -> Iterator[tuple[int, int, str]]:
    """Yield each event of a socket, its value and endpoint. Source: zmq_socket_monitor(3)."""
    while monitor is not None and monitor.poll(0):
        packed, endpoint = monitor.recv_multipart()
        yield *struct.unpack("=Hi", packed), endpoint.decode(errors="replace")


def _peer(frame: zmq.Frame) -> Peer:
    """Return who sent a frame. Source: SO_PEERCRED, in libzmq 4.3.5 as "localhost:UID:GID:PID" of an ipc connection."""
    try:
        address = str(frame.get("Peer-Address"))
    except zmq.ZMQError:
        return Peer()
    parts = address.split(":")
    if len(parts) == 4 and parts[0] == "localhost" and all(map(str.isdigit, parts[1:])):
        return Peer(int(parts[1]), int(parts[3]), address)
    return Peer(address=address)


def _lock(path: Path) -> IO[str]:
    with usable(f"--listen ipc://{path}", "choose a folder that you may write in"):
        path.parent.mkdir(mode=0o755 if os.getuid() == 0 else 0o700, parents=True, exist_ok=True)
        status = path.parent.lstat()
    foreign = stat.S_ISLNK(status.st_mode) or status.st_uid != os.getuid()
    if foreign and path.parent.parent == Path("/tmp"):  # a user can create a folder there in another one's name
        raise ConfigError(f"{path.parent} belongs to another user; remove it, or choose another endpoint with --listen")
    return lock_beside(path, f"--listen ipc://{path}")


def lock_beside(path: Path, option: str) -> IO[str]:
    """Return the open lock file of what one agent alone may use; makes its folder. Raises: ConfigError."""
    with usable(option, "choose a file that you may write to"):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = path.with_name(f"{path.name}.lock").open("a")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        handle.close()
        raise ConfigError(f"{option}: another agent uses it already; stop that one, or choose another") from error
    return handle


def _permit(path: Path) -> None:
    """Give only this user write access to the socket; for root's also the group `gpuwatch`, if it exists."""
    path.chmod(0o600)
    if os.getuid() == 0:
        try:
            shutil.chown(path, 0, "gpuwatch")
            path.chmod(0o660)
        except (LookupError, OSError) as error:
            logger.info("%s: only root can connect (%s): groupadd --system gpuwatch, and restart", path, error)
