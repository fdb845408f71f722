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
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, TypeVar, cast

from gpuwatch.batches import move, size_bytes
from gpuwatch.facts import loader_facts
from gpuwatch.identity import Identity, identify, script_name
from gpuwatch.loops import (
    DataContext,
    PhaseContext,
    StepContext,
    TransferContext,
    WatchedIterator,
    WatchedLoader,
)
from gpuwatch.publisher import Publisher, RunFacts
from gpuwatch.recorder import NOBODY, UNKNOWN_SAMPLES, Recorder
from gpuwatch.report import Report

logger = logging.getLogger(__name__)
T = TypeVar("T")

_open_watches: list[Watch] = []
_made_in_process = 0


class Watch:
    """One training run as this process sees it: every second since it was opened, by state.

    Use it as a context manager, or call `close()`. Options:

    - `run`: a name for people (default: GPUWATCH_RUN, else the script's name). The unique id comes from GPUWATCH_RUN, the scheduler or
      torchelastic, else from host, pid and start time, and is `w.run`.
    - `job`: the scheduler's job id (default: Slurm's, PBS's or LSF's).
    - `tags`: names and values that describe the run; shown, never made into labels.
    - `endpoint`: where the agent listens (default: GPUWATCH_ENDPOINT, else the first agent's socket on this node).
    - `quiet`: print no verdict (default: GPUWATCH_QUIET=1).
    """

    def __init__(
        self,
        run: str | None = None,
        *,
        job: str | None = None,
        tags: Mapping[str, str] | None = None,
        endpoint: str | None = None,
        quiet: bool | None = None,
    ) -> None:
        self._disabled = _flag("GPUWATCH_DISABLE")
        self._quiet = _flag("GPUWATCH_QUIET") if quiet is None else quiet
        self._recorder = Recorder()
        self._trained_with_gradients = False
        self._loops: weakref.WeakSet[WatchedIterator[Any]] = weakref.WeakSet()
        self._closed = False
        self._printed = (0, 0.0)
        """Steps and seconds of the verdict that was printed last."""
        identity = self.identity = _unique(identify())
        self._facts = RunFacts(
            name=str(run or os.environ.get("GPUWATCH_RUN") or script_name())[:128],
            job=str(job or identity.job)[:128],
            tags={str(key)[:128]: str(value)[:256] for key, value in list((tags or {}).items())[:32]},
        )
        self._publisher = Publisher(self._recorder, identity, self._facts, endpoint, self._early_verdict)
        self._step = StepContext(self)
        self._data = DataContext(self)
        self._transfer = TransferContext(self)
        if not self._disabled:
            _open_watches.append(self)
            atexit.register(self._at_exit)

    @property
    def run(self) -> str:
        """The run's unique id, shared by all ranks."""
        return self.identity.run

    def steps(self, loader: Iterable[T], *, to: Any = None, samples: Callable[[Any], int] | None = None) -> Iterable[T]:
        """Return the loader, watched: each batch taken from it begins a step, which lasts until the next one is asked for.

        `to` moves each batch to a device and times that as `transfer` (non_blocking where its memory is pinned).
        `samples` tells a batch's number of samples (default: the length of its first tensor).
        """
        if self._disabled:
            return loader if to is None else _Moved(loader, to)
        return WatchedLoader(self, loader, to, samples)

    def step(self, samples: int | None = None) -> AbstractContextManager[None]:
        """Return the context of one step, for a loop without a loader."""
        if self._disabled:
            return contextlib.nullcontext()
        self._step.samples = UNKNOWN_SAMPLES if samples is None else samples
        return self._step

    def data(self) -> AbstractContextManager[None]:
        """Return a context whose time is a wait for input."""
        return contextlib.nullcontext() if self._disabled else self._data

    def transfer(self) -> AbstractContextManager[None]:
        """Return a context whose time is a copy to the device."""
        return contextlib.nullcontext() if self._disabled else self._transfer

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Return a context whose time belongs to a phase, steps inside it included.

        "eval", "checkpoint", "startup" and "compile" are states of their own; any other name is `other`.
        """
        return contextlib.nullcontext() if self._disabled else PhaseContext(self, str(name)[:128])

    def report(self) -> Report:
        """Return all wall time since this Watch was opened, by state, with findings; `str()` of it is the verdict."""
        return self._publisher.report(self._closed)

    def close(self) -> None:
        """End the run: print the verdict, say good-bye to the agent. Safe to call twice."""
        if self._closed or self._disabled:
            return
        self._closed = True
        if self in _open_watches:
            _open_watches.remove(self)
        atexit.unregister(self._at_exit)
        try:
            if self._recorder.thread is not None:
                now = self._recorder.clock()
                for loop in list(self._loops):
                    loop._open = False
                self._recorder.end_step(now)
                self._recorder.exit(1, now)
            self._recorder.thread = NOBODY
            self._publisher.close()
            self._print_verdict()
        except Exception as error:
            self._failed("closing", error)

    def __enter__(self) -> Watch:
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # What the loops call ------------------------------------------------------------------------------------------

    def _loop(self, loader: Iterable[T], to: Any, samples: Callable[[Any], int]) -> WatchedIterator[T]:
        """Return a new pass over the loader."""
        self._start()
        iterator = WatchedIterator(self, loader, to, samples)
        self._loops.add(iterator)
        try:
            self._publisher.loader = loader_facts(loader, iterator._iterator) or self._publisher.loader
        except Exception as error:
            self._failed("reading the loader's settings", error)
        return iterator

    def _first_batch(self, batch: Any) -> None:
        """Note what only a batch can tell, once a pass."""
        try:
            torch = sys.modules.get("torch")
            if torch is not None and torch.is_grad_enabled():
                self._trained_with_gradients = True
            self._publisher.note_batch(size_bytes(batch))
        except Exception as error:
            self._failed("looking at a batch", error)

    def _loop_ended(self, iterator: WatchedIterator[Any]) -> None:
        """Print the verdict after the first pass; later ones wait for the end, so that nobody's log is flooded."""
        self._loops.discard(iterator)
        if not self._printed[0] and not self._recorder.levels and not _interpreter_is_ending():
            self._print_verdict()

    def _start(self) -> None:
        if not self._closed:
            self._publisher.start()

    def _failed(self, doing: str, error: BaseException) -> None:
        self._publisher.count_failure()
        logger.warning("gpuwatch: %s failed and is left out from now on: %r", doing, error)

    # Verdicts -----------------------------------------------------------------------------------------------------

    def _print_verdict(self) -> None:
        try:
            if self._quiet or (self._closed and not self._new_to_tell()):
                return
            report = self.report()
            if not report.steps:
                return
            self._printed = (report.steps, report.duration_s)
            print(report, file=sys.stderr, flush=True)
        except Exception as error:
            self._failed("printing the verdict", error)

    def _new_to_tell(self) -> bool:
        """Whether more than a moment has passed since the verdict was last printed."""
        report = self.report()
        steps, duration_s = self._printed
        return report.steps > steps or report.duration_s > 1.02 * duration_s + 1.0

    def _early_verdict(self) -> None:
        """One line after the first minute of a long first pass; called by the background thread."""
        report = self.report()
        if not self._quiet and not self._printed[0] and report.steps:
            print(f"\ngpuwatch: {report.verdict.sentence}", file=sys.stderr, flush=True)

    def _at_exit(self) -> None:
        if os.getpid() == self.identity.pid:
            self.close()


class _Moved(Iterable[T]):
    """A loader whose batches are moved to a device, unwatched."""

    def __init__(self, loader: Iterable[T], to: Any) -> None:
        self._loader = loader
        self._to = to

    def __iter__(self) -> Any:
        return (move(batch, self._to) for batch in self._loader)

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]


_default_lock = threading.Lock()


def watch(loader: Iterable[T], *, to: Any = None, samples: Callable[[Any], int] | None = None) -> Iterable[T]:
    """Return the loader, watched: `for batch in gpuwatch.watch(loader):` is all that a training loop needs.

    Steps go to the `Watch` that is open, else to one that is opened here and ends with the process. A verdict is printed
    when the loop ends, and when the process ends. See `Watch.steps` for `to` and `samples`.
    """
    if _flag("GPUWATCH_DISABLE"):
        return loader if to is None else cast("Iterable[T]", _Moved(loader, to))
    with _default_lock:
        current = _open_watches[-1] if _open_watches else Watch()
    return current.steps(loader, to=to, samples=samples)


def _unique(identity: Identity) -> Identity:
    """Give a second Watch of the same process a run id of its own."""
    global _made_in_process
    _made_in_process += 1
    if _made_in_process == 1:
        return identity
    from dataclasses import replace

    return replace(identity, run=f"{identity.run}-{_made_in_process}")


def _flag(name: str) -> bool:
    return os.environ.get(name, "").strip().lower() not in ("", "0", "false", "no")


def _interpreter_is_ending() -> bool:
    return sys.is_finalizing()


def _forget_in_child() -> None:
    """A forked child (a loader worker, say) records nothing, sends nothing and prints nothing."""
    for each in list(_open_watches):
        each._recorder.thread = NOBODY
        each._closed = True
        each._publisher.abandon()
    _open_watches.clear()


os.register_at_fork(after_in_child=_forget_in_child)

__all__ = ["Watch", "watch"]
