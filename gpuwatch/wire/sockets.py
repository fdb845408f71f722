"""ZeroMQ sockets that carry frames from hooks to the agent. Sending never blocks. A sender belongs to one thread and never crosses a fork."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import stat
from pathlib import Path
from typing import IO, Protocol

import zmq

from gpuwatch.errors import ConfigError
from gpuwatch.wire import MAX_MESSAGE_BYTES

logger = logging.getLogger(__name__)

_SEND_QUEUE = 64
_RECEIVE_QUEUE = 10_000
_LINGER_MS = 300


class Sender(Protocol):
    """`send` returns at once, False when the frame cannot be queued now."""

    def send(self, frame: bytes) -> bool: ...

    def close(self) -> None: ...


class ZmqSender:
    """PUSH socket that queues at most 64 frames for a connected agent, and none without one."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.SNDHWM, _SEND_QUEUE)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._socket.connect(endpoint)

    def send(self, frame: bytes) -> bool:
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        """Close; queued frames get at most 0.3 s to be sent."""
        self._socket.close()
        self._context.term()


class ZmqReceiver:
    """PULL socket bound to one or more endpoints; a lock file keeps a second agent off an ipc socket."""

    def __init__(self, endpoints: list[str]) -> None:
        self.endpoints = tuple(endpoints)
        self._locks: list[IO[str]] = []
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, _RECEIVE_QUEUE)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.LINGER, 0)
        try:
            for endpoint in endpoints:
                self._bind(endpoint)
        except BaseException:
            self.close()
            raise

    def _bind(self, endpoint: str) -> None:
        path = Path(endpoint.removeprefix("ipc://")) if endpoint.startswith("ipc://") else None
        if path is not None:
            self._locks.append(_lock(path))
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"--listen {endpoint}: cannot be bound ({error.strerror}): "
                "another program has it, or the folder cannot be written; choose another endpoint"
            ) from error
        if path is not None:
            _permit(path)

    def receive(self, timeout_ms: int) -> list[bytes]:
        """Return the frames that have arrived, oldest first, waiting at most `timeout_ms` for the first; [] for none."""
        if not self._socket.poll(timeout_ms):
            return []
        frames: list[bytes] = []
        while len(frames) < _RECEIVE_QUEUE:
            try:
                frames.append(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                break
        return frames

    def close(self) -> None:
        self._socket.close()
        self._context.term()
        for endpoint, lock in zip(self.endpoints, self._locks, strict=False):
            if endpoint.startswith("ipc://"):
                Path(endpoint.removeprefix("ipc://")).unlink(missing_ok=True)
            lock.close()


def _lock(path: Path) -> IO[str]:
    """Return the socket's open lock file. Raises: ConfigError when another agent holds it."""
    try:
        path.parent.mkdir(mode=0o755 if os.getuid() == 0 else 0o700, parents=True, exist_ok=True)
        status = path.parent.lstat()
        foreign = stat.S_ISLNK(status.st_mode) or status.st_uid != os.getuid()
        if foreign and path.parent.parent == Path("/tmp"):  # a user can create a folder there in another one's name
            raise ConfigError(
                f"{path.parent} belongs to another user; remove it, or choose another endpoint with --listen"
            )
        handle = path.with_suffix(".lock").open("a")
    except OSError as error:
        raise ConfigError(f"--listen ipc://{path}: {error.strerror}; choose a folder that you may write in") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        handle.close()
        raise ConfigError(
            f"--listen ipc://{path}: another agent listens there already; stop it, or choose another endpoint"
        ) from error
    return handle


def _permit(path: Path) -> None:
    """Give only this user write access to the socket; for root's also the group `gpuwatch`, if it exists."""
    path.chmod(0o600)
    if os.getuid() == 0:
        try:
            shutil.chown(path, 0, "gpuwatch")
            path.chmod(0o660)
        except (LookupError, OSError) as error:
            logger.info("%s: only root's runs are seen (%s): groupadd --system gpuwatch, and restart", path, error)
