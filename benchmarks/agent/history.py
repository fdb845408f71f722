"""How large the history grows: ten minutes of 8 GPUs and 8 ranks × 20 steps/s, then the same by the minute."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path

from benchmarks.agent.ingest import NoSocket, step_batches
from benchmarks.agent.load import Rank
from gpuwatch.metrics import Sample
from gpuwatch_agent.history import History, StepBatch, Tick
from gpuwatch_agent.receiver import Receiver

_SECONDS = 600
_SERIES = 640
_RANKS, _MESSAGES_A_SECOND, _STEPS_A_MESSAGE = 8, 2, 10
_BEGIN_S = 1_790_000_000.0


def history_part(directory: Path) -> list[str]:
    """Return the size of a second and of a day, at full resolution and by the minute."""
    path = directory / "history.db"
    history = History(path, full_s=3600.0)
    empty = used_bytes(path)
    hooks = [Rank(rank, 1, 1, (), "boot") for rank in range(_RANKS)]
    for second in range(_SECONDS):
        time_s = _BEGIN_S + second
        samples = [Sample("gpuwatch_gpu_power_watts", 0.1 * second * n, (str(n), "")) for n in range(_SERIES)]
        assert history.commit(Tick(time_s, samples, {}, [], steps(hooks, time_s), []))
    full = used_bytes(path) - empty
    while full_rows(path):
        history.downsample(_BEGIN_S + _SECONDS + 7200)
    minutes = used_bytes(path) - empty
    history.close()

    def line(name: str, size: int) -> str:
        return f"| {name} | {size / _SECONDS / 1e3:.1f} kB | {size / _SECONDS * 86400 / 1e6:,.0f} MB |"

    return [
        "| history | a second | a day |",
        "|---|---|---|",
        line(f"full resolution: {_SERIES} series, {_RANKS} ranks × 20 steps/s", full),
        line("the same by the minute", minutes),
    ]


def steps(hooks: list[Rank], time_s: float) -> list[StepBatch]:
    """Return what all ranks send in one second."""
    receiver = Receiver(NoSocket())  # type: ignore[arg-type]
    for hook in hooks * _MESSAGES_A_SECOND:
        receiver.take(hook.steps_message(_STEPS_A_MESSAGE, time.monotonic_ns()))
    return [batch._replace(time_s=time_s) for batch in step_batches(receiver.drain())]


def used_bytes(path: Path) -> int:
    """Return the size of what is in the file, its free pages left out."""
    with closing(sqlite3.connect(path)) as connection:
        pages, free, size = (
            connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
        )
    return int((pages - free) * size)


def full_rows(path: Path) -> int:
    """Return how many rows of full resolution are left."""
    with closing(sqlite3.connect(path)) as connection:
        query = "SELECT (SELECT count(*) FROM tick) + (SELECT count(*) FROM steps)"
        return int(connection.execute(query).fetchone()[0])
