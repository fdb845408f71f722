"""What a report says, as plain records: the JSON of `gpuwatch report --json`, described in docs/guides/report.md.

Times in Unix seconds, durations in seconds, ratios 0–1. None: not measured. Fields are only ever added within a schema's number.
"""

from __future__ import annotations

import msgspec

from gpuwatch.diagnosis.cost import Cost
from gpuwatch.diagnosis.finding import Finding, Verdict
from gpuwatch.errors import ConfigError
from gpuwatch.tools.stacks.records import Stacks

SCHEMA = "gpuwatch-report/1"


class Found(Finding, frozen=True, kw_only=True):
    """A cause over the whole run: what it said last, and when it was there."""

    rank: int
    episodes: tuple[tuple[float, float], ...]
    """Begin and end of each time that it was there."""
    stacks: Stacks | None = None
    """Where the processes were when it began; None: no stacks were taken."""

    @property
    def active_s(self) -> float:
        return sum(end - begin for begin, end in self.episodes)


class StepStatistics(msgspec.Struct, frozen=True):
    """Training steps, first batches of passes left out; by the device's timeline where it measured them."""

    measured: int
    """Steps that these figures are of: the last ones, 20,000 at most."""
    mean_s: float
    mean_interval_s: tuple[float, float] | None
    """95% confidence interval of the mean: t over means of blocks of consecutive steps; None with too few steps."""
    median_s: float
    p05_s: float
    p95_s: float
    data_wait_s: float
    transfer_s: float
    compute_s: float
    """Means of the three parts."""
    block_means_s: tuple[float, ...]
    """What the interval is made of: means of consecutive blocks of equal size, oldest first."""
    of_last: int | None = None
    """How many of the run's last steps were taken; None: all whose records came."""


class LedgerOverTime(msgspec.Struct, frozen=True):
    """Where the time went, interval by interval, all ranks together. Columns of equal length, oldest first."""

    end_s: tuple[float, ...]
    states: dict[str, tuple[float, ...]]
    """Seconds by state in each interval."""


class StepsOverTime(msgspec.Struct, frozen=True):
    """Step time in groups of consecutive steps of one rank."""

    time_s: tuple[float, ...]
    p05_s: tuple[float, ...]
    median_s: tuple[float, ...]
    p95_s: tuple[float, ...]
    data_wait_s: tuple[float, ...]
    """Mean wait for data in each group."""
    steps: int = 0
    """Steps in all groups together."""
    means: int = 0
    """The first so many groups are of old steps, of which single ones are no longer kept: their three times of a step are one and the same mean."""


class Rank(msgspec.Struct, frozen=True):
    """One training process of the run."""

    rank: int
    host: str
    pid: int | None
    status: str
    steps: int
    states: dict[str, float]


class RunReport(msgspec.Struct, frozen=True):
    """One run, from its start to its last sign."""

    schema: str
    gpuwatch: str
    generated_s: float
    run: str
    name: str
    status: str
    """running, ended (it said good-bye) or lost."""
    user: str
    job: str
    host: str
    device: str
    timeline: str
    world_size: int
    started_s: float
    until_s: float
    """Up to when the account is final."""
    duration_s: float
    """Time of all ranks together: the sum of `states`."""
    states: dict[str, float]
    shares: dict[str, float]
    steps: int
    samples: int | None
    records_lost: int
    verdict: Verdict
    step_time: StepStatistics | None
    findings: tuple[Found, ...]
    """Roots first, by what they cost; a consequence follows its root."""
    ranks: tuple[Rank, ...]
    loader: dict[str, int | bool | None] | None
    versions: dict[str, str]
    tags: dict[str, str]
    gpus: tuple[str, ...]
    """Models of the GPUs that the run held, as far as the agent saw them."""
    over_time: LedgerOverTime
    steps_over_time: StepsOverTime
    cost: Cost | None = None


def as_json(report: RunReport) -> str:
    """Return the report as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(report), indent=1).decode()


def from_json(text: bytes, where: str) -> RunReport:
    """Return a report that was written before. Raises: ConfigError for anything else."""
    try:
        report = msgspec.json.decode(text, type=RunReport)
    except (msgspec.MsgspecError, ValueError) as error:
        raise ConfigError(f"{where} is not a report: {error}; make one with gpuwatch report RUN --json") from error
    if report.schema != SCHEMA:
        raise ConfigError(f"{where} is a report of schema {report.schema!r}, this gpuwatch reads {SCHEMA!r}")
    return report
