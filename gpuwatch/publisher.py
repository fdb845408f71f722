"""The hook's background thread: folds the recorder, looks at the node, tells the agent. Twice a second, never in the way."""

from __future__ import annotations

import contextlib
import itertools
import logging
import platform
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from gpuwatch import __version__, endpoint, wire
from gpuwatch.accounts import Accounts, activity, device
from gpuwatch.errors import ConfigError
from gpuwatch.identity import Identity
from gpuwatch.membership import Membership
from gpuwatch.recorder import NOBODY, Recorder
from gpuwatch.report import Report, make_report
from gpuwatch.throughput import Done
from gpuwatch.timeline import PhaseRecord, StepRecord
from gpuwatch.transport import Sender, ZmqSender

logger = logging.getLogger(__name__)

INTERVAL_S = 0.5
_HELLO_EVERY = 2
_HOST_EVERY = 4
_EARLY_VERDICT_S = 60.0
_PHASE_TIME_TO_LIVE_S = 3600.0
_BACKLOG_MESSAGES = 120
_BACKLOG_BYTES = 4 << 20
"""Messages kept while an agent is away: a minute, or 4 MiB. Older ones go, counted; their time stays in the totals."""
_STEPS_A_FRAME = 1024
"""Steps in one message: 48 KiB, so that what queues for an agent that hangs stays small at 10,000 steps a second too."""
_LOOK_AGAIN_TURNS = 20
"""An agent that has taken nothing for so many turns may have come back elsewhere."""
_CLOSE_S = 0.8
_CONNECT_TRIES, _CONNECT_TRY_S = 10, 0.01


_not_ours: list[object] = []
"""Sockets that a fork copied into this process: kept, because even to collect them would touch them."""


@dataclass(frozen=True)
class RunFacts:
    """What the user said of the run."""

    name: str
    job: str
    tags: dict[str, str]
    flops: wire.Flops | None = None


class Publisher:
    """Owns the accounts and the socket. All of it happens in one daemon thread of the process that made it."""

    def __init__(
        self,
        recorder: Recorder,
        membership: Membership,
        facts: RunFacts,
        where: str | None = None,
        early_verdict: Callable[[], bool] | None = None,
        connect: Callable[[str], Sender] = ZmqSender,
    ) -> None:
        self.accounts = Accounts(recorder)
        self._recorder = recorder
        self.membership = membership
        self._told_as: Identity | None = None
        self._facts = facts
        self._where = where
        self._early_verdict = early_verdict
        self._connect = connect
        self._sender: Sender | None = None
        self._connected_to: str | None = None
        self._refused_turns = 0
        self._hello_due = True
        self._heard = False
        """An agent has taken a message."""
        self._sender_id = uuid.uuid4().hex
        self._seq = itertools.count(1)
        self._backlog: deque[tuple[bytes, int]] = deque()
        self._backlog_bytes = 0
        self._dropped = 0
        self._overhead_ns = 0
        self._sampled_fetch_ns = (0, 0)
        self._thread: threading.Thread | None = None
        self._start_lock = threading.Lock()
        self._stop = threading.Event()
        self._warned: set[str] = set()
        self.reporting: int | None = None
        """The thread that makes a report now, and so holds the accounts' lock."""

    @property
    def _identity(self) -> Identity:
        return self._told_as or self.membership.identity

    def look_at_world(self) -> bool:
        """Look whether torch.distributed tells our rank by now; return whether there is a run to tell of."""
        speaks = self.membership.look(self._recorder.in_step, self.accounts.timeline.steps > 0)
        self.accounts.local_world_size = self.membership.identity.local_world_size
        return speaks

    @property
    def loader(self) -> wire.Loader | None:
        return self.accounts.loader

    @loader.setter
    def loader(self, loader: wire.Loader | None) -> None:
        self.accounts.loader = loader

    def note_batch(self, size_bytes: int | None) -> None:
        if size_bytes is not None:
            self.accounts.batch_bytes = size_bytes

    def count_failure(self) -> None:
        self.accounts.failures += 1

    def start(self) -> None:
        """Start the background thread unless it runs. Costs an attribute look-up when it does."""
        if self._thread is None:
            with self._start_lock:  # two threads may begin their loops at once, but a socket is one thread's
                if self._thread is not None or self._stop.is_set():
                    return
                self._thread = threading.Thread(target=self._run, name="gpuwatch", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError as error:  # no more threads to be had, or the interpreter is going down
                    self._disable(error)

    def report(self, closed: bool) -> Report:
        """Return the run so far; after `close()` the run as it ended."""
        accounts = self.accounts
        if not closed:
            self._look_at_host()
        with accounts.lock:
            self.reporting = threading.get_ident()
            try:
                if not closed:
                    accounts.fold(self._recorder.clock())
                # The training thread may have logged an end between our look at the clock and at its log.
                now = accounts.timeline.ledger.watermark_ns
                now = now if closed else max(now, self._recorder.clock())
                window, tail_ns = accounts.window(now)
            finally:
                self.reporting = None
            line = accounts.timeline
            done = Done(
                seconds=sum(line.phases_ns.values()) / 1e9,
                steps=line.steps,
                samples=line.samples if line.samples_known else None,
                tokens=line.tokens if line.tokens_known else None,
            )
        return make_report(
            run=self.membership.identity.run,
            name=self._facts.name,
            window=window,
            provisional_s={state: ns / 1e9 for state, ns in tail_ns.items()},
            done=done,
            flops=self._facts.flops,
        )

    def close(self) -> None:
        """Book the tail, send what is left and the good-bye; takes at most about a second, with or without an agent."""
        self._stop.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=_CLOSE_S)
        self._look_at_host()
        with self.accounts.lock:
            self.accounts.finish(self._recorder.clock())
        if thread is None or thread.is_alive():
            return
        with contextlib.suppress(Exception):
            self._tell(hello=True, bye=True)
        if self._sender is not None:
            with contextlib.suppress(Exception):
                self._sender.close()
            self._sender = None

    def abandon(self) -> None:
        """Forget everything without touching it: called in a forked child, where the socket is the parent's."""
        _not_ours.append(self._sender)
        self._thread = None
        self._sender = None
        self._backlog.clear()
        self.accounts.lock = threading.Lock()

    def _run(self) -> None:
        started = time.monotonic()
        try:
            for turn in itertools.count():
                self._overhead_ns = time.thread_time_ns()
                if turn % _HOST_EVERY == 0:
                    self._look_at_host()
                with self.accounts.lock:
                    self.accounts.fold(self._recorder.clock())
                try:
                    self._tell(hello=turn % _HELLO_EVERY == 0)
                except Exception as error:
                    self._failed("telling the agent", error)
                tell = self._early_verdict
                if tell is not None and time.monotonic() - started > _EARLY_VERDICT_S and tell():
                    self._early_verdict = None
                if self._stop.wait(INTERVAL_S):
                    return
        except Exception as error:
            self._disable(error)

    def _look_at_host(self) -> None:
        """Without evidence there is still a ledger."""
        try:
            self.accounts.look_at_host()
        except Exception as error:
            self._failed("looking at the node", error)

    def _tell(self, hello: bool, bye: bool = False) -> None:
        """Tell the agent what was folded. Step records that wait for it are bounded; the oldest go first, counted."""
        if not self.look_at_world():
            return
        with self.accounts.lock:
            news = self.accounts.take_news()
        told = 0
        try:
            if hello:
                self._hello_due = True
                self._find_agent()
            if self._sender is None:
                return
            self._take_place()
            if self._hello_due:
                self._greet(self._sender, _CONNECT_TRIES if bye and not self._heard else 1)
            for phase in news.phases[-_BACKLOG_MESSAGES:]:
                self._post(self._phase(phase), 0)
            while True:  # without steps too: a heartbeat
                steps = news.steps[told : told + _STEPS_A_FRAME]
                self._post(self._steps(steps, news.first_step + told), len(steps))
                told += len(steps)
                if told == len(news.steps):
                    break
            if bye:
                self._post(self._bye("closed"), 0)
            self._flush()
        finally:
            self._dropped += len(news.steps) - told

    def _greet(self, sender: Sender, tries: int) -> None:
        """Say who we are. At the end of a run that was too short for a connection, that is waited for a moment."""
        while tries and not sender.send(self._hello()):
            tries -= 1
            if tries:
                time.sleep(_CONNECT_TRY_S)
        self._hello_due = not tries
        self._heard = self._heard or not self._hello_due

    def _take_place(self) -> None:
        """Speak as the rank that torch.distributed has named; what was told under another name ends there."""
        before, now = self._told_as, self.membership.identity
        if before is not None and (before.run, before.rank) != (now.run, now.rank):
            self._post(self._bye("moved"), 0)
            self._flush()
            self._sender_id = uuid.uuid4().hex
            self._hello_due = True
        self._told_as = now

    def _find_agent(self) -> None:
        """Connect once an agent's socket is there. ZeroMQ connects again by itself when an agent comes back there."""
        if self._sender is not None and self._refused_turns < _LOOK_AGAIN_TURNS:
            return
        try:
            where = endpoint.checked(self._where, "endpoint") if self._where else endpoint.find()
        except ConfigError as error:
            self._warn("endpoint", "gpuwatch: no agent is told: %s", error)
            return
        if where is None or where == self._connected_to:
            return
        old, self._sender, self._connected_to = self._sender, None, None
        if old is not None:
            old.close()
        self._sender = self._connect(where)
        self._connected_to = where
        self._refused_turns = 0

    def _post(self, frame: bytes, steps: int) -> None:
        self._backlog.append((frame, steps))
        self._backlog_bytes += len(frame)
        while len(self._backlog) > _BACKLOG_MESSAGES or self._backlog_bytes > _BACKLOG_BYTES:
            old, lost = self._backlog.popleft()
            self._backlog_bytes -= len(old)
            self._dropped += lost

    def _flush(self) -> None:
        self._refused_turns += 1
        while self._backlog and self._sender is not None and self._sender.send(self._backlog[0][0]):
            self._backlog_bytes -= len(self._backlog.popleft()[0])
            self._refused_turns = 0

    def _failed(self, doing: str, error: BaseException) -> None:
        """Something that the ledger can do without has failed: training and the ledger go on."""
        self.accounts.failures += 1
        self._warn(doing, "gpuwatch: %s failed; what it would have told is missing: %r", doing, error)

    def _warn(self, cause: str, message: str, *arguments: object) -> None:
        """Say each cause once."""
        if cause not in self._warned:
            self._warned.add(cause)
            logger.warning(message, *arguments)

    def _disable(self, error: BaseException) -> None:
        self._recorder.thread = NOBODY
        self.accounts.blind = True
        self.accounts.failures += 1
        self._warn("hook", "gpuwatch: the hook has stopped and records nothing more: %r", error)

    # Messages -----------------------------------------------------------------------------------------------------

    def _origin(self) -> wire.Origin:
        return wire.Origin(
            version=wire.PROTOCOL_VERSION,
            sender=self._sender_id,
            seq=next(self._seq),
            boot_id=self._identity.boot_id,
            monotonic_ns=time.monotonic_ns(),
            time_ns=time.time_ns(),
        )

    def _totals(self) -> wire.Totals:
        with self.accounts.lock:
            return self.accounts.totals(self._dropped, self._overhead_ns)

    def _hello(self) -> bytes:
        who = self._identity
        torch = sys.modules.get("torch")
        versions = {"gpuwatch": __version__, "python": platform.python_version()}
        if torch is not None:
            versions["torch"] = str(getattr(torch, "__version__", ""))[:64]
        with self.accounts.lock:
            loader = self.accounts.loader_with_batch()
            timeline = "device" if self.accounts.timeline.device_steps else "host"
        return wire.encode(
            wire.Hello(
                origin=self._origin(),
                run=who.run,
                name=self._facts.name,
                job=self._facts.job,
                rank=who.rank,
                local_rank=who.local_rank,
                world_size=who.world_size,
                pid=who.pid,
                process_start_ticks=who.process_start_ticks,
                pid_namespace=who.pid_namespace,
                host=who.host,
                timeline=timeline,
                device=device(),
                loader=loader,
                versions=versions,
                tags=self._facts.tags,
                flops=self._facts.flops,
            )
        )

    def _steps(self, steps: list[StepRecord], first_step: int) -> bytes:
        return wire.encode(
            wire.Steps(
                origin=self._origin(),
                run=self._identity.run,
                rank=self._identity.rank,
                totals=self._totals(),
                activity=activity(self._recorder),
                first_step=first_step,
                columns=_columns(steps),
                fetch_cpu_ratio=self._fetch_cpu_ratio(),
            )
        )

    def _phase(self, phase: PhaseRecord) -> bytes:
        return wire.encode(
            wire.Phase(
                origin=self._origin(),
                run=self._identity.run,
                rank=self._identity.rank,
                totals=self._totals(),
                name=phase.name,
                start_ns=phase.start_ns,
                seconds=None if phase.end_ns is None else (phase.end_ns - phase.start_ns) / 1e9,
                time_to_live_s=_PHASE_TIME_TO_LIVE_S,
            )
        )

    def _bye(self, reason: str) -> bytes:
        return wire.encode(
            wire.Bye(
                origin=self._origin(),
                run=self._identity.run,
                rank=self._identity.rank,
                totals=self._totals(),
                reason=reason,
            )
        )

    def _fetch_cpu_ratio(self) -> float | None:
        cpu, wall = self._recorder.fetch_cpu_ns, self._recorder.fetch_wall_ns
        last_cpu, last_wall = self._sampled_fetch_ns
        self._sampled_fetch_ns = (cpu, wall)
        return (cpu - last_cpu) / (wall - last_wall) if wall > last_wall else None


def _columns(steps: list[StepRecord]) -> dict[str, bytes]:
    if not steps:
        return {}
    rows = {
        "start_ns": [step.start_ns for step in steps],
        "data_wait_ns": [step.data_wait_ns for step in steps],
        "transfer_ns": [step.transfer_ns for step in steps],
        "compute_ns": [step.compute_ns for step in steps],
        "samples": [step.samples for step in steps],
    }
    if any(step.epoch_start for step in steps):
        rows["epoch_start"] = [int(step.epoch_start) for step in steps]
    if any(step.exposed is not None for step in steps):
        rows["input_wait_ns"] = [wire.MISSING if s.exposed is None else s.exposed.input_wait_ns for s in steps]
        rows["host_wait_ns"] = [
            wire.MISSING if s.exposed is None or s.exposed.host_wait_ns is None else s.exposed.host_wait_ns
            for s in steps
        ]
        rows["device_transfer_ns"] = [wire.MISSING if s.exposed is None else s.exposed.transfer_ns for s in steps]
        rows["device_compute_ns"] = [wire.MISSING if s.exposed is None else s.exposed.compute_ns for s in steps]
    if any(step.comm_wait_ns is not None for step in steps):
        rows["comm_wait_ns"] = [wire.MISSING if step.comm_wait_ns is None else step.comm_wait_ns for step in steps]
    return {name: wire.pack(column) for name, column in rows.items()}
