"""Two runs side by side: what changed, how sure that is, and whether the first one's prediction came true."""

from __future__ import annotations

import msgspec

from gpuwatch.ledger.states import RUN_STATES
from gpuwatch.tools.reports.model import Found, RunReport
from gpuwatch.tools.reports.statistics import speedup

SCHEMA = "gpuwatch-compare/1"


class Prediction(msgspec.Struct, frozen=True):
    """What the first run's advice promised, beside what came of it."""

    cause: str
    advice: str
    predicted: float
    """Times the throughput."""
    predicted_range: tuple[float, float] | None
    achieved: float | None
    """None: one of the runs has no steps."""
    fulfilled: float | None
    """Achieved over predicted throughput: 1.0 is as predicted."""
    gone: bool
    """Whether the second run no longer has the cause."""


class Comparison(msgspec.Struct, frozen=True):
    """`b` against `a`."""

    schema: str
    a: RunReport
    b: RunReport
    share_change: dict[str, float]
    """Share of each state in `b` minus that in `a`."""
    speedup: float | None
    """Step time of `a` over that of `b`: above 1, `b` is faster. Samples a step are taken into account where both know them."""
    speedup_interval: tuple[float, float] | None
    """95%: Welch's t on the logarithms of the means of blocks of consecutive steps; None with too few steps."""
    per_sample: bool
    """Whether batches differ, so that it is the time of a sample that is compared."""
    prediction: Prediction | None
    """None where the first run had no prediction."""


def compare(a: RunReport, b: RunReport) -> Comparison:
    """Return what changed from `a` to `b`."""
    samples_a, samples_b = _samples_a_step(a), _samples_a_step(b)
    per_sample = samples_a is not None and samples_b is not None and abs(samples_a / samples_b - 1) > 0.02
    ratio, interval = None, None
    if a.step_time is not None and b.step_time is not None:
        found = speedup(a.step_time.block_means_s, b.step_time.block_means_s)
        ratio, interval = found or (a.step_time.mean_s / b.step_time.mean_s, None)
        if per_sample and samples_a and samples_b:
            factor = samples_b / samples_a
            ratio *= factor
            interval = None if interval is None else (interval[0] * factor, interval[1] * factor)
    return Comparison(
        schema=SCHEMA,
        a=a,
        b=b,
        share_change={
            state: b.shares.get(state, 0.0) - a.shares.get(state, 0.0)
            for state in RUN_STATES
            if state in a.shares or state in b.shares
        },
        speedup=ratio,
        speedup_interval=interval,
        per_sample=per_sample,
        prediction=_prediction(a, b, ratio),
    )


def as_json(comparison: Comparison) -> str:
    """Return the comparison as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(comparison), indent=1).decode()


def _prediction(a: RunReport, b: RunReport, achieved: float | None) -> Prediction | None:
    promised = next((each for each in a.findings if _promise(each) is not None), None)
    if promised is None:
        return None
    predicted = _promise(promised)
    assert predicted is not None
    still = {each.cause for each in b.findings if each.active_s > 0.5 * promised.active_s}
    return Prediction(
        cause=promised.cause,
        advice=promised.advice,
        predicted=predicted,
        predicted_range=promised.predicted_range,
        achieved=achieved,
        fulfilled=None if achieved is None else achieved / predicted,
        gone=promised.cause not in still,
    )


def _promise(found: Found) -> float | None:
    gain = found.predicted_speedup
    return gain if gain is not None and gain >= 1.05 and found.severity != "info" else None


def _samples_a_step(report: RunReport) -> float | None:
    steps = sum(rank.steps for rank in report.ranks)
    return report.samples / steps if report.samples and steps else None
