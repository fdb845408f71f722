"""A loader that is watched, and the contexts of a loop without one. They only call the recorder: this is the hot path.

The user's objects keep behaving as they did: `iter()` starts workers when the loader would, `len()`, attributes and
exceptions pass through unchanged, and a thread that is not the training thread is not measured.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator
from threading import get_ident
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from gpuwatch.batches import move, sample_counter
from gpuwatch.ledger import EVAL
from gpuwatch.recorder import DATA_WAIT, IN_STEP, LOOSE, STEP, TOKENS, TRANSFERRING, UNKNOWN_SAMPLES, Recorder

if TYPE_CHECKING:
    from gpuwatch.hook import Watch

T = TypeVar("T")
Samples = Callable[[Any], int]
_CPU_SAMPLED_EVERY = 8
_CPU_SAMPLED_SELDOM = 64
_QUICK_FETCH_NS = 1_000_000
"""A look costs 4 µs: nothing beside a slow fetch, and a quick one is nobody's bottleneck."""


class WatchedLoader(Generic[T]):
    """Any iterable of batches, measured while it is iterated. Everything else is the loader's own."""

    def __init__(
        self,
        watch: Watch,
        loader: Iterable[T],
        to: Any = None,
        samples: Samples | None = None,
        tokens: Samples | None = None,
    ) -> None:
        self._gpuwatch_watch = watch
        self._gpuwatch_loader = loader
        self._gpuwatch_to = to
        self._gpuwatch_samples = samples
        self._gpuwatch_tokens = tokens
        self._gpuwatch_pass: WatchedIterator[T] | None = None

    def __iter__(self) -> Iterator[T]:
        return self._gpuwatch_begin()

    def _gpuwatch_begin(self) -> WatchedIterator[T]:
        return self._gpuwatch_watch._loop(
            self._gpuwatch_loader, self._gpuwatch_to, self._gpuwatch_samples, self._gpuwatch_tokens
        )

    def __next__(self) -> T:
        """Return the next batch of a generator or another iterator, as it would itself."""
        if not isinstance(self._gpuwatch_loader, Iterator):
            raise TypeError(f"{type(self._gpuwatch_loader).__name__!r} object is not an iterator")
        if self._gpuwatch_pass is None:
            self._gpuwatch_pass = self._gpuwatch_begin()
        return next(self._gpuwatch_pass)

    def __len__(self) -> int:
        return len(self._gpuwatch_loader)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return bool(self._gpuwatch_loader)

    def __getattr__(self, name: str) -> Any:
        # Special methods are not handed on: copy and pickle would then copy the loader in this object's place.
        if name.startswith(("_gpuwatch_", "__")):
            raise AttributeError(name)
        return getattr(self._gpuwatch_loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_gpuwatch_"):
            object.__setattr__(self, name, value)
        else:
            setattr(self._gpuwatch_loader, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._gpuwatch_loader, name)

    def __dir__(self) -> Iterable[str]:
        return dir(self._gpuwatch_loader)

    def __getitem__(self, index: Any) -> Any:
        return self._gpuwatch_loader[index]  # type: ignore[index]

    def __copy__(self) -> WatchedLoader[T]:
        return self._gpuwatch_around(copy.copy(self._gpuwatch_loader))

    def __deepcopy__(self, memo: dict[int, Any]) -> WatchedLoader[T]:
        return self._gpuwatch_around(copy.deepcopy(self._gpuwatch_loader, memo))

    def _gpuwatch_around(self, loader: Iterable[T]) -> WatchedLoader[T]:
        return WatchedLoader(
            self._gpuwatch_watch, loader, self._gpuwatch_to, self._gpuwatch_samples, self._gpuwatch_tokens
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the bare loader: another process (a spawned worker) is not this run's and must not report."""
        return _same, (self._gpuwatch_loader,)

    def __repr__(self) -> str:
        return f"gpuwatch.watch({self._gpuwatch_loader!r})"


def _same(loader: T) -> T:
    return loader


class WatchedIterator(Iterator[T]):
    """One pass over a loader. Each batch asked for ends the step before it."""

    def __init__(
        self,
        watch: Watch,
        loader: Iterable[T],
        to: Any = None,
        samples: Samples | None = None,
        tokens: Samples | None = None,
    ) -> None:
        self._watch = watch
        self._recorder = recorder = watch._recorder
        self._to = to
        self._samples = samples
        self._tokens = tokens
        self._owner = object()
        """Stands for this loop in the recorder, which must not keep the loop itself alive: dropping it is its end."""
        self._first = True
        self._nested = False
        self._training = False
        # A loader that is iterated inside another one's fetch is a part of that wait.
        self._open = recorder.claim_thread() and (recorder.activity is not DATA_WAIT or bool(recorder.parts))
        if not self._open:
            self._iterator = iter(loader)
            return
        begin = recorder.clock()
        if self._is_evaluation():
            recorder.enter(EVAL, begin)
            self._nested = True
        elif recorder.in_step and recorder.step_owner is not LOOSE:
            recorder.enter(None, begin)
            self._nested = True
        self._level = recorder.level
        self._training = not recorder.in_phase
        recorder.begin_part(DATA_WAIT, begin)
        try:
            self._iterator = iter(loader)
        except BaseException:
            recorder.end_part(recorder.clock())
            self._close()
            raise
        recorder.end_part(recorder.clock())

    def _is_evaluation(self) -> bool:
        """Whether this loop is one without gradients in a run that trains: the loop of an evaluation."""
        torch = sys.modules.get("torch")
        if torch is None or not self._watch._trained_with_gradients or self._recorder.in_phase:
            return False
        return not torch.is_grad_enabled()

    def __iter__(self) -> WatchedIterator[T]:
        return self

    def __len__(self) -> int:
        return len(self._iterator)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        if name == "_iterator":
            raise AttributeError(name)
        return getattr(self._iterator, name)

    def __next__(self) -> T:
        recorder = self._recorder
        # The usual case is written out, with few attributes: beside a real step all of this runs from cold caches, and a
        # call costs as much as all that it does here. While a `data()` or `transfer()` is open the activity is another one.
        if recorder.step_owner is self._owner and recorder.activity is IN_STEP and recorder.thread == get_ident():
            begin = recorder.clock()
            if recorder.device is not None:
                recorder.device_ends(begin)
            recorder.log.append(
                (
                    STEP,
                    recorder.begin_ns,
                    begin,
                    recorder.data_ns,
                    recorder.transfer_ns,
                    recorder.samples,
                    recorder.epoch_start,
                )
            )
            recorder.unfed = recorder.epoch_start = False
            recorder.begin_ns = recorder.mark_ns = begin
            recorder.data_ns = recorder.transfer_ns = 0
            recorder.samples = UNKNOWN_SAMPLES
        else:
            if recorder.thread != get_ident() or not self._open:
                batch = next(self._iterator)
                return batch if self._to is None else move(batch, self._to)
            if recorder.level != self._level:
                self._settle_level()
            begin = recorder.clock()
            if recorder.parts or (recorder.in_step and recorder.step_owner is not self._owner):
                return self._fetch_slowly(begin)
            recorder.begin_step(self._owner, begin)
        recorder.activity = DATA_WAIT
        recorder.countdown = countdown = recorder.countdown - 1
        try:
            batch = next(self._iterator) if countdown else self._fetch_sampled(begin)
        except StopIteration:
            self._got_nothing()
            self._close()
            raise
        except BaseException as error:  # the loop may go on to ask for the next batch: it stays open
            self._got_nothing()
            self._watch._fetch_failed(error)
            raise
        end = recorder.clock()
        if (
            recorder.step_owner is not self._owner
        ):  # the main thread has taken over, or the run was closed, during the fetch
            return batch if self._to is None else move(batch, self._to)
        recorder.data_ns += end - recorder.mark_ns
        recorder.activity = IN_STEP
        if recorder.device is not None:
            recorder.device.begin()
        if self._first:
            self._note_first(batch)
        if self._samples is not None:
            try:
                recorder.samples = self._samples(batch)
            except Exception as error:
                self._cannot_count(error)
        if self._to is not None:
            batch = self._moved(batch)
        return batch

    def _fetch_sampled(self, begin: int) -> T:
        """Fetch, with a look at the thread's own time and at the device. Where fetches are quick it is done more seldom."""
        recorder = self._recorder
        recorder.countdown = _CPU_SAMPLED_EVERY
        if recorder.home is None:
            self._watch._find_device()
        else:
            recorder.poll(begin)
        if recorder.thread_time is None:
            return next(self._iterator)
        began, cpu = recorder.clock(), recorder.thread_time.busy_ns()
        batch = next(self._iterator)
        if recorder.thread_time is not None:  # the run may have been closed meanwhile
            recorder.fetch_cpu_ns += recorder.thread_time.busy_ns() - cpu
            wall = recorder.clock() - began
            recorder.fetch_wall_ns += wall
            if wall < _QUICK_FETCH_NS:
                recorder.countdown = _CPU_SAMPLED_SELDOM
        return batch

    def _moved(self, batch: T) -> T:
        """Return the batch on the device, its copy timed by both clocks."""
        recorder = self._recorder
        recorder.activity = TRANSFERRING  # not timed once more by the watch on Tensor.to
        recorder.mark_ns = begin = recorder.clock()
        device = recorder.device
        token = device.copy_begins(follows=True) if device is not None else None
        try:
            batch = move(batch, self._to)
        finally:
            if device is not None:
                device.copy_ends(token)
            recorder.transfer_ns += recorder.clock() - begin
            recorder.activity = IN_STEP
        return batch

    def _fetch_slowly(self, begin: int) -> T:
        """Fetch inside an open `step()`, `data()` or `transfer()`, or for a step that another loader feeds too (zip)."""
        recorder = self._recorder
        if not recorder.in_step or recorder.step_owner is LOOSE or recorder.step_owner is self._owner:
            recorder.begin_step(self._owner, begin)
        mine = recorder.step_owner is self._owner
        recorder.begin_part(DATA_WAIT, begin)
        try:
            batch = next(self._iterator)
        except BaseException as error:
            recorder.end_part(recorder.clock())
            if mine:
                self._got_nothing()
            if not isinstance(error, StopIteration):
                self._watch._fetch_failed(error)
            else:
                recorder.unfed = recorder.in_step and recorder.step_owner is not LOOSE
                self._close()
            raise
        recorder.end_part(recorder.clock())
        recorder.unfed = False
        if self._first:
            self._note_first(batch)
        if self._samples is not None and recorder.samples == UNKNOWN_SAMPLES:
            try:
                recorder.samples = self._samples(batch)
            except Exception as error:
                self._cannot_count(error)
        if self._to is not None:
            recorder.begin_part(TRANSFERRING, recorder.clock())
            try:
                batch = move(batch, self._to)
            finally:
                recorder.end_part(recorder.clock())
        return batch

    def _got_nothing(self) -> None:
        """The loader raised, or has come to its end: this step was none."""
        if self._recorder.step_owner is self._owner:
            self._recorder.abandon(self._recorder.clock())

    def _note_first(self, batch: Any) -> None:
        """Note what only a batch can tell, once a pass."""
        self._first = False
        self._recorder.epoch_start = True
        if self._samples is None:
            self._samples = sample_counter(batch)
        if self._tokens is not None:
            self._samples = _with_tokens(self._tokens, self._samples, self._recorder, self._watch)
        if self._training:
            self._watch._first_batch(batch)

    def _cannot_count(self, error: Exception) -> None:
        self._samples = None
        self._watch._failed("counting a batch's samples", error)

    def _settle_level(self) -> None:
        """Leave what was entered inside this loop's last step and not left, such as a nested loop that was broken off."""
        recorder = self._recorder
        if self._level == 0 or recorder.is_open(self._level):
            inner = next(entry[0] for entry in recorder.levels if entry[0] > self._level)
            recorder.exit(inner, recorder.clock())
        else:  # it goes on outside of the phase in which it began
            self._level, self._nested = recorder.level, False

    def _close(self) -> None:
        """End this loop's open step and, for a nested loop, go on with what it interrupted."""
        if not self._open:
            return
        self._open = False
        recorder = self._recorder
        now = recorder.clock()
        if self._nested:
            recorder.exit(self._level, now)
        elif recorder.step_owner is self._owner:
            recorder.end_step(now)
        self._watch._loop_ended(self)

    def __del__(self) -> None:
        # `break` and an exception in the loop's body drop the iterator: CPython calls this at once.
        try:
            if self._open and self._recorder.thread == get_ident():
                self._close()
        except Exception:  # the interpreter may be going down: there is nobody left to tell
            pass


def _with_tokens(tokens: Samples, samples: Samples | None, recorder: Recorder, watch: Watch) -> Samples:
    """Return a counter of samples that logs the batch's tokens beside: a loop that counts none pays nothing for it."""
    failed = False

    def count(batch: Any) -> int:
        nonlocal failed
        if not failed:
            try:
                recorder.log.append((TOKENS, max(0, int(tokens(batch)))))
            except Exception as error:
                failed = True
                watch._failed("counting a batch's tokens", error)
        return UNKNOWN_SAMPLES if samples is None else samples(batch)

    return count


class StepContext:
    """`with w.step():` — one step of a loop that has no loader. A step inside a step is a part of that one."""

    __slots__ = ("_recorder", "_samples", "_tokens", "_watch")

    def __init__(self, watch: Watch, samples: int, tokens: int | None = None) -> None:
        self._watch = watch
        self._tokens = tokens
        self._recorder = watch._recorder
        self._samples = samples

    def __enter__(self) -> None:
        recorder = self._recorder
        if recorder.thread != get_ident():
            if not recorder.claim_thread():
                return
            self._watch._start()
        if not recorder.in_step:
            recorder.open(self, recorder.clock())
        elif recorder.step_owner is LOOSE:
            recorder.begin_step(self, recorder.clock())
        else:
            return
        recorder.samples = self._samples
        if self._tokens is not None:
            recorder.log.append((TOKENS, self._tokens))

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        recorder = self._recorder
        if recorder.step_owner is self and recorder.thread == get_ident():
            recorder.end_step(recorder.clock())


class PartContext:
    """`with w.data():` and `with w.transfer():` — the training thread waits for input, or copies a batch."""

    __slots__ = ("_part", "_recorder", "_watch")

    def __init__(self, watch: Watch, part: str) -> None:
        self._watch = watch
        self._recorder = watch._recorder
        self._part = part

    def __enter__(self) -> None:
        recorder = self._recorder
        if recorder.thread != get_ident():
            if not recorder.claim_thread(steps=False):
                return
            self._watch._start()
        if recorder.activity is IN_STEP and recorder.device is None:  # a usual case, written out
            recorder.parts.append(IN_STEP)
            recorder.activity = self._part
            recorder.mark_ns = recorder.clock()
        else:
            recorder.begin_part(self._part, recorder.clock())

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        recorder = self._recorder
        if recorder.thread == get_ident():
            recorder.end_part(recorder.clock())


class PhaseContext:
    """`with w.phase("eval"):` — time that belongs to a declared phase, steps inside it included."""

    __slots__ = ("_levels", "_name", "_recorder", "_watch")

    def __init__(self, watch: Watch, name: str) -> None:
        self._watch = watch
        self._recorder = watch._recorder
        self._name = name
        self._levels: list[int] = []

    def __enter__(self) -> None:
        recorder = self._recorder
        if recorder.claim_thread(steps=False):
            self._watch._start()
            self._levels.append(recorder.enter(self._name, recorder.clock()))
        else:
            self._levels.append(0)

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        level = self._levels.pop()
        if level and self._recorder.thread == get_ident():
            self._recorder.exit(level, self._recorder.clock())
