"""Runs as their hooks describe them: one `Run` per (run, rank), its ledger kept across lost messages and restarts, and all of the node's.

Times are ns of the agent's monotonic clock; no clock is read here.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from gpuwatch import wire
from gpuwatch.diagnosis.window import MemoryKills
from gpuwatch.ledger.states import UNKNOWN, Ledger
from gpuwatch_agent.processes.owners import NO_OWNER
from gpuwatch_agent.runs.records import (
    MINUTE_NS,
    Counts,
    LastMinute,
    RunRecord,
    Speaker,
    WorkerIo,
    clock_offset_ns,
    went_back,
)
from gpuwatch_agent.runs.timeline import RecentSteps, Stretch, Trace

SILENCE_NS = 10_000_000_000
"""A hook sends twice a second; after so long without a message the time is `unknown`."""
GONE_NS = 2_000_000_000
"""A process that has ended is given so long for its good-bye to arrive."""
ABANDONED_NS = 60_000_000_000
"""A silent run whose process is not visible counts as gone after this time."""
_SPEAKERS_KEPT = 16

RUNNING, ENDED, LOST = "running", "ended", "lost"


class Run:
    """One rank of a run, spoken for by one process, or by several after another (an elastic restart)."""

    def __init__(self, run: str, rank: int, boot_id: str) -> None:
        self.run = run
        self.rank = rank
        self.boot_id = boot_id
        self.ledger: Ledger | None = None
        self.trace = Trace()
        """Where in time the ledger's states lay, since this agent started."""
        self.process_start_ns = 0
        """Begin of the process that was heard last."""
        self.hello: wire.Hello | None = None
        self.status = RUNNING
        self.speakers: dict[str, Speaker] = {}
        """The processes heard last, in the order of their first message."""
        self.before = Counts()
        """What processes did that are no longer among the speakers."""
        self.lost = 0
        self.activity = "startup"
        self.fetch_cpu_ratio: float | None = None
        self.heard_ns = 0
        """Since when there is silence."""
        self.last_message_s = 0.0
        self.started_s = 0.0
        self.ended_s: float | None = None
        self.last_step_s: float | None = None
        self.worker_cpu_s = 0.0
        self.worker_seen_s: dict[int, float] = {}
        self.user = ""
        """Whose process it is; remembered when that has ended."""
        self.owner = NO_OWNER
        self.worker_io = WorkerIo()
        self.worker_io_seen: dict[int, WorkerIo] = {}
        self.oom: MemoryKills | None = None
        """What the kernel killed for lack of memory as the run was lost."""
        self.gpus: dict[str, str] = {}
        """Models of the GPUs that it held last, by UUID: what its time is charged for."""
        self.steps = RecentSteps()
        self.minute = LastMinute()
        self.changed = True

    @property
    def counts(self) -> Counts:
        counts = self.before
        for speaker in self.speakers.values():
            counts = counts.plus(speaker.sent)
        return counts

    def apply(self, message: wire.Message, now_ns: int, now_s: float) -> bool:
        """Take one message; return whether it brought step records that are new.

        Late, repeated and lost messages are all right: totals are cumulative. What a process says after its good-bye,
        or in an order that its totals contradict, is not listened to.
        """
        speaker = self._speaker(message.origin, now_ns, now_s)
        if speaker.said_bye:
            return False
        self.heard_ns, self.last_message_s = now_ns, now_s
        self.changed = True
        if isinstance(message, wire.Hello):
            self.hello = message
            if self.status == LOST:
                self._resume()
            return False
        columns = message.columns if isinstance(message, wire.Steps) else None
        self._book(speaker, message.totals, columns, now_ns, now_s)
        self._resume()
        if isinstance(message, wire.Steps):
            self.activity = message.activity
            if message.fetch_cpu_ratio is not None:
                self.fetch_cpu_ratio = message.fetch_cpu_ratio
            return self._take_steps(speaker, message, now_ns, now_s)
        if isinstance(message, wire.Bye):
            speaker.said_bye = True
            self.status, self.ended_s, self.activity = ENDED, now_s, ENDED
            self._give_up_steps(speaker)
        return False

    def pass_time(self, now_ns: int, now_s: float, alive: bool | None) -> None:
        """Note what silence means. `alive` says whether the process lives, None where that cannot be seen."""
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
            for speaker in self.speakers.values():
                self._give_up_steps(speaker)

    def remember(self, now_ns: int) -> None:
        """Keep the totals of this moment, for the shares of the last minute; of an ended run, its last one."""
        if self.ledger is None or self.status != RUNNING:
            return
        self.minute.keep(now_ns, self.ledger, self.counts)
        self.steps.drop_before(now_ns - MINUTE_NS)

    def recent_ns(self) -> tuple[int, dict[str, int]]:
        """Return (time covered, time by state) of the last minute, in ns; of the whole run while it is younger."""
        return (0, {}) if self.ledger is None else self.minute.states_ns(self.ledger)

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
            speakers=list(self.speakers.values()),
            before=self.before,
            lost=self.lost,
            last_step_s=self.last_step_s,
            worker_cpu_s=self.worker_cpu_s,
            worker_seen_s=self.worker_seen_s,
            user=self.user,
            owner=self.owner,
            worker_io=self.worker_io,
            worker_io_seen=self.worker_io_seen,
            ended_s=self.ended_s,
            gpus=self.gpus,
            oom=self.oom,
        )

    @classmethod
    def restore(cls, record: RunRecord, boot_id: str, now_ns: int, now_s: float) -> Run:
        """Return the run as a former agent left it. Its silence counts from now; a former boot's run is gone."""
        run = cls(record.run, record.rank, boot_id)
        run.ledger = Ledger(record.start_ns)
        run.ledger.watermark_ns = record.watermark_ns
        run.ledger.totals_ns.update(record.states_ns)
        for name in ("status", "started_s", "last_message_s", "hello", "before", "lost", "last_step_s", "ended_s"):
            setattr(run, name, getattr(record, name))
        run.worker_cpu_s, run.worker_seen_s, run.user = record.worker_cpu_s, dict(record.worker_seen_s), record.user
        run.owner = record.owner
        run.gpus, run.oom = dict(record.gpus), record.oom
        run.worker_io, run.worker_io_seen = record.worker_io, dict(record.worker_io_seen)
        run.speakers = {speaker.sender: speaker for speaker in record.speakers}
        run.heard_ns = now_ns
        run.process_start_ns = run.ledger.start_ns
        if record.boot_id != boot_id:  # that boot's clock has gone: its times are placed by the wall clock
            run.ledger.shift(now_ns - int((now_s - record.last_message_s) * 1e9) - record.watermark_ns)
            if run.status == RUNNING:
                run.status, run.ended_s = LOST, record.last_message_s
        run.activity = run.status if run.status != RUNNING else "silent"
        return run

    def _resume(self) -> None:
        self.status, self.ended_s, self.oom = RUNNING, None, None

    def _speaker(self, origin: wire.Origin, now_ns: int, now_s: float) -> Speaker:
        """Return the process that sent this, noted when it is heard for the first time."""
        speaker = self.speakers.get(origin.sender)
        if speaker is None:
            speaker = Speaker(origin.sender, clock_offset_ns(origin, self.boot_id, now_ns, now_s))
            self.speakers[origin.sender] = speaker
            self.steps.clear()
            if len(self.speakers) > _SPEAKERS_KEPT:
                oldest = next((key for key, one in self.speakers.items() if one.said_bye), next(iter(self.speakers)))
                self.before = self.before.plus(self.speakers.pop(oldest).sent)
        return speaker

    def _book(
        self,
        speaker: Speaker,
        totals: wire.Totals,
        columns: Mapping[str, bytes] | None,
        now_ns: int,
        now_s: float,
    ) -> None:
        start_ns, watermark_ns = totals.start_ns + speaker.offset_ns, totals.watermark_ns + speaker.offset_ns
        if speaker.sent is None:
            self.process_start_ns = start_ns
        if self.ledger is None:
            self.ledger = Ledger(start_ns)
            self.started_s = now_s - (now_ns - start_ns) / 1e9
        elif speaker.sent is None and start_ns > self.ledger.watermark_ns:
            # Between two processes of one run: not the run's time after a good-bye, else not known.
            if self.status == ENDED:
                self.ledger.shift(start_ns - self.ledger.watermark_ns)
            else:
                self._book_unknown(self.ledger, start_ns)
        if speaker.sent is not None and went_back(totals, speaker.sent):
            return
        before = speaker.sent.states_ns if speaker.sent is not None else {}
        grown = {state: ns - before.get(state, 0) for state, ns in totals.states_ns.items()}
        begin_ns, then = self.ledger.watermark_ns, dict(self.ledger.totals_ns)
        self.ledger.book_mixture({s: ns for s, ns in grown.items() if ns > 0}, watermark_ns)
        booked = {state: ns - then[state] for state, ns in self.ledger.totals_ns.items() if ns > then[state]}
        self.trace.add(Stretch(begin_ns, self.ledger.watermark_ns, booked, columns, speaker.offset_ns))
        speaker.sent = totals

    def _book_unknown(self, ledger: Ledger, until_ns: int) -> None:
        begin_ns = ledger.watermark_ns
        if booked_ns := ledger.book(UNKNOWN, until_ns):
            self.trace.add(Stretch(begin_ns, until_ns, {UNKNOWN: booked_ns}))

    def _take_steps(self, speaker: Speaker, message: wire.Steps, now_ns: int, now_s: float) -> bool:
        """Count and keep step records. Ones that came before, or were counted as lost, are not taken again."""
        count = wire.step_count(message.columns)
        if not count or message.first_step < speaker.next_step:
            return False
        self.lost += message.first_step - speaker.next_step
        speaker.next_step = message.first_step + count
        end_ns = self.steps.take(message.columns, speaker.offset_ns)
        if end_ns is None:
            return "start_ns" in message.columns
        self.last_step_s = now_s - (now_ns - end_ns) / 1e9
        return True

    def _give_up_steps(self, speaker: Speaker) -> None:
        """Count the records that will not come any more."""
        if speaker.sent is not None and speaker.sent.steps > speaker.next_step:
            self.lost += speaker.sent.steps - speaker.next_step
            speaker.next_step = speaker.sent.steps


logger = logging.getLogger(__name__)

_LATE_TICK_NS = 3_000_000_000


class RunRegistry:
    """The runs by (run, rank). Past `MAX_RUNS` a new one takes the place of the one that ended first, or is refused."""

    MAX_RUNS = 512
    KEEP_ENDED_S = 900.0
    """An ended run's series go after this; its history stays."""

    def __init__(self, boot_id: str) -> None:
        self.boot_id = boot_id
        self.runs: dict[tuple[str, int], Run] = {}
        self.refused = 0
        self._last_tick_ns: int | None = None

    def apply(self, message: wire.Message, now_ns: int, now_s: float) -> bool:
        """Take one message; return whether it brought step records that are new and are to be kept."""
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
        """Note that a tick begins. If the agent itself was held up, that is not the runs' silence."""
        pause_ns = 0 if self._last_tick_ns is None else now_ns - self._last_tick_ns
        self._last_tick_ns = now_ns
        if pause_ns > _LATE_TICK_NS:
            for run in self.runs.values():
                run.heard_ns = min(now_ns, run.heard_ns + pause_ns)

    def restore(self, records: Sequence[RunRecord], now_ns: int, now_s: float) -> None:
        """Take up the runs that a former agent kept, those that ended long ago left out."""
        for record in sorted(records, key=lambda record: record.last_message_s)[-self.MAX_RUNS :]:
            run = Run.restore(record, self.boot_id, now_ns, now_s)
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
