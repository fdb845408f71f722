"""What an agent answers at /api/v1/…, declared once, and the one client that reads it. Paths and queries: docs/reference/api.md.

The agent encodes these structs as JSON; reports, pages, `top`, `tune` and `doctor` decode them. Times are Unix seconds,
durations seconds, ratios 0–1; None: not measured, or not known to who answers. Fields are only ever added, with a default,
so that a reader and an agent may be a version apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol
from urllib.parse import quote, urlencode

import msgspec

from gpuwatch.diagnosis import finding
from gpuwatch.diagnosis.cost import Cost
from gpuwatch.diagnosis.finding import Verdict
from gpuwatch.errors import SourceError
from gpuwatch.http import LONG_TIMEOUT_S, Answer, Get, JsonServer, Params
from gpuwatch.tools.stacks.records import Stacks
from gpuwatch.wire import LoaderSettings

RunStatus = Literal["running", "ended", "lost", "gone"]
"""`ended`: it sent its last message. `lost`: its process or its messages are gone. `gone`: either, as Prometheus sees it."""
Points = tuple[tuple[float, float | None], ...]
"""(Unix time, value), oldest first. A None is a gap: a line is interrupted there."""


class Finding(finding.Finding, frozen=True):
    """A finding over time. `rank`: in a list of several ranks' findings the one that has it."""

    since_s: float | None = None
    """When it was first seen."""
    seen_s: float | None = None
    """When it was last seen; None in a list of active ones."""
    stacks: Stacks | None = None
    """Where the code was when it began; None: no stacks were taken."""
    run: str | None = None
    """None: it is about a GPU that no run explains, or stands in its run's own list."""
    name: str | None = None
    """The run's display name."""


class Recent(msgspec.Struct, frozen=True):
    """The last minute of a run."""

    duration_s: float = 0.0
    states: Mapping[str, float] = {}
    """Seconds by state."""
    step_s_p50: float | None = None
    step_s_p95: float | None = None
    data_wait_s_p50: float | None = None
    steps_per_s: float | None = None
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    """None: the training declares no tokens."""
    flops_per_s: float | None = None
    """Achieved; None: the training declares no operations for a step, sample or token."""
    mfu_ratio: float | None = None
    """Model FLOPs utilisation; None: operations or the device's peak are not declared."""


class Owner(msgspec.Struct, frozen=True):
    """Where a run's process belongs. None: not there, or not to be seen."""

    job: str | None = None
    step: str | None = None
    container_id: str | None = None
    pod_uid: str | None = None
    namespace: str | None = None
    pod: str | None = None
    container: str | None = None


class Run(msgspec.Struct, frozen=True):
    """One training process: a rank of a run."""

    run: str
    """Id, shared by all ranks."""
    rank: int
    name: str
    status: RunStatus
    started_s: float
    watermark_s: float
    """Up to when `states` are final."""
    last_message_s: float
    job: str = ""
    host: str = ""
    pid: int | None = None
    """As the process itself numbers it."""
    host_pid: int | None = None
    """As the agent's /proc numbers it; None: gone, or not to be seen."""
    user: str = ""
    owner: Owner | None = None
    world_size: int = 1
    timeline: str = ""
    """The clock of `states`: host or device."""
    device: str = ""
    steps: int = 0
    samples: int | None = None
    tokens: int | None = None
    records_lost: int = 0
    """Step records that did not arrive; their time is in `states` all the same."""
    activity: str | None = None
    """What it does now: step, a phase, silent …; None once it is over."""
    states: Mapping[str, float] = {}
    """Seconds by state over the whole run."""
    gpus: tuple[str, ...] = ()
    """Models of the GPUs that the rank holds, or held last."""
    cost: Cost | None = None
    """Of these GPUs; None without a price or a GPU."""
    recent: Recent | None = None
    """None without a step in the last minute."""
    verdict: Verdict | None = None
    """Of the last minute; None until the first steps."""
    findings: tuple[Finding, ...] = ()
    """The active ones: each root, then its consequences."""
    loader: LoaderSettings | None = None
    versions: Mapping[str, str] = {}
    tags: Mapping[str, str] = {}

    @property
    def instance(self) -> str | None:
        """Return Prometheus's name of the node's agent; None where an agent answers, which knows one node only."""
        return None


class Gpu(msgspec.Struct, frozen=True):
    """A GPU now."""

    gpu: str
    """Index."""
    uuid: str
    name: str = ""
    state: str | None = None
    utilization_ratio: float | None = None
    memory_used_bytes: float | None = None
    memory_total_bytes: float | None = None
    power_watts: float | None = None
    run: str | None = None
    """The run that holds it, "shared" for several."""
    owner: str | None = None
    """Who holds it, for people."""


class Collector(msgspec.Struct, frozen=True):
    name: str
    success: bool | None = None
    """None: there is nothing to measure on this node."""
    message: str | None = None
    """Why it fails, or has nothing to measure."""
    duration_s: float | None = None


class HistoryFile(msgspec.Struct, frozen=True):
    path: str | None = None
    bytes: int | None = None
    failures: int = 0
    """Commits that failed."""


class Status(msgspec.Struct, frozen=True):
    """/api/v1/status: the agent itself."""

    host: str
    collectors: tuple[Collector, ...]
    version: str = "?"
    time_s: float | None = None
    """The agent's clock."""
    started_s: float | None = None
    history: HistoryFile = HistoryFile()
    gpus: tuple[Gpu, ...] | None = None
    listen: tuple[str, ...] = ()
    """Endpoints that training processes send to."""


class Series(msgspec.Struct, frozen=True):
    """A metric's values under one set of labels."""

    labels: Mapping[str, str]
    points: Points

    @property
    def last(self) -> float | None:
        """Return the last value that is known."""
        return next((value for _, value in reversed(self.points) if value is not None), None)

    @property
    def mean(self) -> float | None:
        values = [value for _, value in self.points if value is not None]
        return sum(values) / len(values) if values else None


class SeriesOf(msgspec.Struct, frozen=True):
    """/api/v1/series: one metric."""

    series: Sequence[Series]
    metric: str = ""
    kind: str = ""
    unit: str = ""


class LastSteps(msgspec.Struct, frozen=True):
    """/api/v1/runs/{run}/steps: single steps as columns of equal length, oldest first."""

    time_s: Sequence[float]
    """When each step began."""
    data_wait_s: Sequence[float | None]
    transfer_s: Sequence[float | None]
    compute_s: Sequence[float | None]
    """These three by the host's clock, the next four by the device's, None where that was not measured."""
    input_wait_s: Sequence[float | None]
    host_wait_s: Sequence[float | None]
    device_transfer_s: Sequence[float | None]
    device_compute_s: Sequence[float | None]
    samples: Sequence[int | None]
    epoch_start: Sequence[int]
    """1 for the first step of a pass over the data."""
    run: str = ""
    rank: int = 0
    first_step: int = 0


class Spread(msgspec.Struct, frozen=True):
    """One column of bucketed steps: mean, least and greatest of each bucket in seconds; None: not measured there."""

    mean: Sequence[float | None]
    min: Sequence[float | None]
    max: Sequence[float | None]


class Epoch(msgspec.Struct, frozen=True):
    step: int
    time_s: float


class Steps(msgspec.Struct, frozen=True):
    """The same with `points`: all steps in buckets of `bucket_steps`, as columns of equal length, oldest first."""

    run: str = ""
    rank: int = 0
    steps: int = 0
    bucket_steps: int = 1
    epochs: Sequence[Epoch] = ()
    step_s: Mapping[str, float] | None = None
    """p5, p50, p95, p99 of the host's step time; None without steps."""
    step: Sequence[int] = ()
    """Number of a bucket's first step."""
    time_s: Sequence[float] = ()
    """When that step began."""
    end_s: Sequence[float] = ()
    """When the bucket's last step ended."""
    count: Sequence[int] = ()
    samples: Sequence[int | None] = ()
    bucket_s: Mapping[str, Sequence[float | None]] = {}
    """p5, p50, p95 of the host's step time in each bucket; None of old steps, of which sums are kept."""
    columns: Mapping[str, Spread | None] = {}
    """By name, as in LastSteps; None: never measured."""

    def column(self, name: str) -> Spread | None:
        return self.columns.get(name)


class Runs(msgspec.Struct, frozen=True):
    """/api/v1/runs."""

    runs: Sequence[Run]


class Findings(msgspec.Struct, frozen=True):
    """/api/v1/findings, and /api/v1/runs/{run}/findings with `run`."""

    findings: Sequence[Finding]
    run: str | None = None


class Answers(msgspec.Struct, frozen=True):
    """/api/v1/series/many."""

    answers: Sequence[SeriesOf]


class GpuSeconds(msgspec.Struct, frozen=True):
    gpu: str
    uuid: str = msgspec.field(name="UUID")
    states: Mapping[str, float]
    seconds: float
    """The sum of `states`: shares divide by it."""


class RunSeconds(msgspec.Struct, frozen=True):
    run: str
    rank: str
    states: Mapping[str, float]
    seconds: float


class LedgerOf(msgspec.Struct, frozen=True):
    """/api/v1/ledger: seconds by state of each GPU and run over a stretch of time."""

    start_s: float
    end_s: float
    gpus: Sequence[GpuSeconds]
    runs: Sequence[RunSeconds]


AGENT_REMEDY = "start it with `gpuwatch up` or `gpuwatch agent`"


class Client(JsonServer):
    """A node's agent. Every method raises SourceError when it does not answer, or not as agreed."""

    def __init__(self, url: str, remedy: str = AGENT_REMEDY, get: Get | None = None) -> None:
        super().__init__(url, "the agent", remedy, get)

    def status(self) -> Status:
        return self.ask("/api/v1/status", Status)

    def runs(self, kept: bool = False) -> Sequence[Run]:
        """Return the runs, the most recently active first; `kept`: those too that only the history knows."""
        return self.ask("/api/v1/runs", Runs, {"kept": "all"} if kept else None).runs

    def active_findings(self) -> Sequence[Finding]:
        """Return the active findings of all runs and GPUs."""
        return self.ask("/api/v1/findings", Findings).findings

    def findings(self, run: str) -> Sequence[Finding]:
        """Return every finding that a run's ranks have had, the oldest first."""
        return self.ask(f"/api/v1/runs/{quote(run, safe='')}/findings", Findings).findings

    def series(
        self, metric: str, labels: Mapping[str, str], start_s: float, end_s: float, points: int
    ) -> Sequence[Series]:
        params: Params = {"metric": metric, "start": start_s, "end": end_s, "points": points, **labels}
        return self.ask("/api/v1/series", SeriesOf, params, LONG_TIMEOUT_S).series

    def many_series(self, queries: Sequence[Params]) -> list[Sequence[Series]]:
        """Return the series of each query, by one request: a request costs as much as decoding ten answers."""
        if not queries:
            return []
        params = {"q": [urlencode(query) for query in queries]}
        return [answer.series for answer in self.ask("/api/v1/series/many", Answers, params).answers]

    def last_steps(self, run: str, rank: int, last: int) -> LastSteps | None:
        """Return the last single steps; None where none are kept."""
        return self._steps(run, LastSteps, {"rank": rank, "last": last})

    def steps(
        self, run: str, rank: int, points: int, start_s: float | None = None, end_s: float | None = None
    ) -> Steps | None:
        """Return the steps that began in a stretch of time (None: all) in at most `points` buckets; None where none are kept."""
        times = {name: at for name, at in (("start", start_s), ("end", end_s)) if at is not None}
        return self._steps(run, Steps, {"rank": rank, "points": points, **times})

    def _steps(self, run: str, answer: type[Answer], params: Params) -> Answer | None:
        try:
            return self.ask(f"/api/v1/runs/{quote(run, safe='')}/steps", answer, params, LONG_TIMEOUT_S)
        except SourceError as error:
            if error.status == 404:
                return None
            raise


class RunSource(Protocol):
    """What a report reads from: a Client, or a history file (in the agent's package). Each raises as its kind does."""

    where: str
    """For messages: what is read."""

    def runs(self, kept: bool = False) -> Sequence[Run]: ...

    def findings(self, run: str) -> Sequence[Finding]: ...

    def series(
        self, metric: str, labels: Mapping[str, str], start_s: float, end_s: float, points: int
    ) -> Sequence[Series]: ...

    def last_steps(self, run: str, rank: int, last: int) -> LastSteps | None: ...

    def steps(self, run: str, rank: int, points: int) -> Steps | None: ...
