"""What a diagnosis returns: a verdict and findings. And what a rule is, which makes a finding of one cause."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import msgspec

from gpuwatch.diagnosis.thresholds import THRESHOLDS, Thresholds
from gpuwatch.diagnosis.window import RankFacts, Window
from gpuwatch.formatting import duration, harmless, percent, size
from gpuwatch.host.frames import Place

Severity = Literal["info", "warning", "critical"]
SEVERITIES: tuple[Severity, ...] = ("critical", "warning", "info")


class Verdict(msgspec.Struct, frozen=True):
    """The state that decides what to do."""

    state: str  # input, transfer, compute, eval, checkpoint, startup, host, comm, straggler, stalled, other or unknown.
    ratio: float  # That state's share of the window's time, 0–1.
    sentence: str  # For people, e.g. "input-bound: 62% of the time training waited for data".


class Evidence(msgspec.Struct, frozen=True):
    """One measured number that supports a finding."""

    what: str
    value: float
    unit: str  # "ratio" (0–1), "s", "bytes", "cores", "" for a plain number.
    text: str  # The same for people, e.g. "checkpoints take 38% of the time".


class Finding(msgspec.Struct, frozen=True):
    """A cause, proven by evidence, with the one change to make."""

    cause: str
    severity: Severity
    title: str  # The cause in a few words, e.g. "too few loader workers for the CPU time that a batch takes".
    ratio: float  # The share of time (or of a capacity) at stake, 0–1. Findings are ordered by it.
    evidence: tuple[Evidence, ...]
    advice: str  # One concrete change, with its cost.
    predicted_speedup: float | None = None  # Upper bound of the gain in throughput, 1.0 = none; None: not predicted.
    predicted_range: tuple[float, float] | None = None  # Lowest and highest gain; None: only bounded from above.
    gpu: str | None = None  # UUID, if the finding is about a GPU instead of a run.
    rank: int | None = None  # The straggler's rank; None: the finding is about the rank that reports it.
    because: tuple[str, ...] = ()  # Causes that it names as its reason; lists show them as its consequences.
    root: str | None = None  # The cause that this one is a consequence of; None: it is a root itself.

    @property
    def gain(self) -> str:
        """Return the predicted throughput, e.g. "1.20× to 2.40×", "up to 2.60×"; empty where no gain is expected."""
        if self.predicted_range is not None and self.predicted_range[1] >= 1.05:
            low, high = self.predicted_range
            return f"{low:.2f}× to {high:.2f}×" if high - low >= 0.05 else f"{high:.2f}×"
        speedup = self.predicted_speedup or 0.0
        return f"up to {speedup:.2f}×" if speedup >= 1.05 else ""

    def brief(self, rank: int) -> str:
        """Return the advice, or where this rank hangs, with the gain: up to 160 characters, harmless to a terminal."""
        texts = {each.what: each.text for each in reversed(self.evidence)}
        place = texts.get("late") or ("activity" in texts and f"rank {rank}: {texts['activity']}")
        gain = self.gain and f" ({self.gain} the throughput)"
        text, room = harmless(place or self.advice), 160 - len(gain)
        return (text if len(text) <= room else f"{text[: room - 1]}…") + gain


class Conclusion(msgspec.Struct, frozen=True):
    """What a training process has found over its whole run, as it prints it at the end."""

    verdict: Verdict
    findings: tuple[Finding, ...] = ()
    ranks: int = 1  # number of ranks compared


def found(
    title: str, ratio: float, *evidence: Evidence, advice: str = "", severity: Severity = "warning", **more: Any
) -> Finding:
    """Return a finding of the rule that calls this, which gives it its cause and, without advice, its change."""
    return Finding("", severity, title, ratio, evidence, advice, **more)


class RankSummary(msgspec.Struct, frozen=True):
    """What a rank reports about itself to rank 0."""

    facts: RankFacts
    verdict: Verdict  # On this rank alone.
    reasons: Mapping[Literal["input", "host"], Finding]
    """The reasons for its wait for data, and for its own time after it, as far as a rule found them."""


_SHOWN = {"ratio": percent, "s": duration, "bytes": size}


def measured(
    what: str, value: float | None, text: str, unit: Literal["ratio", "s", "bytes"] = "ratio"
) -> list[Evidence]:
    """Return a value as evidence, with `{}` in its text replaced by it; nothing where it was not measured."""
    return [] if value is None else [Evidence(what, value, unit, text.format(_SHOWN[unit](value)))]


def place_evidence(place: Place | None, what: str = "a fetch") -> list[Evidence]:
    """Return the user's own function in which the training thread was most often."""
    return [] if place is None else measured("hottest function", place.ratio, f"{{}} of {what} is in {place}")


def speedup_without(share: float) -> float | None:
    """Return the gain if this share of the time went away; None where that is nearly all of it."""
    return round(1 / (1 - share), 2) if share < 0.99 else None


Find = Callable[[Window, Thresholds], "Finding | None"]
Target = Literal["workers", "training", "all ranks"]


@dataclass(frozen=True)
class Rule:
    """One cause: how it is found, and every fact about it. Called with a window and, if set, a site's own thresholds.

    Returns None when the cause is not there, or when its signal was not measured.
    """

    find: Find  # Pure: a window and thresholds in, a finding of this cause or None out. Its docstring is in the docs.
    change: str  # What to change, in a line: for docs and alerts, and the advice of a finding that has none of its own.
    explains: tuple[str, ...]  # Causes that are its consequences. A fallback among them is not reported with it.
    explained_by: tuple[str, ...]  # Causes that this one is a consequence of, besides those that name it in `explains`.
    stacks: Target | None
    """Whose stacks show more: the rank's loader workers (its training process where it has none), its training process,
    or the training processes of all ranks on the node. None: stacks do not help."""
    alert: str | None  # The alert of alerting/alerts.yml that it raises, by which the agent notifies; None: none.
    runbook: str  # The page in docs/runbooks that lists this cause: that of its alert, if it has one.
    delays_rank: Literal["input", "host"] | None = None
    """By what it can make one rank of a run late: its wait for data, or its own time after that. None: by neither."""
    fallback: bool = False  # It says that nothing is proven: reported where no rule that explains it found anything.
    ends_run: bool = False  # It can be the reason why a run has ended.
    all_is_well: bool = False  # It says that nothing is to be mended: no cause of a loss.
    costs_later: bool = False  # Its ratio is no loss of time: it raises its alert however small that is.

    @property
    def cause(self) -> str:
        return self.find.__name__

    def __call__(self, window: Window, thresholds: Thresholds = THRESHOLDS) -> Finding | None:
        finding = self.find(window, thresholds)
        more = {} if finding is None else {"cause": self.cause, "advice": finding.advice or self.change}
        return finding and msgspec.structs.replace(finding, **more)


def rule(change: str, **facts: Any) -> Callable[[Find], Rule]:
    """Make a rule of a function named after its cause. The facts are `Rule`'s fields; a missing one is a TypeError."""
    of_alert = {"runbook": facts["alert"]} if facts.get("alert") else {}
    return lambda find: Rule(find, change, **of_alert, **facts)


# A cause without ties to others, or all but those named.
lone = partial(rule, explains=(), explained_by=(), stacks=None)
