"""Messages survive the wire unchanged; whatever breaks the contract is named by one word."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwatch import wire
from gpuwatch.errors import ProtocolError
from gpuwatch.ledger.states import MAX_DECLARED

int64 = st.integers(-(2**63), 2**63 - 1)


def origin(**changes: Any) -> wire.Origin:
    fields: dict[str, Any] = {
        "version": wire.PROTOCOL_VERSION, "sender": "s", "boot_id": "b", "monotonic_ns": 5, "time_ns": 6,
    }  # fmt: skip
    return wire.Origin(**{**fields, **changes})


def totals(**changes: Any) -> wire.Totals:
    fields: dict[str, Any] = {
        "start_ns": 100,
        "watermark_ns": 160,
        "states_ns": {"compute": 40, "input_wait": 20},
        "phases_ns": {"data_wait": 20, "transfer": 0, "compute": 40},
        "steps": 2,
        "samples": -1,
        "records_dropped": 0,
        "overhead_ns": 7,
    }
    return wire.Totals(**{**fields, **changes})


def steps(**changes: Any) -> wire.Steps:
    columns = {"start_ns": wire.pack([100, 130]), "data_wait_ns": wire.pack([10, 10])}
    fields: dict[str, Any] = {
        "origin": origin(), "run": "r", "rank": 0, "totals": totals(), "activity": "step", "first_step": 0,
        "columns": columns,
    }  # fmt: skip
    return wire.Steps(**{**fields, **changes})


def hello(**changes: Any) -> wire.Hello:
    fields: dict[str, Any] = {
        "origin": origin(), "run": "r", "name": "n", "job": "", "rank": 0, "world_size": 1, "pid": 1,
        "process_start_ticks": 2, "pid_namespace": 3, "host": "h", "timeline": "host", "device": "cpu",
        "loader": wire.Loader(num_workers=4, worker_pids=(7, 8)), "versions": {"python": "3"}, "tags": {"team": "vision"},
    }  # fmt: skip
    return wire.Hello(**{**fields, **changes})


MESSAGES: tuple[wire.Message, ...] = (
    hello(),
    hello(loader=None),
    steps(),
    steps(columns={}, fetch_cpu_ratio=0.5),
    wire.Bye(origin(), "r", 0, totals()),
)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_arrives_as_it_was_sent(message: wire.Message) -> None:
    assert wire.decode(wire.encode(message)) == message


@given(st.lists(int64, max_size=50))
def test_columns_are_little_endian_int64(values: list[int]) -> None:
    packed = wire.pack(values)
    assert packed == b"".join(value.to_bytes(8, "little", signed=True) for value in values)
    assert list(wire.unpack(packed)) == values
    assert wire.step_count({"start_ns": packed}) == len(values)


def test_a_step_takes_at_most_80_bytes_on_the_wire() -> None:
    now = 10**15
    # A first batch is marked in those messages that have one, a wait for other ranks where there are no device columns.
    names = [name for name in wire.STEP_COLUMNS if name not in ("epoch_start", "comm_wait_ns")]
    columns = {name: wire.pack([now + index for index in range(1024)]) for name in names}
    assert len(wire.encode(steps(columns=columns))) / 1024 <= 80


def test_the_largest_message_of_a_hook_is_taken() -> None:
    columns = {name: wire.pack([1] * wire.MAX_STEPS_A_MESSAGE) for name in wire.STEP_COLUMNS}
    names = {"\N{GRINNING FACE}" * (wire.MAX_NAME - 1) + chr(65 + n): 1 for n in range(MAX_DECLARED + 1)}
    ten = {"compute": 41, "input_wait": 10, "other": 9}
    wide = "\N{GRINNING FACE}"
    group = wire.Collective(64 * wide, 1 << 52, 64 * wide, True, True)
    still = wire.Standstill(wire.MAX_TEXT * wide, (group,) * wire.MAX_GROUPS)
    largest = steps(columns=columns, totals=totals(declared_ns=names, states_ns=ten), standstill=still)
    assert wire.decode(wire.encode(largest)) == largest


BROKEN: tuple[tuple[str, wire.Message], ...] = (
    ("version", hello(origin=origin(version=2))),
    ("malformed", hello(run="")),
    ("malformed", hello(name="x" * 257)),
    ("malformed", hello(tags={"team": "x" * 257})),
    ("malformed", hello(origin=origin(sender="x" * 257))),
    ("malformed", steps(activity="x" * 257)),
    ("malformed", hello(tags={str(index): "" for index in range(33)})),
    ("malformed", steps(columns={"loss": wire.pack([1])})),
    ("malformed", steps(columns={"start_ns": b"1234567"})),
    ("malformed", steps(columns={"start_ns": wire.pack([1, 2]), "samples": wire.pack([1])})),
    ("malformed", steps(columns={"start_ns": bytes(8 * (wire.MAX_STEPS_A_MESSAGE + 1))})),
    ("too_large", steps(columns={"start_ns": bytes(wire.MAX_MESSAGE_BYTES)})),
    ("unbalanced", steps(totals=totals(watermark_ns=161))),
    ("malformed", steps(totals=totals(states_ns={"compute": 70, "input_wait": -10}))),
    ("malformed", steps(totals=totals(states_ns={"lunch": 60}))),
    ("malformed", steps(totals=totals(steps=-1))),
    ("malformed", steps(totals=totals(start_ns=2**63, watermark_ns=2**63 + 60))),
    ("malformed", steps(first_step=2**63)),
    ("malformed", steps(fetch_cpu_ratio=float("nan"))),
    ("malformed", steps(fetch_cpu_ratio=float("inf"))),
    ("malformed", hello(rank=-1)),
    ("malformed", hello(pid=2**64 - 1)),
)


@pytest.mark.parametrize(("reason", "message"), BROKEN, ids=[f"{r}{i}" for i, (r, _) in enumerate(BROKEN)])
def test_what_breaks_the_contract_is_refused_with_its_reason(reason: str, message: wire.Message) -> None:
    with pytest.raises(ProtocolError) as caught:
        wire.decode(wire.encode(message))
    assert caught.value.reason == reason


def test_a_later_version_with_other_fields_is_a_version_and_not_rubbish() -> None:
    frame = msgspec.msgpack.encode({"type": "novel", "origin": {"version": 9, "who": "?"}, "x": 1})
    with pytest.raises(ProtocolError) as caught:
        wire.decode(frame)
    assert caught.value.reason == "version"


@pytest.mark.parametrize("frame", [b"", b"\x91" * 100_000, b"\x81\xa4type" * 20_000, b"\x81\xa4type\xa3\xe2ye"])
def test_hostile_frames_are_malformed(frame: bytes) -> None:
    with pytest.raises(ProtocolError) as caught:
        wire.decode(frame)
    assert caught.value.reason == "malformed"


@given(st.binary(max_size=300))
def test_rubbish_is_malformed_and_raises_nothing_else(frame: bytes) -> None:
    with pytest.raises(ProtocolError) as caught:
        wire.decode(frame)
    assert caught.value.reason == "malformed"


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_cut_short_or_with_a_byte_changed_raises_nothing_else(message: wire.Message) -> None:
    frame = wire.encode(message)
    changed = (
        frame[:at] + bytes([frame[at] ^ flip]) + frame[at + 1 :] for at in range(len(frame)) for flip in (1, 0x80)
    )
    for broken in itertools.chain((frame[:length] for length in range(len(frame))), changed):
        try:
            wire.decode(broken)
        except ProtocolError as error:
            assert error.reason


def test_a_phase_of_sixty_days_is_taken() -> None:
    """ "between cells" of a notebook, say: it was refused after 52 days, 2**52 ns."""
    phase_ns = 60 * 86_400 * 10**9
    states = {"other": phase_ns}
    lasting = totals(
        watermark_ns=100 + phase_ns, states_ns=states, phases_ns={}, declared_ns={"between cells": phase_ns}
    )
    sent = steps(origin=origin(monotonic_ns=100 + phase_ns), totals=lasting, columns={})
    assert wire.decode(wire.encode(sent)) == sent
