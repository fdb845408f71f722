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
from gpuwatch.accounts import Accounts, News
from gpuwatch.identity import Identity
from gpuwatch.recorder import NOBODY, Recorder
from gpuwatch.report import Report, make_report
from gpuwatch.timeline import PhaseRecord, StepRecord
from gpuwatch.transport import Sender, ZmqSender

logger = logging.getLogger(__name__)

INTERVAL_S = 0.5
_HELLO_EVERY = 2
_HOST_EVERY = 4
_EARLY_VERDICT_S = 60.0
_PHASE_TIME_TO_LIVE_S = 3600.0
_BACKLOG_MESSAGES = 120
"""Messages kept while no agent takes them: a minute. Older ones go, counted; their time stays in the totals."""


@dataclass(frozen=True)
class RunFacts:
    """What the user said of the run."""

    name: str
    job: str
    tags: dict[str, str]


class Publisher:
    """Owns the accounts and the socket. All of it happens in one daemon thread of the process that made it."""

    def __init__(
        self,
        recorder: Recorder,
        identity: Identity,
        facts: RunFacts,
        where: str | None = None,
        early_verdict: Callable[[], None] | None = None,
        connect: Callable[[str], Sender] = ZmqSender,
    ) -> None:
        self.accounts = Accounts(recorder)
        self._recorder = recorder
        self._identity = identity
        self._facts = facts
        self._where = where
        self._early_verdict = early_verdict
        self._connect = connect
        self._sender: Sender | None = None
        self._sender_id = uuid.uuid4().hex
        self._seq = itertools.count(1)
        self._backlog: deque[tuple[bytes, int]] = deque()
        self._dropped = 0
        self._overhead_ns = 0
        self._sampled_fetch_ns = (0, 0)
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._warned = False

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
            self._thread = threading.Thread(target=self._run, name="gpuwatch", daemon=True)
            try:
                self._thread.start()
            except RuntimeError as error:  # no more threads to be had, or the interpreter is going down
                self._disable(error)

    def report(self, closed: bool) -> Report:
        """Return the run so far; after `close()` the run as it ended."""
        accounts = self.accounts
        with accounts.lock:
            now = accounts.timeline.ledger.watermark_ns if closed else self._recorder.clock()
            if not closed:
                accounts.fold(now)
                accounts.look_at_host()
            window, tail_ns = accounts.window(now)
            return make_report(
                run=self._identity.run,
                name=self._facts.name,
                window=window,
                provisional_s={state: ns / 1e9 for state, ns in tail_ns.items()},
                steps=accounts.timeline.steps,
                samples=accounts.timeline.samples if accounts.timeline.samples_known else None,
            )

    def close(self) -> None:
        """Book the tail, send what is left and the good-bye; takes at most about a second, with or without an agent."""
        self._stop.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=2.0)
        with self.accounts.lock:
            self.accounts.finish(self._recorder.clock())
            self.accounts.look_at_host()
        if thread is None or thread.is_alive():
            return
        with contextlib.suppress(Exception):
            self._turn(hello=True)
            self._post(self._bye("closed"), 0)
            self._flush()
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def abandon(self) -> None:
        """Forget everything without touching it: called in a forked child, where the socket is the parent's."""
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
                    with self.accounts.lock:
                        self.accounts.look_at_host()
                self._turn(hello=turn % _HELLO_EVERY == 0)
                tell = self._early_verdict
                if tell is not None and time.monotonic() - started > _EARLY_VERDICT_S:
                    self._early_verdict = None
                    tell()
                if self._stop.wait(INTERVAL_S):
                    return
        except Exception as error:
            self._disable(error)

    def _turn(self, hello: bool) -> None:
        """Fold, and tell the agent. Step records that wait for an agent are bounded; the oldest go first, counted."""
        with self.accounts.lock:
            self.accounts.fold(self._recorder.clock())
            news = self.accounts.take_news(wire.MAX_STEPS_A_MESSAGE)
        if hello:
            self._find_agent()
        if self._sender is None:
            self._dropped += len(news.steps)
            return
        if hello:
            self._sender.send(self._hello())
        for phase in news.phases:
            self._post(self._phase(phase), 0)
        self._post(self._steps(news), len(news.steps))
        self._flush()

    def _find_agent(self) -> None:
        """Connect once an agent's socket is there. ZeroMQ connects again by itself when an agent comes back."""
        if self._sender is not None:
            return
        try:
            where = endpoint.checked(self._where, "endpoint") if self._where else endpoint.find()
        except Exception as error:
            if not self._warned:
                logger.warning("gpuwatch: no agent is told: %s", error)
            self._warned = True
            return
        if where is not None:
            self._sender = self._connect(where)

    def _post(self, frame: bytes, steps: int) -> None:
        self._backlog.append((frame, steps))
        while len(self._backlog) > _BACKLOG_MESSAGES:
            self._dropped += self._backlog.popleft()[1]

    def _flush(self) -> None:
        while self._backlog and self._sender is not None and self._sender.send(self._backlog[0][0]):
            self._backlog.popleft()

    def _disable(self, error: BaseException) -> None:
        self._recorder.thread = NOBODY
        self.accounts.failures += 1
        logger.warning("gpuwatch: the hook has stopped and records nothing more: %r", error)

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
            window, _ = self.accounts.window(self._recorder.clock())
            loader = self.accounts.loader_with_batch()
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
                timeline=window.timeline,
                device=window.device,
                loader=loader,
                versions=versions,
                tags=self._facts.tags,
            )
        )

    def _steps(self, news: News) -> bytes:
        return wire.encode(
            wire.Steps(
                origin=self._origin(),
                run=self._identity.run,
                rank=self._identity.rank,
                totals=self._totals(),
                activity=self._recorder.activity,
                first_step=news.first_step,
                columns=_columns(news.steps),
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
        "epoch_start": [int(step.epoch_start) for step in steps],
    }
    return {name: wire.pack(rows[name]) for name in wire.STEP_COLUMNS}
