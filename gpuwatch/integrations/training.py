"""The integrations' base: a training loop, measured by a `Watch`: who requests a batch, trains, evaluates or saves."""

from __future__ import annotations

import inspect
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import repeat
from threading import get_ident
from typing import Any, TypeVar

from gpuwatch.errors import pass_on
from gpuwatch.hook.batches import sample_count, sample_counter
from gpuwatch.hook.loader import WatchedIterator
from gpuwatch.hook.loop import Loop
from gpuwatch.hook.session import Session
from gpuwatch.hook.torch.communication import is_parallel
from gpuwatch.hook.torch.patches import Patches, say_once
from gpuwatch.hook.watch import StepContext, Watch, open_watches, records_here
from gpuwatch.hook.watch import watch as watch_loader

T = TypeVar("T")
_active: list[Training] = []
training_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # those that made an optimizer, or a step


class Training:
    """One training by a framework, from its beginning to its end, however that comes.

    A step lasts from the request for a batch to the next one after training; fetches without training are part of it.
    """

    def __init__(self, watch: Watch | None = None, **options: Any) -> None:
        """Use `watch`, else the open Watch, else one of `options` that ends with this. Call in the training thread."""
        if watch is not None and watch.identity.pid != os.getpid():
            watch = None  # this process was forked since, and has its own
        current = watch or (open_watches[-1] if open_watches else None)
        self._owned = current is None
        self.watch = current or Watch(**options)
        self.session: Session = self.watch.session
        self._disabled = self.session.disabled or self.session.closed  # then it is measured no more
        self.patches = Patches(on=not self._disabled)
        if not self._disabled:
            self.session.start()
            self.session.guard(self.session.torch_hooks.optimizer.give_way)
            self.session.guard(self.session.torch_hooks.begin_loop)
            self.session.find_device()
        self._thread = get_ident()
        self._step, self._transfer = StepContext(self.session), self.watch.transfer()
        self.data = self.watch.data()  # a wait for data of the open step, or of the step that follows
        self._asked: list[Any] = []  # the request for the open step's batch, and its arguments
        self._pass: Iterator[Any] | None = None  # the requests, watched as a loop's loader is
        self._stepping = self._trained = False
        self._declared = False  # the open step was begun here, not by the pass
        self._is_ahead = False  # batches are fetched before the one that is trained on: only that one's samples count
        self._phases = 0
        self._count: Callable[[Any], int] | None = None
        _active.append(self)
        torch_data = sys.modules.get("torch.utils.data")
        if torch_data is not None:
            self.patches.wrap(torch_data.DataLoader, "__iter__", self._loader_iter)

    def fetch(self, request: Callable[..., T], *args: Any) -> T:
        """Return `request(*args)`: the next batch. The time is a wait for data; a step that has trained ends here."""
        if self._disabled or get_ident() != self._thread:
            return request(*args)
        is_ahead = self._stepping and not self._trained and not self._phases  # or more of the same step
        self._is_ahead |= is_ahead
        if is_ahead or self._phases:  # an evaluation's, which stays one
            with self.data:
                return request(*args)
        if self._declared:
            self.end_step()
        if self._pass is None:
            requests = map(lambda asked: asked[0](*asked[1]), repeat(self._asked))
            self._pass = WatchedIterator(Loop(self.session, requests, of_framework=True))
        self._asked[:] = request, args
        self._trained, self._stepping = False, True
        try:
            batch: T = next(self._pass)
        except BaseException as error:  # no batch: this was a wait, and no step
            self._stepping = False
            if isinstance(error, StopIteration):
                self._pass = None
            raise
        finally:
            self._asked.clear()  # an iterator that has come to its end is not kept alive
        return batch

    def wait(self, original: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call `original`, in which training waits for data, such as for the start of workers."""
        with self.data if self.is_input() else nullcontext():
            return original(*args, **kwargs)

    def fetched(self, batches: Sequence[Any]) -> None:
        """Training goes on with these batches: what was fetched is one step's input."""
        self._trained = True
        if not self.is_input():
            return
        if not self._stepping:
            if all(batch is None for batch in batches):
                return
            self._stepping = self._declared = True  # the last batch, fetched before the request that got none
            self._step.__enter__()
        elif len(batches) == 1 and not self._is_ahead:
            return  # the one that was fetched: its samples are counted
        try:
            if not batches:
                return
            if self._count is None:
                self._count = sample_counter(batches[0]) or sample_count
            samples = [self._count(batch) for batch in batches]
            if min(samples) >= 0:  # else one is not known
                self.session.recorder.set_samples(sum(samples))
        except Exception as error:  # a batch of an unknown kind
            pass_on(error)
            say_once(f"samples are not counted: {error!r}")

    def end_step(self) -> None:
        """End the open step: the next batch is requested, or the epoch has ended."""
        self._trained = False
        recorder = self.session.recorder
        if self._declared:
            self._declared = False
            self._step.__exit__(None, None, None)
        elif self._stepping and recorder.thread == get_ident():
            self.session.guard(lambda: recorder.end_step(recorder.clock()), "ending a step")
        self._stepping = False

    def in_phase(self, name: str, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Call `original` inside a declared phase: "eval" or "checkpoint"."""
        if get_ident() != self._thread:  # a checkpoint that is written while training goes on
            return original(*args, **kwargs)
        self._phases += 1
        try:
            with self.watch.phase(name):
                return original(*args, **kwargs)
        finally:
            self._phases -= 1

    def wrap_phase(self, owner: Any, method: str, phase: str) -> None:
        """Have calls of `owner.method` counted as a declared phase."""
        self.patches.wrap(owner, method, lambda original, *args, **kw: self.in_phase(phase, original, *args, **kw))

    def copy(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Call `original`, which copies a batch to the device."""
        if not self.is_input():
            return original(*args, **kwargs)
        recorder = self.session.recorder
        if recorder.steady is None:
            with self._transfer:
                return original(*args, **kwargs)
        # An ordinary step stays on the fast path. The tensors copied inside are timed too: this replaces their times.
        before_ns, begin = recorder.transfer_ns, recorder.clock()
        result = original(*args, **kwargs)
        if recorder.steady is not None:
            recorder.set_copied(before_ns, begin)
        return result

    def watch_model(self, model: Any) -> None:
        """Measure a model's waits for other ranks where it is one of DDP or FSDP."""
        if not self._disabled and is_parallel(model):
            self.watch.watch_communication(model)

    def count_from(self, step: Callable[[], int]) -> None:
        """The next step is the trainer's global step `step()`: not 0 where it resumes from a checkpoint."""
        if not self._disabled:
            self.session.count_from(step)

    def close(self) -> None:
        """End the training: restore all that was patched; close a Watch made here, which prints its verdict."""
        _active.remove(self)
        self.patches.restore()
        self.end_step()
        self._pass = None
        if not self._disabled:
            self.session.guard(self.session.torch_hooks.end_loop)
        if self._owned:
            self.watch.close()

    def is_input(self) -> bool:
        """Whether this is training input: no phase is open, and the caller is the thread that trains."""
        return not self._phases and not self._disabled and get_ident() == self._thread

    def _loader_iter(self, original: Any, loader: Any) -> Any:
        """Make a DataLoader's iterator: its workers start here."""
        iterator = self.wait(original, loader)
        if self.is_input():
            self.session.note_loader(loader, iterator)
        return iterator


class TimedIterator:
    """A framework's iterator, its waits measured."""

    def __init__(self, training: Training, iterator: Iterator[Any]) -> None:
        self._training = training
        self.iterator = iterator

    def __iter__(self) -> TimedIterator:
        return self

    def __next__(self) -> Any:
        return self._training.fetch(self.iterator.__next__)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.iterator, name)


class FrameworkCallback:
    """What the frameworks' callbacks share: the options of their trainings, and the training that runs."""

    def __init__(self, watch: Watch | None = None, **options: Any) -> None:
        """`watch`: an open one; else the options make one, as in `Watch`. Raises: TypeError for unknown options."""
        super().__init__()
        inspect.signature(Watch).bind(**options)
        self._watch, self._options = watch, options
        self._training: Training | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A spawned process gets it without what runs here: it makes its own Watch."""
        return {**self.__dict__, "_training": None, "_watch": None}

    def _note(self, note: Callable[[Training], None]) -> None:
        """Call `note` with the training that runs, if one does."""
        if self._training is not None:
            note(self._training)


def is_watched_already() -> bool:
    """Whether a framework's training runs now in this process, so that its integration handles its loaders."""
    return bool(_active)


def trains_here() -> bool:
    """Whether this is the main thread, or one that has made an optimizer, of a process that is no loader's worker."""
    thread = threading.current_thread()
    return records_here() and (thread is threading.main_thread() or thread in training_threads)


def open_watch_for_the_process() -> None:
    """Open the Watch that ends with the process, if none is open: several trainings of one script are one run."""
    watch_loader(())
