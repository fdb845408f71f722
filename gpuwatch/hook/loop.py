"""One pass over a watched loader: each batch asked for ends the step before it.

The usual step of a loop is written out in `watched_iterator`. Here is every step: the first of a pass, one with a device's timeline, one that
is looked at closely, one in which something else began or ended. A thread that is not the training thread is not measured.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from threading import get_ident
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from gpuwatch.hook.batches import move, sample_counter
from gpuwatch.hook.events import DATA_WAIT, IN_STEP, LOOSE, STEP, TOKENS, TRANSFERRING, UNKNOWN_SAMPLES
from gpuwatch.hook.loader import Samples
from gpuwatch.hook.recorder import Recorder
from gpuwatch.hook.sampling import Looks
from gpuwatch.ledger.states import EVAL

if TYPE_CHECKING:
    from gpuwatch.hook.watch import Watch

T = TypeVar("T")


class Loop(Generic[T]):
    """One pass over a loader."""

    __slots__ = (
        "__weakref__",
        "_first",
        "_level",
        "_looks",
        "_nested",
        "_to",
        "_tokens",
        "_watch",
        "fetch",
        "is_known",
        "is_last_word",
        "is_open",
        "iterator",
        "owner",
        "recorder",
        "samples",
        "training",
    )

    def __init__(
        self,
        watch: Watch,
        loader: Iterable[T],
        to: Any = None,
        samples: Samples | None = None,
        tokens: Samples | None = None,
        has_settings: bool = False,
    ) -> None:
        self._watch = watch
        self.recorder = recorder = watch._recorder
        self._to = to
        self.samples = samples
        self._tokens = tokens
        self.owner = object()
        """Stands for this loop in the recorder, which must not keep the loop itself alive: dropping it is its end."""
        self._first = True
        self._looks = Looks(recorder, watch._find_device, watch._verdicts.print_early)
        self._nested = False
        self.training = self.is_known = False
        self.is_last_word = True
        """Its end may be the end of the run, so that a verdict is due."""
        # A loader that is iterated inside another one's fetch is a part of that wait.
        self.is_open = recorder.claim_thread() and (recorder.doing() is not DATA_WAIT or bool(recorder.parts))
        if not self.is_open:
            self.iterator = iter(loader)
            self.fetch = self.iterator.__next__
            return
        begin = recorder.clock()
        if self._is_evaluation():
            recorder.enter(EVAL, begin)
            self._nested = True
        elif recorder.in_step and recorder.step_owner is not LOOSE:
            recorder.enter(None, begin)
            self._nested = True
        self._level = recorder.level
        self.training = not recorder.in_phase
        recorder.begin_part(DATA_WAIT, begin)
        try:
            self.iterator = iter(loader)
        except BaseException:
            recorder.end_part(recorder.clock())
            self._close()
            raise
        watch._loop_begins(self, loader, has_settings)
        recorder.end_part(recorder.clock(), more_follows=True)
        self.fetch = recorder.fetches.looking(self.iterator) if self.training else self.iterator.__next__

    def _is_evaluation(self) -> bool:
        """Whether this loop is one without gradients in a run that trains: the loop of an evaluation."""
        torch = sys.modules.get("torch")
        if torch is None or not self._watch._trained_with_gradients or self.recorder.in_phase:
            return False
        return not torch.is_grad_enabled()

    def ask(self, usual: Callable[[Loop[T]], T]) -> T:
        """End the open step and return the next one's batch, whatever else is going on. `usual` takes a usual step."""
        recorder = self.recorder
        if recorder.thread != get_ident() or not self.is_open:
            batch = self.fetch()
            return batch if self._to is None else move(batch, self._to)
        if recorder.steady is self.owner:
            if not self._looks.is_due_for_usual():
                return usual(self)
            if self._looks.meters_next:
                return self._looks.meter_usual(usual, self)
        if recorder.steady is not None:
            recorder.leave_steady()
        # With a device's timeline this is every step, so that it is written out too. While a `data()` or `transfer()` is open the activity is another one.
        if recorder.step_owner is self.owner and recorder.activity is IN_STEP:
            begin = recorder.clock()
            device, piece = recorder.device, None
            if device is not None:
                piece = device.end(begin)
                if device.attention:
                    recorder.attend(begin)
            recorder.log.append(
                (
                    STEP,
                    recorder.begin_ns,
                    begin,
                    recorder.data_ns,
                    recorder.transfer_ns,
                    recorder.samples,
                    recorder.epoch_start,
                    piece,
                )
            )
            recorder.unfed = recorder.epoch_start = False
            recorder.begin_ns = recorder.mark_ns = begin
            recorder.data_ns = recorder.transfer_ns = 0
            recorder.samples = UNKNOWN_SAMPLES
        else:
            if recorder.level != self._level:
                self._settle_level()
            begin = recorder.clock()
            if recorder.parts or (recorder.in_step and recorder.step_owner is not self.owner):
                return self._fetch_slowly(begin)
            recorder.begin_step(self.owner, begin)
        recorder.activity = DATA_WAIT
        recorder.countdown = countdown = recorder.countdown - 1
        try:
            batch = self.fetch() if countdown else self._looks.fetch(self.fetch, begin, self._first)
        except BaseException as error:
            self.nothing_came(error)
            raise
        batch = self.came(batch, recorder.clock())
        if not countdown:
            self._looks.note_cost()
        return batch

    def came(self, batch: T, at_ns: int) -> T:
        """The batch that was asked for has come: return it, on the device if it is to be moved there."""
        recorder = self.recorder
        if recorder.step_owner is not self.owner:  # the main thread has taken over, or the run was closed, in the fetch
            return batch if self._to is None else move(batch, self._to)
        if self._first:  # a part of the wait, as all that gpuwatch does before a batch
            self._note_first(batch)
            at_ns = recorder.clock()
        recorder.data_ns += at_ns - recorder.mark_ns
        recorder.activity = IN_STEP
        if recorder.device is not None:
            recorder.device.begin(at_ns)
        count = self.samples
        if count is not None:
            try:
                recorder.samples = count(batch)
            except Exception as error:
                self.cannot_count(error)
        if self._to is not None:
            return self._moved(batch)
        if recorder.device is None and self._looks.is_quick and not recorder.epoch_start:
            recorder.fed_ns = recorder.begin_ns + recorder.data_ns
            recorder.steady = self.owner
        return batch

    def nothing_came(self, error: BaseException) -> None:
        """The loader has come to its end, or raised: then the loop may go on to ask for the next batch, and stays open."""
        if isinstance(error, StopIteration) and self.is_open:
            self.recorder.poll(self.recorder.clock())
            self._close(unfed=True)
            return
        self._got_nothing()
        if not isinstance(error, StopIteration):
            self._watch._fetch_failed(error)

    def _moved(self, batch: T) -> T:
        """Return the batch on the device, its copy timed by both clocks."""
        recorder = self.recorder
        recorder.activity = TRANSFERRING  # not timed once more by the watch on Tensor.to
        recorder.mark_ns = begin = recorder.clock()
        device = recorder.device
        token = device.copy_begins(begin, follows=True) if device is not None else None
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
        recorder = self.recorder
        if not recorder.in_step or recorder.step_owner is LOOSE or recorder.step_owner is self.owner:
            recorder.begin_step(self.owner, begin)
        mine = recorder.step_owner is self.owner
        recorder.begin_part(DATA_WAIT, begin)
        try:
            batch = self.fetch()
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
        if recorder.samples == UNKNOWN_SAMPLES:
            self._count(batch)
        if self._to is not None:
            recorder.begin_part(TRANSFERRING, recorder.clock())
            try:
                batch = move(batch, self._to)
            finally:
                recorder.end_part(recorder.clock())
        return batch

    def _got_nothing(self) -> None:
        """The loader raised, or has come to its end: this step was none."""
        if self.recorder.step_owner is self.owner:
            self.recorder.abandon(self.recorder.clock())

    def _note_first(self, batch: Any) -> None:
        """Note what only a batch can tell, once a pass."""
        self._first = False
        self.recorder.epoch_start = True
        if self.samples is None:
            self.samples = sample_counter(batch)
        if self._tokens is not None:
            self.samples = _with_tokens(self._tokens, self.samples, self.recorder, self._watch)
        if self.training:
            self._watch._first_batch(self, batch)

    def _count(self, batch: T) -> None:
        """Set the number of samples of the open step, where they are counted. What every step goes through has this written out."""
        if self.samples is not None:
            try:
                self.recorder.samples = self.samples(batch)
            except Exception as error:
                self.cannot_count(error)

    def cannot_count(self, error: Exception) -> None:
        """Counting this batch's samples has failed: count none any more."""
        self.samples, self.recorder.samples = None, UNKNOWN_SAMPLES
        self._watch._failed("counting a batch's samples", error)

    def _settle_level(self) -> None:
        """Leave what was entered inside this loop's last step and not left, such as a nested loop that was broken off."""
        recorder = self.recorder
        if self._level == 0 or recorder.is_open(self._level):
            inner = next(entry[0] for entry in recorder.levels if entry[0] > self._level)
            recorder.exit(inner, recorder.clock())
        else:  # it goes on outside of the phase in which it began
            self._level, self._nested = recorder.level, False

    def _close(self, unfed: bool = False) -> None:
        """End this loop's open step and, for a nested loop, go on with what it interrupted.

        `unfed`: the step got no batch. What gpuwatch does at the end is then a part of the wait for one.
        """
        if not self.is_open:
            return
        self.is_open = False
        recorder = self.recorder
        if not unfed:
            self._leave(recorder.clock())
        try:
            self._watch._loop_ends(self)
        finally:
            if unfed:
                now = recorder.clock()
                try:
                    if recorder.step_owner is self.owner:
                        recorder.abandon(now, is_polled=True)
                finally:
                    self._leave(now)
        self._watch._loop_ended(self)

    def _leave(self, now: int) -> None:
        recorder = self.recorder
        if self._nested:
            recorder.exit(self._level, now)
        elif recorder.step_owner is self.owner:
            recorder.end_step(now)
            recorder.leave_loop(now)

    def dropped(self) -> None:
        """The loop has let go of its iterator: at its end, by a `break`, or by an exception in its body."""
        if self.is_open and self.recorder.thread == get_ident():
            self._close()
        elif self.is_open and not self._nested:
            self._end_elsewhere()

    def _end_elsewhere(self) -> None:
        """The iterator was handed to another thread and is gone: nobody else will end the step that it left open in this one's."""
        self.is_open = False
        recorder = self.recorder
        # A device is asked by the training thread alone.
        if recorder.step_owner is self.owner and recorder.device is None:
            recorder.end_step(recorder.clock())
        self._watch._loop_ends(self)


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
