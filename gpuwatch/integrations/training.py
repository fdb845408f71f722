"""A framework's training loop, told to a `Watch`: who asks for a batch, who trains on it, who evaluates or saves.

The integrations use this and nothing of the hook's inside. What has no public name is in the functions at the end.
"""

from __future__ import annotations

import functools
import inspect
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from threading import get_ident
from typing import TYPE_CHECKING, Any, TypeVar

from gpuwatch import this_process
from gpuwatch.batches import sample_count, sample_counter, size_bytes
from gpuwatch.facts import loader_facts
from gpuwatch.hook import Watch
from gpuwatch.integrations.patches import Patches, say_once
from gpuwatch.looks import LOOKED_AT_EVERY, LOOKED_AT_SELDOM, QUICK_FETCH_NS

if TYPE_CHECKING:
    from typing import ParamSpec

    P = ParamSpec("P")

T = TypeVar("T")
_FIRST_LOOKS = 4
"""The device is set up by the first steps, so that those are looked at more often."""
_active: list[Training] = []


class Training:
    """One training by a framework, from its begin to its end on any way.

    A step lasts from asking for a batch until the next one is asked for after training on it, as in `gpuwatch.watch`; several
    fetches without training between them (a batch ahead, micro-batches) are one step's.
    """

    def __init__(self, watch: Watch | None = None, **options: Any) -> None:
        """`watch`: the Watch to tell, else the one that is open, else one made of `options` that ends with this training.

        The thread that calls this is the one that trains.
        """
        current = watch or open_watch()
        self._owned = current is None
        self.watch = current or Watch(**options)
        self._disabled = is_disabled(self.watch)
        self.patches = Patches(on=not self._disabled)
        if not self._disabled:
            self.watch.__enter__()
            tap_torch(self.watch)
        self._thread = get_ident()
        self._step, self._data, self._transfer = self.watch.step(), self.watch.data(), self.watch.transfer()
        self._stepping = self._trained = False
        self._phases = 0
        self._fresh = True
        self._countdown = 1
        """Fetches until the next one that is looked at closely."""
        self._looks = 0
        self._count: Callable[[Any], int] = sample_count
        self._ended = False
        _active.append(self)
        torch_data = sys.modules.get("torch.utils.data")
        if torch_data is not None:
            self.patches.wrap(torch_data.DataLoader, "__iter__", self._loader_iter)

    # The wait for data --------------------------------------------------------------------------------------------

    def fetch(self, ask: Callable[..., T], *args: Any) -> T:
        """Return `ask(*args)`: the next batch. The time is a wait for data; a step that has trained ends here."""
        if not self.is_input():
            return ask(*args)
        if self._trained:
            self.end_step()
        fed = self._stepping
        if not fed:
            self._begin_step()
        self._countdown -= 1
        try:
            with self._data:
                batch = ask(*args) if self._countdown else self._fetch_closely(ask, *args)
        except BaseException:
            if not fed:  # no batch at all: this was a wait, and no step
                self._stepping = False
                drop_step(self.watch)
            raise
        return batch

    def _fetch_closely(self, ask: Callable[..., T], *args: Any) -> T:
        """Fetch, and look meanwhile: at the thread's own time, and at the device. That takes several times what a fetch's clocks take."""
        self._countdown = LOOKED_AT_EVERY  # also if there is none
        begin, busy = time.monotonic_ns(), busy_ns(self.watch)
        look_at_device(self.watch, begin)
        batch = ask(*args)
        wall_ns = time.monotonic_ns() - begin
        count_fetch(self.watch, busy, wall_ns)
        self._looks += 1
        if wall_ns < QUICK_FETCH_NS and self._looks >= _FIRST_LOOKS:
            self._countdown = LOOKED_AT_SELDOM
        return batch

    def fetched(self, batches: Sequence[Any]) -> None:
        """Training goes on with these batches: what was fetched is one step's input."""
        self._trained = True
        if not self.is_input():
            return
        if not self._stepping:
            if all(batch is None for batch in batches):
                return
            self._begin_step()  # the last batch, fetched before the one that there was not
        try:
            if not batches:
                return
            if self._fresh:
                self._fresh = False
                self._count = sample_counter(batches[0]) or sample_count
                note_batch(self.watch, batches[0])
            count_samples(self.watch, *map(self._count, batches))
        except Exception as error:  # a batch of a kind that nobody thought of
            say_once(f"samples are not counted: {error!r}")

    def _begin_step(self) -> None:
        self._stepping = True
        self._step.__enter__()

    def starting_workers(self) -> AbstractContextManager[None]:
        """Return the context of making an iterator: a wait for data, for the step that comes."""
        return self._data

    def end_step(self) -> None:
        """End the open step: the next batch is asked for, or the epoch has ended."""
        self._trained = False
        if self._stepping:
            self._stepping = False
            self._step.__exit__(None, None, None)

    # What is no training input ------------------------------------------------------------------------------------

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Return the context of a declared phase: "eval" or "checkpoint"."""
        return _Phase(self, name)

    def in_phase(self, name: str, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Call `original` inside a phase."""
        if get_ident() != self._thread:  # a checkpoint that is written beside the training
            return original(*args, **kwargs)
        with self.phase(name):
            return original(*args, **kwargs)

    def copy(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Call `original`, which copies a batch to the device."""
        if not self.is_input():
            return original(*args, **kwargs)
        with self._transfer:
            return original(*args, **kwargs)

    def close(self) -> None:
        """End the training: all that was patched is restored, and an own Watch is closed and tells its verdict."""
        if self._ended:
            return
        self._ended = True
        _active.remove(self)
        self.patches.restore()
        self.end_step()
        if not self._disabled:
            untap_torch(self.watch)
        if self._owned:
            self.watch.close()

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def is_input(self) -> bool:
        """Whether this is training input: no phase is open, and the caller is the thread that trains."""
        return not self._phases and not self._disabled and get_ident() == self._thread

    def _loader_iter(self, original: Any, loader: Any) -> Any:
        """Make a DataLoader's iterator: its workers start here."""
        if not self.is_input():
            return original(loader)
        with self.starting_workers():
            iterator = original(loader)
        note_loader(self.watch, loader, iterator)
        return iterator


class _Phase:
    def __init__(self, training: Training, name: str) -> None:
        self._training = training
        self._phase = training.watch.phase(name)

    def __enter__(self) -> None:
        self._training._phases += 1
        self._phase.__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._training._phases -= 1
        self._phase.__exit__(*exception)


def checked(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a Watch. Raises: TypeError for one that it does not know, before a training has begun."""
    inspect.signature(Watch).bind(**options)
    return options


def is_watched_already() -> bool:
    """Whether a framework's training runs now in this process, so that its loaders are its integration's."""
    return bool(_active)


# The hook's inside: no public name yet --------------------------------------------------------------------------------


def _fail_open(function: Callable[P, None]) -> Callable[P, None]:
    """Have a failure said once and left out: it must not reach the training."""

    @functools.wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            function(*args, **kwargs)
        except Exception as error:
            say_once(f"{function.__name__} is left out: {error!r}")

    return guarded


def open_watch() -> Watch | None:
    """Return the innermost open Watch of this process."""
    return this_process.open_watches[-1] if this_process.open_watches else None


def is_disabled(watch: Watch | None = None) -> bool:
    """Whether GPUWATCH_DISABLE is set, so that nothing is to be touched."""
    return this_process.is_set("GPUWATCH_DISABLE") if watch is None else watch._disabled


@_fail_open
def tap_torch(watch: Watch) -> None:
    """Time copies, compilations and the device as inside a watched loop."""
    watch._tap(watch._taps.loop_begins)


@_fail_open
def untap_torch(watch: Watch) -> None:
    """The end of what `tap_torch` began."""
    watch._tap(watch._taps.loop_ends)


@_fail_open
def look_at_device(watch: Watch, now_ns: int) -> None:
    """Find the device once the user's code has set it up, and read what it has finished."""
    if watch._recorder.home is None:
        watch._find_device()
    else:
        watch._recorder.poll(now_ns)


@_fail_open
def drop_step(watch: Watch) -> None:
    """The open step got no batch: its time was a wait for data."""
    watch._recorder.abandon(watch._recorder.clock())


def count_samples(watch: Watch, *samples: int) -> None:
    """Set the number of samples of the open step, which these batches have together; none where one of them is not known (-1)."""
    if min(samples) >= 0:
        watch._recorder.samples = sum(samples)


@_fail_open
def count_fetch(watch: Watch, busy_ns_before: int | None, wall_ns: int) -> None:
    """Count a fetch by the training thread: evidence for why it waited."""
    after = busy_ns(watch)
    if after is not None and busy_ns_before is not None:
        watch._recorder.fetches.count(after - busy_ns_before, wall_ns)


def busy_ns(watch: Watch) -> int | None:
    """Return the training thread's time on a CPU or in the queue for one, in ns; None before there is such a thread."""
    thread_time = watch._recorder.fetches.thread_time
    return None if thread_time is None else thread_time.busy_ns()


@_fail_open
def note_loader(watch: Watch, loader: Any, iterator: Any) -> None:
    """Tell a loader's settings and workers: evidence, and advice in numbers."""
    watch._publisher.loader = loader_facts(loader, iterator)


@_fail_open
def note_batch(watch: Watch, batch: Any) -> None:
    """Tell the bytes of a batch, and that this run trains."""
    watch._trained_with_gradients = True
    watch._publisher.note_batch(size_bytes(batch))
