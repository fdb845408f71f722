"""Two runs side by side: what changed and how sure that is, what was predicted, and the limits of `--fail-on`."""

from contextlib import suppress
from difflib import get_close_matches

import msgspec

from gpuwatch.diagnosis.rates import money
from gpuwatch.errors import ConfigError
from gpuwatch.formatting import duration, percent
from gpuwatch.ledger.states import RUN_STATES
from gpuwatch.tools.reports.display import STATES
from gpuwatch.tools.reports.model import RunReport, when
from gpuwatch.tools.reports.statistics import speedup

SCHEMA = "gpuwatch-compare/1"
VISIBLE = 0.0005  # shares below it are 0.0% in a table and nothing in a bar
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
    predicted: float  # times the throughput
    predicted_range: tuple[float, float] | None
    achieved: float | None  # None: one of the runs has no steps
    fulfilled: float | None  # achieved over predicted throughput: 1.0 is as predicted
    gone: bool


class Comparison(msgspec.Struct, frozen=True):
    """`b` against `a`."""

    schema: str
    a: RunReport
    b: RunReport
    share_change: dict[str, float]  # share of each state in `b` minus that in `a`
    speedup: float | None
    """Step time of `a` over that of `b`: above 1, `b` is faster. Accounts for samples a step where both know them."""
    speedup_interval: tuple[float, float] | None
    """95%: Welch's t on the logarithms of the means of blocks of consecutive steps; None with too few steps."""
    per_sample: bool  # whether batches differ, so that it is the time of a sample that is compared
    prediction: Prediction | None  # none where the first run had no prediction

    @property
    def runs(self) -> tuple[RunReport, RunReport]:
        """Return `a` and `b` as they are shown: two of one name have their starts in it."""
        if self.a.name != self.b.name:
            return self.a, self.b
        a, b = (f"{run.name} ({when(run.started_s, seconds=True)})" for run in (self.a, self.b))
        return msgspec.structs.replace(self.a, name=a), msgspec.structs.replace(self.b, name=b)

    @property
    def outcome(self) -> list[str]:
        """Return sentences: faster or slower and how sure that is, and what had been predicted."""
        promise = self.prediction
        if promise is None or promise.achieved is None:
            return [self._speed()]
        predicted, most = f"up to {promise.predicted:.2f}×", "of that gain"
        if promise.predicted_range is not None:
            low, high = promise.predicted_range
            predicted, most = f"{low:.2f}× to {high:.2f}×", "of the upper gain"
        reached = f"achieved {promise.achieved:.2f}×"
        if self.speedup_interval is not None and self.speedup_interval[0] > 1:
            reached += f", {(promise.achieved - 1) / (promise.predicted - 1):.0%} {most}"
        gone = "gone" if promise.gone else "still there"
        promised = f"predicted for {promise.cause}: {predicted} the throughput"
        return [self._speed(), f"{promised}; {reached}, and the cause is {gone}"]

    def _speed(self) -> str:
        (a, b), ratio = (run.name for run in self.runs), self.speedup
        if ratio is None:
            if old := [run.name for run in self.runs if run.steps and run.step_time is None]:
                return f"speed not compared: single steps of {' and '.join(old)} are no longer stored"
            return "one of the runs has no steps to compare"
        what = "a sample" if self.per_sample else "a step"
        times = f"{ratio:.2f}× as fast as one of {a}"
        if self.speedup_interval is None:
            return f"{what} of {b} is {times}; too few steps for a confidence interval"
        low, high = self.speedup_interval
        sure = f"95%: {low:.2f}× to {high:.2f}×"
        if low <= 1 <= high:
            return f"no significant difference in speed: {what} of {b} is {times} ({sure})"
        return f"{b} is {'faster' if ratio > 1 else 'slower'}: {what} is {times} ({sure})"

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """Return (what, in a, in b, change)."""
        a, b = self.a, self.b
        times = (duration(run.until_s - run.started_s) for run in (a, b))
        rows: list[tuple[str, ...]] = [("time", *times, ""), ("steps", f"{a.steps:,}", f"{b.steps:,}", "")]
        taken = [run.step_time.of_last if run.step_time else None for run in (a, b)]
        if any(taken):
            rows.append(("step times of", *(f"the last {of:,}" if of else "all" for of in taken), ""))
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
            is_comparable = before > 0 and a.cost.currency == b.cost.currency
            rows.append(("cost of 1,000 steps", *costs, f"{after / before - 1:+.0%}" if is_comparable else ""))
        return rows

    @property
    def setting_rows(self) -> list[tuple[str, str, str]]:
        """Return the settings that differ: the loader's, tags, versions, GPUs."""
        sides = [{**run.settings, "device": run.device, "GPUs": ", ".join(run.gpus)} for run in (self.a, self.b)]
        names = dict.fromkeys((*sides[0], *sides[1]))
        rows = [(name, sides[0].get(name) or "-", sides[1].get(name) or "-") for name in names]
        return [row for row in rows if row[1] != row[2]]


Result = RunReport | Comparison


def compare(a: RunReport, b: RunReport) -> Comparison:
    """Return what changed from `a` to `b`."""
    samples_a, samples_b = _samples_a_step(a), _samples_a_step(b)
    factor = samples_b / samples_a if samples_a and samples_b else 1.0
    per_sample = abs(factor - 1) > 0.02
    ratio, interval = None, None
    if a.step_time is not None and b.step_time is not None:
        found = speedup(a.step_time.block_means_s, b.step_time.block_means_s)
        ratio, interval = found or (a.step_time.mean_s / b.step_time.mean_s, None)
        if per_sample:
            ratio *= factor
            interval = None if interval is None else (interval[0] * factor, interval[1] * factor)
    states = (state for state in RUN_STATES if state in a.shares or state in b.shares)
    return Comparison(
        schema=SCHEMA,
        a=a,
        b=b,
        share_change={state: b.shares.get(state, 0.0) - a.shares.get(state, 0.0) for state in states},
        speedup=ratio,
        speedup_interval=interval,
        per_sample=per_sample,
        prediction=_prediction(a, b, ratio),
    )


def _prediction(a: RunReport, b: RunReport, achieved: float | None) -> Prediction | None:
    for promised in a.findings:
        predicted = promised.predicted_speedup
        if predicted is not None and predicted >= 1.05 and promised.severity != "info":
            least = 0.5 * promised.active_s / max(a.until_s - a.started_s, 1e-9)  # of the run's time
            still = {each.cause for each in b.findings if each.active_s > least * (b.until_s - b.started_s)}
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


def parse_gate(text: str, of_two: bool = False) -> tuple[str, float]:
    """Return the name and the limit in e.g. "input_wait=0.1"; with `of_two` "slower=0.05" too. Raises: ConfigError.

    A state's limit is a share of the run's time (0–1), `step_s` a mean step in seconds, `slower` a share of step time.
    """
    name, _, number = text.partition("=")
    name = name.strip()
    known = (*RUN_STATES, STEP, *((SLOWER,) if of_two else ()))
    if name not in known:
        near = get_close_matches(name, known, 1, 0.6)
        hint = f"did you mean {near[0]}?" if near else f"give one of {', '.join(known)}"
        raise ConfigError(f"--fail-on {text}: {name!r} is not a state; {hint}")
    with suppress(ValueError):
        if 0 <= (most := float(number)) <= (float("inf") if name == STEP else 1):
            return name, most
    wanted = "seconds, e.g. step_s=0.05" if name == STEP else f"a share from 0 to 1, e.g. {name}=0.1"
    raise ConfigError(f"--fail-on {text}: give {wanted}")


def broken(report: RunReport, gates: list[tuple[str, float]], against: Comparison | None = None) -> list[str]:
    """Return by how much the run breaks which limits, as text. What was not measured keeps no limit. `against` has the
    run as the second of two, for `slower`."""
    values: dict[str, float | None] = {state: report.shares.get(state, 0.0) for state in RUN_STATES if report.states}
    values[STEP] = report.step_time.mean_s if report.step_time else None
    if against is not None and against.speedup is not None:  # no more of it than the interval proves
        values[SLOWER] = 1 / (against.speedup_interval or (0.0, against.speedup))[1] - 1
    found = []
    for name, most in gates:
        value, text = values.get(name), duration if name == STEP else percent
        if value is None:
            found.append(f"{name} was not measured (limit {text(most)})")
        elif value > most and name == SLOWER:
            found.append(f"it is {percent(value)} slower, which is over the limit of {percent(most)}")
        elif value > most:
            by = duration(value - most) if name == STEP else f"{(value - most) * 100:.1f} points"
            found.append(f"{name} is {text(value)}, {by} over the limit of {text(most)}")
    return found
