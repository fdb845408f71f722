"""The tests' own transport, and that a sender's bounds are what the contract says. Sockets: tests/integration."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import zmq

from benchmarks.fakes import MemorySender
from benchmarks.overhead.extras import bytes_a_step
from gpuwatch.errors import ConfigError
from gpuwatch.wire.sockets import ZmqReceiver, ZmqSender


def test_the_memory_sender_refuses_while_it_is_not_connected() -> None:
    sender = MemorySender()
    assert sender.send(b"one")
    sender.connected = False
    assert not sender.send(b"two")
    assert sender.frames == [b"one"]


def test_the_benchmark_of_bytes_a_step_counts_all_messages() -> None:
    assert 30 < bytes_a_step(2_000, 20_000) < 200, "the columns of each step, and the messages around them"


def test_a_senders_options_keep_training_from_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[int, int] = {}

    class Socket:
        def setsockopt(self, name: int, value: int) -> None:
            options[name] = value

        def connect(self, endpoint: str) -> None:
            options[-1] = len(endpoint)

        def send(self, frame: bytes, flags: int) -> None:
            assert flags == zmq.NOBLOCK
            raise zmq.Again

    class Context:
        def socket(self, kind: int) -> Socket:
            assert kind == zmq.PUSH
            return Socket()

    monkeypatch.setattr(zmq, "Context", Context)
    sender = ZmqSender("ipc:///x")
    assert options[zmq.IMMEDIATE] == 1, "without an agent nothing queues"
    assert options[zmq.SNDHWM] == 64
    assert 0 < options[zmq.LINGER] <= 300, "the end of a training waits for an agent that hangs at most so long"
    assert sender.send(b"x") is False


def test_a_file_that_is_no_socket_is_not_deleted_by_listening_there(tmp_path: Path) -> None:
    file = tmp_path / "thesis.tex"
    file.write_text("all of it")
    for path in (file, tmp_path):
        with pytest.raises(ConfigError, match="not a socket; choose another path"):
            ZmqReceiver([f"ipc://{path}"])
    assert file.read_text() == "all of it"


def test_sockets_that_differ_in_their_suffix_alone_have_locks_of_their_own(tmp_path: Path) -> None:
    receivers = [ZmqReceiver([f"ipc://{tmp_path}/a.{suffix}"]) for suffix in ("sock", "ipc")]
    for receiver in receivers:
        receiver.close()


def test_another_program_s_socket_is_not_taken(tmp_path: Path) -> None:
    path, link = tmp_path / "docker.sock", tmp_path / "link.sock"
    link.symlink_to(path)
    with socket.socket(socket.AF_UNIX) as other, socket.socket(socket.AF_UNIX) as client:
        other.bind(str(path))
        other.listen()
        for each in (path, link):
            with pytest.raises(ConfigError, match="another program listens there; choose another path"):
                ZmqReceiver([f"ipc://{each}"])
        client.connect(str(path))
    ZmqReceiver([f"ipc://{path}"]).close()  # left behind by one that has ended


@pytest.mark.parametrize("kind", ["fifo", "link to a file", "device"])
def test_what_is_no_socket_stays(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path = Path("/dev/null")
    else:
        (tmp_path / "file").write_text("all of it")
        path.symlink_to(tmp_path / "file")
    before = path.stat()
    with pytest.raises(ConfigError, match="not a socket; choose another path"):
        ZmqReceiver([f"ipc://{path}"])
    assert (path.stat().st_ino, path.stat().st_mode) == (before.st_ino, before.st_mode)
