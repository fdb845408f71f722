"""The books of one watched process: its recorder folded into a timeline, with what a diagnosis needs beside it.

Shared by the background thread and `report()`, under one lock that the training thread never takes on the hot path.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from dataclasses import dataclass

import msgspec

from gpuwatch.evidence import HostWatcher
from gpuwatch.ledger import COMPUTE
from gpuwatch.recorder import Recorder
from gpuwatch.timeline import PhaseRecord, StepRecord, Timeline
from gpuwatch.window import StepColumns, Window
from gpuwatch.wire import Loader, Totals

_STEPS_KEPT = 2048
_EPOCH_STARTS_KEPT = 256


@dataclass(frozen=True)
class News:
    """What was folded since the last time."""

    steps: list[StepRecord]
    phases: list[PhaseRecord]
    first_step: int
    """Index of the first of `steps`, from 0."""


class Accounts:
    """Everything known of this process's run."""

    def __init__(self, recorder: Recorder, watcher: HostWatcher | None = None) -> None:
        self.recorder = recorder
        self.watcher = watcher or HostWatcher()
        self.lock = threading.Lock()
        self.timeline = Timeline(recorder.clock())
        self.loader: Loader | None = None
        self.batch_bytes: int | None = None
        self.failures = 0
        self._recent: deque[StepRecord] = deque(maxlen=_STEPS_KEPT)
        self._epoch_starts: deque[StepRecord] = deque(maxlen=_EPOCH_STARTS_KEPT)
        self._unsent: tuple[list[StepRecord], list[PhaseRecord]] = ([], [])
        self._unsent_first = 0

    def fold(self, now_ns: int) -> None:
        """Book all that the recorder has logged, and what is certain of the time since. Call with the lock held."""
        log, entries = self.recorder.log, []
        while log:
            entries.append(log.popleft())
        steps, phases = self.timeline.fold(entries)
        for step in steps:
            (self._epoch_starts if step.epoch_start else self._recent).append(step)
        self._unsent[0].extend(steps)
        self._unsent[1].extend(phases)
        self.timeline.book_certain(now_ns, self.recorder.in_step)
        self.timeline.book_stall(now_ns)

    def take_news(self, keep: int) -> News:
        """Return what was folded since the last call, at most the newest `keep` steps. Call with the lock held."""
        steps, phases = self._unsent
        self._unsent = ([], [])
        first = self._unsent_first + max(0, len(steps) - keep)
        self._unsent_first += len(steps)
        return News(steps[-keep:], phases, first)

    def totals(self, dropped: int, overhead_ns: int) -> Totals:
        """Return the cumulative totals for the wire. Call with the lock held."""
        line = self.timeline
        return Totals(
            start_ns=line.ledger.start_ns,
            watermark_ns=line.ledger.watermark_ns,
            states_ns={state: ns for state, ns in line.ledger.totals_ns.items() if ns},
            phases_ns=dict(line.phases_ns),
            steps=line.steps,
            samples=line.samples if line.samples_known else -1,
            step_histogram=list(line.histogram),
            records_dropped=dropped,
            overhead_ns=overhead_ns,
        )

    def provisional_ns(self, now_ns: int) -> dict[str, int]:
        """Return the time after the watermark by the state it will most likely be booked under. Lock held."""
        watermark = self.timeline.ledger.watermark_ns
        begin, parts = self.recorder.open_parts_ns(now_ns)
        open_ns = max(0, now_ns - watermark)
        if not parts:
            return {self.timeline.state_between(): open_ns} if open_ns else {}
        if self.timeline.open_phase is not None:
            return {self.timeline.state_between(): open_ns}
        tail: dict[str, int] = {}
        if begin > watermark:
            tail[self.timeline.state_between()] = begin - watermark
        at = begin
        for state, part in parts.items():
            at += part
            late = min(part, max(0, at - watermark))
            if late:
                tail[state] = tail.get(state, 0) + late
        missing = open_ns - sum(tail.values())  # the training thread went on while we read its slots
        if missing > 0:
            tail[COMPUTE] = tail.get(COMPUTE, 0) + missing
        return tail

    def window(self, now_ns: int) -> tuple[Window, dict[str, int]]:
        """Return the whole run as a window for the diagnosis, and its provisional tail in ns by state. Lock held."""
        tail = self.provisional_ns(now_ns)
        states = {state: ns for state, ns in self.timeline.ledger.totals_ns.items() if ns}
        for state, ns in tail.items():
            states[state] = states.get(state, 0) + ns
        steps = sorted((*self._epoch_starts, *self._recent), key=lambda step: step.start_ns)
        recorder = self.recorder
        stalled_ns = now_ns - self.timeline.last_progress_ns if self.timeline.is_stalled(now_ns) else None
        window = Window(
            duration_s=(now_ns - self.timeline.start_ns) / 1e9,
            states_s={state: ns / 1e9 for state, ns in states.items()},
            device=_device(),
            steps=StepColumns(
                data_wait_s=tuple(step.data_wait_ns / 1e9 for step in steps),
                transfer_s=tuple(step.transfer_ns / 1e9 for step in steps),
                compute_s=tuple(step.compute_ns / 1e9 for step in steps),
                epoch_start=tuple(step.epoch_start for step in steps),
            ),
            fetch_cpu_ratio=recorder.fetch_cpu_ns / recorder.fetch_wall_ns if recorder.fetch_wall_ns else None,
            loader=self.loader_with_batch(),
            worker_cpu_ratios=self.watcher.worker_cpu_ratios(),
            host=self.watcher.facts(),
            activity=recorder.activity,
            stalled_s=None if stalled_ns is None else stalled_ns / 1e9,
        )
        return window, tail

    def look_at_host(self) -> None:
        """Take a look at the node and the loader's workers. Call with the lock held."""
        self.watcher.sample(self.recorder.clock() / 1e9, self.loader.worker_pids if self.loader else ())

    def loader_with_batch(self) -> Loader | None:
        """Return the loader's settings with the size of a batch."""
        if self.loader is None or self.batch_bytes is None:
            return self.loader
        return msgspec.structs.replace(self.loader, batch_bytes=self.batch_bytes)

    def finish(self, now_ns: int) -> None:
        """Book the tail: the run ends now. Call with the lock held."""
        self.fold(now_ns)
        for state, ns in self.provisional_ns(now_ns).items():
            self.timeline.ledger.book(state, self.timeline.ledger.watermark_ns + ns)


def _device() -> str:
    """Return what the training works on as far as torch has been set up: "cuda" once CUDA is initialised, else "cpu"."""
    torch = sys.modules.get("torch")
    try:
        if torch is not None and torch.cuda.is_initialized():
            return "cuda"
    except Exception:  # a torch without CUDA support, or one that is still being imported
        pass
    return "cpu"
