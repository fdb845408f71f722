"""What the training thread measures of itself: the hook's cost, which sets the sampling rate, and evidence of fetches.

Every step is logged, whatever the hook costs. Only a fetch's CPU time and the device's timing events are sampled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from gpuwatch.errors import pass_on
from gpuwatch.host.frames import random
from gpuwatch.host.proc import ThreadTime
from gpuwatch.ledger.states import median

if TYPE_CHECKING:
    from gpuwatch.hook.recorder import Recorder
    from gpuwatch.wire import Loader

T = TypeVar("T")
Call = Callable[[], None]

BUDGET = 0.01  # share of the step time that the hook may take by default

SAMPLE_EVERY = 4  # one in so many fetches is sampled, at random: workers deliver in turns
SAMPLE_QUICK_EVERY = 31  # quick ones: after so many, or twice that; prime, so that few numbers of workers divide it
QUICK_FETCH_NS = 1_000_000  # reading the CPU time costs 4 µs: nothing compared with a slower fetch
FIRST_VISITS = 4  # so many fetches of a run are all sampled: its device is set up in its first steps

_KEPT = 15
_ENOUGH = 3
_MOST_STRETCH = 16
_MOST_REST = 32
_RELAX_AT = 0.25  # share of the budget below which the sampling rate rises again


class Meter:
    """The hook's own time in the training thread, which notes costs: the background thread sets the sampling rate."""

    def __init__(self, budget: float = BUDGET) -> None:
        self.budget = budget
        self.visits = 0  # fetches that were sampled; in every other one the thread's CPU time too
        self._plain, self._by_device, self._evidence, self._launches = (deque[int](maxlen=_KEPT) for _ in range(4))
        self.device_ns = 0  # time in device events outside of fetches: last launches, and reading what has finished
        self.last_harvest = (0, 0)  # when the device's times were last read for many steps, and how long it took
        self.stretch = 1  # fetches are sampled so many times less often than by default
        self.device_one_in = 1  # the device's timeline measures one in so many runs of steps
        self.cost_ns = 0  # the training thread's time in the hook so far
        self.ratio: float | None = None  # its recent share of the step time; None before it is known
        self._settled = (0, 0, 0, 0)
        self._was_over = False  # whether it cost more than the budget at the last `settle`

    @property
    def cost_s(self) -> float | None:
        """The training thread's time in the hook so far, in seconds; None before it is known."""
        return None if self.ratio is None else self.cost_ns / 1e9

    def note(self, own_ns: int, with_evidence: bool, by_device: bool) -> None:
        """Note what the hook took around one fetch, without the fetch itself."""
        kind = self._evidence if with_evidence else self._by_device if by_device else self._plain
        kind.append(own_ns)

    def launched(self, took_ns: int, launches: int) -> None:
        """Note what recording one in so many last launches took. The median counts, as one may be interrupted."""
        self._launches.append(took_ns)
        self.device_ns += launches * int(median(self._launches))

    def harvested(self, at_ns: int, took_ns: int) -> None:
        """Note what reading the device's times of many steps took: it counts for no single fetch."""
        self.last_harvest = (at_ns, took_ns)
        self.device_ns += took_ns

    def settle(self, steps: int, sampled: int, step_ns: int) -> None:
        """Update the cost, given the cumulative number of steps, of sampled fetches, and the time in steps."""
        now = (steps, sampled, step_ns, self.device_ns)
        plain, by_device, evidence = list(self._plain), list(self._by_device), list(self._evidence)
        new_steps, new_sampled, new_step_ns, new_device_ns = (a - b for a, b in zip(now, self._settled, strict=True))
        if len(plain) + len(by_device) < _ENOUGH or new_steps <= 0 or new_step_ns <= 0:
            return
        self._settled = now
        measured = 0.0 if not by_device else 1 / self.device_one_in if plain else 1.0
        typical_ns = measured * median(by_device or [0]) + (1 - measured) * median(plain or [0])
        samples_ns = new_sampled * max(0.0, median(evidence or [0]) - typical_ns)
        new_ns = new_steps * typical_ns + samples_ns + new_device_ns
        self.cost_ns += max(0, int(new_ns))  # a sum that falls would be refused, and the run with it
        self.ratio = new_ns / new_step_ns
        self._set_pace(self.ratio, samples_ns / new_step_ns, bool(by_device))

    def _set_pace(self, ratio: float, sampling_ratio: float, has_device: bool) -> None:
        """Over budget, reduce sampling if it matters, else, when over it twice, device events. Restore in reverse."""
        still_over, self._was_over = self._was_over and ratio > self.budget, ratio > self.budget
        may_rest = has_device and self.device_one_in < _MOST_REST
        if ratio > self.budget:
            if self.stretch < _MOST_STRETCH and (sampling_ratio > self.budget / 8 or not may_rest):
                self.stretch *= 2
            elif may_rest and still_over:
                self.device_one_in *= 2
        elif ratio < _RELAX_AT * self.budget:
            if self.device_one_in > 1:
                self.device_one_in //= 2
            elif self.stretch > 1:
                self.stretch //= 2


_COUNTED = ("busy_ns", "wall_ns", "fetches_sampled", "worker_fetches", "ready_batches", "empty_fetches", "out_of_order")


class FetchEvidence:
    """Cumulative counts of one loop's fetches, or of a recorder's. One thread writes; any other reads single numbers.

    Without workers the training thread makes the batches itself: its CPU time in some fetches distinguishes work from
    waiting. With workers the number of batches that were ready at each request shows whether the workers keep up.
    """

    def __init__(self) -> None:
        self.loader: Loader | None = None  # the loop's own, as all that follows up to `is_main`
        self.batch_sizes: dict[str, int] = {}  # as in `Accounts`
        self.is_open, self.is_past = True, False  # the second: it has ended, and another pass has begun
        self.inside_ns = 0  # waits for it in steps that another loop's batches begin
        self.led_ns = 0  # waits for it in steps that its own batches begin, and in earlier passes: set by `Accounts`
        self.is_main = True  # of the loops that feed a step, the one that is waited for longest
        self._taken = [0] * (len(_COUNTED) + 1)
        # The training thread's time on a CPU or in the queue for one, and its wall time, in sampled fetches.
        self.busy_ns = self.wall_ns = 0
        self.fetches_sampled = self.worker_fetches = self.ready_batches = self.empty_fetches = 0  # as in `Counters`
        self.out_of_order = 0  # empty ones at which half of all requested ones were ready: other workers' later ones
        self.thread_time: ThreadTime | None = None  # the training thread's

    def count(self, busy_ns: int, wall_ns: int) -> None:
        """Add a fetch that was sampled."""
        self.busy_ns += busy_ns
        self.wall_ns += wall_ns
        self.fetches_sampled += 1

    def take(self) -> tuple[list[int], int]:
        """Return what `add` takes, and the waits inside steps of others: since the last call."""
        now = [getattr(self, name) for name in (*_COUNTED, "inside_ns")]
        new, self._taken = [a - b for a, b in zip(now, self._taken, strict=True)], now
        return new[:-1], new[-1]

    def add(self, counts: list[int]) -> None:
        """Add what another loop has counted."""
        for name, count in zip(_COUNTED, counts, strict=True):
            setattr(self, name, getattr(self, name) + count)

    @property
    def cpu_ratio(self) -> float | None:
        """Share of the sampled fetches in which the thread was on a CPU or in the queue for one; None without any."""
        return self.busy_ns / self.wall_ns if self.wall_ns else None

    def counting(self, iterator: Any) -> Callable[[], Any]:
        """Return a function that fetches the next batch; with workers it first counts the ready ones (0.4 µs)."""
        fetch: Callable[[], Any] = iterator.__next__
        ready = ready_batches(iterator)
        if ready is None:
            return fetch

        def counted() -> Any:
            if not iterator._task_info:  # this request ends the pass
                return fetch()
            try:
                count = ready()
            except Exception as error:  # a queue that was closed meanwhile, or that has no size
                pass_on(error)
                return fetch()
            self.worker_fetches += 1
            stored = early_batches(iterator)
            ahead = 2 * (count + stored) >= len(iterator._task_info) > 0
            if count <= 0:
                self.empty_fetches += 1
                self.out_of_order += ahead
                return fetch()
            batch = fetch()
            if early_batches(iterator) > stored:  # batches that are not the next one do not help
                self.empty_fetches += 1
                self.out_of_order += ahead
            else:
                self.ready_batches += count
            return batch

        return counted


class Sampling:
    """Samples a loop's fetches when `countdown` says so: the training thread's time, the device, the hook's cost."""

    def __init__(self, recorder: Recorder, evidence: FetchEvidence, find_device: Call, after_batch: Call) -> None:
        self._evidence = evidence
        self._recorder, self._find_device, self._after_batch = recorder, find_device, after_batch
        self.is_quick = True  # fetches take so little that the hook's own cost matters
        self._own_ns = self._fetched_ns = 0  # time before the metered fetch, and when that ended; 0: it is not metered

    def is_due(self) -> bool:
        """Count a round of fast steps; return whether the next fetch is to be sampled."""
        left = self._recorder.countdown - SAMPLE_QUICK_EVERY
        self._recorder.sample_after(max(1, left))
        return left <= 0

    def sample(self, fetch: Callable[[], T]) -> T:
        """Return the batch of `fetch`, the training thread's own time in it sampled."""
        clock, thread_time = self._recorder.clock, self._recorder.fetches.thread_time
        if thread_time is None:
            return fetch()
        busy, asked = thread_time.busy_ns(), clock()
        batch = fetch()
        self._evidence.count(thread_time.busy_ns() - busy, clock() - asked)
        return batch

    def fetch(self, fetch: Callable[[], T], begin_ns: int, is_first: bool) -> T:
        """Return the batch of `fetch`, sampled. A pass's first batch costs more than others, and is not metered."""
        recorder = self._recorder
        meter, clock = recorder.meter, recorder.clock
        self._visit_device(begin_ns)
        thread_time = recorder.fetches.thread_time if meter.visits & 1 else None
        busy = 0 if thread_time is None else thread_time.busy_ns()
        asked = clock()
        batch = fetch()
        fetched = clock()
        if thread_time is not None:
            self._evidence.count(thread_time.busy_ns() - busy, fetched - asked)
        self._set_rate(fetched - asked)
        harvest_at_ns, harvest_ns = meter.last_harvest
        # `note_cost` subtracts all copies of the step: those in the fetch were never a part of the hook's time
        self._own_ns = asked - begin_ns - (harvest_ns if harvest_at_ns == begin_ns else 0) + recorder.transfer_ns
        self._fetched_ns = 0 if is_first else fetched
        return batch

    def note_cost(self) -> None:
        """Meter the hook's time around the fetch that was sampled, without the fetch and a requested copy."""
        recorder = self._recorder
        if self._fetched_ns:
            own_ns = self._own_ns + recorder.clock() - self._fetched_ns - recorder.transfer_ns
            recorder.meter.note(own_ns, bool(recorder.meter.visits & 1), recorder.active_timeline is not None)
        self._after_batch()

    def meter(self, take: Callable[[], T]) -> T:
        """Return the batch of `take`, a fast step, and meter the hook's time around the fetch."""
        recorder = self._recorder
        meter, clock = recorder.meter, recorder.clock
        owner = recorder.steady
        begin = clock()
        self._visit_device(begin)
        asked = clock()
        batch = take()
        answered = clock()
        wait_ns = recorder.batch_ready_ns - recorder.begin_ns + recorder.transfer_ns  # with copies in the fetch
        self._set_rate(wait_ns)
        if recorder.steady is owner:
            meter.note(answered - asked - wait_ns + (asked - begin) // recorder.countdown, False, False)
        self._after_batch()
        return batch

    def _set_rate(self, fetch_ns: int) -> None:
        """Set when the next sample is due, given what a fetch takes."""
        meter = self._recorder.meter
        is_new = meter.visits < FIRST_VISITS  # the first steps of a run set its device up
        self.is_quick = fetch_ns < QUICK_FETCH_NS and not is_new
        every = 1 if is_new else SAMPLE_QUICK_EVERY if self.is_quick else SAMPLE_EVERY
        self._recorder.sample_after(1 + int(random() * (2 * every * meter.stretch - 1)))

    def _visit_device(self, now_ns: int) -> None:
        """Find a device that was set up by now, or visit the one that is known."""
        timeline = self._recorder.timeline
        if timeline is None or timeline.is_astray:
            self._find_device()
            self._recorder.meter.visits += 1
        else:
            self._recorder.visit_device(now_ns)


def early_batches(iterator: Any) -> int:
    """Return how many batches have come that are not the next one. Source: as `ready_batches`."""
    return sum(len(task) > 1 for task in list(iterator._task_info.values()))


def ready_batches(iterator: Any) -> Callable[[], int] | None:
    """Return a function that counts the workers' ready batches, in torch's queue or out of it; None without workers.

    Source: _MultiProcessingDataLoaderIter in torch.utils.data.dataloader, whose names are not public.
    """
    if not getattr(iterator, "_workers", None):
        return None
    try:
        size, early = iterator._data_queue.qsize, iterator._task_info
        size()
        early.get(iterator._rcvd_idx)
    except (AttributeError, NotImplementedError, OSError):  # macOS has no size of a queue between processes
        return None
    return lambda: int(size()) + (len(early.get(iterator._rcvd_idx, ())) > 1)
