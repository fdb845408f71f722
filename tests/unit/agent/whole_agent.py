"""The agent without its socket, its threads and its clock, in a test's own time.

It can receive, tick, downsample and trim, and has the page and the API's queries.
"""

from __future__ import annotations

import contextlib
from concurrent import futures
from pathlib import Path

import pytest

from gpuwatch import wire
from gpuwatch.alerting.thresholds import Prices
from gpuwatch.config import AgentSettings, Config
from gpuwatch.wire.sockets import Peer
from gpuwatch_agent import receiver as receiver_module
from gpuwatch_agent import sampler as sampler_module
from gpuwatch_agent.history import History, RetentionClock, queries
from gpuwatch_agent.receiver import Receiver
from gpuwatch_agent.sampler import Sampler
from tests.unit.agent.hooks import BOOT, NOW_S

SERIES = "full"


class NoSocket:
    endpoints = ("ipc:///nowhere",)


class Clock:
    """Stands for the module `time`."""

    def __init__(self, now_ns: int) -> None:
        self.now_ns = now_ns
        self.suspended_s = 0.0
        """Time in suspend, which the monotonic clock leaves out."""

    def monotonic_ns(self) -> int:
        return self.now_ns

    def monotonic(self) -> float:
        return self.now_ns / 1e9

    def time(self) -> float:
        return NOW_S + self.now_ns / 1e9 + self.suspended_s


class WholeAgent:
    """`hear` takes frames, `tick` passes a second. `procfs` is empty: no process is visible."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, now_ns: int) -> None:
        self.is_open = True
        self.clock = Clock(now_ns)
        monkeypatch.setattr(sampler_module, "time", self.clock)
        monkeypatch.setattr(receiver_module, "time", self.clock)
        monkeypatch.setattr("gpuwatch_agent.history.writer._WAIT_S", 60.0)  # a busy machine is no disk that hangs
        procfs = directory / "proc"
        procfs.mkdir(exist_ok=True)
        self.history = History(directory / "history.db", full_s=60.0)
        self.receiver = Receiver(NoSocket(), self.clock.monotonic)  # type: ignore[arg-type]
        nothing = str(procfs)
        settings = AgentSettings(procfs=nothing, sysfs=nothing, shm=nothing, series=SERIES)
        self.sampler = Sampler(self.receiver, self.history, Config(agent=settings), BOOT)
        self.sampler._retention_s = RetentionClock(self.clock.time, self.clock.monotonic)
        self.sampler._runs.restore(self.history.reader.records(), now_ns, self.clock.time())

    def hear(self, *messages: wire.Message | bytes, peer: Peer | None = None) -> None:
        for message in messages:
            frame = message if isinstance(message, bytes) else wire.encode(message)
            self.receiver.take(frame, *([peer] if peer else []))

    def tick(self, now_ns: int) -> None:
        """Let time pass up to a moment, and do what the agent does once a second."""
        self.clock.now_ns = now_ns
        self.sampler._tick()
        writer = self.sampler.writer
        writer.tidy(self.sampler._retention_s(), True)
        if writer._thread.pending is not None and not writer._hangs:
            futures.wait([writer._thread.pending], 60)  # a test reads the writer's own connection

    def page(self) -> dict[tuple[str, ...], float]:
        assert self.sampler.snapshot is not None
        lines = self.sampler.snapshot.page.body(False, False).decode().rstrip("\n").split("\n")
        return {tuple([line.rpartition(" ")[0]]): float(line.rpartition(" ")[2]) for line in lines if line[0] != "#"}

    def value(self, series: str) -> float:
        return self.page()[series,]

    def failures(self) -> dict[str, int]:
        return dict(self.sampler._runs.failures)

    def ask(self, run: str) -> None:
        """Ask everything that the API answers about a run; nothing kept is an answer too."""
        reader, now_s = self.history.reader, self.clock.time()
        queries.runs(reader, [], {"kept": "all"}, Prices())
        queries.ledger(reader, {"end": str(now_s)})
        queries.series(reader, {"metric": "gpuwatch_run_seconds_total", "end": str(now_s)})
        for query in ({"last": "500"}, {"points": "20"}, {"points": "7", "start": str(now_s - 600), "end": str(now_s)}):
            with contextlib.suppress(queries.NothingKept):
                queries.steps(reader, run, dict(query))
        reader.findings(run)

    def close(self) -> None:
        """Close it, unless a test has: its writer, which has ended, would be waited for a minute."""
        if not self.is_open:
            return
        writer, self.is_open = self.sampler.writer, False
        writer.close()
        for thread in (
            writer._thread,
            writer._marker,
        ):  # the traceback of a failed test would keep them for later tests
            thread._calls.put(None)
