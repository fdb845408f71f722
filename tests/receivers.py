"""Receivers of notifications for tests: an HTTP server and a mail server on loopback that keep what they are sent."""

from __future__ import annotations

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
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"ok")
            except OSError:
                pass  # it has given up on us

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
