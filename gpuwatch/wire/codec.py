"""Messages as msgpack, and back."""

from __future__ import annotations

import msgspec

from gpuwatch.errors import ProtocolError
from gpuwatch.wire.checks import check
from gpuwatch.wire.messages import PROTOCOL_VERSION, Message

MAX_MESSAGE_BYTES = 1 << 20


class _Versioned(msgspec.Struct):
    version: int


class _AnyMessage(msgspec.Struct):
    """All that is asked of a message of another version. At module level: msgspec looks its annotations up there."""

    origin: _Versioned


_UNDECODABLE = (msgspec.MsgspecError, ValueError, RecursionError)
"""What msgspec raises: a text that is not UTF-8 is a ValueError to it, nesting without end a RecursionError."""

_version_decoder = msgspec.msgpack.Decoder(_AnyMessage)
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Return the message as msgpack."""
    return _encoder.encode(message)


def decode(frame: bytes) -> Message:
    """Return the message in `frame`, checked against every bound of the contract.

    Raises: ProtocolError, whose `reason` is a short word fit for a label.
    """
    if len(frame) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"message of {len(frame)} bytes; at most {MAX_MESSAGE_BYTES} are taken", "too_large")
    try:
        message = _decoder.decode(frame)
    except _UNDECODABLE as error:
        raise ProtocolError(f"message that does not decode: {error}", _undecodable(frame)) from error
    if message.origin.version != PROTOCOL_VERSION:
        raise _wrong_version(message.origin.version)
    check(message)
    return message


def _undecodable(frame: bytes) -> str:
    """Tell a message of another protocol version, whose fields may differ, from rubbish."""
    try:
        found = _version_decoder.decode(frame)
    except _UNDECODABLE:
        return "malformed"
    return "malformed" if found.origin.version == PROTOCOL_VERSION else "version"


def _wrong_version(version: int) -> ProtocolError:
    return ProtocolError(
        f"message of protocol version {version}; this agent speaks {PROTOCOL_VERSION}: "
        "install the same gpuwatch-training version in the training environment and for the agent",
        "version",
    )
