"""The agent's own HTTP server: its keep-alives, and the address that it listens on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import uvicorn

from gpuwatch_agent.main import _Server


def test_keep_alives_go_on_after_the_clock_is_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """By an hour, as NTP does if the hardware's clock has the local time: systemd killed the agent after a minute."""
    now_s, heard = 2e9, list[float]()

    def time_s() -> float:
        nonlocal now_s
        now_s += 10
        return now_s

    async def alive() -> None:
        nonlocal now_s
        heard.append(now_s)
        now_s -= 3600
        server.should_exit = len(heard) == 3

    async def app(scope: Any, receive: Any, send: Any) -> None: ...

    settings = uvicorn.Config(app, lifespan="off", callback_notify=alive, timeout_notify=5, log_config=None)
    settings.load()
    server = _Server(settings)
    monkeypatch.setattr("time.time", time_s)
    asyncio.run(asyncio.wait_for(server.main_loop(), 10))
    assert len(heard) == 3
