"""Viewers of the pages without a browser: they speak Streamlit's own protocol over its websocket.

So ten of them leave the cores to the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import Any

import psutil
import websockets
from streamlit.proto.BackMsg_pb2 import BackMsg
from streamlit.proto.ForwardMsg_pb2 import ForwardMsg

WARM_UP_S = 8.0
WINDOWS = {"1 h": "window=1+h", "5 min": "window=5+min"}
"""The charts of an hour change every twelve seconds, those of five minutes at every refresh."""


@dataclass
class Viewer:
    """One open page: what it was sent."""

    refreshes: int = 0
    bytes: int = 0
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    async def watch(self, url: str, query: str) -> None:
        address = f"{url.replace('http', 'ws', 1)}/_stcore/stream"
        async with websockets.connect(
            address, subprotocols=["streamlit"], max_size=None, ping_interval=None, origin=url
        ) as socket:  # type: ignore[list-item, arg-type]
            begin = BackMsg()
            begin.rerun_script.query_string = query
            await socket.send(begin.SerializeToString())
            async for raw in socket:
                self._take(socket, raw, query)

    def _take(self, socket: Any, raw: Any, query: str) -> None:
        message = ForwardMsg()
        message.ParseFromString(raw)
        self.bytes += len(raw)
        kind = message.WhichOneof("type")
        if kind == "script_finished":
            self.refreshes += 1
        elif kind == "auto_rerun":
            fragment, every_s = message.auto_rerun.fragment_id, message.auto_rerun.interval
            if fragment in self.tasks:
                self.tasks[fragment].cancel()
            self.tasks[fragment] = asyncio.create_task(_rerun(socket, fragment, every_s, query))


async def _rerun(socket: Any, fragment: str, every_s: float, query: str) -> None:
    while True:
        await asyncio.sleep(every_s)
        message = BackMsg()
        message.rerun_script.fragment_id = fragment
        message.rerun_script.is_auto_rerun = True
        message.rerun_script.query_string = query
        await socket.send(message.SerializeToString())


async def viewers(url: str, count: int, seconds: float, window: str) -> None:
    """Print what `count` viewers cost the server in steady state."""
    process = server_of(url)
    watching = [Viewer() for _ in range(count)]
    tasks = []
    for viewer in watching:
        tasks.append(asyncio.create_task(viewer.watch(url, WINDOWS[window])))
        await asyncio.sleep(2.0 / count)  # people do not arrive at once
    await asyncio.sleep(WARM_UP_S)
    cpu, begin, seen = cpu_s(process), time.monotonic(), sum(v.refreshes for v in watching)
    sent = sum(viewer.bytes for viewer in watching)
    await asyncio.sleep(seconds)
    spent_s, took_s = cpu_s(process) - cpu, time.monotonic() - begin
    refreshes = sum(viewer.refreshes for viewer in watching) - seen
    kib = (sum(viewer.bytes for viewer in watching) - sent) / refreshes / 1024
    print(
        f"{count:3d} viewer(s), {window}: {100 * spent_s / took_s:5.1f}% of a core, {1e3 * spent_s / refreshes:6.1f} ms of CPU and "
        f"{kib:.0f} KiB a refresh ({refreshes} refreshes in {took_s:.0f} s)",
        flush=True,
    )
    for task in (*tasks, *(task for viewer in watching for task in viewer.tasks.values())):
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def server_of(url: str) -> psutil.Process:
    """Return the process that serves the pages."""
    return next(process for process in psutil.process_iter() if _serves(process, url))


def _serves(process: psutil.Process, url: str) -> bool:
    with contextlib.suppress(psutil.Error):
        line = process.cmdline()
        return "streamlit" in line and f"--server.port={url.rpartition(':')[2]}" in line
    return False


def cpu_s(process: psutil.Process) -> float:
    """Return the CPU time of a process, in seconds since its start."""
    times = process.cpu_times()
    return float(times.user + times.system)
