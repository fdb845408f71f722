"""The node's training runs: one `Run` per (run, rank), whose ledger survives lost messages and restarts.

Times are ns of the agent's monotonic clock; no clock is read here.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from pathlib import Path

import msgspec
from msgspec.structs import replace

from gpuwatch import wire
from gpuwatch.diagnosis.finding import Conclusion
from gpuwatch.diagnosis.rules import BY_CAUSE
from gpuwatch.diagnosis.window import JobFacts, MemoryKills
from gpuwatch.errors import ProtocolError
from gpuwatch.ledger.states import RUN_STATES, UNKNOWN, Ledger
from gpuwatch.wire.sockets import Peer
from gpuwatch_agent.processes.owners import NO_OWNER, Owner
from gpuwatch_agent.runs import timeline
from gpuwatch_agent.runs.records import Counted, Sender, add_counters, clock_offset_ns, went_back
from gpuwatch_agent.runs.timeline import RecentColumns, Stretch, Trace, read_columns

SILENCE_NS = 10_000_000_000  # A hook sends twice a second; after so long without a message the time is `unknown`
GONE_NS = 2_000_000_000  # grace for the last message of a process that has ended
ABANDONED_NS = 60_000_000_000  # A silent run whose process is not visible counts as gone after this time
MINUTE_NS = 60_000_000_000
SENDERS_KEPT = 16
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_LONGEST_TICK_NS = 1_200_000_000  # of one that comes later, the rest is the agent's own delay
_EVALUATED_AFTER_S = 30.0
_REPORTED_S = 7 * 86_400.0  # a run that a reboot ended longer ago is not reported as lost
_OLDEST_START_NS = 400 * 86_400_000_000_000

RUNNING, ENDED, LOST = "running", "ended", "lost"
RunKey = tuple[str, int]  # its name and rank

logger = logging.getLogger(__name__)


class Run(msgspec.Struct, eq=False):
    """One rank of a run, whose messages one process sends, or several one after another (an elastic restart).

    The fields before `trace` are kept in the history, in one transaction with what is served of them.
    """

    run: str
    rank: int
    boot_id: str
    ledger: Ledger | None = None
    status: str = RUNNING
    started_s: float = 0.0
    last_message_s: float = 0.0
    ended_s: float | None = None
    noticed_s: float = 0.0  # when an agent found that it was lost: after its end if none was there
    last_step_s: float | None = None
    hello: wire.Hello | None = None
    senders: dict[str, Sender] = {}  # the last processes, in the order of their first message
    earlier: dict[str, Sender] | None = None  # its last processes before it was dropped; None: not looked for yet
    before: wire.Counters = msgspec.field(default_factory=wire.Counters)
    """Counters of processes that are no longer among the senders."""
    lost: int = 0  # step records that never arrived
    worker_totals: dict[str, float] = {}  # what its workers have used, by name; absent: not readable
    worker_seen: dict[int, dict[str, float]] = {}  # by pid: what each has used that is in `worker_totals` already
    user: str = ""
    owner: Owner = NO_OWNER
    uid: int | None = None  # the user whose processes alone send for it; None: not known
    address: str = ""  # what alone sends for it over TCP, while it is heard; empty: a process of this node sends
    gpus: dict[str, str] = {}  # models of the GPUs that it held last, by UUID: its time is charged for them
    lent_s: float = 0.0  # seconds of its GPUs that are those of others, whose processes held them too
    oom: MemoryKills | None = None  # what the kernel's OOM killer did as the run was lost
    job_over: bool = False  # it was lost, and the control group of its job or pod is gone
    energy_joules: dict[str, float] = {}  # its share of its GPUs' energy, by state of the GPU
    conclusion: Conclusion | None = None  # by its only process, at its end
    counted: Counted = msgspec.field(default_factory=Counted)  # its job's counters

    trace: Trace = msgspec.field(default_factory=Trace)  # where in time the states lay, since this agent started
    process_start_ns: int = 0  # start of the process that sent last
    activity: str = "startup"
    fetch_cpu_ratio: float | None = None
    standstill: wire.Standstill | None = None
    heard_ns: int = 0  # when the last message arrived
    job_group: Path | None = None  # the control group of its whole job or pod, which the scheduler removes at its end
    restored: bool = False  # no totals of it were heard since this agent started
    steps: RecentColumns = msgspec.field(default_factory=RecentColumns)  # those of the last minute
    kept: tuple[int, int] = 0, timeline.KEPT  # of the steps: since when, and how many at most
    seconds: list[tuple[int, dict[str, int], wire.Counters]] = []
    """(when, time by state, counters) of every second of the last minute."""
    changed: bool = True
    job: JobFacts | None = None  # what the ledger of its job says of interruptions and checkpoints; None: it has no job
    kept_bytes: int = 0  # what is kept and served of it takes about so much, as it was last weighed

    @property
    def key(self) -> RunKey:
        return self.run, self.rank

    @property
    def over_s(self) -> float:
        """Since when it is known to be over, in Unix time, of a run that is."""
        return max(self.ended_s or 0.0, self.noticed_s)

    @property
    def ended_well(self) -> bool:
        return self.status == ENDED and not any(sender.failed for sender in [*self.senders.values()][-1:])

    @property
    def live_hello(self) -> wire.Hello | None:
        """The last Hello while the run is running."""
        return self.hello if self.status == RUNNING else None

    @property
    def counts(self) -> wire.Counters:
        """The counters of all its processes."""
        sent = [sender.sent for sender in self.senders.values() if sender.sent is not None]
        return sent[0] if len(sent) == 1 and self.before == wire.Counters() else reduce(add_counters, sent, self.before)

    def apply(self, message: wire.Message, now_ns: int, now_s: float, peer_pid: int = 0) -> bool:
        """Apply one message; return whether it had new step records.

        Late, repeated and lost messages do no harm: totals are cumulative. Messages after a process's Bye are ignored,
        and so are totals that went back. Raises: ProtocolError, before anything is changed, for times that cannot be.
        """
        offset_ns = self._check_times(message, now_ns, now_s)
        sender = self._sender(message.origin, offset_ns)
        sender.pid = sender.pid or peer_pid
        if sender.said_bye:
            return False
        self.heard_ns = max(self.heard_ns, now_ns)  # it may have waited while the agent did not run
        self.last_message_s, self.changed = now_s, True
        if isinstance(message, wire.Hello):
            self.hello = message
            if sender.first_step is None:
                sender.first_step = message.first_step
            sender.rewinds = max(sender.rewinds, message.rewinds, key=len)
            if not sender.began_ns:
                ticks = message.process_start_ticks if message.origin.boot_id == self.boot_id else 0
                sender.began_ns = min(now_ns, ticks * 1_000_000_000 // _TICKS_PER_S)
            if self.status == LOST:
                self._resume()
            return False
        self.restored = False  # a Hello has no totals, and those that were kept may be older than what was served
        self._book(sender, message, now_ns, now_s)
        self._resume()
        if isinstance(message, wire.Steps):
            self.activity, self.standstill = message.activity, message.standstill
            if message.fetch_cpu_ratio is not None:
                self.fetch_cpu_ratio = message.fetch_cpu_ratio
            return self._take_steps(sender, message, now_ns, now_s)
        if isinstance(message, wire.Bye):
            sender.said_bye, sender.failed = True, message.failed
            self.conclusion = _concluded(message) if len(self.senders) == 1 else None
            self._end(ENDED, now_s, [sender])
        return False

    def add_worker(self, pid: int, **used: float | None) -> None:
        """Add to the totals what a worker has used since it was seen last, of all it has used; None: not readable."""
        seen = self.worker_seen.setdefault(pid, {})
        for name, value in used.items():
            if value is not None:
                grown = max(0, value - seen.get(name, 0))
                self.worker_totals[name], seen[name] = self.worker_totals.get(name, 0) + grown, value

    def add_energy(self, used: Mapping[str, float], share: float) -> None:
        """Add its share of the joules by state that a GPU used, in a run's states."""
        for state in used.keys() & set(RUN_STATES):
            self.energy_joules[state] = self.energy_joules.get(state, 0.0) + used[state] * share

    def pass_time(self, now_ns: int, now_s: float, alive: bool | None) -> None:
        """Book silence as unknown, or end the run. `alive`: whether its process is; None where that is not visible."""
        if self.status != RUNNING:
            return
        silent_ns = now_ns - self.heard_ns
        gone = (alive is False and silent_ns > GONE_NS) or (alive is None and silent_ns > ABANDONED_NS)
        if self.restored and alive is not True:
            self.activity = "silent"  # it may have ended with its last message: no later time is known to be its own
        elif self.ledger is not None and (gone or silent_ns > SILENCE_NS):
            self._book_unknown(self.ledger, now_ns)
            self.activity, self.changed = "silent", True
        if gone:
            self._end(LOST, self.last_message_s if self.restored else now_s, self.senders.values())
            self.noticed_s = now_s

    def remember(self, now_ns: int, runs: int = 1) -> None:
        """Record the present totals for the last minute, as one of so many runs; an ended run keeps its last minute."""
        if self.ledger is None or self.status != RUNNING:
            return
        self.seconds.append((now_ns, dict(self.ledger.totals_ns), self.counts))
        while len(self.seconds) > 2 and self.seconds[1][0] <= now_ns - MINUTE_NS:
            del self.seconds[0]
        self.kept = now_ns - MINUTE_NS, min(timeline.KEPT, timeline.KEPT_OF_ALL // runs)
        self.steps = self.steps.followed_by(RecentColumns(), *self.kept)
        self.trace.most_bytes = min(timeline.KEPT_BYTES, timeline.KEPT_BYTES_OF_ALL // runs)

    def recent(self) -> tuple[int, dict[str, int], wire.Counters, wire.Counters]:
        """Return (ns covered, ns by state, counters now and at its begin) of the last minute, or of a younger run."""
        if self.ledger is None:
            return 0, {}, wire.Counters(), wire.Counters()
        is_whole = self.ledger.sum_ns <= MINUTE_NS or not self.seconds
        _, then, before = (0, dict[str, int](), wire.Counters()) if is_whole else self.seconds[0]
        states = {s: ns - then.get(s, 0) for s, ns in self.ledger.totals_ns.items() if ns > then.get(s, 0)}
        return sum(states.values()), states, self.seconds[-1][2] if self.seconds else before, before

    def record(self) -> bytes | None:
        """Return what must survive a restart of the agent; None before the first totals."""
        if self.ledger is None:
            return None
        return msgspec.msgpack.encode({name: getattr(self, name) for name in _KEPT}, enc_hook=Ledger.kept)

    def restore(self, boot_id: str, now_ns: int, now_s: float) -> Run:
        """Continue a run that a former agent recorded. Its silence counts from now; a former boot's run is gone."""
        assert self.ledger is not None
        self.heard_ns = now_ns
        self.process_start_ns = self.ledger.start_ns
        if self.boot_id != boot_id:  # that boot's clock is gone: its times are mapped by the wall clock
            self.boot_id = boot_id
            self.ledger.shift(now_ns - int(max(0.0, now_s - self.last_message_s) * 1e9) - self.ledger.watermark_ns)
            if self.status == RUNNING:
                self.status, self.ended_s, self.changed = LOST, self.last_message_s, True
                self.noticed_s = now_s if now_s - self.last_message_s < _REPORTED_S else 0.0
        self.activity = self.status if self.status != RUNNING else "startup"  # unless `pass_time` finds it silent
        self.restored = True
        return self

    def _resume(self) -> None:
        self.status, self.ended_s, self.noticed_s, self.oom = RUNNING, None, 0.0, None
        self.conclusion, self.job_over = None, False

    def _end(self, status: str, ended_s: float, senders: Iterable[Sender]) -> None:
        """End the run; the step records that will not arrive any more are lost."""
        self.status, self.ended_s, self.activity, self.changed = status, ended_s, status, True
        for sender in senders:
            if sender.sent is not None and sender.sent.steps > sender.next_step:
                self.lost += sender.sent.steps - sender.next_step
                sender.next_step = sender.sent.steps

    def _check_times(self, message: wire.Message, now_ns: int, now_s: float) -> int:
        """Return the sender's clock offset, by which the message was sent before it arrived. Raises: ProtocolError."""
        origin = message.origin
        sender = self.senders.get(origin.sender)
        offset_ns = clock_offset_ns(origin, self.boot_id, now_ns, now_s) if sender is None else sender.offset_ns
        if origin.monotonic_ns + offset_ns > now_ns + wire.CLOCK_SLACK_NS:
            if offset_ns == 0:
                raise ProtocolError("the message's timestamp is in the future", "impossible")
            # another clock, whose first message had waited, or that runs faster
            offset_ns = now_ns - origin.monotonic_ns
        if not isinstance(message, wire.Hello) and message.totals.start_ns + offset_ns < now_ns - _OLDEST_START_NS:
            raise ProtocolError("the run began more than 400 days ago", "impossible")
        return offset_ns

    def _sender(self, origin: wire.Origin, offset_ns: int) -> Sender:
        sender = self.senders.get(origin.sender)
        if sender is not None:
            sender.offset_ns = offset_ns
            return sender
        sender = self.senders[origin.sender] = Sender(offset_ns, self.boot_id, began_ns=None)
        self.steps = RecentColumns()
        if len(self.senders) > SENDERS_KEPT:
            oldest = next((key for key, one in self.senders.items() if one.said_bye), next(iter(self.senders)))
            self.before = add_counters(self.before, self.senders.pop(oldest).sent)
        return sender

    def _book(self, sender: Sender, message: wire.Steps | wire.Bye, now_ns: int, now_s: float) -> None:
        totals, columns = message.totals, message.columns if isinstance(message, wire.Steps) else None
        start_ns, watermark_ns = totals.start_ns + sender.offset_ns, totals.watermark_ns + sender.offset_ns
        started_s = now_s - (now_ns - start_ns) / 1e9
        if sender.sent is None:
            self.process_start_ns = sender.started_ns = start_ns
            sender.started_s = started_s
        if self.ledger is None:
            self.ledger, self.started_s = Ledger(start_ns), started_s
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
        sender.take(totals)

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
        if steps := read_columns(message.columns, sender.offset_ns):
            self.steps = self.steps.followed_by(steps, *self.kept)
            self.last_step_s = now_s - (now_ns - steps.end_ns[-1]) / 1e9
        return "start_ns" in message.columns


def _concluded(message: wire.Bye) -> Conclusion | None:
    """Return what the process found by its end, without causes not known here; None where that cannot be read."""
    try:
        found = msgspec.msgpack.decode(message.conclusion, type=Conclusion)
        msgspec.json.decode(msgspec.json.encode(found), type=Conclusion)  # as the API gives it: JSON has no NaN
    except wire.UNDECODABLE:
        return None
    return replace(found, findings=tuple(each for each in found.findings if each.cause in BY_CAUSE))


_KEPT = Run.__struct_fields__[: Run.__struct_fields__.index("trace")]
_decoder = msgspec.msgpack.Decoder(Run, dec_hook=lambda kind, kept: Ledger(0).restore(*kept))
read_record = _decoder.decode
"""Returns the run in a record, for `Run.restore` or to be shown. Raises: `wire.UNDECODABLE`."""


class RunRegistry:
    """The runs by (run, rank), of one user each. Past `MAX_RUNS` a new one replaces an ended one, or the top process's.

    A run whose message or figures cannot be processed is dropped, so that all others go on.
    """

    MAX_RUNS = 512
    KEEP_ENDED_S = 900.0  # an ended run's series go so long after its end was found; its history stays
    KEEP_ENDED = 64  # of more ended runs, the series of those that ended first go earlier
    _FAIR_SHARE = 4  # so many runs of a process are never given up for another process's
    _BANNED_S = 60.0
    _MOST_BYTES = 4 << 20  # of a user's runs together, as `weigh` counts them
    _SERIES_OF_A_RUN = 40

    def __init__(
        self,
        boot_id: str,
        alive: Callable[[wire.Hello | None], bool | None] = lambda hello: None,
        is_peer: Callable[[wire.Hello, int], bool] = lambda hello, pid: True,
    ) -> None:
        self.boot_id = boot_id
        self.runs: dict[RunKey, Run] = {}
        self.failures: Counter[str] = Counter()
        """Runs dropped for an error, by the step that failed, or (given_up) to make room for another process's."""
        self.kept_apart = 0  # processes that sent for a run and rank while another process of these was alive
        self._alive, self._is_peer = alive, is_peer
        self._banned: dict[RunKey, float] = {}
        self._apart: dict[str, RunKey] = {}  # by sender: the key of its run, where that is not the one that it gives
        self._last_tick_ns: int | None = None

    def apply(self, message: wire.Message, now_ns: int, now_s: float, peer: Peer | None = None) -> Run | None:
        """Apply a message; return its run if it had new step records, else None. Raises: ProtocolError if refused."""
        peer = peer or Peer()
        if peer.is_remote and isinstance(message, wire.Hello):  # nothing proves its processes: they own no GPU
            loader = None if message.loader is None else replace(message.loader, worker_pids=())
            message = replace(message, pid=0, pid_namespace=0, process_start_ticks=0, loader=loader)
        key = self._key(message, now_ns, peer)
        if self._banned.get(key, 0.0) > now_s:
            raise ProtocolError(f"run {key[0]!r} was dropped after an error; it may come back in a minute", "dropped")
        run = self.runs.get(key)
        self._check_peer(message, run, peer, now_ns)
        if run is None:
            if len(self.runs) >= self.MAX_RUNS:
                self._make_room(peer)
            run = Run(*key, self.boot_id)
        new_steps = False
        with self.guard(run, "apply", now_s):
            new_steps = run.apply(message, now_ns, now_s, peer.pid)
            self.runs[key] = run
            if run.uid is None:
                run.uid = peer.uid
            run.address = peer.address if peer.is_remote else ""
        return run if new_steps else None

    @contextmanager
    def guard(self, run: Run, step: str, now_s: float) -> Iterator[None]:
        """Drop the run if an error occurs: all others go on."""
        try:
            yield
        except ProtocolError:
            raise
        except Exception as error:
            self.drop(run, step, error, now_s)

    def weigh(self, run: Run, record: bytes | None) -> None:
        """Weigh a run: its texts, processes, name in each series. Raises: ValueError if its user has too much."""
        run.kept_bytes = len(record or wire.encode(run.hello)) + self._SERIES_OF_A_RUN * len(run.run.encode())
        of_user = sum(each.kept_bytes for each in self.runs.values() if each.uid == run.uid)
        if of_user > self._MOST_BYTES:
            raise ValueError(f"the runs of uid {run.uid} take {of_user} bytes, a user's at most {self._MOST_BYTES}")

    def drop(self, run: Run, step: str, error: Exception, now_s: float) -> None:
        """Drop a run because of an error. Its messages are refused for a minute."""
        self.runs.pop(run.key, None)
        self._banned = {key: until_s for key, until_s in self._banned.items() if until_s > now_s}
        self._banned[run.key] = now_s + self._BANNED_S
        self.count_failure(step, error, f"run {run.run!r} rank {run.rank} is dropped for {self._BANNED_S:.0f} s")

    def count_failure(self, step: str, error: Exception, consequence: str) -> None:
        """Count an error by the step that failed; each step's first one is logged."""
        if not self.failures[step]:
            logger.error("%s failed: %s; later errors of this kind are only counted", step, consequence, exc_info=error)
        self.failures[step] += 1

    def _key(self, message: wire.Message, now_ns: int, peer: Peer) -> RunKey:
        """Return the key of a message's run: another than it gives if the run's process is alive and not its sender."""
        name, sender = message.run, message.origin.sender
        key = self._apart.get(sender, (name, message.rank))
        run = self.runs.get(key)
        if run is None or sender in run.senders or not run.senders or run.status != RUNNING:
            return key
        latest = next(reversed(run.senders.values()))
        silent_ns = now_ns - run.heard_ns
        same_hello = isinstance(message, wire.Hello) and run.hello and message.pid and message.pid == run.hello.pid
        over = same_hello or (peer.pid and latest.pid == peer.pid) or latest.said_bye or silent_ns > SILENCE_NS
        # no process is seen over TCP, and a former agent's may have ended meanwhile
        sends = peer.is_remote and peer.address == run.address and silent_ns < GONE_NS and not run.restored
        if over or not (sends or self._alive(run.hello)):
            return key  # it takes over: an elastic restart, or a process's next loop
        number = 2
        while (key := (f"{name[: wire.MAX_NAME - 8]}#{number}", message.rank)) in self.runs:
            number += 1
        if not self.kept_apart:
            logger.warning("two processes report as run %r rank %s: the second becomes %r", name, message.rank, key[0])
        self.kept_apart += 1
        if len(self._apart) >= self.MAX_RUNS:
            self._apart = {sender: at for sender, at in self._apart.items() if at in self.runs}
        self._apart[sender] = key
        return key

    def _check_peer(self, message: wire.Message, run: Run | None, peer: Peer, now_ns: int) -> None:
        """Raise ProtocolError for a message that claims another user's or address's run, or another process."""
        bound = run is not None and run.status == RUNNING and now_ns - run.heard_ns <= SILENCE_NS
        if run is not None and bound and run.address and run.address != (peer.address if peer.is_remote else ""):
            raise ProtocolError(f"{peer.address} sends for run {message.run!r} of {run.address}", "wrong_address")
        if peer.uid is None and not peer.is_remote:
            return
        owners = [run] if run is not None else [one for one in self.runs.values() if one.run == message.run]
        if any(one.uid not in (None, peer.uid) for one in owners):
            raise ProtocolError(f"uid {peer.uid} sends for run {message.run!r} of uid {owners[0].uid}", "wrong_user")
        sender = None if run is None else run.senders.get(message.origin.sender)
        if sender is not None and sender.pid and peer.pid and sender.pid != peer.pid:
            raise ProtocolError(f"pid {peer.pid} sends as pid {sender.pid}, for run {message.run!r}", "wrong_process")
        if isinstance(message, wire.Hello) and peer.pid and not self._is_peer(message, peer.pid):
            raise ProtocolError(f"pid {peer.pid} claims to be pid {message.pid}, run {message.run!r}", "wrong_process")

    def excuse_pause(self, now_ns: int) -> None:
        """Call with the time that a tick books up to: if the agent itself was late, that is not the runs' silence."""
        late_ns = 0 if self._last_tick_ns is None else now_ns - self._last_tick_ns - _LONGEST_TICK_NS
        self._last_tick_ns = now_ns
        for run in self.runs.values():
            run.heard_ns += max(0, late_ns)

    def restore(self, kept: Sequence[Run], now_ns: int, now_s: float) -> None:
        """Continue the runs that a former agent kept, but those that it knew to be over long ago."""
        for run in sorted(kept, key=lambda run: run.last_message_s)[-self.MAX_RUNS :]:
            run.changed = False
            run.restore(self.boot_id, now_ns, now_s)
            if run.status == RUNNING or now_s - run.over_s < self.KEEP_ENDED_S:
                self.runs[run.key] = run
                if run.hello is not None and run.hello.run != run.run:
                    self._apart |= dict.fromkeys(run.senders, run.key)

    def forget_ended(self, now_s: float) -> None:
        """Drop the runs that are known to be over for long enough, and the oldest of many."""
        for number, run in enumerate(self._ended()):
            age_s = now_s - run.over_s
            if run.restored and run.changed:
                continue  # the history does not have its end yet
            if number >= self.KEEP_ENDED or age_s > self.KEEP_ENDED_S:
                del self.runs[run.key]
            elif run.seconds and age_s > _EVALUATED_AFTER_S:
                run.steps, run.seconds, run.trace = RecentColumns(), [], Trace()  # its last minute was evaluated

    def _ended(self) -> list[Run]:
        over = [run for run in self.runs.values() if run.status != RUNNING and run.ended_s is not None]
        return sorted(over, key=lambda run: run.over_s, reverse=True)

    def _make_room(self, peer: Peer) -> None:
        """Give up the run that ended first, else the newest of the top user's top process. Raises: ProtocolError."""
        if ended := self._ended():
            del self.runs[ended[-1].key]
            return
        user, runs_of_user = Counter(run.uid for run in self.runs.values()).most_common(1)[0]
        of_user = [run for run in self.runs.values() if run.uid == user]
        process, runs_of_process = Counter(map(_process, of_user)).most_common(1)[0]
        own = peer.address if peer.is_remote else peer.pid
        greedy = runs_of_process > self._FAIR_SHARE and process and process != own
        if not greedy and not (user != peer.uid and runs_of_user > self.MAX_RUNS // 2):
            raise ProtocolError(f"more than {self.MAX_RUNS} runs: further ones are refused", "too_many_runs")
        newest = next(run for run in reversed(of_user) if _process(run) == process)
        del self.runs[newest.key]
        self.failures["given_up"] += 1


def _process(run: Run) -> int | str:
    """Return the process that sent last for a run, over TCP its address; 0: not known."""
    return run.address or (next(reversed(run.senders.values())).pid if run.senders else 0)
