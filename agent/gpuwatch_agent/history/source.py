"""A history file as a source of reports, with or without an agent that writes it. Implements `gpuwatch.reports.source.Source`."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from gpuwatch.alerting.thresholds import Prices
from gpuwatch.costs import cost_of
from gpuwatch.errors import ConfigError
from gpuwatch_agent.history.file import check_readable
from gpuwatch_agent.history.reader import HistoryReader
from gpuwatch_agent.runs.records import Counts, RunRecord
from gpuwatch_agent.runs.views import loader_view

Json = dict[str, Any]


class HistorySource:
    """Reads one file. Raises: ConfigError for a file that is no history."""

    def __init__(self, path: Path) -> None:
        check_readable(path)
        self.where = f"the history {path}"
        self._reader = HistoryReader(path)

    def runs(self) -> list[Json]:
        try:
            return [record_view(record) for record in self._reader.runs()]
        except sqlite3.Error as error:
            raise ConfigError(f"{self.where} cannot be read: {error}") from error

    def series(self, metric: str, labels: Mapping[str, str], start_s: float, end_s: float, points: int) -> list[Json]:
        found = self._reader.series(metric, labels, start_s, end_s, points)
        return [{"labels": names, "points": values} for names, values in found]

    def steps(self, run: str, rank: int, last: int) -> Json | None:
        first, columns = self._reader.steps(run, rank, last)
        return {"run": run, "rank": rank, "first_step": first, **columns} if columns["time_s"] else None

    def condensed_steps(self, run: str, rank: int, points: int) -> Json | None:
        found = self._reader.downsampled_steps(run, rank, points)
        return {"run": run, "rank": rank, **found} if found["steps"] else None

    def findings(self, run: str) -> list[Json]:
        return self._reader.findings(run)


def record_view(record: RunRecord, prices: Prices | None = None) -> Json:
    """Return what /api/v1/runs would say of a run that is kept, as far as its record tells it; without `prices` no cost."""
    states_s, gpus = {state: ns / 1e9 for state, ns in record.states_ns.items() if ns}, list(record.gpus.values())
    cost = None if prices is None else cost_of(states_s, prices.hourly(gpus), prices.currency)
    hello = record.hello
    counts: Counts = record.before
    for speaker in record.speakers:
        counts = counts.plus(speaker.sent)
    return {
        "run": record.run,
        "rank": record.rank,
        "name": hello.name if hello is not None else record.run,
        "job": hello.job if hello is not None else "",
        "host": hello.host if hello is not None else "",
        "pid": hello.pid if hello is not None else None,
        "user": record.user,
        "status": record.status,
        "world_size": hello.world_size if hello is not None else 1,
        "timeline": hello.timeline if hello is not None else "host",
        "device": hello.device if hello is not None else "",
        "started_s": record.started_s,
        "watermark_s": record.started_s + sum(record.states_ns.values()) / 1e9,
        "last_message_s": record.last_message_s,
        "steps": counts.steps,
        "samples": counts.samples if counts.samples >= 0 else None,
        "records_lost": record.lost,
        "states": states_s,
        "cost": None if cost is None else msgspec.to_builtins(cost),
        "loader": loader_view(hello),
        "versions": dict(hello.versions) if hello is not None else {},
        "gpus": gpus,
        "tags": dict(hello.tags) if hello is not None else {},
    }
