"""Captures stacks when a finding begins, as opt-in: once per finding, once in ten minutes per run (of a rank, of all).

One capture serves every finding about the same processes that began before it or within a minute. py-spy runs in its
own thread; the sampler starts it, collects its result in a later tick, and never waits.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from gpuwatch.config import StackSettings
from gpuwatch.diagnosis.rules import BY_CAUSE
from gpuwatch.errors import GpuwatchError
from gpuwatch.formatting import file_name
from gpuwatch.tools.stacks.records import Stacks
from gpuwatch.tools.stacks.spy import Target, take
from gpuwatch_agent.deadline import DeadlineThread
from gpuwatch_agent.evaluator import FindingTracker
from gpuwatch_agent.processes import ProcessTable
from gpuwatch_agent.runs import RUNNING, Run
from gpuwatch_agent.runs.views import ActiveFinding

logger = logging.getLogger(__name__)

_MOST_RANKS = 16
_SERVES_NS = 60_000_000_000
"""One problem causes several findings, some of which take seconds longer to be proven: they share the stacks."""
_SUFFIX = ".speedscope.json"


def _subject(run: str, rank: int, cause: str) -> tuple[str, int | None]:
    """Return whose stacks show more of a cause: a run and its rank; None: all its ranks."""
    return run, None if BY_CAUSE[cause].stacks == "all ranks" else rank


def _wants(entry: ActiveFinding) -> bool:
    return not entry.stacks_taken and BY_CAUSE[entry.finding.cause].stacks is not None


@dataclass(frozen=True)
class _Capture:
    """One capture: for which finding, and of which processes."""

    subject: tuple[str, int | None]
    cause: str
    targets: tuple[Target, ...]
    at_ns: int


class StackWatch:
    """Owned by the sampler's thread; only `_sample` runs elsewhere."""

    def __init__(
        self, settings: StackSettings, folder: Path, take: Callable[[Sequence[Target], float, int], Stacks] = take
    ) -> None:
        self._settings = settings
        self._folder = folder
        self._take = take
        self._thread = DeadlineThread("stacks", math.inf)
        self._running: _Capture | None = None
        self._sampled_ns: dict[tuple[str, bool], int] = {}
        """When a run's stacks were last taken, of one rank or (True) all: a hang may come soon after a slow loader."""
        self._seen: list[tuple[_Capture, Stacks | None]] = []  # recent results; None where a capture failed
        self._warn = cache(partial(logger.warning, "%s"))  # each message once

    def tick(self, runs: list[Run], tracker: FindingTracker, table: ProcessTable, now_ns: int, now_s: float) -> None:
        """Assign finished captures to findings, and start the next one if a finding needs it."""
        self._collect(tracker, now_ns)
        if not self._settings.automatic or self._running is not None:
            return
        every_ns = self._settings.every_s * 1e9
        self._sampled_ns = {key: at_ns for key, at_ns in self._sampled_ns.items() if now_ns - at_ns < every_ns}
        for run in runs:
            for entry in tracker.active(run.run, run.rank) if run.status == RUNNING else ():
                cause = entry.finding.cause
                subject = _subject(*run.key, cause)
                of_all = subject[1] is None
                if not _wants(entry) or (run.run, of_all) in self._sampled_ns:
                    continue
                ranks = [each for each in runs if each.run == run.run] if of_all else [run]
                if targets := self._targets(ranks, cause, table, now_s):
                    self._sampled_ns[run.run, of_all] = now_ns
                    self._running = _Capture(subject, cause, targets, now_ns)
                    self._advance(self._running)
                    return

    def _collect(self, tracker: FindingTracker, now_ns: int) -> None:
        self._seen = [seen for seen in self._seen if now_ns - seen[0].at_ns < 2 * _SERVES_NS]
        if self._running is not None:
            self._advance(self._running)
        for capture, stacks in self._seen:
            for (run, rank, cause, _), entry in tracker.entries.items():
                is_about = (
                    _subject(run, rank, cause) == capture.subject and entry.since_ns <= capture.at_ns + _SERVES_NS
                )
                if is_about and _wants(entry):
                    entry.stacks_taken, entry.stacks = True, stacks

    def _advance(self, capture: _Capture) -> None:
        """Start a capture, or take its result if it has ended."""
        if (done := self._thread.offer(partial(self._sample, capture), 0.0)) is not None:
            self._seen.append(done)
            self._running = None

    def _targets(self, ranks: Sequence[Run], cause: str, table: ProcessTable, now_s: float) -> tuple[Target, ...]:
        found = []
        for rank in sorted(ranks, key=lambda rank: rank.rank)[:_MOST_RANKS]:
            if (pid := table.host_pid(rank.live_hello)) is not None and table.is_of_user(pid, rank.uid):
                file = f"{int(now_s)}-{file_name(rank.run)}-rank{rank.rank}-{cause}{_SUFFIX}"
                found.append(Target(rank.rank, pid, self._folder / file))
        return tuple(found)

    def _sample(self, capture: _Capture) -> tuple[_Capture, Stacks | None]:
        stacks = None
        try:
            stacks = self._take(capture.targets, self._settings.seconds, self._settings.rate_hz)
            # The newest flame graphs are kept; their names begin with their time.
            kept = sorted(self._folder.glob(f"*{_SUFFIX}"), key=lambda path: path.stat().st_mtime)
            for path in kept[: -self._settings.keep]:
                path.unlink(missing_ok=True)
        except (GpuwatchError, OSError) as error:
            self._warn(f"no stacks for {capture.cause} of run {capture.subject[0]}: {error}")
        except Exception:
            logger.exception("sampling the stacks of run %s failed", capture.subject[0])
        return capture, stacks
