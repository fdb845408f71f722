"""What both forms of a comparison say in words."""

from __future__ import annotations

from gpuwatch.diagnosis.rates import money
from gpuwatch.formatting import duration, percent
from gpuwatch.tools.reports.comparing import Comparison
from gpuwatch.tools.reports.looks import STATES
from gpuwatch.tools.reports.model import RunReport
from gpuwatch.tools.reports.words import VISIBLE, setting


def outcome_sentences(comparison: Comparison) -> list[str]:
    """Return what came of it: faster or slower and how sure, and what had been predicted."""
    return [_speed(comparison), *_promise(comparison)]


def _speed(comparison: Comparison) -> str:
    a, b, ratio = comparison.a.name, comparison.b.name, comparison.speedup
    if ratio is None:
        old = [run.name for run in (comparison.a, comparison.b) if run.steps and run.step_time is None]
        if old:
            return f"the speeds are not compared: single steps of {' and '.join(old)} are no longer kept"
        return "one of the runs has no steps to compare"
    what = "a sample" if comparison.per_sample else "a step"
    low_high = comparison.speedup_interval
    if low_high is None:
        return f"{what} of {b} is {ratio:.2f}× as fast as one of {a}; too few steps to say how sure that is"
    sure = f"95%: {low_high[0]:.2f}× to {low_high[1]:.2f}×"
    if low_high[0] <= 1 <= low_high[1]:
        return f"no difference in speed is proven: {what} of {b} is {ratio:.2f}× as fast as one of {a} ({sure})"
    word = "faster" if ratio > 1 else "slower"
    return f"{b} is {word}: {what} is {ratio:.2f}× as fast as one of {a} ({sure})"


def _promise(comparison: Comparison) -> list[str]:
    promise = comparison.prediction
    if promise is None or promise.achieved is None or promise.fulfilled is None:
        return []
    low_high = promise.predicted_range
    predicted = f"up to {promise.predicted:.2f}×"
    if low_high is not None:
        predicted = (
            f"{low_high[0]:.2f}× to {low_high[1]:.2f}×" if low_high[1] - low_high[0] >= 0.05 else f"{low_high[1]:.2f}×"
        )
    left = "and the cause is gone" if promise.gone else "and the cause is still there"
    most = "of it" if low_high is None else "of the most that was predicted"
    return [
        f"predicted for {promise.cause}: {predicted} the throughput; achieved {promise.achieved:.2f}×, "
        f"{promise.fulfilled:.0%} {most}, {left}"
    ]  # fmt: skip


def compared_rows(comparison: Comparison) -> list[tuple[str, str, str, str]]:
    """Return (what, in a, in b, change)."""
    a, b = comparison.a, comparison.b
    rows = [("time", duration(a.until_s - a.started_s), duration(b.until_s - b.started_s), "")]
    rows.append(("steps", f"{a.steps:,}", f"{b.steps:,}", ""))
    taken = _taken(a), _taken(b)
    if taken != ("all", "all"):
        rows.append(("of which the times are", *taken, ""))
    for what, name in (("step, mean", "mean_s"), ("step, median", "median_s"), ("step, 95th percentile", "p95_s"),
                       ("waiting for data, a step", "data_wait_s"), ("transfer, a step", "transfer_s"), ("compute, a step", "compute_s")):  # fmt: skip
        texts = _two(a, b, name)
        if set(texts[:2]) != {duration(0)}:
            rows.append((what, *texts))
    for state in sorted(
        comparison.share_change, key=lambda state: -max(a.shares.get(state, 0.0), b.shares.get(state, 0.0))
    ):
        if max(a.shares.get(state, 0.0), b.shares.get(state, 0.0)) < VISIBLE:
            continue
        shares, change = (a.shares.get(state, 0.0), b.shares.get(state, 0.0)), comparison.share_change[state]
        rows.append(
            (STATES[state][0], percent(shares[0]), percent(shares[1]), f"{round(change * 100, 1) + 0.0:+.1f} points")
        )
    if a.cost is not None and b.cost is not None and a.steps and b.steps:
        each = a.cost.total / a.steps * 1000, b.cost.total / b.steps * 1000
        rows.append(("cost of 1,000 steps", money(each[0], a.cost.currency), money(each[1], b.cost.currency), f"{each[1] / each[0] - 1:+.0%}"))  # fmt: skip
    return rows


def _taken(run: RunReport) -> str:
    """Return of which of a run's steps its times are."""
    return f"the last {run.step_time.of_last:,}" if run.step_time and run.step_time.of_last else "all"


def _two(a: RunReport, b: RunReport, name: str) -> tuple[str, str, str]:
    values = [getattr(run.step_time, name) if run.step_time else None for run in (a, b)]
    texts = ["" if value is None else duration(value) for value in values]
    before, after = values
    change = "" if not before or after is None else f"{round(after / before - 1, 2) + 0.0:+.0%}"  # 0.0: no "-0%"
    return texts[0], texts[1], change


def loader_rows(comparison: Comparison) -> list[tuple[str, str, str]]:
    """Return the settings that differ: the loader's, tags, versions, GPUs."""
    rows = []
    for prefix, before, after in (
        ("", comparison.a.loader or {}, comparison.b.loader or {}),
        ("tag ", comparison.a.tags, comparison.b.tags),
        ("version of ", comparison.a.versions, comparison.b.versions),
        ("", {"device": comparison.a.device}, {"device": comparison.b.device}),
        ("", {"GPUs": ", ".join(comparison.a.gpus)}, {"GPUs": ", ".join(comparison.b.gpus)}),
    ):
        for name in dict.fromkeys((*before, *after)):
            values = before.get(name), after.get(name)
            if values[0] != values[1]:
                rows.append(
                    (prefix + name, *("-" if value in (None, "") else setting(name, value) for value in values))
                )
    return [(name, first, second) for name, first, second in rows]
