"""The hook's background thread: folds the recorder, looks at the node, tells the agent. Twice a second, never in the way."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from threading import get_ident
from typing import TYPE_CHECKING

from gpuwatch import wire
from gpuwatch.diagnosis.rates import Done, price_from
from gpuwatch.errors import ConfigError
from gpuwatch.hook import process_state as this_process
from gpuwatch.hook.account import Accounts, activity
from gpuwatch.hook.distributed import Membership
from gpuwatch.hook.encoder import RunFacts, Speaker
from gpuwatch.hook.events import CLOSED
from gpuwatch.hook.interrupts import pass_on
from gpuwatch.hook.recorder import Recorder
from gpuwatch.hook.send_buffer import MOST_MESSAGES, Outbox

if TYPE_CHECKING:
    from gpuwatch.diagnosis.report import Report
    from gpuwatch.wire.sockets import Sender

logger = logging.getLogger(__name__)

INTERVAL_S = 0.5
_HELLO_EVERY = 2
_HOST_EVERY = 4
_STEPS_A_FRAME = 1024
"""Steps in one message: 48 KiB, so that what queues for an agent that hangs stays small at 10,000 steps a second too."""
_CLOSE_S = 0.8
_CONNECT_TRIES, _CONNECT_TRY_S = 10, 0.01


class Publisher:
    """Owns the accounts and the socket. All of it happens in one daemon thread of the process that made it."""

    def __init__(
        self,
        recorder: Recorder,
        membership: Membership,
        facts: RunFacts,
        where: str | None = None,
        connect: Callable[[str], Sender] | None = None,
    ) -> None:
        self.accounts = Accounts(recorder)
        self._recorder = recorder
        self.membership = membership
        self.outbox = Outbox(where, connect)
        self._speaker: Speaker | None = None
        self._facts = facts
        self._hello_due = True
        self._heard = False
        """An agent has taken a message."""
        self._dropped = 0
        """Steps that were never put into a message, because there was no agent."""
        self._overhead_ns = 0
        self._told_fetch_ns = (0, 0)
        self._thread: threading.Thread | None = None
        self._may_start = [True]
        """Taken out by the one that starts the thread: a lock could be asked for by a signal handler that interrupts its holder."""
        self._stopping = False
        self._stop: queue.SimpleQueue[None] = queue.SimpleQueue()
        """Wakes the thread to end. An Event has a lock that is not re-entrant; this one may be put into by a finalizer too."""
        self._turning: int | None = None
        """The background thread, while it is at work."""
        self._postponed: Callable[[], None] | None = None
        self._warned: set[str] = set()

    def look_at_world(self, ask: bool = False) -> bool:
        """Look whether torch.distributed tells our rank by now; return whether there is a run to tell of."""
        speaks = self.membership.look(self._recorder.in_step, self.accounts.timeline.counts.steps > 0, ask)
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
            try:  # two threads may begin their loops at once, but a socket is one thread's
                self._may_start.pop()
            except IndexError:
                return
            self._thread = threading.Thread(target=self._run, name="gpuwatch", daemon=True)
            try:
                self._thread.start()
            except RuntimeError as error:  # no more threads to be had, or the interpreter is going down
                self._disable(error)

    def postpones(self, close: Callable[[], None]) -> bool:
        """Return whether the run cannot be closed at this moment, because this thread is in the midst of the books: `close` is called after."""
        busy = self.accounts.is_held_here or self._turning == get_ident()
        if busy:
            self._postponed = close
        return busy

    def close_if_postponed(self) -> None:
        """Close the run if that was asked for while this thread was in the midst of the books."""
        if self._postponed is not None and not self.accounts.is_held_here:
            close, self._postponed = self._postponed, None
            close()

    def report(self, closed: bool) -> Report:
        """Return the run so far; after `close()` the run as it ended.

        In a signal handler or a finalizer that interrupts another report: the run as it is booked, all later time as unknown.
        """
        this_process.import_diagnosis()
        from gpuwatch.diagnosis.report import make_report

        accounts = self.accounts
        if not closed:
            self._look_at_host()
        with accounts.held() as is_outermost:
            if not closed and is_outermost:
                accounts.fold(self._recorder.clock())
            # The training thread may have logged an end between our look at the clock and at its log.
            now = accounts.timeline.ledger.start_ns + accounts.timeline.ledger.sum_ns
            now = now if closed else max(now, self._recorder.clock())
            window, tail_ns = accounts.window(now, settled=is_outermost)
            counts = accounts.timeline.counts
            done = Done(
                seconds=counts.total_ns / 1e9,
                steps=counts.steps,
                samples=counts.samples if counts.samples >= 0 else None,
                tokens=counts.tokens if counts.tokens >= 0 else None,
            )
        return make_report(
            run=self.membership.identity.run,
            name=self._facts.name,
            window=window,
            provisional_s={state: ns / 1e9 for state, ns in tail_ns.items()},
            done=done,
            flops=self._facts.flops,
            hook_s=self._recorder.meter.cost_s,
            price=self._price(),
            thresholds=this_process.thresholds(),
        )

    def _price(self) -> tuple[float, str] | None:
        """Return the price of a GPU-hour; a wrong one is said once, and is none."""
        try:
            return price_from(os.environ)
        except ConfigError as error:
            self._warn("price", "gpuwatch: %s", error)
            return None

    def close(self, ended_ns: int) -> None:
        """Book the tail up to the run's end, send what is left and the good-bye; takes about a second at most, agent or not."""
        self._may_start.clear()
        self._stopping = True
        self._stop.put(None)
        thread, self._thread = self._thread, None
        own = thread is threading.current_thread()
        if thread is not None and not own:
            thread.join(timeout=_CLOSE_S)
        self._look_at_host()
        with self.accounts.held():
            self.accounts.finish(ended_ns)
        if thread is None or (thread.is_alive() and not own):
            return
        with contextlib.suppress(Exception):
            self._tell(hello=True, bye=True)
        self.outbox.close()

    def abandon(self) -> None:
        """Forget everything without touching it: called in a forked child, where the socket is the parent's."""
        self._thread = None
        self.outbox.abandon()
        self.accounts.forget_holder()

    def _run(self) -> None:
        try:
            this_process.import_diagnosis()
            for turn in itertools.count():
                self._turning = get_ident()
                self._overhead_ns = time.thread_time_ns()
                if turn % _HOST_EVERY == 0:
                    self._look_at_host()
                with self.accounts.held():
                    self.accounts.fold(self._recorder.clock())
                    self.accounts.settle_cost()
                try:
                    self._tell(hello=turn % _HELLO_EVERY == 0)
                except Exception as error:
                    self._failed("telling the agent", error)
                with contextlib.suppress(queue.Empty):
                    self._stop.get(timeout=INTERVAL_S)
                self._turning = None
                self.close_if_postponed()
                if self._stopping:
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
        if bye:
            self.membership.stop_asking()
        if not self.look_at_world(ask=not bye):
            return
        with self.accounts.held():
            news = self.accounts.take_news()
        told = 0
        try:
            if hello:
                self._hello_due = True
                self._find_agent()
            if self.outbox.sender is None:
                return
            speaker = self._take_place()
            if self._hello_due:
                self._greet(speaker, self.outbox.sender, _CONNECT_TRIES if bye and not self._heard else 1)
            for phase in news.phases[-MOST_MESSAGES:]:
                self.outbox.post(speaker.phase(phase, self._totals()))
            while True:  # without steps too: a heartbeat
                steps = news.steps[told : told + _STEPS_A_FRAME]
                self.outbox.post(
                    speaker.steps(
                        steps,
                        news.first_step + told,
                        self._totals(),
                        activity(self._recorder),
                        self._fetch_cpu_ratio(),
                    ),
                    len(steps),
                )
                told += len(steps)
                if told == len(news.steps):
                    break
            if bye:
                self.outbox.post(speaker.bye("closed", self._totals()))
            self.outbox.flush()
        finally:
            self._dropped += len(news.steps) - told

    def _greet(self, speaker: Speaker, sender: Sender, tries: int) -> None:
        """Say who we are. At the end of a run that was too short for a connection, that is waited for a moment."""
        with self.accounts.lock:
            loader = self.accounts.loader_with_batch()
            timeline = self.accounts.which_clock
            deaths = self.accounts.worker_deaths
        while tries and not sender.send(speaker.hello(loader, timeline, deaths)):
            tries -= 1
            if tries:
                time.sleep(_CONNECT_TRY_S)
        self._hello_due = not tries
        self._heard = self._heard or not self._hello_due

    def _take_place(self) -> Speaker:
        """Speak as the rank that torch.distributed has named; what was told under another name ends there."""
        before, now = self._speaker, self.membership.identity
        if before is not None and (before.identity.run, before.identity.rank) == (now.run, now.rank):
            before.identity = now
            return before
        if before is not None:
            self.outbox.post(before.bye("moved", self._totals()))
            self.outbox.flush()
            self._hello_due = True
        self._speaker = Speaker(now, self._facts)
        return self._speaker

    def _find_agent(self) -> None:
        try:
            self.outbox.find_agent()
        except ConfigError as error:
            self._warn("endpoint", "gpuwatch: no agent is told: %s", error)

    def _failed(self, doing: str, error: BaseException) -> None:
        """Something that the ledger can do without has failed: training and the ledger go on."""
        pass_on(error)
        self.accounts.failures += 1
        self._warn(doing, "gpuwatch: %s failed; what it would have told is missing: %r", doing, error)

    def _warn(self, cause: str, message: str, *arguments: object) -> None:
        """Say each cause once."""
        if cause not in self._warned:
            self._warned.add(cause)
            logger.warning(message, *arguments)

    def _disable(self, error: BaseException) -> None:
        self._recorder.thread = CLOSED
        self.accounts.blind = True
        self.accounts.failures += 1
        self._warn("hook", "gpuwatch: the hook has stopped and records nothing more: %r", error)

    def _totals(self) -> wire.Totals:
        with self.accounts.lock:
            return self.accounts.totals(self._dropped + self.outbox.steps_dropped, self._overhead_ns)

    def _fetch_cpu_ratio(self) -> float | None:
        busy, wall = self._recorder.fetches.busy_ns, self._recorder.fetches.wall_ns
        last_busy, last_wall = self._told_fetch_ns
        self._told_fetch_ns = (busy, wall)
        return (busy - last_busy) / (wall - last_wall) if wall > last_wall else None
