"""A kubelet's pod-resources server on a Unix socket, on a real HTTP/2 implementation."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from gpuwatch_agent.gpus.allocations import Allocation
from gpuwatch_agent.processes.owners import Owner


class Devices(NamedTuple):
    """Devices of one resource that a container has."""

    namespace: str
    pod: str
    container: str
    resource: str
    ids: tuple[str, ...]

    @property
    def allocation(self) -> Allocation:
        owner = Owner(namespace=self.namespace, pod=self.pod, container=self.container)
        return Allocation(self.ids, owner, by_index=True)


def _field(number: int, value: bytes) -> bytes:
    length, head = len(value), b""
    while True:
        head += bytes(((length & 0x7F) | (0x80 if length > 0x7F else 0),))
        length >>= 7
        if not length:
            return bytes((number << 3 | 2,)) + head + value


def encode(devices: Sequence[Devices]) -> bytes:
    """Return the ListPodResourcesResponse of containers with these devices; also fields that the agent skips."""
    pods = []
    for each in devices:
        ids = b"".join(_field(2, name.encode()) for name in each.ids)
        topology = _field(3, _field(1, b"\x08\x01"))
        held = _field(2, _field(1, each.resource.encode()) + ids + topology) if each.ids else b""
        cpus = _field(3, b"\x01\x02\x81\x01")
        container = _field(1, each.container.encode()) + held + cpus
        pods.append(_field(1, _field(1, each.pod.encode()) + _field(2, each.namespace.encode()) + _field(3, container)))
    return b"".join(pods)


class Kubelet:
    """What it answers is `devices`; with `status` that gRPC status and no message."""

    def __init__(self) -> None:
        self.devices: list[Devices] = []
        self.status = 0
        self.calls: list[str] = []

    def serve(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, suppress(OSError):  # a caller that has its answer, or none, closes at once
                self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        from jh2.config import H2Configuration
        from jh2.connection import H2Connection
        from jh2.events import RequestReceived, StreamEnded

        http = H2Connection(H2Configuration(client_side=False, header_encoding="utf-8"))
        http.initiate_connection()
        http.ping(b"12345678")
        connection.sendall(http.data_to_send())
        while data := connection.recv(65536):
            for event in http.receive_data(data):
                if isinstance(event, RequestReceived):
                    headers = dict(event.headers)
                    assert headers["content-type"] == "application/grpc" and headers["te"] == "trailers"
                    self.calls.append(headers[":path"])
                if isinstance(event, StreamEnded):
                    self._respond(http, event.stream_id)
            connection.sendall(http.data_to_send())

    def _respond(self, http: object, stream: int) -> None:
        body = encode(self.devices)
        head = [(":status", "200"), ("content-type", "application/grpc")]
        send: object = http
        if self.status:
            send.send_headers(stream, [*head, ("grpc-status", str(self.status))], end_stream=True)  # type: ignore[attr-defined]
            return
        send.send_headers(stream, head)  # type: ignore[attr-defined]
        message = b"\0" + len(body).to_bytes(4, "big") + body
        for at in range(0, len(message), 16000):
            send.send_data(stream, message[at : at + 16000], pad_length=3)  # type: ignore[attr-defined]
        send.send_headers(stream, [("grpc-status", "0")], end_stream=True)  # type: ignore[attr-defined]


@contextmanager
def kubelet(path: Path) -> Iterator[Kubelet]:
    server = Kubelet()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=server.serve, args=(listener,), daemon=True)
        thread.start()
        yield server
        listener.shutdown(socket.SHUT_RDWR)
    path.unlink()
    thread.join(5)
