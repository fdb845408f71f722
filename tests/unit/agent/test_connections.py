"""Hooks' connections are limited by process, user and file descriptors.

The sockets are real, and their other ends are this process or a child of it.
"""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import zmq

from gpuwatch.wire.sockets import ZmqReceiver
from gpuwatch_agent import receiver
from gpuwatch_agent.receiver import Connections, Receiver
from tests.servers import wait_for

_CHILD = """
import socket, sys
held = [socket.socket(socket.AF_UNIX) for _ in range(int(sys.argv[2]))]
for each in held:
    each.connect(sys.argv[1])
print("connected", flush=True)
sys.stdin.read()
"""


class Listening:
    """A listening socket whose connections are counted as they are accepted, without ZeroMQ."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self.path, self._stack = path, stack
        self._socket = stack.enter_context(socket.socket(socket.AF_UNIX))
        self._socket.bind(str(path))
        self._socket.listen(100)
        self.counted = Connections([f"ipc://{path}"])
        self.accepted: list[socket.socket] = []

    def connect(self) -> socket.socket:
        client = self._stack.enter_context(socket.socket(socket.AF_UNIX))
        client.connect(str(self.path))
        return client

    def accept(self) -> str | None:
        self.accepted.append(self._stack.enter_context(self._socket.accept()[0]))
        return self.counted.note("opened", self.accepted[-1].fileno())

    def child(self, many: int) -> None:
        """Let another process of this user connect so many times."""
        command = [sys.executable, "-S", "-c", _CHILD, str(self.path), str(many)]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._stack.callback(child.communicate)
        assert child.stdout is not None and child.stdout.readline() == b"connected\n"

    def ended(self) -> list[int]:
        """Return the numbers of the accepted connections that were closed."""
        return [number for number, each in enumerate(self.accepted) if _has_ended(each)]


def _has_ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[Listening]:
    with ExitStack() as stack:
        yield Listening(tmp_path / "s", stack)


def test_of_one_process_too_many_connections_are_closed(listening: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver, "MOST_OF_PROCESS", 3)
    reasons = []
    for _ in range(5):
        listening.connect()
        reasons.append(listening.accept())
    assert reasons[:3] == [None] * 3
    assert reasons[3] == f"more than 3 connections, most of them of uid {os.getuid()} pid {os.getpid()}"
    assert listening.ended() == [3, 4]
    listening.counted.note("closed", listening.accepted[0].fileno())
    listening.connect()
    assert listening.accept() is None, "one has ended: there is room"


def test_a_users_process_with_most_connections_makes_room_for_his_others(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver, "MOST_OF_USER", 6)
    listening.child(5)
    assert [listening.accept() for _ in range(5)] == [None] * 5
    listening.connect()
    assert listening.accept() is None
    listening.child(1)
    assert listening.accept() is not None
    assert listening.ended() == [4], "the newest one of who has most"


def test_one_more_process_of_a_user_with_too_many_is_refused(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver, "MOST_OF_USER", 2)
    for _ in range(3):
        listening.child(1)
    assert [listening.accept() is None for _ in range(3)] == [True, True, False]
    assert listening.ended() == [2]


@pytest.mark.parametrize(("files", "most"), [(16384, 8192), (2400, 1100), (1024, 256)])
def test_descriptors_are_kept_for_what_zeromq_accepts_meanwhile(
    files: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (files, files))
    assert Connections(["ipc:///x"])._most == most


def test_most_descriptors_stay_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (80, 80))
    with ExitStack() as stack:
        listening = Listening(tmp_path / "s", stack)
        listening.child(20)
        assert [listening.accept() for _ in range(20)] == [None] * 20
        listening.child(1)
        assert listening.accept() is not None
        assert listening.ended() == [19]


def test_a_descriptor_that_is_another_file_by_now_is_left_alone(
    listening: Listening, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(receiver, "MOST_OF_PROCESS", 0)
    with socket.create_server(("127.0.0.1", 0)) as http, socket.create_connection(http.getsockname()) as client:
        accepted = http.accept()[0]
        with accepted, (tmp_path / "file").open("w") as file:
            for descriptor in (accepted.fileno(), file.fileno(), 10_000):
                assert listening.counted.note("opened", descriptor) is None
            client.sendall(b"x")
            assert accepted.recv(1) == b"x"


def test_a_connections_copy_does_not_keep_it_open(listening: Listening) -> None:
    client = listening.connect()
    assert listening.accept() is None
    listening.accepted[0].close()
    assert client.recv(1) == b""


def test_a_receiver_with_a_storm_of_connections_counts_serves_and_ends(tmp_path: Path) -> None:
    """More events wait than ZeroMQ queues: its thread waits for the receiver's, also when that has ended."""
    path = tmp_path / "hook.sock"
    receiver = Receiver(ZmqReceiver([f"ipc://{path}"]))
    storm = [
        subprocess.Popen([sys.executable, "-S", "-c", _STORM, str(path)], stdout=subprocess.DEVNULL) for _ in range(2)
    ]
    try:
        context = zmq.Context()
        push = context.socket(zmq.PUSH)
        push.linger = 0
        push.connect(f"ipc://{path}")
        receiver.start()
        push.send(b"no message of a hook")
        wait_for("it is received", lambda: receiver.rejected["malformed"], 20, 0.05)
        wait_for("it closes connections", lambda: receiver.rejected["too_many_connections"] > 100, 20, 0.05)
        push.close()
        context.term()
        receiver._stop.set()
        receiver._thread.join()
        time.sleep(0.5)  # what nothing takes now fills ZeroMQ's queue
        receiver.stop()
    finally:
        for each in storm:
            each.kill()
            each.wait()


_STORM = """
import socket, sys
from collections import deque
held = deque()
while True:
    one = socket.socket(socket.AF_UNIX)
    one.settimeout(1)
    try:
        one.connect(sys.argv[1])
        held.append(one)
    except OSError:
        one.close()
    if len(held) > 60:
        held.popleft().close()
"""
