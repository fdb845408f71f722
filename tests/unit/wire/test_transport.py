"""The transport of the tests themselves, and that a sender's bounds are what the contract says. Sockets: tests/integration."""

from __future__ import annotations

import pytest
import zmq

from gpuwatch.testing import MemorySender
from gpuwatch.wire.sockets import Sender, ZmqSender


def test_the_memory_sender_refuses_while_it_is_not_connected() -> None:
    sender: Sender = MemorySender()
    assert sender.send(b"one")
    assert isinstance(sender, MemorySender)
    sender.connected = False
    assert not sender.send(b"two")
    assert sender.frames == [b"one"]


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
