"""The agent's own HTTP server: its keep-alives, and the address that it listens on."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from typing import Any

import pytest
import uvicorn

from gpuwatch.commands.up import free_port_or_error
from gpuwatch.errors import ConfigError
from gpuwatch_agent.main import _Server, bind_http


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


@pytest.mark.parametrize("listen", [bind_http, lambda address: free_port_or_error("::", 9478)])
def test_an_address_of_a_family_that_the_kernel_lacks_is_named(
    listen: Callable[[str], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after ipv6.disable=1: it ended in a traceback."""

    def refused(*_: Any) -> None:
        raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))

    monkeypatch.setattr("gpuwatch_agent.main.Listener", refused)
    monkeypatch.setattr("socket.socket", refused)
    with pytest.raises(ConfigError, match="Address family not supported"):
        listen("[::]:9478")
