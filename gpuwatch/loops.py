"""A loader that is watched, and the contexts of a loop without one. They only call the recorder: this is the hot path.

The user's objects keep behaving as they did: `iter()` starts workers when the loader would, `len()`, attributes and
exceptions pass through unchanged, and a thread that is not the training thread is not measured.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from threading import get_ident
from time import thread_time_ns
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from gpuwatch.batches import move, sample_count
from gpuwatch.ledger import EVAL
from gpuwatch.recorder import DATA_WAIT, IN_STEP, PART, UNKNOWN_SAMPLES

if TYPE_CHECKING:
    from gpuwatch.hook import Watch

T = TypeVar("T")
_CPU_SAMPLED_EVERY = 8


class WatchedLoader(Generic[T]):
    """Any iterable of batches, measured while it is iterated. Everything else is the loader's own."""

    def __init__(
        self, watch: Watch, loader: Iterable[T], to: Any = None, samples: Callable[[Any], int] | None = None
    ) -> None:
        self._gpuwatch_watch = watch
        self._gpuwatch_loader = loader
        self._gpuwatch_to = to
        self._gpuwatch_samples = samples or sample_count

    def __iter__(self) -> Iterator[T]:
        return self._gpuwatch_watch._loop(self._gpuwatch_loader, self._gpuwatch_to, self._gpuwatch_samples)

    def __len__(self) -> int:
        return len(self._gpuwatch_loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_gpuwatch_"):  # asked for while being unpickled or copied, before __init__
            raise AttributeError(name)
        return getattr(self._gpuwatch_loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_gpuwatch_"):
            object.__setattr__(self, name, value)
        else:
            setattr(self._gpuwatch_loader, name, value)

    def __getitem__(self, index: Any) -> Any:
        return self._gpuwatch_loader[index]  # type: ignore[index]

    def __repr__(self) -> str:
        return f"gpuwatch.watch({self._gpuwatch_loader!r})"


class WatchedIterator(Iterator[T]):
    """One pass over a loader. Each batch asked for ends the step before it."""

    def __init__(
        self, watch: Watch, loader: Iterable[T], to: Any = None, samples: Callable[[Any], int] = sample_count
    ) -> None:
        self._watch = watch
        self._recorder = recorder = watch._recorder
        self._to = to
        self._samples = samples
        self._first = True
        self._countdown = 1
        # A loader that is iterated inside another one's fetch is a part of that wait.
        self._open = recorder.claim_thread() and recorder.activity is not DATA_WAIT
        self._nested = False
        self._depth = recorder.depth
        if not self._open:
            self._iterator = iter(loader)
            return
        begin = recorder.clock()
        if self._is_evaluation():
            self._depth, self._nested = recorder.enter(EVAL, begin), True
        elif recorder.in_step:
            self._depth, self._nested = recorder.enter(None, begin), True
        try:
            self._iterator = iter(loader)
        except BaseException:
            self._close()
            raise
        finally:
            end = recorder.clock()
            if self._open:
                recorder.log.append((PART, begin, end, end - begin, 0, UNKNOWN_SAMPLES, True))

    def _is_evaluation(self) -> bool:
        """Whether this loop is one without gradients in a run that trains: the loop of an evaluation."""
        torch = sys.modules.get("torch")
        return torch is not None and self._watch._trained_with_gradients and not torch.is_grad_enabled()

    def __iter__(self) -> WatchedIterator[T]:
        return self

    def __len__(self) -> int:
        return len(self._iterator)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "_iterator":
            raise AttributeError(name)
        return getattr(self._iterator, name)

    def __next__(self) -> T:
        recorder = self._recorder
        if not self._open or recorder.thread != get_ident():
            batch = next(self._iterator)
            return batch if self._to is None else move(batch, self._to)
        if recorder.depth != self._depth:
            self._settle_depth()
        begin = recorder.clock()
        if recorder.in_step and recorder.step_owner is not self and recorder.step_owner is not None:
            return self._also_fetch(begin)
        recorder.begin_step(self, begin)
        recorder.mark_ns = begin
        recorder.activity = DATA_WAIT
        self._countdown -= 1
        sampled = self._countdown == 0
        cpu = thread_time_ns() if sampled else 0
        try:
            batch = next(self._iterator)
        except BaseException:
            recorder.abandon_fetch(recorder.clock())
            self._close()
            raise
        end = recorder.clock()
        recorder.data_ns = end - begin
        recorder.activity = IN_STEP
        if sampled:
            self._countdown = _CPU_SAMPLED_EVERY
            recorder.fetch_cpu_ns += thread_time_ns() - cpu
            recorder.fetch_wall_ns += end - begin
        if self._first:
            self._first = False
            recorder.epoch_start = True
            self._watch._first_batch(batch)
        try:
            recorder.samples = self._samples(batch)
        except Exception as error:
            self._watch._failed("counting a batch's samples", error)
            self._samples = _unknown_samples
        if self._to is not None:
            begin = recorder.clock()
            batch = move(batch, self._to)
            recorder.transfer_ns = recorder.clock() - begin
        return batch

    def _also_fetch(self, begin: int) -> T:
        """Fetch for a step that another loader feeds as well (two loaders zipped): it waits for both."""
        recorder = self._recorder
        if recorder.activity is DATA_WAIT:  # inside the other one's fetch: counted there
            return next(self._iterator)
        recorder.mark_ns = begin
        recorder.activity = DATA_WAIT
        try:
            batch = next(self._iterator)
        except BaseException:
            self._close()
            raise
        finally:
            recorder.data_ns += recorder.clock() - begin
            recorder.activity = IN_STEP
        if self._to is not None:
            begin = recorder.clock()
            batch = move(batch, self._to)
            recorder.transfer_ns += recorder.clock() - begin
        return batch

    def _settle_depth(self) -> None:
        """Leave what was entered inside this loop's last step and not left, such as a nested loop that was broken off."""
        recorder = self._recorder
        if recorder.depth > self._depth:
            recorder.exit(self._depth + 1, recorder.clock())
        self._depth = recorder.depth

    def _close(self) -> None:
        """End this loop's open step and, for a nested loop, go on with what it interrupted."""
        if not self._open:
            return
        self._open = False
        recorder = self._recorder
        now = recorder.clock()
        if self._nested:
            recorder.exit(self._depth, now)
        elif recorder.step_owner is self:
            recorder.end_step(now)
        self._watch._loop_ended(self)

    def __del__(self) -> None:
        # `break` and an exception in the loop's body drop the iterator: CPython calls this at once.
        try:
            if self._recorder.thread == get_ident():
                self._close()
        except Exception:  # the interpreter may be going down: there is nobody left to tell
            pass


def _unknown_samples(batch: Any) -> int:
    return UNKNOWN_SAMPLES


class StepContext:
    """`with w.step():` — one step of a loop that has no loader."""

    __slots__ = ("_mine", "_recorder", "_watch", "samples")

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._recorder = watch._recorder
        self._mine = False
        self.samples = UNKNOWN_SAMPLES

    def __enter__(self) -> None:
        recorder = self._recorder
        self._mine = recorder.claim_thread() and not recorder.in_step  # a watched loader's step is a step already
        if self._mine:
            self._watch._start()
            recorder.begin_step(None, recorder.clock())
            recorder.samples = self.samples

    def __exit__(self, *exception: object) -> None:
        if self._mine:
            self._mine = False
            self._recorder.end_step(self._recorder.clock())


class DataContext:
    """`with w.data():` — the training thread waits for input."""

    __slots__ = ("_begin", "_recorder")

    def __init__(self, watch: Watch) -> None:
        self._recorder = watch._recorder
        self._begin = 0

    def __enter__(self) -> None:
        recorder = self._recorder
        self._begin = begin = recorder.clock()
        if recorder.in_step and recorder.thread == get_ident():
            recorder.mark_ns = begin
            recorder.activity = DATA_WAIT

    def __exit__(self, *exception: object) -> None:
        recorder = self._recorder
        end = recorder.clock()
        if recorder.thread != get_ident():
            return
        if recorder.in_step:
            recorder.data_ns += end - self._begin
            recorder.activity = IN_STEP
        else:
            recorder.log.append((PART, self._begin, end, end - self._begin, 0, UNKNOWN_SAMPLES, False))


class TransferContext:
    """`with w.transfer():` — a batch goes to the device."""

    __slots__ = ("_begin", "_recorder")

    def __init__(self, watch: Watch) -> None:
        self._recorder = watch._recorder
        self._begin = 0

    def __enter__(self) -> None:
        self._begin = self._recorder.clock()

    def __exit__(self, *exception: object) -> None:
        recorder = self._recorder
        end = recorder.clock()
        if recorder.thread != get_ident():
            return
        if recorder.in_step:
            recorder.transfer_ns += end - self._begin
        else:
            recorder.log.append((PART, self._begin, end, 0, end - self._begin, UNKNOWN_SAMPLES, False))


class PhaseContext:
    """`with w.phase("eval"):` — time that belongs to a declared phase, steps inside it included."""

    __slots__ = ("_depths", "_name", "_recorder", "_watch")

    def __init__(self, watch: Watch, name: str) -> None:
        self._watch = watch
        self._recorder = watch._recorder
        self._name = name
        self._depths: list[int] = []

    def __enter__(self) -> None:
        recorder = self._recorder
        if recorder.claim_thread():
            self._watch._start()
            self._depths.append(recorder.enter(self._name, recorder.clock()))
        else:
            self._depths.append(0)

    def __exit__(self, *exception: object) -> None:
        depth = self._depths.pop()
        if depth:
            self._recorder.exit(depth, self._recorder.clock())
