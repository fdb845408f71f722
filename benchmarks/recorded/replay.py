"""A recorded timeline, replayed through the real `Watch`: its ledger next to what the recording's own times say."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from benchmarks.recorded.trace import STATES, Copy, Trace, latest_ends, true_times
from gpuwatch.diagnosis.thresholds import Thresholds
from gpuwatch.hook.watch import Watch
from gpuwatch.ledger.step_records import StepRecord
from tests.unit.hook.fakes import MS, Clock, fake_watch

BOUND_POINTS = 1.0
BOUND_STEP_MS = 0.05
_TURN_NS = 500 * MS
"""The background thread's period."""


class Host:
    """The training thread's clock, in the trace's time. Twice a second it does what the background thread would."""

    def __init__(self, begin_ns: int) -> None:
        self.clock = Clock()
        self._zero_ns = self.clock.now_ns - begin_ns
        self._turned_ns = begin_ns
        self.watch: Watch | None = None
        self.steps: list[StepRecord] = []
        """What was applied so far."""

    @property
    def now_ns(self) -> int:
        return self.clock.now_ns - self._zero_ns

    def go_to(self, at_ns: int) -> None:
        """Move the clock on to a moment of the trace, if that is not over."""
        while self.watch is not None and self._turned_ns + _TURN_NS <= at_ns:
            self._turned_ns += _TURN_NS
            self._set(self._turned_ns)
            self.apply()
        self._set(at_ns)

    def apply(self) -> None:
        """Book what was logged, and keep the steps."""
        assert self.watch is not None
        accounts = self.watch._publisher.accounts
        with accounts.lock:
            accounts.apply(self.clock())
            self.steps += accounts.take_delta()[0]

    def _set(self, at_ns: int) -> None:
        self.clock.now_ns = max(self.clock.now_ns, at_ns + self._zero_ns)


@dataclass
class ReplayEvent:
    """A point of a stream, reached at a moment of the trace."""

    at_ns: int = 0


class ReplayEvents:
    """Timing events of a recorded device. Implements `gpuwatch.ledger.device_timeline.Events`."""

    def __init__(self, trace: Trace, host: Host) -> None:
        self._host = host
        self._home = self.current = trace.home_stream
        self._launches: dict[str, list[int]] = {}
        self._ends: dict[str, list[int]] = {}
        for stream in {op.stream for op in trace.ops}:
            ops = [op for op in trace.ops if op.stream == stream]
            self._launches[stream], self._ends[stream] = [op.launch for op in ops], latest_ends(ops)
        self.foreign = 0
        self.records = self.queries = 0
        self._free: list[ReplayEvent] = []

    def record(self, event: ReplayEvent | None) -> ReplayEvent:
        return self._record(event, self._home)

    def record_aside(self) -> ReplayEvent | None:
        return None if self.current == self._home else self._record(None, self.current)

    def ready(self, event: ReplayEvent) -> bool:
        self.queries += 1
        return self._host.now_ns >= event.at_ns

    def elapsed_ns(self, first: ReplayEvent, second: ReplayEvent) -> int:
        if self._host.now_ns < max(first.at_ns, second.at_ns):
            raise RuntimeError("both events must be completed before calculating elapsed time")
        return second.at_ns - first.at_ns

    def release(self, event: ReplayEvent) -> None:
        self._free.append(event)

    def usable(self) -> bool:
        if self.current == self._home:
            return True
        self.foreign += 1
        return False

    def saw(self, device: Any) -> None:
        pass

    def _record(self, event: ReplayEvent | None, stream: str) -> ReplayEvent:
        self.records += 1
        if event is None:
            event = self._free.pop() if self._free else ReplayEvent()
        launched = bisect_left(self._launches.get(stream, ()), self._host.now_ns)
        event.at_ns = max(self._host.now_ns, self._ends[stream][launched - 1]) if launched else self._host.now_ns
        return event


@dataclass
class Section:
    """A fetch or what follows it, until the next one: what the host does meanwhile, in the order of time."""

    end_ns: int
    copies: list[Copy] = field(default_factory=list)
    optimizer_ends: list[int] = field(default_factory=list)

    def add(self, copy: Copy) -> None:
        """Add a copy after the others; of two that overlap on a stream one is made."""
        begin, end = min(copy.begin, self.end_ns), min(copy.end, self.end_ns)
        if self.copies:
            last = self.copies[-1]
            if begin < last.end and copy.stream == last.stream:
                self.copies[-1] = last._replace(end=max(end, last.end))
                return
            begin = max(begin, last.end)
        self.copies.append(Copy(begin, max(begin, end), copy.stream))


class Replay:
    """One trace on its way through a `Watch`."""

    def __init__(self, trace: Trace, patch: pytest.MonkeyPatch) -> None:
        self._trace = trace
        begins = [trace.window[0], *(op.begin for op in trace.ops), *(copy.begin for copy in trace.copies)]
        self._host = Host(min([*begins, *trace.optimizer_ends]))
        self.events = ReplayEvents(trace, self._host)
        patch.setattr("gpuwatch.hook.account.device", lambda: "cuda")  # torch has none here, and is not asked
        self.watch = self._host.watch = fake_watch(self._host.clock, patch)
        self.watch.session.torch_hooks.attach(self.events)
        self.num_workers = trace.num_workers
        self._lay_out()

    def _lay_out(self) -> None:
        """Divide what the host did into fetches and what lies between them."""
        trace, fetches = self._trace, self._trace.fetches
        begins = [begin for begin, _ in fetches]
        ends = [*begins[1:], trace.host_end_ns]
        self._before = Section(begins[0])
        self._in_fetch = [Section(end) for _, end in fetches]
        self._in_step = [Section(end) for end in ends]
        for copy in trace.copies:
            at = bisect_right(begins, copy.begin) - 1
            self._section(at, at >= 0 and copy.begin < fetches[at][1]).add(copy)
        for end in trace.optimizer_ends:
            at = bisect_left(begins, end) - 1
            self._section(at, at >= 0 and end <= fetches[at][1]).optimizer_ends.append(end)

    def _section(self, fetch: int, inside: bool) -> Section:
        if fetch < 0:
            return self._before
        return (self._in_fetch if inside else self._in_step)[fetch]

    def run(self) -> tuple[dict[str, float], Any]:
        """Return seconds by state from the first fetch to the window's end, and the report at that moment."""
        self._walk(self._before)
        before = self.watch.report().states
        for number in self.watch.steps(self):
            self._walk(self._in_step[number])
        self._host.go_to(self._trace.window[1])
        self.watch._recorder.poll(self._host.clock())
        self._host.apply()
        report = self.watch.report()
        return {state: spent - before.get(state, 0.0) for state, spent in report.states.items()}, report

    def __iter__(self) -> Iterator[int]:
        """The loader: a fetch ends when the recorded one did. What it took of the CPU is not known."""
        self.watch._recorder.fetches.thread_time = None
        for number, section in enumerate(self._in_fetch):
            self._walk(section)
            yield number

    def _walk(self, section: Section) -> None:
        steps, done = section.optimizer_ends, 0

        def optimizer_until(at_ns: int) -> None:
            nonlocal done
            while done < len(steps) and (steps[done] <= at_ns or at_ns >= section.end_ns):
                self._host.go_to(min(steps[done], at_ns))
                self.watch._recorder.launched()
                done += 1
            self._host.go_to(at_ns)

        for copy in section.copies:
            optimizer_until(copy.begin)
            self.events.current = copy.stream
            with self.watch.transfer():
                optimizer_until(copy.end)
            self.events.current = self._trace.home_stream
        optimizer_until(section.end_ns)

    def input_waits_ns(self) -> list[int]:
        """Return the exposed wait of each step, as booked."""
        return [step.data_wait_ns if step.exposed is None else step.exposed.input_wait_ns for step in self._host.steps]


@contextmanager
def replaying(trace: Trace) -> Iterator[Replay]:
    """A replay whose Watch is closed in the end."""
    with pytest.MonkeyPatch.context() as patch:
        # A recording of a few steps stands for a long run.
        patch.setattr("gpuwatch.hook.account.site_thresholds", Thresholds(short_run_s=0.0, short_run_steps=0))
        replay = Replay(trace, patch)
        try:
            yield replay
        finally:
            replay.watch.close()


def compare(trace: Trace) -> dict[str, Any]:
    """Return a trace's truth, what gpuwatch makes of it, and the difference. Shares in % of the window, points, ms."""
    truth = true_times(trace)
    with replaying(trace) as replay:
        states_s, report = replay.run()
        waits_ns = replay.input_waits_ns()
        hidden_ns = replay.watch._publisher.accounts.timeline.counts.hidden_ns
    ours = {state: truth.percent(round(spent * 1e9)) for state, spent in states_s.items() if round(spent * 1e9)}
    true = {state: truth.percent(spent) for state, spent in truth.states_ns.items()}
    names = [*STATES, *sorted(set(ours) - set(STATES))]
    difference = {state: ours.get(state, 0.0) - true.get(state, 0.0) for state in names}
    if not trace.optimizer_ends:  # without a last known launch the host's time after it is compute by definition
        difference["compute"] += difference.pop("host_wait")
    errors_ms = [
        max(least - wait, wait - most, 0) / MS
        for wait, (least, most) in zip(waits_ns, truth.input_waits_ns, strict=False)
    ]
    closure = sum(round(spent * 1e9) for spent in states_s.values()) - truth.window_ns
    exceeded = [f"{state} off by {by:+.2f} points" for state, by in difference.items() if abs(by) > BOUND_POINTS]
    exceeded += [
        f"step {number}: input wait off by {error:.3f} ms"
        for number, error in enumerate(errors_ms)
        if error > BOUND_STEP_MS
    ]
    if len(waits_ns) != len(truth.input_waits_ns):
        exceeded.append(f"{len(waits_ns)} steps were booked, {len(truth.input_waits_ns)} recorded")
    if abs(closure) > 1000:
        exceeded.append(f"the ledger is off by {closure} ns")
    return {
        "name": trace.name,
        "gpu": trace.gpu,
        "steps": len(trace.fetches),
        "window_s": truth.window_ns / 1e9,
        "truth": true,
        "ours": {state: ours.get(state, 0.0) for state in names},
        "difference": difference,
        "busy": truth.percent(truth.busy_ns),
        "compute_idle": truth.percent(truth.compute_idle_ns),
        "hidden": {"truth": truth.percent(truth.hidden_ns), "ours": truth.percent(hidden_ns)},
        "input_wait_error_ms": max(errors_ms, default=0.0),
        "input_wait_errors_ms": errors_ms,
        "timeline": report.timeline,
        "coverage": report.coverage,
        "unverified": report.unverified_ratio,
        "verdict": report.verdict.sentence,
        "findings": [
            {
                "cause": finding.cause,
                "predicted_speedup": finding.predicted_speedup,
                "predicted_range": finding.predicted_range,
            }
            for finding in report.findings
        ],
        "calls_a_step": {
            "record": replay.events.records / len(trace.fetches),
            "query": replay.events.queries / len(trace.fetches),
        },
        "exceeded": exceeded,
    }
