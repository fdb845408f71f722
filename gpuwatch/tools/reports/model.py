"""A report as plain records: the JSON of `gpuwatch report --json`, see docs/guides/report.md, and its rows of text.

Times in Unix seconds, durations in seconds, ratios 0–1. None: not measured. Within a schema, fields are only added.
"""

from datetime import datetime, timezone
from typing import Any

import msgspec

from gpuwatch.diagnosis.finding import Finding, Verdict
from gpuwatch.diagnosis.rates import Cost, money
from gpuwatch.errors import ConfigError
from gpuwatch.formatting import duration, percent, size
from gpuwatch.ledger.states import shares
from gpuwatch.tools.reports.display import STATES
from gpuwatch.tools.reports.statistics import StepStatistics
from gpuwatch.tools.stacks.records import Stacks

SCHEMA = "gpuwatch-report/1"


def when(time_s: float, seconds: bool = False) -> str:
    """Return e.g. "2026-11-20 20:57 UTC": a report is read elsewhere than it was made."""
    return datetime.fromtimestamp(time_s, timezone.utc).strftime(f"%Y-%m-%d %H:%M{':%S' * seconds} UTC")


class Found(Finding, frozen=True, kw_only=True):
    """A cause over the whole run: its last finding, and when it was active."""

    rank: int
    episodes: tuple[tuple[float, float], ...]
    stacks: Stacks | None = None  # where the processes were when it began; None: no stacks were taken

    @property
    def active_s(self) -> float:
        return sum(end - begin for begin, end in self.episodes)


class LedgerOverTime(msgspec.Struct, frozen=True):
    """Where the time went, interval by interval, all ranks together. Columns of equal length, oldest first."""

    end_s: tuple[float, ...]
    states: dict[str, tuple[float, ...]]


class StepsOverTime(msgspec.Struct, frozen=True):
    """Step time in groups of consecutive steps of one rank."""

    time_s: tuple[float, ...]
    p05_s: tuple[float, ...]
    median_s: tuple[float, ...]
    p95_s: tuple[float, ...]
    data_wait_s: tuple[float, ...]
    steps: int = 0
    means: int = 0
    """How many of the first groups are of old steps, whose single times are gone: their step times are one mean."""


class Rank(msgspec.Struct, frozen=True):
    """One training process of the run."""

    rank: int
    host: str
    pid: int | None
    status: str
    steps: int
    states: dict[str, float]


class RunReport(msgspec.Struct, frozen=True):
    """One run, from its start to its last message."""

    schema: str
    gpuwatch: str
    generated_s: float
    run: str
    name: str
    status: str
    user: str
    job: str
    host: str
    device: str
    timeline: str
    world_size: int
    started_s: float
    until_s: float  # up to when the account is final
    duration_s: float  # time of all ranks together: the sum of `states`
    states: dict[str, float]
    shares: dict[str, float]
    steps: int
    samples: int | None
    records_lost: int
    verdict: Verdict
    step_time: StepStatistics | None
    findings: tuple[Found, ...]  # roots first, by what they cost; a consequence follows its root
    ranks: tuple[Rank, ...]
    loader: dict[str, int | float | bool | str | None] | None
    versions: dict[str, str]
    tags: dict[str, str]
    gpus: tuple[str, ...]  # models of the GPUs that the run held, as far as the agent saw them
    over_time: LedgerOverTime
    steps_over_time: StepsOverTime
    cost: Cost | None = None
    phases: dict[str, float] = {}  # seconds by name of the declared phases that are a part of the state `other`
    mfu_estimated_ratio: float | None = None  # by the tensor cores' activity, of all ranks; None: not measured
    breakdown: dict[str, float] = {}  # compute in seconds by section, of the steps in which it was measured
    energy_joules: dict[str, float] = {}  # by state of its ranks' GPUs, their share of shared ones; empty: not measured

    @property
    def headline(self) -> str:
        """Return e.g. "resnet50-a · 2h 05m, 8,120 steps of 42 ms"."""
        text = f"{self.name} · {duration(max(0.0, self.until_s - self.started_s))}, {self.steps:,} steps"
        if self.step_time is None:
            return text
        last = "" if self.step_time.of_last is None else f", the last {self.step_time.of_last:,}"
        return f"{text}{last} of {duration(self.step_time.mean_s)}"

    @property
    def measured_steps(self) -> str:
        """Return which steps the step times are of, e.g. "the last 20,000 of 1,200,000 steps"; empty where all are."""
        of_last = None if self.step_time is None else self.step_time.of_last
        return "" if of_last is None else f"the last {of_last:,} of {self.steps:,} steps"

    @property
    def plotted_steps(self) -> str:
        """Return which steps a plot of step times shows as means alone; empty for none."""
        over = self.steps_over_time
        if not over.means:
            return ""
        until = "" if over.means == len(over.time_s) else f"up to {when(over.time_s[over.means])} "
        return f"{until}means only: single steps from then are no longer stored"

    @property
    def state_rows(self) -> list[tuple[str, ...]]:
        """Return (word, time, share) of states, largest first, then of declared phases; with a price also the cost."""
        cost = self.cost
        rows = [
            (STATES[state].name, duration(self.states[state]), percent(share))
            + ((money(cost.states.get(state, 0.0), cost.currency),) if cost else ())
            for state, share in self.shares.items()
        ]
        for name, spent in sorted(self.phases.items(), key=lambda phase: -phase[1]):
            share = percent(spent / self.duration_s) if self.duration_s else ""
            rows.append((f"in other: {name}", duration(spent), share, *(("",) if cost else ())))
        return rows

    @property
    def rank_rows(self) -> list[tuple[str, ...]]:
        """Return (rank, host, status, steps, and its shares of compute, input wait and waits for other ranks)."""
        rows = []
        for rank in self.ranks:
            of = shares(rank.states)
            parts = (percent(of.get(state, 0.0)) for state in ("compute", "input_wait", "comm_wait"))
            rows.append((str(rank.rank), rank.host, rank.status, f"{rank.steps:,}", *parts))
        return rows

    @property
    def settings(self) -> dict[str, str]:
        """Return the loader's settings, versions and tags, by name."""
        loader: dict[str, Any] = {name: of for name, of in (self.loader or {}).items() if of is not None}
        return {
            **{f"loader: {name}": size(of) if name.endswith("_bytes") else str(of) for name, of in loader.items()},
            **{f"version of {name}": value for name, value in self.versions.items()},
            **{f"tag {name}": value for name, value in self.tags.items()},
        }

    @property
    def environment(self) -> list[tuple[str, str]]:
        rows: list[tuple[str, str]] = [
            ("run", self.run),
            ("status", self.status),
            ("host", self.host),
            ("user", self.user),
            ("job", self.job),
            ("started", when(self.started_s)),
            ("device", f"{self.device}, by the {self.timeline}'s clock"),
            ("GPUs", ", ".join(self.gpus)),
            ("ranks", f"{len(self.ranks)} of {self.world_size}" if self.world_size > 1 else ""),
            ("step records lost", str(self.records_lost or "")),
            *self.settings.items(),
        ]
        return [(name, value) for name, value in rows if value]


def from_json(text: bytes, where: str) -> RunReport:
    """Return a report that `as_json` wrote. Raises: ConfigError for anything else."""
    try:
        report = msgspec.json.decode(text, type=RunReport)
    except (msgspec.MsgspecError, ValueError) as error:
        raise ConfigError(f"{where} is not a report: {error}; make one with gpuwatch report RUN --json") from error
    if report.schema != SCHEMA:
        raise ConfigError(f"{where} is a report of schema {report.schema!r}, this gpuwatch reads {SCHEMA!r}")
    return report
