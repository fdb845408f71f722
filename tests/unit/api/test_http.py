"""The one GET of gpuwatch on a real server: kept connections, gzip, timeouts, refusals, and the client's structs."""

from __future__ import annotations

import gzip
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

import msgspec
import pytest

from gpuwatch.api import Status
from gpuwatch.api.client import Client, Http, Prometheus, Reply, fetch
from gpuwatch.errors import SourceError


class Server(ThreadingHTTPServer):
    """Counts connections, and keeps what was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.connections = 0
        self.asked: list[tuple[str, str | None]] = []
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.hold = threading.Event()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60.0  # an idle connection is closed after so long
    server: Server

    def setup(self) -> None:
        super().setup()
        self.server.connections += 1

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers["Authorization"]))
        status, body, more = 200, b'{"findings": []}', {}
        if self.path == "/moved":
            status, more = 308, {"Location": "https://elsewhere/"}
        elif self.path.endswith("/steps?rank=0&last=5"):
            status, body = 404, b'{"error": "none are kept"}'
        elif self.path == "/held":
            self.server.hold.wait(10)
        elif self.path == "/closes":
            self.close_connection = True  # without a word in the answer, as one that was idle for too long
        elif self.path == "/zip":
            body, more = gzip.compress(b"plain"), {"Content-Encoding": "gzip"}
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **more}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        query = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())["query"][0]
        self.server.asked.append((f"{self.path} {self.headers['Content-Type']}", query))
        answer = {"status": "success", "data": {"result": 40_000 * [{"metric": {}, "value": [1, "2"]}]}}
        body = msgspec.json.encode(answer)
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    thread = threading.Thread(target=made.serve_forever, args=(0.01,))
    thread.start()
    yield made
    made.hold.set()
    made.shutdown()
    thread.join()
    made.server_close()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the server's thread may begin seconds late."""
    request = Http._request

    def patiently(self: Http, method: str, path: str, timeout_s: float, *args: Any, **more: Any) -> Reply:
        return request(self, method, path, timeout_s if timeout_s < 1 else 60.0, *args, **more)

    monkeypatch.setattr(Http, "_request", patiently)
    monkeypatch.setattr("gpuwatch.api.client.TIMEOUT_S", 60.0)


def test_requests_one_after_the_other_share_a_connection(server: Server) -> None:
    http = Http(f"{server.url}/prefix/")
    assert [http.get(f"/{n}").status for n in range(3)] == [200] * 3
    assert (server.connections, [path for path, _ in server.asked]) == (1, ["/prefix/0", "/prefix/1", "/prefix/2"])


def test_a_connection_that_the_server_has_closed_is_replaced(server: Server) -> None:
    http = Http(server.url)
    http.get("/closes")
    pool = http._pool.connection_from_url(server.url).pool
    connection = pool.get()
    connection.sock.settimeout(60)
    assert connection.sock.recv(1, socket.MSG_PEEK) == b"", "closed by the server"
    pool.put(connection)
    assert http.get("/b").status == 200 and server.connections == 2


def test_what_is_compressed_comes_plain_and_a_user_in_the_url_is_sent(server: Server) -> None:
    assert fetch(f"{server.url}/zip").body == b"plain"
    fetch(server.url.replace("//", "//me:p%40ss@") + "/a?b=1")
    assert server.asked[-1] == ("/a?b=1", "Basic bWU6cEBzcw==")


def test_a_server_that_takes_too_long_is_named_with_the_time(server: Server) -> None:
    with pytest.raises(SourceError, match=f"the agent at {server.url} did not answer within 0.1 s"):
        Client(server.url).ask("/held", dict, timeout_s=0.1)


def test_an_agent_that_runs_is_not_to_be_started(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handler, "timeout", 2.0)  # a handshake may have no end of a line, for which it waits
    with pytest.raises(SourceError, match=r"SSL.*: check http:// or https://"):
        Client(server.url.replace("http", "https")).runs()
    with pytest.raises(SourceError, match=r"whatever: the URL needs http.*\): correct that; no request was sent"):
        Client("whatever").runs()
    monkeypatch.setenv("GPUWATCH_API_TOKEN", "short")
    with pytest.raises(SourceError, match=r"16 or more ASCII characters.*\): correct that; no request was sent"):
        Client(server.url).runs()
    asked = len(server.asked)
    monkeypatch.delenv("GPUWATCH_API_TOKEN")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(SourceError, match="does not answer: start it with `gpuwatch up`"):
            Client(f"http://127.0.0.1:{unused.getsockname()[1]}").runs()
    assert asked == 0


def test_a_redirect_is_not_followed_but_named(server: Server) -> None:
    with pytest.raises(SourceError, match="with status 308: it redirects to https://elsewhere/: use that address"):
        Client(server.url).ask("/moved", dict)


def test_a_run_s_name_is_quoted_and_steps_that_are_not_kept_are_none(server: Server) -> None:
    client = Client(server.url)
    assert client.last_steps("a/b c", 0, 5) is None
    assert list(client.findings("a/b c")) == []
    assert [path for path, _ in server.asked] == [
        "/api/v1/runs/a%2Fb%20c/steps?rank=0&last=5",
        "/api/v1/runs/a%2Fb%20c/findings",
    ]


@pytest.mark.parametrize(
    ("url", "reason"),
    [("nonsense", "needs http:// or https"), ("http://127.0.0.1:x", "x"), ("http://[::1", "needs http:// or https")],
)
def test_a_url_that_is_none_is_an_error_that_says_so(url: str, reason: str) -> None:
    with pytest.raises(SourceError, match=reason):
        Client(url).status()


@pytest.mark.parametrize(
    ("sampled_s", "asks"),
    [((99.0, 99.0, 100.5), 3), ((100.0,), 1), ((None,), 1)],
    ids=["late", "in time", "older agent"],
)
def test_a_client_waits_until_the_agent_has_booked_what_it_had(sampled_s: tuple[float | None, ...], asks: int) -> None:
    """An agent books once a second: what is asked right after a run's end would lack its last second."""
    asked: list[str] = []

    def get(path: str, timeout_s: float) -> Reply:
        asked.append(path)
        now = Status("n", (), time_s=100.0 + len(asked) - 1, sampled_s=sampled_s[len(asked) - 1])
        return Reply(200, msgspec.json.encode(now))

    client = Client("http://agent", get=get)
    assert client.caught_up() is client
    assert asked == ["/api/v1/status"] * asks


def test_a_client_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = Reply(200, msgspec.json.encode(Status("n", (), time_s=100.0, sampled_s=90.0)))
    begin = time.monotonic()
    Client("http://agent", get=lambda path, timeout_s: hangs).caught_up()
    assert 1.9 <= time.monotonic() - begin <= 60  # two seconds, and what a busy machine adds


def test_a_question_of_ten_thousand_runs_is_posted(server: Server) -> None:
    """nginx refuses a URL of more than 8 KiB, Prometheus one of more than 1 MiB. An answer of 1.3 MB is read whole."""
    runs = "|".join(f"llm-worker-0-1-{number}" for number in range(10_000))
    asked = f'sum(a{{run=~"{runs}"}})'
    assert Prometheus(server.url).instant(asked, 5.0, 20) == 40_000 * [({}, 2.0)]
    assert server.asked == [("/api/v1/query application/x-www-form-urlencoded", asked)]


def test_a_client_that_goes_at_the_interpreter_s_exit_is_silent(capfd: pytest.CaptureFixture[str]) -> None:
    class Gone:
        def clear(self) -> None:
            raise ImportError("sys.meta_path is None, Python is likely shutting down")

    Http("http://127.0.0.1:1")._pool = Gone()
    Http("http://127.0.0.1:1").__del__()
    assert capfd.readouterr().err == ""
