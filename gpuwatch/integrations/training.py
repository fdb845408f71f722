"""A framework's training loop, told to a `Watch`: who asks for a batch, who trains on it, who evaluates or saves.

The integrations use this and nothing of the hook's inside. What has no public name is in the functions at the end.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from threading import get_ident
from typing import TYPE_CHECKING, Any, TypeVar

from gpuwatch.hook import process_state as this_process
from gpuwatch.hook.batches import sample_count, sample_counter
from gpuwatch.hook.interrupts import pass_on
from gpuwatch.hook.iterator import WatchedIterator
from gpuwatch.hook.loader_info import loader_facts
from gpuwatch.hook.torch.communication import is_parallel
from gpuwatch.hook.torch.patches import Patches, say_once
from gpuwatch.hook.watch import Watch

if TYPE_CHECKING:
    from typing import ParamSpec

    P = ParamSpec("P")

T = TypeVar("T")
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
        self._recorder = self.watch._recorder
        self._asking = _Asking()
        self._pass: Iterator[Any] | None = None
        """What asks, watched as a loop's loader is; a new one once it has come to its end."""
        self._stepping = self._trained = False
        self._by_hand = False
        """The open step is none of the pass's."""
        self._is_ahead = False
        """Batches are fetched before the one that is trained on: how many samples a step has is told by what it trains on."""
        self._phases = 0
        self._count: Callable[[Any], int] | None = None
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
        if self._stepping and not self._trained:  # a batch ahead, or one more of the same step
            self._is_ahead = True
            with self._data:
                return ask(*args)
        if self._by_hand:
            self.end_step()
        if self._pass is None:
            self._pass = new_pass(self.watch, self._asking)
        self._asking.ask, self._asking.args = ask, args
        self._trained, self._stepping = False, True
        try:
            batch: T = next(self._pass)
        except BaseException as error:  # no batch at all: this was a wait, and no step
            self._stepping = False
            if isinstance(error, StopIteration):
                self._pass = None
            raise
        finally:
            # An iterator that has come to its end is the framework's to let go of.
            self._asking.ask, self._asking.args = None, ()
        return batch

    def fetched(self, batches: Sequence[Any]) -> None:
        """Training goes on with these batches: what was fetched is one step's input."""
        self._trained = True
        if not self.is_input():
            return
        if not self._stepping:
            if all(batch is None for batch in batches):
                return
            self._stepping = self._by_hand = True  # the last batch, fetched before the one that there was not
            self._step.__enter__()
        elif len(batches) == 1 and not self._is_ahead:
            return  # the one that was fetched: its samples are counted
        try:
            if not batches:
                return
            if self._count is None:
                self._count = sample_counter(batches[0]) or sample_count
            count_samples(self.watch, *map(self._count, batches))
        except Exception as error:  # a batch of a kind that nobody thought of
            pass_on(error)
            say_once(f"samples are not counted: {error!r}")

    def starting_workers(self) -> AbstractContextManager[None]:
        """Return the context of making an iterator: a wait for data, for the step that comes."""
        return self._data

    def end_step(self) -> None:
        """End the open step: the next batch is asked for, or the epoch has ended."""
        self._trained = False
        if self._by_hand:
            self._by_hand = False
            self._step.__exit__(None, None, None)
        elif self._stepping:
            end_open_step(self.watch)
        self._stepping = False

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
        recorder = self._recorder
        if recorder.steady is None:
            with self._transfer:
                return original(*args, **kwargs)
        # A usual step stays one. The tensors that are copied inside are timed too: what they took is in this.
        before_ns, begin = recorder.transfer_ns, recorder.clock()
        result = original(*args, **kwargs)
        if recorder.steady is not None and recorder.begin_ns <= begin:
            recorder.transfer_ns = before_ns + recorder.clock() - begin
        return result

    def watch_model(self, model: Any) -> None:
        """Measure a model's waits for other ranks where it is one of DDP or FSDP."""
        if not self._disabled and is_parallel(model):
            self.watch.watch_communication(model)

    def close(self) -> None:
        """End the training: all that was patched is restored, and an own Watch is closed and tells its verdict."""
        if self._ended:
            return
        self._ended = True
        _active.remove(self)
        self.patches.restore()
        self.end_step()
        self._pass = None
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


class _Asking:
    """Asks for batches as a framework does, as an iterator: so its steps take the way of any loop's."""

    ask: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()

    def __iter__(self) -> _Asking:
        return self

    def __next__(self) -> Any:
        assert self.ask is not None
        return self.ask(*self.args)


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
            pass_on(error)
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
    watch._find_device()


@_fail_open
def untap_torch(watch: Watch) -> None:
    """The end of what `tap_torch` began."""
    watch._tap(watch._taps.loop_ends)


def new_pass(watch: Watch, asking: Iterator[T]) -> Iterator[T]:
    """Return a pass over what is asked for, measured as one over a loader."""
    loop = watch._pass(asking)
    loop.is_last_word = False  # the framework's training goes on, and says when it ends
    watched: Iterator[T] = WatchedIterator(loop)
    return watched


@_fail_open
def end_open_step(watch: Watch) -> None:
    """End the step that is open in the training thread."""
    recorder = watch._recorder
    if recorder.thread == get_ident():
        recorder.end_step(recorder.clock())


def count_samples(watch: Watch, *samples: int) -> None:
    """Set the number of samples of the open step, which these batches have together; none where one of them is not known (-1)."""
    if min(samples) >= 0:
        watch._recorder.samples = sum(samples)


@_fail_open
def note_loader(watch: Watch, loader: Any, iterator: Any) -> None:
    """Tell a loader's settings and workers: evidence, and advice in numbers."""
    watch._publisher.loader = loader_facts(loader, iterator)
