"""Two runs side by side: what changed and how sure that is, what was predicted, and the limits of `--fail-on`."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

import msgspec

from gpuwatch.diagnosis.rates import money
from gpuwatch.errors import ConfigError
from gpuwatch.formatting import duration, percent
from gpuwatch.ledger.states import RUN_STATES
from gpuwatch.tools.reports.display import STATES
from gpuwatch.tools.reports.model import RunReport, setting
from gpuwatch.tools.reports.statistics import speedup

SCHEMA = "gpuwatch-compare/1"
VISIBLE = 0.0005
"""Shares below it are 0.0% in a table and nothing in a bar."""
STEP, SLOWER = "step_s", "slower"
_STEP_ROWS = {
    "step, mean": "mean_s",
    "step, median": "median_s",
    "step, 95th percentile": "p95_s",
    "waiting for data, a step": "data_wait_s",
    "transfer, a step": "transfer_s",
    "compute, a step": "compute_s",
}


class Prediction(msgspec.Struct, frozen=True):
    """What the first run's advice was predicted to gain, and what the second run achieved."""

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

    @property
    def outcome(self) -> list[str]:
        """Return sentences: faster or slower and how sure that is, and what had been predicted."""
        return [self._speed(), *self._promise()]

    def _speed(self) -> str:
        a, b, ratio = self.a.name, self.b.name, self.speedup
        if ratio is None:
            old = [run.name for run in (self.a, self.b) if run.steps and run.step_time is None]
            if old:
                return f"the speeds are not compared: single steps of {' and '.join(old)} are no longer kept"
            return "one of the runs has no steps to compare"
        what = "a sample" if self.per_sample else "a step"
        times = f"{ratio:.2f}× as fast as one of {a}"
        if self.speedup_interval is None:
            return f"{what} of {b} is {times}; too few steps to say how sure that is"
        low, high = self.speedup_interval
        sure = f"95%: {low:.2f}× to {high:.2f}×"
        if low <= 1 <= high:
            return f"no difference in speed is proven: {what} of {b} is {times} ({sure})"
        return f"{b} is {'faster' if ratio > 1 else 'slower'}: {what} is {times} ({sure})"

    def _promise(self) -> list[str]:
        promise = self.prediction
        if promise is None or promise.achieved is None or promise.fulfilled is None:
            return []
        predicted, most = f"up to {promise.predicted:.2f}×", "of it"
        if promise.predicted_range is not None:
            low, high = promise.predicted_range
            predicted, most = f"{high:.2f}×", "of the most that was predicted"
            if high - low >= 0.05:
                predicted = f"{low:.2f}× to {predicted}"
        return [
            f"predicted for {promise.cause}: {predicted} the throughput; achieved {promise.achieved:.2f}×, "
            f"{promise.fulfilled:.0%} {most}, and the cause is {'gone' if promise.gone else 'still there'}"
        ]

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """Return (what, in a, in b, change)."""
        a, b = self.a, self.b
        rows: list[tuple[str, ...]] = [
            ("time", duration(a.until_s - a.started_s), duration(b.until_s - b.started_s), "")
        ]
        rows.append(("steps", f"{a.steps:,}", f"{b.steps:,}", ""))
        if any(run.step_time and run.step_time.of_last for run in (a, b)):
            rows.append(("of which the times are", _which(a), _which(b), ""))
        for what, name in _STEP_ROWS.items():
            before, after = (getattr(run.step_time, name) if run.step_time else None for run in (a, b))
            texts = ["" if value is None else duration(value) for value in (before, after)]
            if set(texts) != {duration(0)}:
                change = "" if not before or after is None else f"{round(after / before - 1, 2) + 0.0:+.0%}"  # no "-0%"
                rows.append((what, *texts, change))
        largest = {state: max(a.shares.get(state, 0.0), b.shares.get(state, 0.0)) for state in self.share_change}
        for state in sorted((s for s in largest if largest[s] >= VISIBLE), key=lambda s: -largest[s]):
            shares = (percent(run.shares.get(state, 0.0)) for run in (a, b))
            change = f"{round(self.share_change[state] * 100, 1) + 0.0:+.1f} points"
            rows.append((STATES[state].name, *shares, change))
        if a.cost is not None and b.cost is not None and a.steps and b.steps:
            before, after = a.cost.total / a.steps * 1000, b.cost.total / b.steps * 1000
            costs = money(before, a.cost.currency), money(after, b.cost.currency)
            rows.append(("cost of 1,000 steps", *costs, f"{after / before - 1:+.0%}"))
        return rows

    @property
    def setting_rows(self) -> list[tuple[str, str, str]]:
        """Return the settings that differ: the loader's, tags, versions, GPUs."""
        sides = [
            {
                **(run.loader or {}),
                **{f"tag {name}": value for name, value in run.tags.items()},
                **{f"version of {name}": value for name, value in run.versions.items()},
                "device": run.device,
                "GPUs": ", ".join(run.gpus),
            }
            for run in (self.a, self.b)
        ]
        rows = []
        for name in dict.fromkeys((*sides[0], *sides[1])):
            before, after = (side.get(name) for side in sides)
            if before != after:
                first, second = ("-" if value in (None, "") else setting(name, value) for value in (before, after))
                rows.append((name, first, second))
        return rows


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


def _prediction(a: RunReport, b: RunReport, achieved: float | None) -> Prediction | None:
    for promised in a.findings:
        predicted = promised.predicted_speedup
        if predicted is not None and predicted >= 1.05 and promised.severity != "info":
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
    return None


def _samples_a_step(report: RunReport) -> float | None:
    steps = sum(rank.steps for rank in report.ranks)
    return report.samples / steps if report.samples and steps else None


def _which(run: RunReport) -> str:
    """Return which of a run's steps its times are of."""
    return f"the last {run.step_time.of_last:,}" if run.step_time and run.step_time.of_last else "all"


@dataclass(frozen=True)
class Gate:
    """A limit: a state's share of the run's time (0–1), `step_s`, the mean step time in seconds, or, of two runs, `slower`: by which
    share the second one may be slower than the first."""

    name: str
    most: float

    def text(self, value: float) -> str:
        return duration(value) if self.name == STEP else percent(value)


@dataclass(frozen=True)
class Broken:
    """A gate that the run does not pass."""

    gate: Gate
    value: float | None
    """None: not measured, which passes no gate."""

    def __str__(self) -> str:
        name, most = self.gate.name, self.gate.text(self.gate.most)
        if self.value is None:
            return f"{name} was not measured (limit {most})"
        if name == SLOWER:
            return f"it is {percent(self.value)} slower, which is over the limit of {most}"
        over = self.value - self.gate.most
        by = duration(over) if name == STEP else f"{over * 100:.1f} points"
        return f"{name} is {self.gate.text(self.value)}, {by} over the limit of {most}"


def parse_gate(text: str, of_two: bool = False) -> Gate:
    """Return the limit in e.g. "input_wait=0.1"; with `of_two` "slower=0.05" too. Raises: ConfigError."""
    name, sign, number = text.partition("=")
    name = name.strip()
    known = (*RUN_STATES, STEP, *((SLOWER,) if of_two else ()))
    if name not in known:
        near = get_close_matches(name, known, 1, 0.6)
        hint = f"did you mean {near[0]}?" if near else f"give one of {', '.join(known)}"
        raise ConfigError(f"--fail-on {text}: {name!r} is no state; {hint}")
    try:
        most = float(number)
    except ValueError:
        most = -1.0
    if not sign or not 0 <= most < (float("inf") if name == STEP else 1.0000001):
        wanted = "seconds, e.g. step_s=0.05" if name == STEP else f"a share from 0 to 1, e.g. {name}=0.1"
        raise ConfigError(f"--fail-on {text}: give {wanted}")
    return Gate(name, most)


def broken(report: RunReport, gates: list[Gate], against: Comparison | None = None) -> list[Broken]:
    """Return the gates that the run does not pass; with `against` as the second of two runs, which `slower` is about."""
    found = []
    for gate in gates:
        if gate.name == SLOWER:
            value = None if against is None else _slower_by(against)
        elif gate.name == STEP:
            value = report.step_time.mean_s if report.step_time else None
        else:
            value = report.shares.get(gate.name, 0.0) if report.states else None
        if value is None or value > gate.most:
            found.append(Broken(gate, value))
    return found


def _slower_by(comparison: Comparison) -> float | None:
    """Return the share by which the second run is slower, and no more of it than the interval proves; None: not known."""
    speedup, interval = comparison.speedup, comparison.speedup_interval
    at_best = interval[1] if interval is not None else speedup
    return None if at_best is None or speedup is None or at_best <= 0 else 1 / at_best - 1
