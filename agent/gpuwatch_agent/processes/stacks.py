"""Captures stacks when a finding begins, as opt-in: once per finding, once in ten minutes per run (of one rank, and of all).

One capture serves every finding about the same processes that began before it or within a minute. py-spy runs in its own thread; the
sampler starts it, collects its result in a later tick, and never waits.
"""

from __future__ import annotations

import logging
import queue
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuwatch.config import StackSettings
from gpuwatch.diagnosis.rules import BY_CAUSE
from gpuwatch.errors import GpuwatchError
from gpuwatch.tools.stacks.records import Stacks
from gpuwatch.tools.stacks.spy import Target, take
from gpuwatch_agent.evaluator import FindingTracker
from gpuwatch_agent.processes import ProcessTable
from gpuwatch_agent.runs import RUNNING, Run
from gpuwatch_agent.runs.views import ActiveFinding

logger = logging.getLogger(__name__)

_MOST_RANKS = 16
_SERVES_NS = 60_000_000_000
"""One problem causes several findings, some of which take seconds longer to be proven: they share the stacks."""
_SUFFIX = ".speedscope.json"


@dataclass(frozen=True)
class _Capture:
    """One capture in progress: for which finding, and of which processes."""

    run: str
    rank: int
    cause: str
    targets: tuple[Target, ...]
    at_ns: int

    def serves(self, run: str, rank: int, entry: ActiveFinding) -> bool:
        """Return whether this capture serves a finding."""
        of_all = BY_CAUSE[self.cause].stacks == "all ranks"
        return (
            _wants(entry)
            and _of_all(entry) == of_all
            and run == self.run
            and (of_all or rank == self.rank)
            and entry.since_ns <= self.at_ns + _SERVES_NS
        )


def _in_a_thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="stacks", daemon=True).start()


class StackWatch:
    """Owned by the sampler's thread; only `_sample` runs elsewhere."""

    def __init__(
        self,
        settings: StackSettings,
        folder: Path,
        take: Callable[[Sequence[Target], float, int], Stacks] = take,
        start: Callable[[Callable[[], None]], None] = _in_a_thread,
    ) -> None:
        self._settings = settings
        self._folder = folder
        self._take = take
        self._start_thread = start
        self._done: queue.SimpleQueue[tuple[_Capture, Stacks | None]] = queue.SimpleQueue()
        self._running = False
        self._sampled_ns: dict[tuple[str, bool], int] = {}
        """When stacks of each run were last taken, of one of its ranks and (True) of all: a hang is captured also soon after a slow loader."""
        self._seen: list[tuple[_Capture, Stacks | None]] = []
        """Recent results; None where a capture failed."""
        self._warned: set[str] = set()

    def tick(self, runs: Sequence[Run], book: FindingTracker, table: ProcessTable, now_ns: int, now_s: float) -> None:
        """Assign finished captures to findings, and start the next one if a finding needs it."""
        self._collect(book, now_ns)
        if not self._settings.automatic or self._running:
            return
        self._sampled_ns = {
            key: at for key, at in self._sampled_ns.items() if now_ns - at < self._settings.every_s * 1e9
        }
        for run in runs:
            active = book.active(run.run, run.rank) if run.status == RUNNING else []
            wanted = next((e for e in active if _wants(e) and (run.run, _of_all(e)) not in self._sampled_ns), None)
            targets = () if wanted is None else self._targets(run, runs, wanted.finding.cause, table, now_s)
            if wanted is not None and targets:
                self._sampled_ns[run.run, _of_all(wanted)] = now_ns
                self._start(_Capture(run.run, run.rank, wanted.finding.cause, targets, now_ns))
                return

    def _collect(self, book: FindingTracker, now_ns: int) -> None:
        self._seen = [seen for seen in self._seen if now_ns - seen[0].at_ns < 2 * _SERVES_NS]
        while True:
            try:
                self._seen.append(self._done.get_nowait())
            except queue.Empty:
                break
            self._running = False
        for capture, stacks in self._seen:
            for (run, rank, _, _), entry in book.entries.items():
                if capture.serves(run, rank, entry):
                    entry.stacks_taken, entry.stacks = True, stacks

    def _targets(
        self, run: Run, runs: Sequence[Run], cause: str, table: ProcessTable, now_s: float
    ) -> tuple[Target, ...]:
        chosen = [each for each in runs if each.run == run.run] if BY_CAUSE[cause].stacks == "all ranks" else [run]
        name = re.sub(r"[^A-Za-z0-9._-]+", "_", run.run)[:80]
        found = []
        for each in sorted(chosen, key=lambda run: run.rank)[:_MOST_RANKS]:
            pid = table.host_pid(each.live_hello)
            if pid is not None and table.is_of_user(pid, each.uid):
                file = f"{int(now_s)}-{name}-rank{each.rank}-{cause}{_SUFFIX}"
                found.append(Target(each.rank, pid, self._folder / file))
        return tuple(found)

    def _start(self, capture: _Capture) -> None:
        self._running = True
        self._start_thread(lambda: self._sample(capture))

    def _sample(self, capture: _Capture) -> None:
        stacks = None
        try:
            stacks = self._take(capture.targets, self._settings.seconds, self._settings.rate_hz)
            self._forget_old()
        except (GpuwatchError, OSError) as error:
            if str(error) not in self._warned:
                self._warned.add(str(error))
                logger.warning("no stacks for %s of run %s: %s", capture.cause, capture.run, error)
        except Exception:
            logger.exception("taking the stacks of run %s failed", capture.run)
        finally:
            self._done.put((capture, stacks))

    def _forget_old(self) -> None:
        """Keep the newest flame graphs; their names begin with their time."""
        kept = sorted(self._folder.glob(f"*{_SUFFIX}"), key=lambda path: path.stat().st_mtime)
        for path in kept[: -self._settings.keep]:
            path.unlink(missing_ok=True)


def _wants(entry: ActiveFinding) -> bool:
    return not entry.stacks_taken and BY_CAUSE[entry.finding.cause].stacks is not None


def _of_all(entry: ActiveFinding) -> bool:
    return BY_CAUSE[entry.finding.cause].stacks == "all ranks"
