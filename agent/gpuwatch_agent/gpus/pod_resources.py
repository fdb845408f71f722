"""The kubelet's own list of which container has which devices: gRPC's `v1.PodResourcesLister/List` on a Unix socket.

One call on a connection of its own. No gRPC library is among the agent's dependencies, and grpcio would double its memory: a call
without arguments needs one request of fixed bytes, and of the answer only the data frames. Memory and CPU lists are skipped.
Sources: RFC 9113 (HTTP/2), RFC 7541 (HPACK: literal fields without indexing), gRPC over HTTP2, and api.proto of
k8s.io/kubelet/pkg/apis/podresources/v1.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gpuwatch.errors import NoData

_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _ACK, _END_HEADERS, _PADDED = 0x1, 0x1, 0x4, 0x8
_MOST_BYTES = 16 << 20
"""Of an answer; also the window that the kubelet is given, so that it never waits for an update."""
_HEADER_FIELDS = {
    ":method": "POST",
    ":scheme": "http",
    ":path": "/v1.PodResourcesLister/List",
    ":authority": "localhost",
    "content-type": "application/grpc",
    "te": "trailers",
}


@dataclass(frozen=True)
class Devices:
    """Devices of one resource that a container has."""

    namespace: str
    pod: str
    container: str
    resource: str
    """E.g. "nvidia.com/gpu"."""
    ids: tuple[str, ...]


def list_devices(path: Path, timeout_s: float) -> list[Devices]:
    """Return the devices of every container on this node.

    Raises: NoData where the socket is absent; OSError for one that does not answer, or not as gRPC does; ValueError for an odd answer.
    """
    if not path.exists():
        raise NoData(f"{path} does not exist here")
    return list(parse_list(_call(path, timeout_s)))


# HTTP/2 and gRPC ------------------------------------------------------------------------------------------------------


def _frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    return struct.pack(">I", len(body))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + body


def _text_field(text: str) -> bytes:
    return bytes((len(text),)) + text.encode()


_REQUEST = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    + _frame(_SETTINGS, 0, 0, struct.pack(">HIHI", 2, 0, 4, _MOST_BYTES))  # no push; each stream's window
    + _frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", _MOST_BYTES))
    + _frame(
        _HEADERS, _END_HEADERS, 1, b"".join(b"\0" + _text_field(k) + _text_field(v) for k, v in _HEADER_FIELDS.items())
    )
    + _frame(_DATA, _END_STREAM, 1, struct.pack(">BI", 0, 0))  # an empty message
)


def _call(path: Path, timeout_s: float) -> bytes:
    """Return the answer's message. Raises: OSError."""
    end_s = time.monotonic() + timeout_s
    data = b""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout_s)
        connection.connect(str(path))
        connection.sendall(_REQUEST)
        flags = stream = 0
        while not (stream == 1 and flags & _END_STREAM):
            head = _receive(connection, 9, end_s)
            kind, flags, stream = head[3], head[4], int.from_bytes(head[5:], "big") & 0x7FFFFFFF
            length = int.from_bytes(head[:3], "big")
            if length > _MOST_BYTES or len(data) > _MOST_BYTES:
                raise OSError(f"{path}: the answer is larger than {_MOST_BYTES >> 20} MiB")
            body = _receive(connection, length, end_s)
            if kind in (_SETTINGS, _PING) and not flags & _ACK:
                connection.sendall(_frame(kind, _ACK, 0, body if kind == _PING else b""))
            elif kind in (_GOAWAY, _RST_STREAM):
                raise OSError(f"{path}: the kubelet closed the call, HTTP/2 error {int.from_bytes(body[-4:], 'big')}")
            elif kind == _DATA and stream == 1:
                data += body[1 : length - body[0]] if flags & _PADDED else body
    # Without a message the status is in the headers, compressed: an unknown method, or too many calls.
    length = int.from_bytes(data[1:5], "big")
    if len(data) < 5 + length or data[0]:
        raise OSError(f"{path}: no answer to {_HEADER_FIELDS[':path']}; Kubernetes has it since 1.20")
    return data[5 : 5 + length]


def _receive(connection: socket.socket, count: int, end_s: float) -> bytes:
    found = bytearray()
    while len(found) < count:
        connection.settimeout(max(0.001, end_s - time.monotonic()))
        more = connection.recv(count - len(found))
        if not more:
            raise OSError("the kubelet closed the connection")
        found += more
    return bytes(found)


# protobuf -------------------------------------------------------------------------------------------------------------


def parse_list(message: bytes) -> Iterator[Devices]:
    """Yield what a ListPodResourcesResponse lists. Raises: ValueError."""
    for pod in _messages(message, 1):
        name, namespace = _text(pod, 1), _text(pod, 2)
        for container in _messages(pod, 3):
            for devices in _messages(container, 2):
                ids = tuple(each.decode("utf-8", "replace") for each in _messages(devices, 2))
                yield Devices(namespace, name, _text(container, 1), _text(devices, 1), ids)


def _text(message: bytes, number: int) -> str:
    return next((each.decode("utf-8", "replace") for each in _messages(message, number)), "")


def _messages(message: bytes, number: int) -> Iterator[bytes]:
    """Yield the values of a field of strings or messages. Source: protobuf.dev, encoding."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == 0:
            _, at = _varint(message, at)
            continue
        length, at = _varint(message, at) if kind == 2 else ({1: 8, 5: 4}.get(kind, -1), at)
        if length < 0 or at + length > len(message):
            raise ValueError("not a protobuf message")
        if key >> 3 == number and kind == 2:
            yield message[at : at + length]
        at += length


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Return (the number that begins here, where the next one begins)."""
    value = 0
    for place, byte in enumerate(message[at : at + 10]):
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value, at + place + 1
    raise ValueError("not a protobuf message")
