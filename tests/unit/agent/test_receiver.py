"""What a sender may not send: each kind is counted by its reason, logged once, and stops nothing."""

from __future__ import annotations

import logging

import msgspec
import pytest

from gpuwatch import wire
from gpuwatch_agent.receiver import Receiver
from tests.unit.agent.hooks import FakeHook, S


class NoSocket:
    endpoints = ("ipc:///nowhere",)


@pytest.fixture
def receiver() -> Receiver:
    return Receiver(NoSocket())  # type: ignore[arg-type]


def frame(**changes: object) -> bytes:
    return wire.encode(msgspec.structs.replace(FakeHook().step().message(), **changes))


def with_totals(**changes: object) -> bytes:
    return frame(totals=msgspec.structs.replace(FakeHook().step().totals(), **changes))


def with_origin(**changes: object) -> bytes:
    return frame(origin=msgspec.structs.replace(FakeHook(at_ns=101 * S).origin(), **changes))


OTHER_PROTOCOL = msgspec.msgpack.encode({"type": "steps", "origin": {"version": 2, "node": "x"}, "batch": []})

BAD = [
    (b"", "malformed"),
    (b"GET / HTTP/1.1\r\n\r\n", "malformed"),
    (b"\xc1" * 1000, "malformed"),
    (b"\x91" * 120_000, "malformed"),  # lists in each other
    (b"\x82\xa4type\xa5hello\xa1x" + b"\x91" * 120_000, "malformed"),
    (bytes(wire.MAX_MESSAGE_BYTES + 1), "too_large"),
    (OTHER_PROTOCOL, "version"),
    (with_origin(version=2), "version"),
    (frame(run=""), "malformed"),
    (frame(run="r" * 257), "malformed"),
    (frame(activity="a" * 257), "malformed"),
    (frame(columns={"loss": bytes(8)}), "malformed"),
    (frame(columns={"start_ns": bytes(8), "compute_ns": bytes(16)}), "malformed"),
    (frame(columns={"start_ns": bytes(7)}), "malformed"),
    (frame(columns={"start_ns": bytes(8 * 8193)}), "malformed"),
    (with_totals(states_ns={"compute": 1}), "unbalanced"),
    (with_totals(states_ns={"dreaming": 100_000_000}), "malformed"),
    (with_totals(steps=-1), "malformed"),
    (with_totals(samples=-2), "malformed"),
    (with_totals(steps=1 << 63), "malformed"),
    (with_totals(start_ns=-S, watermark_ns=0, states_ns={"compute": S}), "malformed"),
    (frame(first_step=-1), "malformed"),
    (frame(rank=1 << 63), "malformed"),
    (with_origin(time_ns=1 << 63), "malformed"),
    (with_totals(start_ns=100 * S, watermark_ns=900 * S, states_ns={"compute": 800 * S}), "impossible"),
]


@pytest.mark.parametrize(("bad", "reason"), BAD, ids=[f"{number}-{reason}" for number, (_, reason) in enumerate(BAD)])
def test_bad_message_is_counted_by_its_reason_and_the_next_one_taken(
    receiver: Receiver, bad: bytes, reason: str
) -> None:
    receiver.take(bad)
    receiver.take(frame())
    assert dict(receiver.rejected) == {reason: 1}
    assert receiver.received == 1
    assert len(receiver.drain()) == 1


def test_each_reason_is_said_once(receiver: Receiver, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    for _ in range(100):
        for bad, _ in BAD:
            receiver.take(bad)
    assert sum(receiver.rejected.values()) == 100 * len(BAD)
    assert len(caplog.records) == len(receiver.rejected)
    assert max(len(record.message) for record in caplog.records) < 400


def test_too_many_tags_are_refused(receiver: Receiver) -> None:
    hello = msgspec.structs.replace(FakeHook().hello(), tags={str(i): "x" for i in range(33)})
    receiver.take(wire.encode(hello))
    assert dict(receiver.rejected) == {"malformed": 1}


def test_messages_that_no_thread_takes_are_bounded(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuwatch_agent.receiver._KEPT", 10)
    for _ in range(15):
        receiver.take(frame())
    assert (receiver.received, dict(receiver.rejected)) == (10, {"overload": 5})
