"""One pass over a watched loader: each request for a batch ends the step before it.

`Recorder.fast_path` takes the ordinary steps of a loop. All others are taken here: the first of a pass, one that is
sampled, one in which something else began or ended. A thread that is not the training thread is not measured.
"""

import sys
from collections.abc import Callable, Iterable
from functools import partial
from threading import get_ident
from typing import Any, Generic, TypeVar

from gpuwatch.hook.batches import move, sample_counter
from gpuwatch.hook.metering import SAMPLE_EVERY, FetchEvidence, Sampling
from gpuwatch.hook.recorder import Failed, Recorder
from gpuwatch.hook.session import Session
from gpuwatch.host.frames import random, spawned_workers_sampled
from gpuwatch.ledger.events import DATA_WAIT, IN_STEP, LOOSE, TOKENS, UNKNOWN_SAMPLES, known_count
from gpuwatch.ledger.states import EVAL

T = TypeVar("T")
Count = Callable[[Any], int]  # returns a batch's number of samples or tokens


class Loop(Generic[T]):
    """One pass over a loader."""

    def __init__(
        self,
        session: Session,
        loader: Iterable[T],
        to: Any = None,
        samples: Count | None = None,
        tokens: Count | None = None,
        of_framework: bool = False,
    ) -> None:
        """`of_framework`: these are a framework's requests, which have no settings, and whose end prints no verdict."""
        self.recorder = recorder = session.recorder
        self.began_ns = recorder.clock()
        session.start()
        self._session = session
        self.to = to
        self.samples = samples
        self._tokens = tokens
        # It also represents this loop in the recorder, which must not keep the loop itself alive.
        self.owner = FetchEvidence()
        self._first = True
        self._sampling = Sampling(recorder, self.owner, session.find_device, session.hand_over)
        self._nested = self.training = self.is_open = False
        self._evaluates = False  # it began without gradients, and may be kept to go on later
        self._of_framework = of_framework
        # A loader that is iterated inside another one's fetch is a part of that wait.
        self._given: Any = None  # the loader, until the first request
        if not recorder.claim_thread() or self._is_inside_fetch():
            self.iterator = iter(loader)
            self.fetch = self.iterator.__next__
            return
        self._given = loader
        session.torch_hooks.evaluations.end(None)
        level = self._enter_evaluation(self.began_ns)
        self._in_step_of_another = recorder.in_step and recorder.step_owner is not LOOSE
        recorder.begin_part(DATA_WAIT, self.began_ns)
        try:
            with spawned_workers_sampled(loader):
                self.iterator = iter(loader)
            self.fetch = self.iterator.__next__
        finally:
            recorder.end_part(recorder.clock(), more_follows=True)
            recorder.exit(level, recorder.clock())

    def _begin(self) -> bool:
        """Begin at the first request: an iterator never asked interrupts nothing. Return whether it is its own pass."""
        loader, self._given = self._given, None
        self.is_open = loader is not None and not self._is_inside_fetch()
        if not self.is_open:
            return False
        recorder, session = self.recorder, self._session
        begin = recorder.clock()
        self._evaluates = self._is_without_gradients()
        level = self._enter_evaluation(begin)
        if not level and self._in_step_of_another and recorder.in_step and recorder.step_owner is not LOOSE:
            level = recorder.enter(None, begin)
        self._nested, self._level = level > 0, recorder.level
        self.training = not recorder.in_phase
        recorder.begin_part(DATA_WAIT, begin)
        # The settings of an evaluation's loader do not affect the training.
        accounts = session.publisher.accounts
        self._before = accounts.loader, accounts.batch_sizes
        session.begin_pass(self, loader, self.iterator, self.training and not self._of_framework)
        recorder.end_part(recorder.clock(), more_follows=True)
        if self.training:
            self.fetch = self.owner.counting(self.iterator)
        session.find_device()  # after the first wait, which began without a device
        return True

    def _is_inside_fetch(self) -> bool:
        return self.recorder.doing() is DATA_WAIT and not self.recorder.parts

    def _enter_evaluation(self, at_ns: int) -> int:
        """End what a loop ends that begins; return the level of the evaluation that this one is, 0 where it trains."""
        self.recorder.end_taken()
        self._leave_evaluations()
        if self._is_evaluation():
            return self.recorder.enter(EVAL, at_ns)
        self._session.guard(self._session.torch_hooks.optimizer.give_way)
        return 0

    def _is_evaluation(self) -> bool:
        """Whether this loop is one without gradients in a run that trains: the loop of an evaluation."""
        return not self.recorder.in_phase and self._is_without_gradients()

    def _is_without_gradients(self) -> bool:
        torch = sys.modules.get("torch")
        return torch is not None and self._session.trained_with_gradients and not torch.is_grad_enabled()

    def ask(self) -> T:
        """End the open step and return the next one's batch, whatever else is going on."""
        recorder, owner = self.recorder, self.owner
        if recorder.thread != get_ident() or not (self.is_open or self._begin()):
            if self._given is not None:
                self._session.note_feeding(self._given, self.iterator)
            return self._moved(self.fetch())
        if recorder.steady is owner:
            take: Callable[[], T] = partial(recorder.fast_path(self), False)
            if not self._sampling.is_due():
                self._session.guard(self._session.torch_hooks.optimizer.visit)
                return take()
            if recorder.meter.visits & 1:  # this sample only meters the hook
                return self._sampling.meter(take)
        if recorder.steady is not None:
            recorder.leave_steady()
        # While a `data()` or `transfer()` is open the activity is another one.
        follows = recorder.step_owner is owner and recorder.activity is IN_STEP
        if not follows:
            if recorder.level != self._level:
                self._settle_level()
            if recorder.parts or (recorder.in_step and recorder.step_owner is not owner):
                return self._ask_inside(recorder.clock())
        begin = recorder.clock()
        if follows and recorder.epoch_start and self._session.torch_hooks.optimizer.evaluates(owner):
            self._become_evaluation(begin)
            follows = False
        is_sampled = recorder.next_step(owner, begin, follows)
        try:
            batch = self._sampling.fetch(self.fetch, begin, self._first) if is_sampled else self.fetch()
        except BaseException as error:
            self.got_no_batch(error)
            raise
        batch = self.got_batch(batch, recorder.clock())
        if is_sampled:
            self._sampling.note_cost()
        return batch

    def got_batch(self, batch: T, at_ns: int) -> T:
        """Return the batch that the open step waited for, on the device if it is to be moved there."""
        recorder = self.recorder
        if recorder.step_owner is not self.owner:  # the main thread has taken over, or the run was closed, in the fetch
            return self._moved(batch)
        if self._first:  # a part of the wait, like all that gpuwatch does before a batch
            self._note_first(batch)
            at_ns = recorder.clock()
        recorder.batch_ready(at_ns)
        self._count(batch)
        if self.to is not None:
            return recorder.timed_copy(move, batch, self.to)
        if recorder.active_timeline is None and self._sampling.is_quick and not recorder.epoch_start:
            recorder.become_steady()
        return batch

    def got_no_batch(self, error: BaseException) -> None:
        """The loader has ended; or it raised: then the loop stays open, as it may go on to ask for the next batch."""
        recorder = self.recorder
        if isinstance(error, StopIteration) and self.is_open:
            recorder.poll(recorder.clock())
            self._close(without_batch=True)
            return
        self._abandon_step()
        if not isinstance(error, StopIteration):
            self._session.fetch_failed(error)

    def _moved(self, batch: T) -> T:
        """Return the batch on the device, not timed, if it is to be moved there."""
        return batch if self.to is None else move(batch, self.to)

    def _ask_inside(self, begin: int) -> T:
        """Fetch inside an open `step()`, `data()` or `transfer()`, or for a step that another loader feeds (zip)."""
        recorder = self.recorder
        if not recorder.in_step or recorder.step_owner is LOOSE or recorder.step_owner is self.owner:
            recorder.begin_step(self.owner, begin)
        mine = recorder.step_owner is self.owner
        recorder.begin_part(DATA_WAIT, begin)
        try:
            # At random: loaders that take turns (zip) would else be sampled unequally, or only one of them.
            batch = self._sampling.sample(self.fetch) if random() * SAMPLE_EVERY < 1 else self.fetch()
        except BaseException as error:
            recorder.end_part(recorder.clock())
            if isinstance(error, StopIteration):
                recorder.second_batch(came=False)
                self._close()
            else:
                self._abandon_step()
                self._session.fetch_failed(error)
            raise
        came_ns = recorder.clock()
        recorder.end_part(came_ns)
        self.owner.inside_ns += 0 if mine else came_ns - begin
        recorder.second_batch(came=True)
        if self._first:
            self._note_first(batch)
        if recorder.samples == UNKNOWN_SAMPLES:
            self._count(batch)
        if self.to is not None:
            with self._session.transfer:
                batch = move(batch, self.to)
        return batch

    def _become_evaluation(self, at_ns: int) -> None:
        """The first step, which is open, was one of an evaluation: so is all that follows."""
        recorder = self.recorder
        recorder.abandon(at_ns, EVAL)
        if self._nested:
            recorder.exit(self._level, at_ns)
        self._level, self._nested, self.training = recorder.enter(EVAL, at_ns), True, False
        accounts = self._session.publisher.accounts
        self.owner.is_open, self.owner.is_past = False, True
        accounts.loader, accounts.batch_sizes = self._before

    def _abandon_step(self) -> None:
        """Discard the open step, if it is this loop's: the loader raised."""
        if self.recorder.step_owner is self.owner:
            self.recorder.abandon(self.recorder.clock())

    def _note_first(self, batch: Any) -> None:
        """Note what is read from a batch once per pass."""
        self._first = False
        self.recorder.begin_epoch()
        if self.samples is None:
            self._session.guard(lambda: setattr(self, "samples", sample_counter(batch)), "reading a batch")
        if self._tokens is not None:
            self.samples = _with_tokens(self._tokens, self.samples, self.recorder, self._session.failed)
        if self.training:
            self._session.guard(self._session.first_batch, "reading a batch", self, batch)
            if not self._of_framework:
                self._session.guard(self._session.torch_hooks.optimizer.first_step, "hooking torch", self.owner)
                self.recorder.sample_after(1)  # so that `ask` is called next

    def _count(self, batch: T) -> None:
        """Set the open step's number of samples, where they are counted. The fast path has this inline."""
        if self.samples is not None:
            try:
                self.recorder.set_samples(self.samples(batch))
            except Exception as error:
                self.cannot_count(error)

    def cannot_count(self, error: Exception) -> None:
        """Counting this batch's samples has failed: stop counting."""
        self.samples = None
        self.recorder.set_samples(UNKNOWN_SAMPLES)
        self._session.failed("counting a batch's samples", error)

    def _settle_level(self) -> None:
        """Leave what was entered inside this loop's last step and not left, such as a nested loop ended by `break`."""
        recorder = self.recorder
        self._session.torch_hooks.evaluations.end(self.owner)
        if recorder.level == self._level:
            return
        if self._level == 0 or recorder.is_open(self._level):
            inner = next(entry[0] for entry in recorder.levels if entry[0] > self._level)
            recorder.exit(inner, recorder.clock())
        elif self._evaluates and self._is_evaluation():
            self._level, self._nested = recorder.enter(EVAL, recorder.clock()), True
        else:  # it goes on outside of the phase in which it began
            self._level, self._nested = recorder.level, False

    def _leave_evaluations(self) -> None:
        """This loop begins with gradients: one without them that is kept, and not at its end, evaluates no longer."""
        torch, recorder, contexts = sys.modules.get("torch"), self.recorder, self._session.torch_hooks.evaluations
        if recorder.levels and torch is not None and torch.is_grad_enabled() and not contexts.enabled:
            for each in list(self._session.loops):
                if each._evaluates and recorder.is_open(each._level):
                    recorder.exit(each._level, recorder.clock())

    def _close(self, without_batch: bool = False) -> None:
        """End the open step; resume what a nested loop interrupted. `without_batch`: the step waits until the end."""
        if not self.is_open:
            return
        self.is_open = False
        recorder = self.recorder
        if not without_batch:
            self._leave(recorder.clock())
        try:
            self._session.end_pass(self, self.training)
        finally:
            if without_batch:
                now = recorder.clock()
                try:
                    if recorder.step_owner is self.owner:
                        recorder.abandon(now, at_end=True)
                finally:
                    self._leave(now)
        if not self._of_framework:
            self._session.report_pass()

    def _leave(self, now: int) -> None:
        recorder = self.recorder
        if self._nested:
            recorder.exit(self._level, now)
        elif recorder.step_owner is self.owner:
            recorder.end_step(now)
            recorder.leave_loop(now)

    def dropped(self) -> None:
        """The iterator is gone: at the loop's end, by a `break`, or by an exception in its body."""
        recorder = self.recorder
        if self.is_open and recorder.thread == get_ident():
            self._session.torch_hooks.evaluations.end(self.owner)
            is_first = recorder.step_owner is self.owner and recorder.epoch_start and recorder.activity is IN_STEP
            is_first &= not self._nested and self._session.trained_nothing
            if is_first and self._session.torch_hooks.optimizer.feeds_one_batch():  # `next(iter(loader))` at each step
                recorder.begin_part(DATA_WAIT, recorder.clock())
                del self.fetch, self.iterator  # a permutation of many indices takes time to be freed
                recorder.take(recorder.clock())
            self._close()
        elif self.is_open and not self._nested:  # it was handed to another thread: end the step that it left open
            self.is_open = False
            # Only the training thread polls a device.
            if recorder.step_owner is self.owner and recorder.active_timeline is None:
                recorder.end_step(recorder.clock())
            self._session.end_pass(self, self.training)


def _with_tokens(tokens: Count | None, samples: Count | None, recorder: Recorder, failed: Failed) -> Count:
    """Return a counter of samples that also logs the batch's tokens, so that a loop which counts none pays nothing."""

    def count(batch: Any) -> int:
        nonlocal tokens
        if tokens is not None:
            try:
                recorder.log.append((TOKENS, max(0, known_count(int(tokens(batch))))))
            except Exception as error:
                tokens = None
                failed("counting a batch's tokens", error)
        return UNKNOWN_SAMPLES if samples is None else samples(batch)

    return count
