"""The hook's background thread: twice a second it drains the recorder, samples the node and publishes to the agent."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from threading import get_ident
from typing import TYPE_CHECKING, Any

import msgspec

from gpuwatch import wire
from gpuwatch.diagnosis.rates import PRICE_VARIABLE, Done, parse_price
from gpuwatch.errors import ConfigError, pass_on
from gpuwatch.hook.account import Accounts, thresholds
from gpuwatch.hook.identity import Identity, Membership
from gpuwatch.hook.ranks import RankExchange
from gpuwatch.hook.recorder import Recorder
from gpuwatch.hook.torch.memory import peak_bytes
from gpuwatch.hook.transport import RunFacts, SendBuffer, columns, hello
from gpuwatch.host.proc import optional, run_queue_s

if TYPE_CHECKING:
    from gpuwatch.diagnosis.finding import RankSummary
    from gpuwatch.diagnosis.report import Report
    from gpuwatch.diagnosis.window import Window
    from gpuwatch.hook.trackers import LiveLog
    from gpuwatch.wire.sockets import ZmqSender

logger = logging.getLogger(__name__)

INTERVAL_S = 0.5
_HELLO_EVERY, _HOST_EVERY = 2, 4  # ticks
_SAMPLES_A_TICK, _SAMPLED_OFTEN = 5, 240  # samples of the training thread's place a tick, and in how many first ticks

_CLOSE_S = 0.8
_CONNECT_TRIES, _CONNECT_TRY_S = 10, 0.01

_fork_waits = threading.RLock()
"""A fork waits for it: a child could never finish the import of a module, and would keep a sample's switch interval."""
_imported = threading.Event()  # they are all imported


class Publisher:
    """Owns the accounts and the socket. One daemon thread of the process that made it does the work."""

    def __init__(self, recorder: Recorder, membership: Membership, facts: RunFacts, endpoint: str | None) -> None:
        self.accounts = Accounts(recorder)
        self._recorder = recorder
        self.membership = membership
        self.send_buffer = SendBuffer(endpoint)
        self._facts = facts
        self._published: Identity | None = None  # the one that messages were last made under
        self._sender_id = uuid.uuid4().hex
        self.hello_due = True
        self._accepted = False  # an agent has taken a message
        self._dropped = 0  # steps that were never put into a message, because there was no agent
        self._overhead_ns = 0
        self._fetch_ns = deque([(0, 0)], maxlen=31)  # what `_fetch_cpu_ratio` has read, once a second
        self._thread: threading.Thread | None = None
        # Whoever pops it starts the thread: a signal handler could interrupt the holder of a lock and wait for it.
        self._may_start = [True]
        self._stopping = False
        # Wakes the thread to end. The lock of an Event is not re-entrant; a finalizer may put into this one too.
        self._stop: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._working: int | None = None  # the background thread, while it is at work
        self._postponed: Callable[[], None] | None = None
        self.printed: Report | None = None  # whose verdict was printed last
        self.raised = False  # an exception ends the training
        self.on_tick: Callable[[], None] = lambda: None
        self.live: list[LiveLog] = []  # what takes values between two steps: experiment trackers, a notebook
        self._logged: set[str] = set()
        self.ranks = RankExchange(membership, self._summary, lambda: recorder.in_step, self.failed)

    @property
    def is_running(self) -> bool:
        return self._thread is not None

    def update_membership(self, ask: bool = False) -> bool:
        """Read the rank from torch.distributed if it is known by now; return whether there is a run to publish."""
        may_publish = self.membership.update(self._recorder.in_step, self.accounts.timeline.counts.steps > 0, ask)
        self.accounts.local_world_size = self.membership.identity.local_world_size
        return may_publish

    def start(self) -> None:
        """Start the background thread unless it runs. Costs an attribute look-up when it does."""
        if self._thread is None:
            try:  # two threads may begin their loops at once, but a socket is one thread's
                self._may_start.pop()
            except IndexError:
                return
            self._thread = threading.Thread(target=self._run, name="gpuwatch", daemon=True)
            try:
                self._thread.start()
            except RuntimeError as error:  # no more threads to be had, or the interpreter is going down
                self._thread = None
                self._disable(error)

    def postpones(self, close: Callable[[], None]) -> bool:
        """Return whether this thread is changing the accounts: then `close` is called afterwards instead of now."""
        busy = self.accounts.is_held_here or self._working == get_ident()
        if busy:
            self._postponed = close
        return busy

    def close_if_postponed(self) -> None:
        """Close the run if that was postponed, and this thread no longer changes the accounts."""
        if self._postponed is not None and not self.accounts.is_held_here:
            close, self._postponed = self._postponed, None
            close()

    def report(self, closed: bool) -> Report:
        """Return the run so far, or as it ended. In a signal handler that interrupts one, unbooked time is unknown."""
        import_diagnosis()
        from gpuwatch.diagnosis.report import make_report

        window, tail_ns, done = self._window(closed)
        sections_ns = self.accounts.timeline.counts.breakdown_ns.copy()
        try:
            price = parse_price(os.environ.get(PRICE_VARIABLE, ""))
        except ConfigError as error:
            price = None
            self._warn("price", "gpuwatch: %s", error)
        return make_report(
            run=self.membership.identity.run,
            name=self._facts.name,
            window=window,
            provisional={state: ns / 1e9 for state, ns in tail_ns.items()},
            done=done,
            unread_steps=self.accounts.timeline.unread_steps,
            flops=self._facts.flops,
            hook_s=self._recorder.meter.cost_s,
            price=price,
            thresholds=thresholds(),
            memory_bytes=peak_bytes(),
            breakdown={name: ns / 1e9 for name, ns in sections_ns.items()} if self._facts.breakdown else None,
        )

    def _window(self, closed: bool) -> tuple[Window, dict[str, int], Done]:
        """Return the run so far, with the known other ranks; its provisional tail in ns by state; what was done."""
        from gpuwatch.diagnosis.window import RankFacts

        accounts, who = self.accounts, self.membership.identity
        if not closed:
            self.guard(self.accounts.sample_host, "sampling the node")
        with accounts.held() as is_outermost:
            if not closed and is_outermost:
                accounts.apply(self._recorder.clock())
            # The training thread may have logged an end between our reading of the clock and of its log.
            now = accounts.timeline.ledger.start_ns + accounts.timeline.ledger.sum_ns
            now = now if closed else max(now, self._recorder.clock())
            window, tail_ns = accounts.window(now, settled=is_outermost)
            counts = accounts.timeline.counts
            samples, tokens = (count if count >= 0 else None for count in (counts.samples, counts.tokens))
            done = Done(seconds=counts.total_ns / 1e9, steps=counts.steps, samples=samples, tokens=tokens)
            comm_wait_s = accounts.comm_wait_s() if who.world_size > 1 else None
        if who.world_size > 1:
            own, others = RankFacts(who.rank, window.mean_step, comm_wait_s), dict(self.ranks.others)
            ranks = (own, *(other.facts for other in others.values()))
            place = {"rank": who.rank, "world_size": who.world_size, "ranks": ranks, "summaries": others}
            window = msgspec.structs.replace(window, **place)
        return window, tail_ns, done

    def _summary(self) -> RankSummary:
        """Return what rank 0 needs of this rank. Called by the thread that exchanges them."""
        from gpuwatch.diagnosis.report import give_verdict, is_short
        from gpuwatch.diagnosis.rules import diagnose
        from gpuwatch.diagnosis.rules.progress import summary_of

        window, _, done = self._window(closed=True)  # as it was applied last: nothing is sampled for this
        short = is_short(done.steps, done.seconds, thresholds())
        window = msgspec.structs.replace(window, summaries={}, is_short=short)
        findings = diagnose(window, thresholds())
        verdict = give_verdict(msgspec.structs.replace(window, is_short=False), findings, thresholds())
        return summary_of(window, thresholds(), verdict)

    def close(self, ended_ns: int) -> None:
        """Book the time up to the run's end and send what is left: about a second at most, even without an agent."""
        self._may_start.clear()
        self._stopping = self.ranks.stopped = True
        self._stop.put(None)
        thread, self._thread, until_s = self._thread, None, time.monotonic() + _CLOSE_S
        own = thread is not None and thread.ident == get_ident()
        if thread is not None and not own:
            thread.join(timeout=_CLOSE_S)
        self.ranks.stop(max(0.0, until_s - time.monotonic()))
        self.guard(self.accounts.sample_host, "sampling the node")
        with self.accounts.held():
            self.accounts.finish(ended_ns)
        if thread is None or (thread.is_alive() and not own):
            return
        with contextlib.suppress(Exception):
            self._publish(hello=True, bye=True)
        self.send_buffer.close()

    def abandon(self) -> None:
        """Forget everything without touching it: called in a forked child, whose socket is the parent's."""
        self._thread = None
        self.ranks.stopped = True
        self.send_buffer.abandon()
        self.accounts.replace_lock()

    def _run(self) -> None:
        try:
            import_diagnosis()
            for count in itertools.count():
                self._working = get_ident()
                self._overhead_ns = time.thread_time_ns()
                if count % _HOST_EVERY == 0 or self.accounts.has_new_workers:
                    self.guard(self.accounts.sample_host, "sampling the node")
                with self.accounts.held():
                    self.accounts.apply(self._recorder.clock())
                    self.accounts.settle_cost()
                self.guard(self.accounts.note_standstill, "locating a standstill", self._recorder.clock())
                self.guard(self._publish, "publishing to the agent", count % _HELLO_EVERY == 0)
                self.guard(self.on_tick, "answering a request")
                self.ranks.start_if_distributed()
                for live in self.live:
                    self.guard(live.prepare, "preparing what is logged", self._recorder.clock())
                self._wait(_SAMPLES_A_TICK if count < _SAMPLED_OFTEN else 1)
                self._working = None
                self.close_if_postponed()
                if self._stopping:
                    return
        except Exception as error:
            self._disable(error)
            self._working = None
            self.close_if_postponed()

    def _wait(self, samples: int) -> None:
        """Wait for the next tick, or for the end, and sample the training thread's place meanwhile."""
        clock, thread = time.perf_counter, threading.get_native_id()
        for _ in range(samples):
            due_s, queued_s = clock() + INTERVAL_S / samples, optional(run_queue_s, thread) or 0.0
            with contextlib.suppress(queue.Empty):
                self._stop.get(timeout=INTERVAL_S / samples)
                return
            # One that waits for a core is late too, but then no other one has kept the lock.
            late_s = clock() - due_s - ((optional(run_queue_s, thread) or 0.0) - queued_s)
            with _fork_waits:
                self.guard(self.accounts.sample_frames, "sampling the training thread", late_s)

    def guard(self, call: Callable[..., object], doing: str = "hooking torch", *arguments: object) -> None:
        """Call something that may fail, for example with a torch that is built differently."""
        try:
            call(*arguments)
        except Exception as error:
            self.failed(doing, error)

    def _publish(self, hello: bool, bye: bool = False) -> None:
        """Send what was applied. Step records are buffered within bounds; the oldest are dropped first, and counted."""
        if bye:
            self.membership.stop_asking()
        if not self.update_membership(ask=not bye):
            return
        with self.accounts.held():
            unsent, first_step = self.accounts.take_delta()
        published, buffer = 0, self.send_buffer
        try:
            if hello:
                self.hello_due = True
                try:
                    buffer.find_agent()
                except ConfigError as error:
                    self._warn("endpoint", "gpuwatch: nothing is sent to an agent: %s", error)
            if buffer.sender is None:
                return
            who = self._identify()
            if self.hello_due:
                self._send_hello(who, buffer.sender, _CONNECT_TRIES if bye and not self._accepted else 1)
            fetch_cpu_ratio = self._fetch_cpu_ratio()
            for at in range(0, len(unsent) or 1, wire.MAX_STEPS_A_MESSAGE):  # without steps too: a heartbeat
                steps = unsent[at : at + wire.MAX_STEPS_A_MESSAGE]
                message = self._message(
                    wire.Steps,
                    who,
                    columns=columns(steps),
                    first_step=first_step + at,
                    activity=self.accounts.activity,
                    fetch_cpu_ratio=fetch_cpu_ratio,
                    standstill=self.accounts.standstill,
                )
                buffer.append(message, len(steps))
                published += len(steps)
            if bye:
                buffer.append(self._message(wire.Bye, who, failed=self.raised, conclusion=self._conclusion()))
            buffer.flush(held=self.hello_due)
        finally:
            self._dropped += len(unsent) - published

    def _conclusion(self) -> bytes:
        """Return what is printed at the end, for the agent's reports; empty without steps."""
        from gpuwatch.diagnosis.finding import Conclusion

        try:
            report = self.report(closed=True)
            if self.printed is not None and not report.goes_beyond(self.printed):
                report = self.printed
            encoded = wire.encode(Conclusion(report.verdict, report.findings, len(report.others) + 1))
        except Exception as error:
            self.failed("concluding the run", error)
            return b""
        return encoded if report.steps and len(encoded) <= wire.MAX_CONCLUSION_BYTES else b""

    def _send_hello(self, who: Identity, sender: ZmqSender, tries: int) -> None:
        """Send who we are. At the end of a run that was too short for a connection, wait for that for a moment."""
        for left in reversed(range(tries)):
            with self.accounts.lock:
                message = wire.encode(hello(self._origin(who), who, self._facts, self.accounts))
            if sender.send(message):
                self.hello_due, self._accepted = False, True
                return
            if left:
                time.sleep(_CONNECT_TRY_S)

    def _identify(self) -> Identity:
        """Return the identity to publish under; the run that was published under another one ends."""
        before, now = self._published, self.membership.identity
        if before is not None and (before.run, before.rank) != (now.run, now.rank):
            self.send_buffer.append(self._message(wire.Bye, before))
            self.send_buffer.flush()
            self.hello_due, self._sender_id = True, uuid.uuid4().hex
        self._published = now
        return now

    def _message(self, kind: type[wire.Steps | wire.Bye], who: Identity, **fields: Any) -> bytes:
        """Return a message about the run so far, or its last one."""
        return wire.encode(kind(totals=self._totals(), origin=self._origin(who), run=who.run, rank=who.rank, **fields))

    def _origin(self, who: Identity) -> wire.Origin:
        monotonic_ns, time_ns = self._recorder.clock(), time.time_ns()
        return wire.Origin(wire.PROTOCOL_VERSION, self._sender_id, who.boot_id, monotonic_ns, time_ns)

    def failed(self, doing: str, error: BaseException) -> None:
        """Count a failure, and log each kind once. What a signal handler of the user's raised is raised again."""
        pass_on(error)
        self.accounts.failures += 1
        self._warn(doing, "gpuwatch: %s failed; training continues without it: %r", doing, error)

    def _warn(self, cause: str, message: str, *arguments: object) -> None:
        """Log each cause once."""
        if cause not in self._logged:
            self._logged.add(cause)
            logger.warning(message, *arguments)

    def _disable(self, error: BaseException) -> None:
        self._recorder.close()
        self.accounts.blind = True
        self.accounts.failures += 1
        self._warn("hook", "gpuwatch: the hook has stopped after an internal error and records nothing more: %r", error)

    def _totals(self) -> wire.Totals:
        with self.accounts.lock:
            return self.accounts.totals(self._dropped + self.send_buffer.steps_dropped, self._overhead_ns)

    def _fetch_cpu_ratio(self) -> float | None:
        """Return that of the last half minute: the few fetches sampled in a second may be those without a wait."""
        self._fetch_ns.append((self._recorder.fetches.busy_ns, self._recorder.fetches.wall_ns))
        busy, wall = (now - then for then, now in zip(self._fetch_ns[0], self._fetch_ns[-1], strict=True))
        return busy / wall if wall > 0 else None


def import_diagnosis() -> None:
    """Import what only a report, a diagnosis or an agent needs: `import gpuwatch` leaves it to the background thread.

    The main thread has another one import: a signal handler that reports would find its own imports half done.
    """
    if get_ident() == threading.main_thread().ident and not _imported.is_set():
        with contextlib.suppress(RuntimeError):  # no thread can be started any more: the interpreter ends
            thread = threading.Thread(target=_import_diagnosis, name="gpuwatch-import", daemon=True)
            thread.start()
            thread.join()
    _import_diagnosis()


def _import_diagnosis() -> None:
    if not _imported.is_set():
        with _fork_waits:
            import gpuwatch.diagnosis.report
            import gpuwatch.hook.evidence
            import gpuwatch.wire.sockets  # noqa: F401
        _imported.set()
        if getattr(sys, "last_type", None) is KeyboardInterrupt and not hasattr(sys, "ps1"):
            with contextlib.suppress(KeyboardInterrupt):  # which ends the program: imports have Python forget it
                exec("raise KeyboardInterrupt")


os.register_at_fork(before=_fork_waits.acquire, after_in_parent=_fork_waits.release, after_in_child=_fork_waits.release)
