"""The agent's HTTP server under slow, many and wrong clients; what /healthz reports about a thread that hangs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from gpuwatch.alerting.thresholds import Prices
from gpuwatch_agent import http
from gpuwatch_agent.deadline import Rarely
from gpuwatch_agent.history import History
from gpuwatch_agent.http import BoundedProtocol, make_app


@pytest.fixture
def history(tmp_path: Path) -> Any:
    history = History(tmp_path / "history.db")
    yield history
    history.close()


@pytest.mark.parametrize(
    ("idle", "status", "text"),
    [
        ({"Sampler": 1.0, "Receiver": 0.1}, 200, "ok\n"),
        ({"Sampler": 31.0, "Receiver": 0.1}, 503, "the Sampler has done nothing for 31 s\n"),
        ({"Sampler": 1.0, "Receiver": 99.0}, 503, "the Receiver has done nothing for 99 s\n"),
    ],
)
def test_healthz_fails_when_a_thread_hangs(history: History, idle: dict[str, float], status: int, text: str) -> None:
    answer = TestClient(make_app(lambda: None, history, "node", (), Prices(), lambda: idle)).get("/healthz")
    assert (answer.status_code, answer.text) == (status, text)


@contextlib.asynccontextmanager
async def served(history: History, app: Any = None) -> AsyncIterator[int]:
    app = app or make_app(lambda: None, history, "node", (), Prices())
    config = uvicorn.Config(app, port=0, http=BoundedProtocol, log_level="warning", access_log=False, lifespan="off")
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    await task


async def get(port: int) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    answer = await asyncio.wait_for(reader.read(), 60)
    writer.close()
    return answer


def run(work: Callable[[], Any]) -> None:
    asyncio.run(asyncio.wait_for(work(), 150))


def test_a_head_that_does_not_come_ends_its_connection(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_IDLE_S", 0.3)

    async def work() -> None:
        async with served(history) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for _ in range(20):
                with contextlib.suppress(OSError):
                    writer.write(b"G")
                    await writer.drain()
                await asyncio.sleep(0.1)
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), 60) == b""
            writer.close()
            assert b"200 OK" in await get(port)

    run(work)


def test_many_open_connections_leave_room_for_a_scrape(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundedProtocol, "most", 8)

    async def work() -> None:
        async with served(history) as port:
            slow = [await asyncio.open_connection("127.0.0.1", port) for _ in range(50)]
            await asyncio.sleep(0.1)
            assert b"200 OK" in await get(port)
            for reader, _ in slow:
                with contextlib.suppress(TimeoutError, asyncio.TimeoutError, ConnectionError):
                    await asyncio.wait_for(reader.read(1), 0.01)
            for _, writer in slow:
                writer.close()
            assert sum(reader.at_eof() or reader.exception() is not None for reader, _ in slow) >= 42

    run(work)


def test_wrong_requests_are_logged_once_a_minute() -> None:
    now_s = [0.0]
    may_log = Rarely(60.0, lambda: now_s[0])
    assert sum(may_log("Invalid HTTP request received.") for _ in range(1000)) == 1
    now_s[0] = 59.0
    assert not may_log("Invalid HTTP request received.") and may_log("another")
    now_s[0] = 60.0
    assert may_log("Invalid HTTP request received.")


@pytest.mark.parametrize("ending", ["Connection: close\r\n", ""])
def test_answers_that_no_client_reads_are_bounded_in_bytes_and_time(
    history: History, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    monkeypatch.setattr(http, "_MOST_UNREAD", 30 << 20)
    open_ones: set[Any] = set()
    made = BoundedProtocol.connection_made

    def note(self: BoundedProtocol, transport: Any) -> None:
        made(self, transport)
        open_ones.add(self)

    monkeypatch.setattr(BoundedProtocol, "connection_made", note)

    def unread() -> int:
        return sum(each.unread for each in open_ones)

    def later(seconds: float) -> None:
        for each in open_ones:
            each.since_s -= seconds
            each.check()

    async def work() -> None:
        async with served(history, PlainTextResponse(bytes(16 << 20))) as port:
            slow = [await asyncio.open_connection("127.0.0.1", port, limit=1024) for _ in range(6)]
            for count, (_, writer) in enumerate(slow):
                writer.write(f"GET / HTTP/1.1\r\nHost: x\r\n{ending}\r\n".encode())
                while len(open_ones) <= count or unread() == 0:
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.05)
                assert 0 < unread() <= 30 << 20
            later(http._IDLE_S + 1)
            assert unread() > 0, "a slow reader has more time than an idle one"
            later(http._LONGEST_S)
            await asyncio.sleep(0.05)
            assert unread() == 0
            for _, writer in slow:
                writer.close()

    run(work)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        (f"/docs/runbooks/{'a' * 5000}.md", 404),
        ("/docs/runbooks/..%2f..%2fREADME.md", 404),
        ("/docs/runbooks/RunHung.md", 200),
        ("/%2e%2e/etc/passwd", 404),
        ("/api/v1/runs/%ed%a0%80/findings", 200),
        ("/api/v1/runs/%00/steps", 404),
        *[
            (f"/api/v1/runs/r/steps?{query}", 400)
            for query in (
                "last=-1",
                "last=1e9",
                "last=NaN",
                "last=",
                "last=1&x=1",
                "last=2&points=3",
                "points=3&end=inf",
            )
        ],
        ("/api/v1/series?metric=gpuwatch_run_seconds_total&points=1&start=-1e14&end=9e14", 200),
        (f"/api/v1/series?metric={'m' * 50_000}", 400),
        ("/api/v1/ledger?start=-9e14&end=9e14", 200),
    ],
)
def test_odd_requests_have_a_plain_answer(history: History, path: str, status: int) -> None:
    assert TestClient(make_app(lambda: None, history, "node", (), Prices())).get(path).status_code == status


@pytest.mark.parametrize(
    ("request_text", "status"),
    [
        ("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b" 404 "),
        ("GET /healthz HTTP/1.1\r\n\r\n", b" 400 "),
        ("GET /healthz HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", b" 400 "),
        (f"GET /{'a' * 200_000} HTTP/1.1\r\nHost: x\r\n\r\n", b" 400 "),
        (f"GET /healthz HTTP/1.1\r\nHost: x\r\nX: {'x' * 200_000}\r\n\r\n", b" 400 "),
        ("GET /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", b" 400 "),
        ("GET /healthz HTTP/1.1\r\nHost: x\r\nRange: bytes=0-1\r\n\r\n", b" 200 "),
        ("OPTIONS /healthz HTTP/1.1\r\nHost: x\r\n\r\n", b" 405 "),
        (f"POST /healthz HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n8000\r\n{'x' * 30_000}", b" 405 "),
        ("GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n", b" 400 "),
        ("GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n" * 200, b" 200 "),
    ],
)
def test_odd_bytes_on_a_connection_have_a_plain_answer(history: History, request_text: str, status: bytes) -> None:
    async def work() -> None:
        async with served(history) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request_text.encode())
            answer = await asyncio.wait_for(reader.readline(), 60)
            assert status in answer
            writer.close()
            assert b"200 OK" in await get(port)

    run(work)
