"""Where a report's facts come from. `AgentSource` asks a live agent; the agent's package reads a history file likewise."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any, Protocol

from gpuwatch.errors import ConfigError, GpuwatchError

Json = dict[str, Any]


class Source(Protocol):
    """Answers as the agent's API does (docs/api.md)."""

    where: str
    """For messages: what is asked."""

    def runs(self) -> list[Json]:
        """Return /api/v1/runs."""

    def series(self, metric: str, labels: Mapping[str, str], start_s: float, end_s: float, points: int) -> list[Json]:
        """Return the `series` of /api/v1/series."""

    def steps(self, run: str, rank: int, last: int) -> Json | None:
        """Return /api/v1/runs/{run}/steps; None where none are kept."""

    def condensed_steps(self, run: str, rank: int, points: int) -> Json | None:
        """Return the same with `points`: all steps in so many buckets at most; None where none are kept."""

    def findings(self, run: str) -> list[Json]:
        """Return /api/v1/runs/{run}/findings: every finding that the run has had."""


class AgentSource:
    """Asks a live agent."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self.where = f"the agent at {self._url}"

    def runs(self) -> list[Json]:
        """Return those that the agent's history keeps as well: of a run that ended before the agent was started anew."""
        found: list[Json] = self._get("/api/v1/runs?kept=all")["runs"]
        return found

    def host(self) -> str:
        """Return the name of the agent's node."""
        return str(self._get("/api/v1/status")["host"])

    def series(self, metric: str, labels: Mapping[str, str], start_s: float, end_s: float, points: int) -> list[Json]:
        query = {"metric": metric, "start": repr(start_s), "end": repr(end_s), "points": str(points), **labels}
        found: list[Json] = self._get(f"/api/v1/series?{urllib.parse.urlencode(query)}")["series"]
        return found

    def steps(self, run: str, rank: int, last: int) -> Json | None:
        found: Json | None = self._get(f"/api/v1/runs/{_quoted(run)}/steps?rank={rank}&last={last}", or_none=True)
        return found

    def condensed_steps(self, run: str, rank: int, points: int) -> Json | None:
        found: Json | None = self._get(f"/api/v1/runs/{_quoted(run)}/steps?rank={rank}&points={points}", or_none=True)
        return found

    def findings(self, run: str) -> list[Json]:
        answer = self._get(f"/api/v1/runs/{_quoted(run)}/findings", or_none=True)
        found: list[Json] = answer["findings"] if answer else []
        return found

    def _get(self, path: str, or_none: bool = False) -> Any:
        try:
            with urllib.request.urlopen(self._url + path, timeout=20.0) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                if or_none and error.code == 404:
                    return None
                raise GpuwatchError(f"{self.where} answered {error.code} for {path}: {_said(error)}") from error
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise ConfigError(
                f"no agent answers at {self._url} ({reason}); give --agent URL, or read its file with --history FILE"
            ) from error


def _quoted(run: str) -> str:
    return urllib.parse.quote(run, safe="")


def _said(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"])
    except (OSError, ValueError, KeyError, TypeError):
        return str(error.reason)
