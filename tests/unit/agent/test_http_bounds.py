"""The agent's HTTP server under slow, many and wrong clients; what /healthz tells of a thread that hangs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.testclient import TestClient

from gpuwatch.alerting.thresholds import Prices
from gpuwatch_agent import http
from gpuwatch_agent.history import History
from gpuwatch_agent.http import BoundedProtocol, OncePerMinute, make_app


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
    assert answer.headers["Gpuwatch-Sampler-Age-Seconds"] == f"{idle['Sampler']:.1f}"


@contextlib.asynccontextmanager
async def served(history: History) -> AsyncIterator[int]:
    app = make_app(lambda: None, history, "node", (), Prices())
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
    answer = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    return answer


def run(work: Callable[[], Any]) -> None:
    asyncio.run(asyncio.wait_for(work(), 30))


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
                assert await asyncio.wait_for(reader.read(), 1) == b""
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
    once = OncePerMinute()
    records = [logging.LogRecord("uvicorn.error", 30, "", 0, "Invalid HTTP request received.", (), None)] * 1000
    assert sum(map(once.filter, records)) == 1
