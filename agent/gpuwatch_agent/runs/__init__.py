"""The node's training runs: one `Run` per (run, rank), whose ledger survives lost messages and restarts.

Times are ns of the agent's monotonic clock; no clock is read here.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from functools import reduce

from gpuwatch import wire
from gpuwatch.diagnosis.window import MemoryKills
from gpuwatch.ledger.states import UNKNOWN, Ledger
from gpuwatch_agent.processes.owners import NO_OWNER
from gpuwatch_agent.runs.records import (
    MINUTE_NS,
    LastMinute,
    RunRecord,
    Sender,
    WorkerIo,
    add_counters,
    clock_offset_ns,
    went_back,
)
from gpuwatch_agent.runs.timeline import RecentSteps, Stretch, Trace

SILENCE_NS = 10_000_000_000
"""A hook sends twice a second; after so long without a message the time is `unknown`."""
GONE_NS = 2_000_000_000
"""Grace for the last message of a process that has ended."""
ABANDONED_NS = 60_000_000_000
"""A silent run whose process is not visible counts as gone after this time."""
_SENDERS_KEPT = 16
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_LATE_TICK_NS = 3_000_000_000

RUNNING, ENDED, LOST = "running", "ended", "lost"

logger = logging.getLogger(__name__)


class Run:
    """One rank of a run, whose messages one process sends, or several one after another (an elastic restart).

    What it has in common with RunRecord is described there.
    """

    def __init__(self, run: str, rank: int, boot_id: str) -> None:
        self.run = run
        self.rank = rank
        self.boot_id = boot_id
        self.ledger: Ledger | None = None
        self.trace = Trace()
        """Where in time the ledger's states lay, since this agent started."""
        self.process_start_ns = 0
        """Start of the process that sent last."""
        self.hello: wire.Hello | None = None
        self.status = RUNNING
        self.senders: dict[str, Sender] = {}
        """The last processes, in the order of their first message."""
        self.before = wire.Counters()
        self.lost = 0
        self.activity = "startup"
        self.fetch_cpu_ratio: float | None = None
        self.heard_ns = 0
        """When the last message arrived."""
        self.last_message_s = 0.0
        self.started_s = 0.0
        self.ended_s: float | None = None
        self.last_step_s: float | None = None
        self.worker_cpu_s = 0.0
        self.worker_seen_s: dict[int, float] = {}
        self.user = ""
        self.owner = NO_OWNER
        self.worker_io = WorkerIo()
        self.worker_io_seen: dict[int, WorkerIo] = {}
        self.oom: MemoryKills | None = None
        self.gpus: dict[str, str] = {}
        self.steps = RecentSteps()
        self.minute = LastMinute()
        self.changed = True

    @property
    def key(self) -> tuple[str, int]:
        return self.run, self.rank

    @property
    def live_hello(self) -> wire.Hello | None:
        """The last Hello while the run is running."""
        return self.hello if self.status == RUNNING else None

    @property
    def counts(self) -> wire.Counters:
        """The counters of all its processes."""
        return reduce(add_counters, (sender.sent for sender in self.senders.values()), self.before)

    def apply(self, message: wire.Message, now_ns: int, now_s: float) -> bool:
        """Apply one message; return whether it had new step records.

        Late, repeated and lost messages do no harm: totals are cumulative. Messages after a process's Bye are ignored, and so are
        totals that went back.
        """
        sender = self._sender(message.origin, now_ns, now_s)
        if sender.said_bye:
            return False
        self.heard_ns, self.last_message_s = now_ns, now_s
        self.changed = True
        if isinstance(message, wire.Hello):
            self.hello = message
            if sender.first_step is None:
                sender.first_step = message.first_step
            if message.process_start_ticks and message.origin.boot_id == self.boot_id:
                sender.process_began_s = now_s - now_ns / 1e9 + message.process_start_ticks / _TICKS_PER_S
            if self.status == LOST:
                self._resume()
            return False
        columns = message.columns if isinstance(message, wire.Steps) else None
        self._book(sender, message.totals, columns, now_ns, now_s)
        self._resume()
        if isinstance(message, wire.Steps):
            self.activity = message.activity
            if message.fetch_cpu_ratio is not None:
                self.fetch_cpu_ratio = message.fetch_cpu_ratio
            return self._take_steps(sender, message, now_ns, now_s)
        if isinstance(message, wire.Bye):
            sender.said_bye = True
            self.status, self.ended_s, self.activity = ENDED, now_s, ENDED
            self._give_up_steps(sender)
        return False

    def pass_time(self, now_ns: int, now_s: float, alive: bool | None) -> None:
        """Book silence as unknown, or end the run. `alive`: whether its process is; None where that is not visible."""
        if self.status != RUNNING:
            return
        silent_ns = now_ns - self.heard_ns
        gone = (alive is False and silent_ns > GONE_NS) or (alive is None and silent_ns > ABANDONED_NS)
        if self.ledger is not None and (gone or silent_ns > SILENCE_NS):
            self._book_unknown(self.ledger, now_ns)
            self.activity = "silent"
            self.changed = True
        if gone:
            self.status, self.ended_s, self.activity, self.changed = LOST, now_s, LOST, True
            for sender in self.senders.values():
                self._give_up_steps(sender)

    def remember(self, now_ns: int) -> None:
        """Record the totals of this moment, for the shares of the last minute; an ended run keeps its last minute."""
        if self.ledger is None or self.status != RUNNING:
            return
        self.minute.keep(now_ns, self.ledger, self.counts)
        self.steps.drop_before(now_ns - MINUTE_NS)

    def recent_ns(self) -> tuple[int, dict[str, int]]:
        """Return (time covered, time by state) of the last minute, in ns; of the whole run while it is younger."""
        return (0, {}) if self.ledger is None else self.minute.states_ns(self.ledger)

    def record(self) -> RunRecord | None:
        """Return what must survive a restart of the agent; None before the first totals."""
        if self.ledger is None:
            return None
        return RunRecord(
            boot_id=self.boot_id,
            start_ns=self.ledger.start_ns,
            watermark_ns=self.ledger.watermark_ns,
            states_ns={state: ns for state, ns in self.ledger.totals_ns.items() if ns},
            senders=list(self.senders.values()),
            **{name: getattr(self, name) for name in _IN_COMMON},
        )

    @classmethod
    def restore(cls, record: RunRecord, boot_id: str, now_ns: int, now_s: float) -> Run:
        """Return the run as a former agent left it. Its silence counts from now; a former boot's run is gone."""
        run = cls(record.run, record.rank, boot_id)
        for name in _IN_COMMON:
            setattr(run, name, getattr(record, name))
        run.ledger = Ledger(record.start_ns)
        run.ledger.watermark_ns = record.watermark_ns
        run.ledger.totals_ns.update(record.states_ns)
        run.senders = {sender.sender: sender for sender in record.senders}
        run.heard_ns = now_ns
        run.process_start_ns = run.ledger.start_ns
        if record.boot_id != boot_id:  # that boot's clock is gone: its times are mapped by the wall clock
            run.ledger.shift(now_ns - int((now_s - record.last_message_s) * 1e9) - record.watermark_ns)
            if run.status == RUNNING:
                run.status, run.ended_s = LOST, record.last_message_s
        run.activity = run.status if run.status != RUNNING else "silent"
        return run

    def _resume(self) -> None:
        self.status, self.ended_s, self.oom = RUNNING, None, None

    def _sender(self, origin: wire.Origin, now_ns: int, now_s: float) -> Sender:
        """Return the process that sent a message, added at its first one."""
        sender = self.senders.get(origin.sender)
        if sender is None:
            sender = Sender(origin.sender, clock_offset_ns(origin, self.boot_id, now_ns, now_s))
            self.senders[origin.sender] = sender
            self.steps.clear()
            if len(self.senders) > _SENDERS_KEPT:
                oldest = next((key for key, one in self.senders.items() if one.said_bye), next(iter(self.senders)))
                self.before = add_counters(self.before, self.senders.pop(oldest).sent)
        return sender

    def _book(
        self,
        sender: Sender,
        totals: wire.Totals,
        columns: Mapping[str, bytes] | None,
        now_ns: int,
        now_s: float,
    ) -> None:
        start_ns, watermark_ns = totals.start_ns + sender.offset_ns, totals.watermark_ns + sender.offset_ns
        if sender.sent is None:
            self.process_start_ns = start_ns
            sender.started_s = now_s - (now_ns - start_ns) / 1e9
        if self.ledger is None:
            self.ledger = Ledger(start_ns)
            self.started_s = now_s - (now_ns - start_ns) / 1e9
        elif sender.sent is None and start_ns > self.ledger.watermark_ns:
            # Between two processes of one run: after a Bye not the run's time, else unknown.
            if self.status == ENDED:
                self.ledger.shift(start_ns - self.ledger.watermark_ns)
            else:
                self._book_unknown(self.ledger, start_ns)
        if sender.sent is not None and went_back(totals, sender.sent):
            return
        before = sender.sent.states_ns if sender.sent is not None else {}
        grown = {state: ns - before.get(state, 0) for state, ns in totals.states_ns.items()}
        begin_ns, then = self.ledger.watermark_ns, dict(self.ledger.totals_ns)
        self.ledger.book_mixture({s: ns for s, ns in grown.items() if ns > 0}, watermark_ns)
        booked = {state: ns - then[state] for state, ns in self.ledger.totals_ns.items() if ns > then[state]}
        self.trace.add(Stretch(begin_ns, self.ledger.watermark_ns, booked, columns, sender.offset_ns))
        sender.count_redone(totals, grown)
        sender.sent = totals

    def _book_unknown(self, ledger: Ledger, until_ns: int) -> None:
        begin_ns = ledger.watermark_ns
        if booked_ns := ledger.book(UNKNOWN, until_ns):
            self.trace.add(Stretch(begin_ns, until_ns, {UNKNOWN: booked_ns}))

    def _take_steps(self, sender: Sender, message: wire.Steps, now_ns: int, now_s: float) -> bool:
        """Count and keep step records, but those that arrived before, or were counted as lost."""
        count = wire.step_count(message.columns)
        if not count or message.first_step < sender.next_step:
            return False
        self.lost += message.first_step - sender.next_step
        sender.next_step = message.first_step + count
        end_ns = self.steps.take(message.columns, sender.offset_ns)
        if end_ns is None:
            return "start_ns" in message.columns
        self.last_step_s = now_s - (now_ns - end_ns) / 1e9
        return True

    def _give_up_steps(self, sender: Sender) -> None:
        """Count the records that will not arrive any more as lost."""
        if sender.sent is not None and sender.sent.steps > sender.next_step:
            self.lost += sender.sent.steps - sender.next_step
            sender.next_step = sender.sent.steps


_IN_COMMON = tuple(
    name for name in RunRecord.__struct_fields__ if name in vars(Run("", 0, "")) and name not in ("boot_id", "senders")
)
"""Attributes that a Run and its record share."""


class RunRegistry:
    """The runs by (run, rank). Past `MAX_RUNS` a new one replaces the one that ended first, or is refused."""

    MAX_RUNS = 512
    KEEP_ENDED_S = 900.0
    """An ended run's series go after this; its history stays."""

    def __init__(self, boot_id: str) -> None:
        self.boot_id = boot_id
        self.runs: dict[tuple[str, int], Run] = {}
        self.refused = 0
        self._last_tick_ns: int | None = None

    def apply(self, message: wire.Message, now_ns: int, now_s: float) -> bool:
        """Apply one message; return whether it had new step records."""
        key = (message.run, message.rank)
        run = self.runs.get(key)
        if run is None:
            if len(self.runs) >= self.MAX_RUNS and not self._make_room():
                if not self.refused:
                    logger.warning("more than %s runs: further ones are refused and counted", self.MAX_RUNS)
                self.refused += 1
                return False
            run = self.runs[key] = Run(message.run, message.rank, self.boot_id)
        return run.apply(message, now_ns, now_s)

    def excuse_pause(self, now_ns: int) -> None:
        """Call at the begin of a tick: if the agent itself was delayed, that is not the runs' silence."""
        pause_ns = 0 if self._last_tick_ns is None else now_ns - self._last_tick_ns
        self._last_tick_ns = now_ns
        if pause_ns > _LATE_TICK_NS:
            for run in self.runs.values():
                run.heard_ns = min(now_ns, run.heard_ns + pause_ns)

    def restore(self, records: Sequence[RunRecord], now_ns: int, now_s: float) -> None:
        """Load the runs that a former agent kept, but those that ended long ago."""
        for record in sorted(records, key=lambda record: record.last_message_s)[-self.MAX_RUNS :]:
            run = Run.restore(record, self.boot_id, now_ns, now_s)
            if run.ended_s is None or now_s - run.ended_s < self.KEEP_ENDED_S:
                run.changed = False
                self.runs[run.key] = run

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
