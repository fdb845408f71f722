"""Runs as their hooks describe them: one `Run` per training process, its ledger kept across lost messages and restarts.

Times are ns of the agent's monotonic clock; no clock is read here.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import msgspec

from gpuwatch import wire
from gpuwatch.ledger import UNKNOWN, Ledger

SILENCE_NS = 10_000_000_000
"""A hook sends twice a second; after so long without a message the time is `unknown`."""
ABANDONED_NS = 60_000_000_000
"""A silent run whose process cannot be looked at is taken for gone after so long."""
RECENT_NS = 60_000_000_000
_STEPS_KEPT = 4096

RUNNING, ENDED, LOST = "running", "ended", "lost"


class Counts(msgspec.Struct):
    """What a run has done, cumulative over all its processes so far."""

    steps: int = 0
    samples: int = -1
    phases_ns: dict[str, int] = msgspec.field(default_factory=dict)
    histogram: list[int] = msgspec.field(default_factory=lambda: [0] * (len(wire.STEP_BUCKETS_S) + 1))
    overhead_ns: int = 0

    def plus(self, totals: wire.Totals | None) -> Counts:
        """Return these counts and a process's own."""
        if totals is None:
            return self
        samples = -1 if self.samples < 0 and totals.samples < 0 else max(0, self.samples) + max(0, totals.samples)
        names = self.phases_ns.keys() | totals.phases_ns.keys()
        return Counts(
            steps=self.steps + totals.steps,
            samples=samples,
            phases_ns={name: self.phases_ns.get(name, 0) + totals.phases_ns.get(name, 0) for name in names},
            histogram=[a + b for a, b in zip(self.histogram, totals.step_histogram, strict=True)],
            overhead_ns=self.overhead_ns + totals.overhead_ns,
        )


class RunRecord(msgspec.Struct):
    """All of a run that outlives the agent: kept in the history, in one transaction with what is served."""

    run: str
    rank: int
    boot_id: str
    start_ns: int
    watermark_ns: int
    states_ns: dict[str, int]
    status: str
    started_s: float
    last_message_s: float
    hello: wire.Hello | None
    sender: str
    sent: wire.Totals | None
    offset_ns: int
    before: Counts
    next_step: int
    lost: int
    last_step_s: float | None
    worker_cpu_s: float = 0.0
    ended_s: float | None = None


@dataclass(frozen=True)
class RecentStep:
    """A step as the agent keeps it for a minute. Times in ns, `end_ns` on the agent's clock."""

    end_ns: int
    data_wait_ns: int
    transfer_ns: int
    compute_ns: int
    samples: int
    epoch_start: bool


class Run:
    """One training process of a run: (run, rank)."""

    def __init__(self, run: str, rank: int, boot_id: str) -> None:
        self.run = run
        self.rank = rank
        self.boot_id = boot_id
        self.ledger: Ledger | None = None
        self.hello: wire.Hello | None = None
        self.status = RUNNING
        self.sender = ""
        self.sent: wire.Totals | None = None
        self.offset_ns = 0
        self.before = Counts()
        self.next_step = 0
        self.lost = 0
        self.activity = "startup"
        self.fetch_cpu_ratio: float | None = None
        self.last_message_ns = 0
        self.last_message_s = 0.0
        self.started_s = 0.0
        self.ended_s: float | None = None
        self.last_step_s: float | None = None
        self.worker_cpu_s = 0.0
        self.steps: deque[RecentStep] = deque(maxlen=_STEPS_KEPT)
        self._totals_seen: deque[tuple[int, int, dict[str, int]]] = deque()
        self.changed = True

    @property
    def counts(self) -> Counts:
        return self.before.plus(self.sent)

    def apply(self, message: wire.Message, now_ns: int, now_s: float) -> None:
        """Take one message. Late, repeated and lost ones are all right: totals are cumulative."""
        self.last_message_ns, self.last_message_s = now_ns, now_s
        self.changed = True
        if message.origin.sender != self.sender:
            self._begin_sender(message, now_ns)
        if isinstance(message, wire.Hello):
            self.hello = message
            if self.status == LOST:
                self.status = RUNNING
            return
        self._book(message.totals, now_s, now_ns)
        self.status = RUNNING
        if isinstance(message, wire.Steps):
            self.activity = message.activity
            if message.fetch_cpu_ratio is not None:
                self.fetch_cpu_ratio = message.fetch_cpu_ratio
            self._take_steps(message, now_ns, now_s)
        elif isinstance(message, wire.Bye):
            self.status, self.ended_s, self.activity = ENDED, now_s, "ended"
            self.lost += max(0, message.totals.steps - self.next_step)
            self.next_step = message.totals.steps

    def pass_time(self, now_ns: int, now_s: float, alive: bool | None) -> None:
        """Note what silence means. `alive` says whether the process lives, None where that cannot be seen."""
        if self.status != RUNNING or self.ledger is None:
            return
        silent_ns = now_ns - self.last_message_ns
        gone = alive is False and silent_ns > 2_000_000_000
        gone = gone or (alive is None and silent_ns > ABANDONED_NS)
        if gone or silent_ns > SILENCE_NS:
            self.ledger.book(UNKNOWN, now_ns)
            self.activity = "silent"
            self.changed = True
        if gone:
            self.status, self.ended_s, self.activity = LOST, now_s, "gone"

    def remember(self, now_ns: int) -> None:
        """Keep the totals of this moment, so that the last minute's share can be told."""
        if self.ledger is None:
            return
        self._totals_seen.append((now_ns, self.ledger.watermark_ns, dict(self.ledger.totals_ns)))
        while len(self._totals_seen) > 2 and self._totals_seen[1][0] <= now_ns - RECENT_NS:
            self._totals_seen.popleft()
        while self.steps and self.steps[0].end_ns < now_ns - RECENT_NS:
            self.steps.popleft()

    def recent_ns(self) -> tuple[int, dict[str, int]]:
        """Return (time covered, time by state) of the last minute, in ns."""
        if self.ledger is None or not self._totals_seen:
            return 0, {}
        _, watermark, then = self._totals_seen[0]
        if self._totals_seen[-1][0] - self.ledger.start_ns <= RECENT_NS:
            watermark, then = self.ledger.start_ns, {}  # the whole run is younger than the window
        states = {s: ns - then.get(s, 0) for s, ns in self.ledger.totals_ns.items() if ns > then.get(s, 0)}
        return self.ledger.watermark_ns - watermark, states

    def record(self) -> RunRecord | None:
        """Return what must outlive the agent; None before any totals came."""
        if self.ledger is None:
            return None
        return RunRecord(
            run=self.run,
            rank=self.rank,
            boot_id=self.boot_id,
            start_ns=self.ledger.start_ns,
            watermark_ns=self.ledger.watermark_ns,
            states_ns={state: ns for state, ns in self.ledger.totals_ns.items() if ns},
            status=self.status,
            started_s=self.started_s,
            last_message_s=self.last_message_s,
            hello=self.hello,
            sender=self.sender,
            sent=self.sent,
            offset_ns=self.offset_ns,
            before=self.before,
            next_step=self.next_step,
            lost=self.lost,
            last_step_s=self.last_step_s,
            worker_cpu_s=self.worker_cpu_s,
            ended_s=self.ended_s,
        )

    @classmethod
    def restore(cls, record: RunRecord, boot_id: str, now_ns: int) -> Run:
        """Return the run as a former agent left it. Its silence counts from now; a former boot's run is gone."""
        run = cls(record.run, record.rank, boot_id)
        run.ledger = Ledger(record.start_ns)
        run.ledger.watermark_ns = record.watermark_ns
        run.ledger.totals_ns.update(record.states_ns)
        for name in ("status", "started_s", "last_message_s", "hello", "sender", "sent", "offset_ns", "before"):
            setattr(run, name, getattr(record, name))
        for name in ("next_step", "lost", "last_step_s", "worker_cpu_s", "ended_s"):
            setattr(run, name, getattr(record, name))
        run.last_message_ns = now_ns
        if record.boot_id != boot_id and run.status == RUNNING:
            run.status, run.ended_s = LOST, record.last_message_s
        run.activity = run.status if run.status != RUNNING else "silent"
        return run

    def _begin_sender(self, message: wire.Message, now_ns: int) -> None:
        """A process is heard for the first time: of a new run, or one that goes on with a run (an elastic restart)."""
        self.before = self.counts
        self.sender, self.sent = message.origin.sender, None
        self.next_step = 0
        self.steps.clear()
        same_clock = message.origin.boot_id == self.boot_id
        self.offset_ns = 0 if same_clock else now_ns - message.origin.monotonic_ns

    def _book(self, totals: wire.Totals, now_s: float, now_ns: int) -> None:
        start_ns, watermark_ns = totals.start_ns + self.offset_ns, totals.watermark_ns + self.offset_ns
        if self.ledger is None:
            self.ledger = Ledger(start_ns)
            self.started_s = now_s - (now_ns - start_ns) / 1e9
        elif self.sent is None and start_ns > self.ledger.watermark_ns:
            # Between two processes of one run: not the run's time after a good-bye, else not known.
            if self.status == ENDED:
                self.ledger.shift(start_ns - self.ledger.watermark_ns)
            else:
                self.ledger.book(UNKNOWN, start_ns)
        if self.sent is not None and totals.watermark_ns < self.sent.watermark_ns:
            return  # an older message, overtaken
        before = self.sent.states_ns if self.sent is not None else {}
        grown = {state: ns - before.get(state, 0) for state, ns in totals.states_ns.items()}
        self.ledger.book_mixture({s: ns for s, ns in grown.items() if ns > 0}, watermark_ns)
        self.sent = totals

    def _take_steps(self, message: wire.Steps, now_ns: int, now_s: float) -> None:
        count = wire.step_count(message.columns)
        if not count or not message.columns.keys() >= {"start_ns", "data_wait_ns", "transfer_ns", "compute_ns"}:
            return
        self.lost += max(0, message.first_step - self.next_step)
        self.next_step = max(self.next_step, message.first_step + count)
        columns = {name: wire.unpack(column) for name, column in message.columns.items()}
        missing = [wire.MISSING] * count
        rows = zip(
            columns["start_ns"],
            columns["data_wait_ns"],
            columns["transfer_ns"],
            columns["compute_ns"],
            columns.get("samples", missing),
            columns.get("epoch_start", missing),
            strict=True,
        )
        for start, data, transfer, compute, samples, epoch_start in list(rows)[-_STEPS_KEPT:]:
            end_ns = start + data + transfer + compute + self.offset_ns
            self.steps.append(RecentStep(end_ns, data, transfer, compute, samples, epoch_start == 1))
        self.last_step_s = now_s - (now_ns - self.steps[-1].end_ns) / 1e9


class RunBook:
    """All runs of the node. What a sender may add is bounded: past `MAX_RUNS` a new run is refused and counted."""

    MAX_RUNS = 512
    KEEP_ENDED_S = 900.0
    """An ended run's series go after this; its history stays."""

    def __init__(self, boot_id: str) -> None:
        self.boot_id = boot_id
        self.runs: dict[tuple[str, int], Run] = {}
        self.refused = 0

    def apply(self, message: wire.Message, now_ns: int, now_s: float) -> None:
        key = (message.run, message.rank)
        run = self.runs.get(key)
        if run is None:
            if len(self.runs) >= self.MAX_RUNS and not self._make_room():
                self.refused += 1
                return
            run = self.runs[key] = Run(message.run, message.rank, self.boot_id)
        run.apply(message, now_ns, now_s)

    def restore(self, records: list[RunRecord], now_ns: int, now_s: float) -> None:
        """Take up the runs that a former agent kept, those that ended long ago left out."""
        for record in records:
            run = Run.restore(record, self.boot_id, now_ns)
            if run.ended_s is None or now_s - run.ended_s < self.KEEP_ENDED_S:
                run.changed = False
                self.runs[run.run, run.rank] = run

    def forget_ended(self, now_s: float) -> None:
        """Drop the runs that ended long enough ago."""
        for key, run in list(self.runs.items()):
            if run.ended_s is not None and run.status != RUNNING and now_s - run.ended_s > self.KEEP_ENDED_S:
                del self.runs[key]

    def _make_room(self) -> bool:
        ended = [(run.ended_s or 0.0, key) for key, run in self.runs.items() if run.status != RUNNING]
        if not ended:
            return False
        del self.runs[min(ended)[1]]
        return True
