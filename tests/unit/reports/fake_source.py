"""A source with the data that a test gives it: one run of 100 steps, 60 ms of wait and 40 ms of compute each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from gpuwatch.api import Finding, LastSteps, Run, Series, Spread, Steps

START_S = 1_790_000_000.0

FINDING: dict[str, Any] = {
    "cause": "input_cpu",
    "severity": "critical",
    "title": "too few loader workers",
    "ratio": 0.6,
    "evidence": [{"what": "input wait", "value": 0.6, "unit": "ratio", "text": "training waited 60% of the time"}],
    "advice": "num_workers 4 → 10",
    "predicted_speedup": 2.5,
    "gpu": None,
    "since_s": START_S + 1,
    "seen_s": START_S + 9,
    "rank": 0,
}


def run(**changes: Any) -> Run:
    """Return one entry of /api/v1/runs."""
    plain = {
        "run": "host-1-2",
        "rank": 0,
        "name": "resnet",
        "job": "",
        "host": "node-17",
        "pid": 4711,
        "user": "alice",
        "status": "ended",
        "world_size": 1,
        "timeline": "host",
        "device": "cpu",
        "started_s": START_S,
        "watermark_s": START_S + 10.0,
        "last_message_s": START_S + 10.1,
        "steps": 100,
        "samples": 3200,
        "records_lost": 0,
        "states": {"input_wait": 6.0, "compute": 4.0},
        "loader": {"num_workers": 4, "prefetch_factor": 2, "batch_bytes": None},
        "versions": {"torch": "2.9"},
        "tags": {"team": "vision"},
    }
    return msgspec.convert({**plain, **changes}, Run)


def steps(count: int, wait_s: float, compute_s: float, **columns: list[Any]) -> LastSteps:
    """Return /api/v1/runs/{run}/steps of equal steps."""
    step_s = wait_s + compute_s
    plain: dict[str, Any] = {
        "time_s": [START_S + index * step_s for index in range(count)],
        "data_wait_s": [wait_s] * count,
        "transfer_s": [0.0] * count,
        "compute_s": [compute_s] * count,
        "input_wait_s": [None] * count,
        "host_wait_s": [None] * count,
        "device_transfer_s": [None] * count,
        "device_compute_s": [None] * count,
        "samples": [32] * count,
        "epoch_start": [int(index == 0) for index in range(count)],
    }
    return LastSteps(**{**plain, **columns})


def downsampled(buckets: int, size: int, old: int = 0, **device: float) -> Steps:
    """Return /api/v1/runs/{run}/steps?points=: buckets of equal steps of 60 + 40 ms, the first of them long ago."""
    marks = {"p5": 0.09, "p50": 0.1, "p95": 0.2}
    means = {"data_wait_s": 0.06, "transfer_s": 0.0, "compute_s": 0.04, **device}
    return Steps(
        steps=buckets * size,
        time_s=[START_S + 0.1 * size * index for index in range(buckets)],
        bucket_s={name: [None] * old + [value] * (buckets - old) for name, value in marks.items()},
        columns={name: Spread([value] * buckets, [], []) for name, value in means.items()},
    )


def each(taken: LastSteps) -> Steps:
    """Return the same for few steps: a bucket for each."""
    names = ("data_wait_s", "transfer_s", "compute_s", "input_wait_s", "host_wait_s", "device_transfer_s", "device_compute_s")  # fmt: skip
    totals = [
        sum(part or 0.0 for part in parts)
        for parts in zip(taken.data_wait_s, taken.transfer_s, taken.compute_s, strict=True)
    ]
    columns = {name: Spread(getattr(taken, name), [], []) for name in names}
    return Steps(
        steps=len(totals), time_s=taken.time_s, bucket_s=dict.fromkeys(("p5", "p50", "p95"), totals), columns=columns
    )


class FakeSource:
    """Implements `gpuwatch.api.client.RunSource`."""

    where = "the test"

    def __init__(
        self,
        runs: list[Run] | None = None,
        taken: LastSteps | None = None,
        findings: list[dict[str, Any]] | None = None,
        series: Mapping[str, list[dict[str, Any]]] | None = None,
        downsampled: Steps | None = None,
    ) -> None:
        self._downsampled = downsampled
        self._runs = [run()] if runs is None else runs
        self._taken = steps(100, 0.060, 0.040) if taken is None else taken
        self._findings = msgspec.convert(findings or [], list[Finding])
        self._series = msgspec.convert(series or {}, dict[str, list[Series]])

    def runs(self, kept: bool = False) -> list[Run]:
        return self._runs

    def series(self, metric: str, labels: Mapping[str, str], start_s: float, end_s: float, points: int) -> list[Series]:
        return [one for one in self._series.get(metric, []) if labels.items() <= one.labels.items()]

    def last_steps(self, run: str, rank: int, last: int) -> LastSteps | None:
        return self._taken if self._taken.time_s else None

    def steps(self, run: str, rank: int, points: int) -> Steps | None:
        if self._downsampled is not None or not self._taken.time_s:
            return self._downsampled
        return each(self._taken)

    def findings(self, run: str) -> list[Finding]:
        return self._findings
