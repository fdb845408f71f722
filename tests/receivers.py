"""Receivers of notifications for tests: an HTTP server and a mail server on loopback that keep what they are sent."""

from __future__ import annotations

import contextlib
import gzip
import json
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Inbox:
    """What has arrived, and how the next requests are answered."""

    url: str = ""
    port: int = 0
    posts: list[tuple[str, Any]] = field(default_factory=list)
    """(path, JSON body), those that were refused too."""
    accepted: list[Any] = field(default_factory=list)
    """Bodies that were answered with 200."""
    mails: list[str] = field(default_factory=list)
    answer: Callable[[], int] = lambda: 200
    delay_s: float = 0.0


@contextmanager
def webhook(inbox: Inbox | None = None, port: int = 0) -> Iterator[Inbox]:
    """Give an inbox that an HTTP server on loopback fills; the server is gone in the end."""
    box = inbox or Inbox()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            box.posts.append((self.path, body))
            if box.delay_s:
                time.sleep(box.delay_s)
            code = box.answer()
            if code == 200:
                box.accepted.append(body)
            try:
                self.send_response(code)
                if 300 <= code < 400:
                    self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"ok")
            except OSError:
                pass  # it has given up on us

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        allow_reuse_address = True

    with Server(("127.0.0.1", port), Handler) as server:
        box.port = server.server_address[1]
        box.url = f"http://127.0.0.1:{box.port}"
        with _serving(server):
            yield box


@dataclass
class Collector:
    """What an OTLP collector has got, and how it answers the next requests."""

    url: str = ""
    port: int = 0
    posts: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    """(path, headers by lower-case name, body without its gzip), those that were refused too."""
    answer: Callable[[str], tuple[int, dict[str, str], bytes]] = lambda path: (200, {}, b"")
    """By path: status, headers, body."""
    delay_s: float = 0.0
    drip: Iterator[bytes] | None = None
    """Follows the body, piece by piece, without a Content-Length."""

    def bodies(self, path: str) -> list[bytes]:
        return [body for where, _, body in self.posts if where.endswith(path)]


@contextmanager
def otlp_collector(collector: Collector | None = None, port: int = 0) -> Iterator[Collector]:
    """Give a collector that an HTTP server on loopback fills; the server is gone in the end."""
    box = collector or Collector()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = gzip.decompress(self.rfile.read(int(self.headers["Content-Length"])))
            box.posts.append((self.path, {name.lower(): value for name, value in self.headers.items()}, body))
            time.sleep(box.delay_s)
            status, headers, answer = box.answer(self.path)
            with contextlib.suppress(OSError):  # it has given up on us
                self.send_response(status)
                length = {} if box.drip else {"Content-Length": str(len(answer))}
                for name, value in {**length, **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(answer)
                for piece in box.drip or ():
                    self.wfile.write(piece)
            self.close_connection |= box.drip is not None

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        allow_reuse_address = True

    with Server(("127.0.0.1", port), Handler) as server:
        box.port = server.server_address[1]
        box.url = f"http://127.0.0.1:{box.port}"
        with _serving(server):
            yield box


@contextmanager
def mail_server() -> Iterator[Inbox]:
    """Give an inbox whose `mails` a plain SMTP server on loopback fills with whole messages."""
    box = Inbox()

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self.wfile.write(b"220 test\r\n")
            while line := self.rfile.readline():
                word = line.strip().upper()
                if word == b"DATA":
                    self.wfile.write(b"354 go on\r\n")
                    lines = []
                    while (line := self.rfile.readline()) not in (b".\r\n", b""):
                        lines.append(line.removeprefix(b"."))  # RFC 5321, 4.5.2
                    box.mails.append(b"".join(lines).decode())
                elif word == b"QUIT":
                    self.wfile.write(b"221 bye\r\n")
                    return
                self.wfile.write(b"250 ok\r\n")

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        allow_reuse_address = True

    with Server(("127.0.0.1", 0), Handler) as server:
        box.port = server.server_address[1]
        with _serving(server):
            yield box


@contextmanager
def _serving(server: socketserver.BaseServer) -> Iterator[None]:
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join(10)
