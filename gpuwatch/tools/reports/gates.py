"""`--fail-on input_wait=0.1`: what a run may not exceed, for CI."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

from gpuwatch.errors import ConfigError
from gpuwatch.formatting import duration, percent
from gpuwatch.ledger.states import RUN_STATES
from gpuwatch.tools.reports.comparing import Comparison
from gpuwatch.tools.reports.model import RunReport

STEP = "step_s"
SLOWER = "slower"


@dataclass(frozen=True)
class Gate:
    """A limit: a state's share of the run's time (0–1), `step_s`, the mean step time in seconds, or, of two runs, `slower`: by which
    share the second one may be slower than the first."""

    name: str
    most: float


@dataclass(frozen=True)
class Broken:
    """A gate that the run does not pass."""

    gate: Gate
    value: float | None
    """None: not measured, which passes no gate."""

    def __str__(self) -> str:
        name, most = self.gate.name, self.gate.most
        if self.value is None:
            return f"{name} was not measured (limit {_text(name, most)})"
        over = self.value - most
        if name == SLOWER:
            return f"it is {percent(self.value)} slower, which is over the limit of {percent(most)}"
        by = duration(over) if name == STEP else f"{over * 100:.1f} points"
        return f"{name} is {_text(name, self.value)}, {by} over the limit of {_text(name, most)}"


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


def broken(report: RunReport, gates: list[Gate]) -> list[Broken]:
    """Return the gates that the run does not pass."""
    found = []
    for gate in gates:
        if gate.name == STEP:
            value = report.step_time.mean_s if report.step_time else None
        else:
            value = report.shares.get(gate.name, 0.0) if report.states else None
        if value is None or value > gate.most:
            found.append(Broken(gate, value))
    return found


def broken_of_two(comparison: Comparison, gates: list[Gate]) -> list[Broken]:
    """Return the gates that the second run does not pass. It is slower by no more than what the interval proves."""
    found = broken(comparison.b, [gate for gate in gates if gate.name != SLOWER])
    for gate in (gate for gate in gates if gate.name == SLOWER):
        speedup, sure = comparison.speedup, comparison.speedup_interval
        at_best = sure[1] if sure is not None else speedup
        slower = None if at_best is None or speedup is None or at_best <= 0 else 1 / at_best - 1
        if slower is None or slower > gate.most:
            found.append(Broken(gate, slower))
    return found


def _text(name: str, value: float) -> str:
    return duration(value) if name == STEP else percent(value)
