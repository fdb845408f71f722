"""What a `Watch` consists of, for those who work on it: the loops over its loaders, the contexts, the integrations.

Nothing here raises into training: whatever fails is logged once, counted, and left out from then on.
"""

from __future__ import annotations

import os
import signal
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from operator import index
from pathlib import Path
from threading import current_thread, get_ident, local, main_thread
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from gpuwatch.errors import NoData
from gpuwatch.hook.batches import loader_of_a_thread, loader_settings, size_bytes
from gpuwatch.hook.identity import Membership, asynchronous_framework
from gpuwatch.hook.loader_health import LoaderHealth, shared_bytes
from gpuwatch.hook.metering import FIRST_VISITS, QUICK_FETCH_NS, SAMPLE_EVERY, SAMPLE_QUICK_EVERY
from gpuwatch.hook.publisher import Publisher
from gpuwatch.hook.recorder import Recorder
from gpuwatch.hook.requests import Requests
from gpuwatch.hook.torch.install import TorchHooks
from gpuwatch.hook.torch.memory import explain
from gpuwatch.hook.transport import RunFacts
from gpuwatch.host.proc import stat
from gpuwatch.ledger.events import CLOSED, DATA_WAIT, MARKED, TRANSFERRING
from gpuwatch.ledger.states import CHECKPOINT_LOAD, OTHER, PAUSE
from gpuwatch.startup.instrumented import notes
from gpuwatch.wire import MAX_REWINDS, Loader

if TYPE_CHECKING:
    from gpuwatch.diagnosis.report import Report
    from gpuwatch.hook.trackers import LiveLog, Notebook

_of_thread = local()
_SEARCHES = 16  # so many times a loader is searched for in iterables of a kind in which none is found
_EARLY_NS = 60_000_000_000  # age of a run from which one line is printed in a first pass that has not ended


class Session:
    """One run's recorder and all that goes with it."""

    any_printed = False  # whether any verdict was printed in this process

    def __init__(
        self,
        membership: Membership,
        facts: RunFacts,
        endpoint: str | None,
        quiet: bool,
        transfers: bool,
        device_events: bool,
        budget: float,
        may_trace: bool,
    ) -> None:
        self.recorder = Recorder(failed=lambda doing, error: self.publisher.failed(doing, error))
        self.recorder.meter.budget = budget
        self.publisher = Publisher(self.recorder, membership, facts, endpoint)
        self.guard, self.failed = self.publisher.guard, self.publisher.failed
        self.torch_hooks = TorchHooks(self.recorder, device_events, transfers, facts.breakdown)
        self.torch_hooks.on_first = self._begin_optimizer_steps
        self.torch_hooks.optimizer.on_first = self._begin_training
        self.requests = Requests(self.recorder, may_trace, self.failed)
        self.torch_hooks.on_step = self.requests.at_step
        self.data, self.transfer = PartContext(self, DATA_WAIT), PartContext(self, TRANSFERRING)
        self.trained_with_gradients = False  # a training batch came with gradients on: without them it is an evaluation
        self.loops: weakref.WeakSet[Any] = weakref.WeakSet()  # passes that have begun and not ended
        self._searches = Counter[Any]()  # of iterables of a kind, those in which no loader was found
        self.closed = self.disabled = False  # the run has ended; this process must not record at all
        self._log: LiveLog | None = None
        self._leave_cells: Callable[[], object] = lambda: None  # of the IPython shell that it runs in
        self._pause = 0  # the recorder's level of the time between two cells; 0 in a cell
        self._health = LoaderHealth(self.publisher.accounts, quiet)
        self._loaded_ns = 0  # time of loads of checkpoints, when the global step was given last
        self._pass_began_ns = self._trained_before = 0  # of the last training pass; the optimizers' steps by then
        self.quiet = quiet
        self._notebook: Notebook | None = None
        self._show: Callable[[Report], None] = _print  # prints a verdict on stderr, or draws it in a notebook
        self.close_with_thread: Callable[[], None] | None = None  # closes the run when the thread ends that trains
        self._early_ns, self._early_done = self.recorder.clock() + _EARLY_NS, False
        self._handled = [*map(id, sys.exc_info())]  # the error that is being handled already does not end this run

    def start(self) -> None:
        """Start publishing, unless that runs or the run has ended. Called when a pass or a phase begins."""
        self._end_pause()  # a widget's callback, or a thread, trains between cells
        if not self.closed and not self.disabled:
            self.publisher.update_membership()
            self.publisher.start()

    def log_to(self, wanted: Any) -> None:
        """Log the run to the trackers that are wanted, and show it in the notebook it runs in. Raises: ConfigError."""
        if wanted is None and "IPython" not in sys.modules:
            return
        from gpuwatch.hook import trackers

        source = (lambda: self.publisher.report(self.closed)), self.failed, self.recorder.clock()
        if wanted is not None:
            self._log = trackers.LiveLog(wanted, *source)
            self.publisher.live.append(self._log)
        shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
        if shell is not None:
            self._leave_cells = trackers.follow_cells(shell, self._begin_cell, self._end_cell)
        if not self.quiet and getattr(shell, "kernel", None) is not None:  # of a notebook: in a terminal it has none
            self._notebook = trackers.Notebook()
            self._show = self._notebook.show
            self.publisher.live.append(trackers.LiveLog(self._notebook, *source))

    def _begin_cell(self) -> None:
        self._end_pause()
        if self._notebook is not None:
            # What was prepared since belongs to the cell before.
            self._notebook.handle = self.publisher.live[-1].prepared = None

    def _end_cell(self) -> None:
        """Show the cell's end, and book the time until the next one as a pause. An open step goes on after it."""
        self._end_passes(is_last=True)
        if not self._pause and self.recorder.claim_thread(steps=False):
            self._pause = self.recorder.enter(PAUSE, self.recorder.clock())

    def _end_pause(self) -> None:
        level, self._pause = self._pause, 0
        if level:
            self.recorder.exit(level, self.recorder.clock())

    def hand_over(self) -> None:
        """Log what was prepared; print a line in a long first pass. The training thread calls it at sampled fetches."""
        self.requests.at_step()
        self.guard(self.torch_hooks.optimizer.visit)
        for live in self.publisher.live:
            live.hand_over()
        while self.publisher.ranks.models:  # hooks of a model are added by the thread that calls it
            model = self.publisher.ranks.models.pop()
            self.guard(self.torch_hooks.communication.watch, "watching a model's communication", model)
        if not self._early_done and self.recorder.clock() >= self._early_ns and not self.trained_nothing:
            self.guard(self._print_early, "printing the verdict")

    def _print_early(self) -> None:
        self._early_done = True
        if not (self.quiet or self.publisher.printed or self._rank_0_reports) and self._show is _print:
            report = self.report()
            self._early_done = bool(report.steps)
            if report.steps:
                print(f"\ngpuwatch: {report.verdict.sentence}", file=sys.stderr, flush=True)

    def _begin_training(self) -> None:
        """An optimizer makes its first step: passes before this one have trained nothing."""
        began = self._pass_began_ns if self.recorder.step_owner is not None else self.recorder.clock()
        self.publisher.accounts.trained_since_ns = began
        trains = self.recorder.thread in (None, get_ident())  # else a loop of another thread feeds it
        if trains and self.close_with_thread is not None and current_thread() is not main_thread():
            # Freed when the thread ends. Ray ends its workers without calling what is registered with atexit.
            _of_thread.held = held = local()
            weakref.finalize(held, self.close_with_thread)

    def _begin_optimizer_steps(self) -> None:
        """Steps are bounded by an optimizer from now on."""
        self.trained_with_gradients = True
        if self.publisher.accounts.loader is None:  # else the search of all threads is not needed
            self.guard(lambda: self.note_feeding(found := loader_of_a_thread(), found), "reading the loader's settings")
        self.start()

    def note_feeding(self, loader: Any, iterator: Any) -> None:
        """Another thread takes batches from this loader: note its settings, where none are known."""
        if loader is not None and self.publisher.accounts.loader is None:
            self.note_loader(loader, iterator)

    def find_device(self) -> None:
        """Begin to measure by a device that the user's code has set up by now."""
        self.guard(self.torch_hooks.find_device)

    def visit_step(self) -> None:
        """Look for a device before a declared step, and pause or resume its timeline as the hook's cost demands."""
        recorder, meter = self.recorder, self.recorder.meter
        meter.visits += 1
        every = SAMPLE_QUICK_EVERY if recorder.clock() - recorder.begin_ns < QUICK_FETCH_NS else SAMPLE_EVERY
        recorder.sample_after(1 if meter.visits <= FIRST_VISITS else every)
        self.guard(self.torch_hooks.begin_step)
        self.hand_over()

    def count_from(self, step: Callable[[], int]) -> None:
        """The next step is the training's global step `step()`: a resumed job counts on.

        After the first call only where a checkpoint was loaded since: loops give each pass the first number again.
        At 0 another training begins.
        """

        def count() -> None:
            accounts = self.publisher.accounts
            number = max(-(2**53), min(index(step()), 2**53))  # of numpy's or torch's too
            with accounts.held():
                accounts.apply(self.recorder.clock())
                done, loaded_ns = accounts.timeline.counts.steps, self._loaded_ns
                self._loaded_ns = accounts.timeline.counts.declared_ns.get(CHECKPOINT_LOAD, 0)
                at, then = [(0, accounts.first_step or 0), *accounts.rewinds][-1]
                known = accounts.first_step, accounts.rewinds
                if accounts.first_step is None:
                    accounts.first_step = number - done
                elif loaded_ns != self._loaded_ns and number not in (0, accounts.first_step, then + done - at):
                    accounts.rewinds = (*accounts.rewinds, (done, number))[:MAX_REWINDS]
            self.publisher.hello_due |= known != (accounts.first_step, accounts.rewinds)  # before the steps

        self.guard(count, "counting global steps")

    def begin_pass(self, loop: Any, loader: Any, iterator: Any, has_settings: bool) -> None:
        """Prepare for a pass, which asks for its first batch: a part of that wait."""
        self.loops.add(loop)
        self.guard(self.torch_hooks.begin_loop)
        if not self.recorder.in_phase:
            self._pass_began_ns, self._trained_before = loop.began_ns, self.torch_hooks.optimizer.count
        if has_settings:
            self.note_loader(loader, iterator)
            self.guard(self._health.begin_pass, "reading the loader's settings", iterator)
        if loop.training:
            loop.owner.loader = self.publisher.accounts.loader if has_settings else None
            self.publisher.accounts.begin_feed(loop.owner)

    def note_loader(self, loader: Any, iterator: Any) -> None:
        """Note a loader's settings and workers: evidence, and advice in numbers."""
        doing, accounts = "reading the loader's settings", self.publisher.accounts
        self.guard(lambda: setattr(accounts, "loader", self._settings(loader, iterator)), doing)

    def _settings(self, loader: Any, iterator: Any) -> Loader:
        """Return the loader's settings. In a kind of iterable that has none, it is searched for a few times only."""
        kind = getattr(loader, "gi_code", type(loader))
        found = loader_settings(loader, iterator, self._searches[kind] < _SEARCHES)
        self._searches[kind] += found.num_workers is None
        return found

    def first_batch(self, loop: Any, batch: Any) -> None:
        """Note what is read from one batch per training pass."""
        torch = sys.modules.get("torch")
        if torch is not None and torch.is_grad_enabled():
            self.trained_with_gradients = True
        accounts = self.publisher.accounts
        if (size := size_bytes(batch)) is not None:
            sizes, shared = {"batch_bytes": size}, shared_bytes(batch)
            if shared or hasattr(loop.iterator, "_dataset_kind"):  # else a wrapper may have made arrays of tensors
                sizes["shared_bytes"] = shared or 0
            accounts.batch_sizes = loop.owner.batch_sizes = sizes
        known = loop.owner.loader or accounts.loader
        if loop.owner.loader is not None and loop.owner.loader.num_workers is None:
            known = self._settings(loop.iterator, loop.iterator)  # a generator may have made one by now
        if known is not None and known.num_workers and not known.worker_pids:
            # Made by a generator, just now.
            made = list(getattr(sys.modules.get("multiprocessing.process"), "_children", ()))
            known = replace(known, worker_pids=tuple(each.pid for each in made if each.daemon))
        if known is not None and known.num_workers is not None:
            accounts.loader = loop.owner.loader = known
        self._health.first_batch(batch)

    def fetch_failed(self, error: BaseException) -> None:
        """A loader raised this."""
        with sigchld_held():
            self.guard(lambda: self._health.fetch_failed(error))

    def end_pass(self, loop: Any, training: bool) -> None:
        """Undo what `begin_pass` has prepared, if it has."""
        with sigchld_held():
            has_begun, loop.owner.is_open = loop in self.loops, False
            self.loops.discard(loop)
            if training and self.recorder.thread == get_ident():
                self.guard(self._health.find_dead_workers)  # torch may have raised in the loop's body
            if has_begun:
                self.guard(self.torch_hooks.end_loop)

    def report_pass(self) -> None:
        """Print the verdict after the first pass, later ones only at the end: a log is not flooded. Log to trackers."""
        recorder = self.recorder
        if (
            recorder.thread != get_ident()  # the garbage collector ended a forgotten loop: no place to print
            or self.publisher.accounts.is_held_here  # it may also do so while this thread makes a report
            or recorder.levels
            or recorder.in_step
            or sys.is_finalizing()
        ):
            return
        with sigchld_held():
            if self.publisher.printed is None and not self.trained_nothing:
                self._print_verdict()
            self._end_passes()

    def _end_passes(self, is_last: bool = False) -> None:
        """Log the end of a pass, or of a cell, whose display is drawn a last time."""
        now = self.recorder.clock()
        for live in self.publisher.live:
            self.guard(live.pass_ended, "logging between two steps", now, is_last and live is not self._log)

    @property
    def trained_nothing(self) -> bool:
        """Whether no optimizer of torch's made a step in the last pass, and no other framework computes here."""
        optimizer = self.torch_hooks.optimizer
        return optimizer.is_installed and optimizer.count == self._trained_before and asynchronous_framework() is None

    def _print_verdict(self) -> None:
        """Print the verdict, if there was a step, and more than a moment has passed since the last one."""

        def show() -> None:
            report = self.report()
            if report.steps and report.goes_beyond(self.publisher.printed):
                self.publisher.printed = report
                self._note_printed()
                self._show(report)

        if self._rank_0_reports:
            self._note_printed()
        elif not self.quiet:
            self.guard(show, "printing the verdict")

    def _note_printed(self) -> None:
        Session.any_printed, pid = True, os.getpid()
        with suppress(OSError, NoData), Path(notes()).open("a") as file:
            while (pid := stat(pid).parent) > 1:
                file.write(f"{pid}\n")

    @property
    def _rank_0_reports(self) -> bool:
        """Whether rank 0 compares this rank with all others, and prints one verdict."""
        return self.publisher.ranks.joined and self.publisher.membership.identity.rank > 0

    def report(self) -> Report:
        """Return the run so far, and close it if that was requested meanwhile."""
        try:
            return self.publisher.report(self.closed)
        finally:
            self.publisher.close_if_postponed()

    def close(self) -> None:
        """End the run now; `closed` is set already. What closing takes is not the training's."""
        self._leave_cells()
        failure = sys.exc_info()[0]
        if failure is None or [*map(id, sys.exc_info())] == self._handled:
            # At the end of a process that has raised. A prompt keeps that of any error before.
            failure = None if hasattr(sys, "ps1") else getattr(sys, "last_type", None)
        self.publisher.raised = failure not in (None, SystemExit, StopIteration, GeneratorExit)
        owner = self.recorder.close()
        now = self.recorder.clock()
        for loop in list(self.loops):
            loop.is_open = False
        try:
            if owner not in (None, CLOSED):
                self.recorder.exit_all(now)
                self.recorder.end_taken()
                self.recorder.abandon_bounded(now)
                if self.recorder.step_owner is MARKED:  # what follows the last mark is no step
                    self.recorder.abandon(now, OTHER)
                self.recorder.end_step(now)
        finally:  # whatever a signal handler raises
            in_training_thread = owner == get_ident()
            self.guard(lambda: self.requests.end_run(in_training_thread))
            self.guard(lambda: self.torch_hooks.remove_all(in_training_thread))
            self.guard(self._health.find_dead_workers)  # torch may have raised in the loop's body
            self.publisher.close(now)
        self._print_verdict()
        self.guard(self._print_memory, "explaining a lack of memory", failure)
        if self._log is not None:
            self._log.finish(self.publisher.report(True), self.publisher.membership.identity.rank == 0)

    def _print_memory(self, failure: type[BaseException] | None) -> None:
        sizes, rank = self.publisher.accounts.batch_sizes, self.publisher.membership.identity.rank
        text = explain(failure, sizes.get("batch_bytes"), rank)
        if text and not self.quiet:
            _print(text)

    def abandon(self) -> None:
        """This is a forked child: record, send and print nothing of the parent's run."""
        self.recorder.close()
        self.closed = True
        self.publisher.abandon()
        self.guard(self.torch_hooks.remove_from_torch)


class PartContext:
    """`with w.data():` and `with w.transfer():` — the training thread waits for input, or copies a batch."""

    def __init__(self, session: Session, part: str) -> None:
        self._session, self._recorder, self._part = session, session.recorder, part

    def __enter__(self) -> None:
        recorder = self._recorder
        if recorder.thread != get_ident():
            if not recorder.claim_thread(steps=False):
                return
            self._session.start()
        recorder.begin_part(self._part, recorder.clock())

    def __exit__(self, *_: object) -> None:
        recorder = self._recorder
        if recorder.thread == get_ident():
            recorder.end_part(recorder.clock())


@contextmanager
def sigchld_held() -> Iterator[None]:
    """Hold Python's handler of SIGCHLD back, and call it afterwards if it was due.

    torch's raises "DataLoader worker (pid …) is killed by signal", which would be taken for a failure of gpuwatch.
    """
    handler = signal.getsignal(signal.SIGCHLD)
    if get_ident() != main_thread().ident or not callable(handler):
        yield
        return
    held: list[tuple[Any, ...]] = []
    signal.signal(signal.SIGCHLD, lambda *arguments: held.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, handler)
        if held:
            handler(*held[-1])


def _print(report: object) -> None:
    bars = getattr(getattr(sys.modules.get("tqdm"), "tqdm", None), "_instances", ())  # drawn without a newline
    sys.stderr.write("\n" * (len(bars) > 0) + f"{report}\n")  # Ray's `print` shows it twice
    sys.stderr.flush()
