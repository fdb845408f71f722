"""A history file as a source of reports, with or without an agent that writes it: an `RunSource`."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpuwatch import api
from gpuwatch.errors import ConfigError
from gpuwatch_agent.history.file import check_readable
from gpuwatch_agent.history.reader import HistoryReader
from gpuwatch_agent.runs.views import record_view


class HistorySource:
    """Reads one file. Raises: ConfigError for a file that is no history."""

    def __init__(self, path: Path) -> None:
        check_readable(path)
        self.where = f"the history {path}"
        self._reader = HistoryReader(path)
        self.findings = self._reader.findings

    def runs(self, kept: bool = True) -> Sequence[api.Run]:
        try:
            return [record_view(record) for record in self._reader.runs()]
        except sqlite3.Error as error:
            raise ConfigError(f"{self.where} cannot be read: {error}") from error

    def series(
        self, metric: str, labels: Mapping[str, str], start_s: float, end_s: float, points: int
    ) -> Sequence[api.Series]:
        found = self._reader.series(metric, labels, start_s, end_s, points)
        return [api.Series(names, tuple(values)) for names, values in found]

    def last_steps(self, run: str, rank: int, last: int) -> api.LastSteps | None:
        found = self._reader.steps(run, rank, last)
        return found if found.time_s else None

    def steps(self, run: str, rank: int, points: int) -> api.Steps | None:
        found = self._reader.downsampled_steps(run, rank, points)
        return found if found.steps else None
