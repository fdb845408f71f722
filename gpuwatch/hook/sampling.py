"""Close looks at some of a loop's fetches: at the training thread's own time, at the device, at what the hook itself takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from gpuwatch.hook.recorder import Recorder

L = TypeVar("L")
T = TypeVar("T")
LOOKED_AT_EVERY = 4
LOOKED_AT_SELDOM = 32
FIRST_VISITS = 4
"""So many fetches of a run are all looked at: its device is set up in its first steps."""
QUICK_FETCH_NS = 1_000_000
"""A look at the CPU time costs 4 µs: nothing beside a slow fetch, and a quick one is nobody's bottleneck. Every other visit only meters the hook."""


class Looks:
    """One loop's. The recorder's `countdown` tells after how many fetches the next one is due, over all loops."""

    def __init__(
        self, recorder: Recorder, find_device: Callable[[], None], print_early: Callable[[int], None] | None = None
    ) -> None:
        self._recorder = recorder
        self._find_device = find_device
        self._print_early = print_early
        self.is_quick = True
        """Fetches take so little that what the hook takes beside matters."""
        self._own_ns = self._fetched_ns = 0
        """What the hook took before the fetch that is metered, and when that ended; 0: it is not metered."""

    def is_due_for_usual(self) -> bool:
        """Count a round of usual steps; return whether the next fetch is to be looked at."""
        self._recorder.countdown -= LOOKED_AT_SELDOM
        if self._recorder.countdown > 0:
            return False
        self._recorder.countdown = 1
        return True

    @property
    def meters_next(self) -> bool:
        """Whether the next visit only meters the hook."""
        return bool(self._recorder.meter.visits & 1)

    def fetch(self, fetch: Callable[[], T], begin_ns: int, is_first: bool) -> T:
        """Return the batch that `fetch` brings, and look meanwhile. A pass's first batch costs more than others, and is not metered."""
        recorder = self._recorder
        meter, fetches, clock = recorder.meter, recorder.fetches, recorder.clock
        self._look_at_device(begin_ns)
        meter.visits += 1
        thread_time = fetches.thread_time if meter.visits & 1 else None
        busy = 0 if thread_time is None else thread_time.busy_ns()
        asked = clock()
        batch = fetch()
        fetched = clock()
        if thread_time is not None:
            fetches.count(thread_time.busy_ns() - busy, fetched - asked)
        self._set_pace(fetched - asked)
        harvest_at_ns, harvest_ns = meter.last_harvest
        self._own_ns = asked - begin_ns - (harvest_ns if harvest_at_ns == begin_ns else 0)
        self._fetched_ns = 0 if is_first else fetched
        return batch

    def note_cost(self) -> None:
        """Tell the meter what the hook took of the fetch that was looked at, beside the fetch and a copy that was asked for."""
        recorder = self._recorder
        if self._fetched_ns:
            own_ns = self._own_ns + recorder.clock() - self._fetched_ns - recorder.transfer_ns
            recorder.meter.note(own_ns, bool(recorder.meter.visits & 1), recorder.device is not None)
        self._after_batch()

    def meter_usual(self, usual: Callable[[L], T], loop: L) -> T:
        """Return the batch that the loop's `usual` step brings, and tell the meter what it took beside the fetch."""
        recorder = self._recorder
        meter, clock = recorder.meter, recorder.clock
        owner = recorder.steady
        meter.visits += 1
        begin = clock()
        self._look_at_device(begin)
        asked = clock()
        batch = usual(loop)
        answered = clock()
        wait_ns = recorder.fed_ns - recorder.begin_ns
        self._set_pace(wait_ns)
        if recorder.steady is owner:
            meter.note(answered - asked - wait_ns + (asked - begin) // recorder.countdown, False, False)
        self._after_batch()
        return batch

    def _after_batch(self) -> None:
        """Print what is due early in a long pass; not metered, for it comes once in a run."""
        if self._print_early is not None:
            self._print_early(self._recorder.clock())

    def _set_pace(self, fetch_ns: int) -> None:
        """Say when the next look is due, given what a fetch takes."""
        meter = self._recorder.meter
        is_new = meter.visits < FIRST_VISITS  # the first steps of a run set its device up
        self.is_quick = fetch_ns < QUICK_FETCH_NS and not is_new
        pace = 1 if is_new else LOOKED_AT_SELDOM if self.is_quick else LOOKED_AT_EVERY
        self._recorder.countdown = pace * meter.stretch

    def _look_at_device(self, now_ns: int) -> None:
        """Find a device that was set up by now; read what it has finished; let it rest where it is measured too dearly."""
        recorder = self._recorder
        home, one_in = recorder.home, recorder.meter.device_one_in
        if home is None or home.is_astray:
            self._find_device()
            return
        if recorder.device is None:  # else its steps are read in their turn
            recorder.poll(now_ns)
        if one_in > 1 or recorder.resting:
            recorder.rest_device(recorder.meter.visits % one_in != 0)
