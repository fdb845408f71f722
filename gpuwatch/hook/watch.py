"""`Watch`: the training side. It records, prints a verdict, and tells an agent if there is one.

It never raises into training, never blocks it and never touches the device: whatever fails inside is logged once, counted,
and from then on left out.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from gpuwatch.diagnosis.rates import declared
from gpuwatch.hook import process_state as this_process
from gpuwatch.hook.batches import size_bytes
from gpuwatch.hook.distributed import Membership
from gpuwatch.hook.encoder import RunFacts
from gpuwatch.hook.events import CLOSED, DATA_WAIT, TRANSFERRING, UNKNOWN_SAMPLES
from gpuwatch.hook.identity import Identity, script_name
from gpuwatch.hook.interrupts import pass_on, undisturbed
from gpuwatch.hook.iterator import WatchedIterator
from gpuwatch.hook.loader import WatchedLoader
from gpuwatch.hook.loader_health import LoaderHealth
from gpuwatch.hook.loader_info import loader_facts
from gpuwatch.hook.loop import Loop
from gpuwatch.hook.manual_steps import PartContext, PhaseContext, StepContext
from gpuwatch.hook.metering import BUDGET
from gpuwatch.hook.printer import VerdictPrinter
from gpuwatch.hook.publisher import Publisher
from gpuwatch.hook.recorder import Recorder
from gpuwatch.hook.sampling import FIRST_VISITS, LOOKED_AT_EVERY
from gpuwatch.hook.torch.install import Taps

if TYPE_CHECKING:
    from gpuwatch.diagnosis.report import Report

logger = logging.getLogger(__name__)
T = TypeVar("T")
M = TypeVar("M")
_TRAINING = ("train", "training")


class Watch:
    """One training run as this process sees it: every second since it was opened, by state.

    Use it as a context manager, or call `close()`. Options:

    - `run`: a name for people (default: GPUWATCH_RUN, else the script's name). The unique id comes from GPUWATCH_RUN, the scheduler or
      torchelastic, else from host, pid and start time, and is `w.run`.
    - `job`: the scheduler's job id (default: Slurm's, PBS's or LSF's).
    - `tags`: names and values that describe the run; shown, never made into labels.
    - `endpoint`: where the agent listens (default: GPUWATCH_ENDPOINT, else the first agent's socket on this node).
    - `quiet`: print no verdict (default: GPUWATCH_QUIET=1).
    - `transfers`: time `Tensor.to` and `Tensor.cuda` of the loop's body; False leaves them as they are.
    - `device_events`: measure by timing events on the device, where there is one; False leaves the host's clock alone.
    - `flops_per_step`, `flops_per_sample`, `flops_per_token`: what this rank computes, forward and backward, in floating-point operations;
      with `peak_flops`, the most that its device can do in a second, the report gives the utilisation (MFU).
    - `budget`: share of the step time that gpuwatch may take in the training thread. Above it looks at CPU time are made more seldom and
      device events on fewer steps; every step is accounted all the same.
    """

    def __init__(
        self,
        run: str | None = None,
        *,
        job: str | None = None,
        tags: Mapping[str, str] | None = None,
        endpoint: str | None = None,
        quiet: bool | None = None,
        transfers: bool = True,
        device_events: bool = True,
        flops_per_step: float | None = None,
        flops_per_sample: float | None = None,
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
        budget: float = BUDGET,
    ) -> None:
        self._disabled = this_process.is_set("GPUWATCH_DISABLE") or this_process.is_loader_worker()
        quiet = this_process.is_set("GPUWATCH_QUIET") if quiet is None else quiet
        self._recorder = Recorder(failed=self._failed)
        self._verdicts = VerdictPrinter(self.report, quiet, self._failed, self._recorder.clock())
        self._recorder.meter.budget = budget
        self._taps = Taps(self._recorder, device_events, transfers)
        self._trained_with_gradients = False
        self._loops: weakref.WeakSet[Loop[Any]] = weakref.WeakSet()
        self._known_loader: Callable[[], Any] = _nothing
        """The loader of the last training pass, where it has no workers: its settings have been read."""
        self._closed = False
        self._said: set[str] = set()
        membership = Membership(this_process.next_suffix(), forked=this_process.parent_trained)
        self._facts = RunFacts(
            name=str(run or os.environ.get("GPUWATCH_RUN") or script_name())[:128],
            job=str(job or membership.identity.job)[:128],
            tags={str(key)[:128]: str(value)[:256] for key, value in list((tags or {}).items())[:32]},
            flops=declared(flops_per_step, flops_per_sample, flops_per_token, peak_flops),
        )
        self._publisher = Publisher(self._recorder, membership, self._facts, endpoint)
        self._health = LoaderHealth(self._publisher.accounts, quiet)
        self._data = PartContext(self, DATA_WAIT)
        self._transfer = PartContext(self, TRANSFERRING)
        if self._disabled:
            self._recorder.thread = CLOSED
        else:
            self._read_config()
            this_process.open_watches.append(self)
            atexit.register(self._at_exit)

    @property
    def identity(self) -> Identity:
        """Who this process is, and its place in a distributed run as far as it is known by now."""
        return self._publisher.membership.identity

    @property
    def run(self) -> str:
        """The run's unique id, shared by all ranks."""
        return self.identity.run

    def steps(
        self,
        loader: Iterable[T],
        *,
        to: Any = None,
        samples: Callable[[Any], int] | None = None,
        tokens: Callable[[Any], int] | None = None,
    ) -> Iterable[T]:
        """Return the loader, watched: each batch taken from it begins a step, which lasts until the next one is asked for.

        `to` moves each batch to a device and times that as `transfer` (non_blocking where its memory is pinned).
        `samples` tells a batch's number of samples (default: the length of its first tensor), `tokens` its number of tokens
        (default: they are not counted).
        """
        if self._disabled and to is None:
            return loader
        if not self._disabled:
            self._tap(self._taps.loader_made)
        return WatchedLoader(self, loader, to, None if samples is None else _counted(samples), tokens)

    def step(self, samples: int | None = None, tokens: int | None = None) -> AbstractContextManager[None]:
        """Return the context of one step, for a loop without a loader."""
        if self._disabled:
            return contextlib.nullcontext()
        known = samples if isinstance(samples, int) and samples >= 0 else UNKNOWN_SAMPLES
        return StepContext(self, known, tokens if isinstance(tokens, int) and tokens >= 0 else None)

    def data(self) -> AbstractContextManager[None]:
        """Return a context whose time is a wait for input."""
        return contextlib.nullcontext() if self._disabled else self._data

    def transfer(self) -> AbstractContextManager[None]:
        """Return a context whose time is a copy to the device."""
        return contextlib.nullcontext() if self._disabled else self._transfer

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Return a context whose time belongs to a phase, steps inside it included.

        "eval", "checkpoint", "startup" and "compile" are states of their own; any other name is `other`, but for "train" and
        "training": what is training needs no phase, so these change nothing.
        """
        if str(name).strip().lower() in _TRAINING:
            return contextlib.nullcontext()
        return contextlib.nullcontext() if self._disabled else PhaseContext(self, str(name)[:128])

    def watch_communication(self, model: M) -> M:
        """Return the model, its waits for other ranks booked as `comm_wait` from now on: of DDP, and of FSDP on a device.

        Communication that is hidden behind computing is not in it. See docs/guides/ddp.md.
        """
        if not self._disabled:
            self._tap(lambda: self._taps.communication.watch(model))
        return model

    def report(self) -> Report:
        """Return all wall time since this Watch was opened, by state, with findings; `str()` of it is the verdict.

        Any thread may call it at any time, a signal handler too.
        """
        try:
            return self._publisher.report(self._closed)
        finally:
            self._publisher.close_if_postponed()

    def close(self) -> None:
        """End the run: print the verdict, say good-bye to the agent. Safe to call twice.

        In a signal handler that interrupts `report()` this only says that the run is to end; it ends when that report is made.
        """
        if self._closed or self._disabled or self._publisher.postpones(self.close):
            return
        with undisturbed():
            self._close()

    def _close(self) -> None:
        self._closed = True
        if self in this_process.open_watches:
            this_process.open_watches.remove(self)
        atexit.unregister(self._at_exit)
        try:
            owner, self._recorder.thread = self._recorder.thread, CLOSED
            now = self._recorder.clock()  # the run ends here: what closing takes is not training's
            for loop in list(self._loops):
                loop.is_open = False
            try:
                if owner not in (None, CLOSED):
                    self._recorder.exit_all(now)
                    self._recorder.end_step(now)
            finally:  # whatever a signal handler raises
                self._tap(lambda: self._taps.remove_all(in_training_thread=owner == threading.get_ident()))
                self._tap(self._health.look_for_dead_workers)  # torch may have raised in the loop's body
                self._publisher.close(now)
            self._verdicts.print_last()
        except Exception as error:
            self._failed("closing", error)

    def __enter__(self) -> Watch:
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _read_config(self) -> None:
        """Compare with the thresholds of the file that GPUWATCH_CONFIG names, if it names one."""
        path = os.environ.get("GPUWATCH_CONFIG")
        if path and this_process.made <= 1:
            try:
                from gpuwatch.config import read_config

                this_process.site_thresholds = read_config(Path(path)).thresholds
            except Exception as error:
                self._failed("reading the configuration", error)

    # What the loops call ------------------------------------------------------------------------------------------

    def _loop(
        self,
        loader: Iterable[T],
        to: Any,
        samples: Callable[[Any], int] | None,
        tokens: Callable[[Any], int] | None = None,
    ) -> Iterator[T]:
        """Return a new pass over the loader."""
        iterator: Iterator[T] = WatchedIterator(self._pass(loader, to, samples, tokens, has_settings=True))
        return iterator

    def _pass(
        self,
        loader: Iterable[T],
        to: Any = None,
        samples: Callable[[Any], int] | None = None,
        tokens: Callable[[Any], int] | None = None,
        has_settings: bool = False,
    ) -> Loop[T]:
        """Return a new pass, whatever it is over. `has_settings`: the loader's settings are of interest."""
        self._start()
        loop = Loop(self, loader, to, samples, tokens, has_settings)
        if loop.is_open:  # after its first wait, which began without a device
            self._find_device()
        return loop

    def _loop_begins(self, loop: Loop[T], loader: Iterable[T], has_settings: bool) -> None:
        """Prepare for a pass whose iterator has been made: a part of the wait for its first batch."""
        self._loops.add(loop)
        self._tap(self._taps.loop_begins)
        if not has_settings or not loop.training:  # the settings of an evaluation's loader do not affect the training
            return
        try:
            loop.is_known = loader is self._known_loader() and not getattr(loop.iterator, "_workers", ())
            if not loop.is_known:
                facts = self._publisher.loader = loader_facts(loader, loop.iterator)
                self._health.pass_begins(loader, loop.iterator)
                self._known_loader = _nothing if facts.num_workers else _reference(loader)
        except Exception as error:
            self._failed("reading the loader's settings", error)

    def _first_batch(self, loop: Loop[Any], batch: Any) -> None:
        """Note what only a training batch can tell, once a pass."""
        try:
            torch = sys.modules.get("torch")
            if torch is not None and torch.is_grad_enabled():
                self._trained_with_gradients = True
            if not loop.is_known:
                self._publisher.note_batch(size_bytes(batch))
            self._health.first_batch(batch)
        except Exception as error:
            self._failed("looking at a batch", error)

    def _fetch_failed(self, error: BaseException) -> None:
        with undisturbed():
            self._tap(lambda: self._health.fetch_failed(error))

    def _loop_ends(self, loop: Loop[Any]) -> None:
        """Undo what `_loop_begins` has prepared, if it has."""
        with undisturbed():
            has_begun = loop in self._loops
            self._loops.discard(loop)
            if loop.training and self._recorder.thread == threading.get_ident():
                self._tap(self._health.look_for_dead_workers)  # torch may have raised in the loop's body
            if has_begun:
                self._tap(self._taps.loop_ends)

    def _loop_ended(self, loop: Loop[Any]) -> None:
        """Print the verdict after the first pass; later ones wait for the end, so that a log is not flooded."""
        recorder = self._recorder
        if (
            recorder.thread != threading.get_ident()  # the garbage collector ended a forgotten loop: no place to print
            or self._publisher.accounts.is_held_here  # it may also do so while this thread makes a report
            or not loop.is_last_word
            or self._verdicts.printed
            or recorder.levels
            or recorder.in_step
            or sys.is_finalizing()
        ):
            return
        with undisturbed():
            self._verdicts.print()

    def _visit_step(self) -> None:
        """Look for a device before a declared step, and leave or rejoin it as the hook's cost demands: at first each time, then seldom."""
        meter = self._recorder.meter
        meter.visits += 1
        self._recorder.countdown = 1 if meter.visits <= FIRST_VISITS else LOOKED_AT_EVERY
        self._tap(self._taps.step_begins)

    def _find_device(self) -> None:
        self._tap(self._taps.find_device)

    def _tap(self, what: Callable[[], None]) -> None:
        """Do something with torch's own parts; a torch that is built otherwise must not hurt the training."""
        try:
            what()
        except Exception as error:
            self._failed("tapping torch", error)

    def _start(self) -> None:
        if not self._closed and not self._disabled:
            self._publisher.look_at_world()
            self._publisher.start()

    def _failed(self, doing: str, error: BaseException) -> None:
        """Count a failure, and say each kind once. What a signal handler raised meanwhile is the user's."""
        pass_on(error)
        self._publisher.count_failure()
        if doing not in self._said:
            self._said.add(doing)
            logger.warning("gpuwatch: %s failed and is left out from now on: %r", doing, error)

    def _at_exit(self) -> None:
        if os.getpid() == self.identity.pid:
            with contextlib.suppress(Exception):  # torch's word for a dead worker: nobody is left to hear it
                self.close()

    def _abandon(self) -> None:
        """This is a forked child: record, tell and print nothing of the parent's run."""
        self._recorder.thread = CLOSED
        self._closed = True
        self._publisher.abandon()
        self._tap(self._taps.remove_from_torch)


def watch(
    loader: Iterable[T],
    *,
    to: Any = None,
    samples: Callable[[Any], int] | None = None,
    tokens: Callable[[Any], int] | None = None,
) -> Iterable[T]:
    """Return the loader, watched: `for batch in gpuwatch.watch(loader):` is all that a training loop needs.

    Steps go to the `Watch` that is open, else to one that is opened here and ends with the process. A verdict is printed
    when the loop ends, and when the process ends. See `Watch.steps` for the options.
    """
    if this_process.is_set("GPUWATCH_DISABLE") or this_process.is_loader_worker():
        return Watch().steps(loader, to=to)
    with this_process.opening:
        current = this_process.open_watches[-1] if this_process.open_watches else Watch()
    return current.steps(loader, to=to, samples=samples, tokens=tokens)


def _reference(loader: Any) -> Callable[[], Any]:
    """Return a weak reference to a loader; to nothing where it takes none."""
    try:
        return weakref.ref(loader)
    except TypeError:
        return _nothing


def _nothing() -> None:
    return None


def _counted(samples: Callable[[Any], int]) -> Callable[[Any], int]:
    return lambda batch: max(UNKNOWN_SAMPLES, int(samples(batch)))


__all__ = ["Watch", "watch"]
