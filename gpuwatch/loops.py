"""One pass over a watched loader: each batch asked for ends the step before it. This is the hot path.

A thread that is not the training thread is not measured.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from threading import get_ident
from typing import TYPE_CHECKING, Any, TypeVar

from gpuwatch.batches import move, sample_counter
from gpuwatch.entries import DATA_WAIT, IN_STEP, LOOSE, STEP, TOKENS, TRANSFERRING, UNKNOWN_SAMPLES
from gpuwatch.ledger import EVAL
from gpuwatch.measuring import rest_device
from gpuwatch.recorder import Recorder
from gpuwatch.watched_loader import Samples

if TYPE_CHECKING:
    from gpuwatch.hook import Watch

T = TypeVar("T")
LOOKED_AT_EVERY = 4
LOOKED_AT_SELDOM = 32
QUICK_FETCH_NS = 1_000_000
"""A look at the CPU time costs 4 µs: nothing beside a slow fetch, and a quick one is nobody's bottleneck. Every other visit only meters the hook."""


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
        self._own_ns = self._fetched_ns = 0
        """What the hook took before the fetch that is metered, and when that ended; 0: it is not metered."""
        if not self._open:
            self._iterator = iter(loader)
            self._fetch = self._iterator.__next__
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
        self._fetch = recorder.fetches.looking(self._iterator) if self._training else self._iterator.__next__

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
        if name in ("_iterator", "_fetch"):
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
                batch = self._fetch()
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
            batch = self._fetch() if countdown else self._fetch_closely(begin)
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
        if not countdown and self._fetched_ns:
            self._note_cost()
        return batch

    def _fetch_closely(self, begin: int) -> T:
        """Fetch, and look meanwhile: at the thread's own time, at the device, at what the hook takes itself."""
        recorder = self._recorder
        meter, fetches, clock = recorder.meter, recorder.fetches, recorder.clock
        self._look_at_device(begin)
        meter.visits += 1
        thread_time = fetches.thread_time if meter.visits & 1 else None
        busy = 0 if thread_time is None else thread_time.busy_ns()
        asked = clock()
        batch = self._fetch()
        fetched = clock()
        if thread_time is not None:
            fetches.count(thread_time.busy_ns() - busy, fetched - asked)
        pace = LOOKED_AT_SELDOM if fetched - asked < QUICK_FETCH_NS else LOOKED_AT_EVERY
        recorder.countdown = pace * meter.stretch
        # A first batch is looked at in other ways too, once.
        self._own_ns, self._fetched_ns = asked - begin, 0 if self._first else fetched
        return batch

    def _look_at_device(self, now_ns: int) -> None:
        """Find a device that was set up by now; read what it has finished; let it rest where it is measured too dearly."""
        recorder = self._recorder
        home, one_in = recorder.home, recorder.meter.device_one_in
        if home is None or home.is_astray:
            self._watch._find_device()
            return
        recorder.poll(now_ns)
        if one_in > 1 or recorder.resting:
            rest_device(recorder, recorder.meter.visits % one_in != 0)

    def _note_cost(self) -> None:
        """Tell the meter what the hook took of this fetch, beside the fetch and a copy that was asked for."""
        recorder = self._recorder
        own_ns = self._own_ns + recorder.clock() - self._fetched_ns - recorder.transfer_ns
        recorder.meter.note(own_ns, bool(recorder.meter.visits & 1), recorder.device is not None)

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
            batch = self._fetch()
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
