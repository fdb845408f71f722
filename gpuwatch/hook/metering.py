"""What the hook costs the training thread, measured by itself, and what it leaves out when that is too much. No I/O, no clock.

Accounting is never thinned: every step is logged. What may be sampled is: the look at a fetch's CPU time, and the device's timing events.
"""

from __future__ import annotations

from collections import deque
from statistics import median

BUDGET = 0.01
"""Share of the step time that the hook may take, unless told otherwise."""

_KEPT = 15
_ENOUGH = 3
_MOST_STRETCH = 16
_MOST_REST = 32
_RELAX_AT = 0.25
"""Of the budget: what was thinned comes back below this."""


class Meter:
    """The hook's own time in the training thread, and how much it samples.

    The training thread notes the cost of a visit now and then; the background thread settles the account and sets the pace.
    """

    __slots__ = (
        "_by_device",
        "_evidence",
        "_launches",
        "_plain",
        "_settled",
        "_was_over",
        "budget",
        "cost_ns",
        "device_one_in",
        "last_harvest",
        "ratio",
        "stretch",
        "taps_ns",
        "visits",
    )

    def __init__(self, budget: float = BUDGET) -> None:
        self.budget = budget
        self.visits = 0
        """Fetches that were looked at closely; every other one with a look at the thread's CPU time."""
        self._plain: deque[int] = deque(maxlen=_KEPT)
        self._by_device: deque[int] = deque(maxlen=_KEPT)
        self._evidence: deque[int] = deque(maxlen=_KEPT)
        self._launches: deque[int] = deque(maxlen=_KEPT)
        self.taps_ns = 0
        """Time in device events outside of fetches: in the last launches of steps, and in reading what the device has done."""
        self.last_harvest = (0, 0)
        """When the device's times were last read for many steps at once, and how long that took; it is in `taps_ns` too."""
        self.stretch = 1
        """Fetches are looked at so many times more seldom than usual."""
        self.device_one_in = 1
        """The device's timeline measures one stretch of steps in so many."""
        self.cost_ns = 0
        """The training thread's time in the hook so far."""
        self.ratio: float | None = None
        """Its share of the step time lately; None before it is known."""
        self._settled = (0, 0, 0, 0)
        self._was_over = False
        """Whether it cost more than the budget when the account was settled last."""

    @property
    def cost_s(self) -> float | None:
        """The training thread's time in the hook so far, in seconds; None before it is known."""
        return None if self.ratio is None else self.cost_ns / 1e9

    def note(self, own_ns: int, with_evidence: bool, by_device: bool) -> None:
        """Note what the hook took of one fetch, beside the fetch itself."""
        kind = self._evidence if with_evidence else self._by_device if by_device else self._plain
        kind.append(own_ns)

    def launched(self, took_ns: int, launches: int) -> None:
        """Note what it took to record a last launch, one of so many: the usual time counts, not the odd one that was interrupted."""
        self._launches.append(took_ns)
        self.taps_ns += launches * int(median(self._launches))

    def harvested(self, at_ns: int, took_ns: int) -> None:
        """Note what it took to read the device's times of many steps: of no single fetch, though it came before one."""
        self.last_harvest = (at_ns, took_ns)
        self.taps_ns += took_ns

    def settle(self, steps: int, sampled: int, step_ns: int) -> None:
        """Bring the account up to date: so many steps by now, so many fetches sampled, so much time in steps (cumulative)."""
        taps_ns = self.taps_ns
        plain, by_device, evidence = list(self._plain), list(self._by_device), list(self._evidence)
        if len(plain) + len(by_device) < _ENOUGH:
            return
        last_steps, last_sampled, last_step_ns, last_taps_ns = self._settled
        new_steps, new_step_ns = steps - last_steps, step_ns - last_step_ns
        if new_steps <= 0 or new_step_ns <= 0:
            return
        self._settled = (steps, sampled, step_ns, taps_ns)
        measured = 0.0 if not by_device else 1 / self.device_one_in if plain else 1.0
        usual_ns = measured * (median(by_device) if by_device else 0) + (1 - measured) * (median(plain) if plain else 0)
        looks_ns = (sampled - last_sampled) * (max(0.0, median(evidence) - usual_ns) if evidence else 0.0)
        new_ns = new_steps * usual_ns + looks_ns + taps_ns - last_taps_ns
        self.cost_ns += int(new_ns)
        self.ratio = new_ns / new_step_ns
        self._set_pace(self.ratio, looks_ns / new_step_ns, bool(by_device))

    def _set_pace(self, ratio: float, looks_ratio: float, has_device: bool) -> None:
        """Thin first the looks, if they matter, then the device's events; bring back in the opposite order.

        Steps that the device's timeline leaves out are estimated: it rests only when the hook is too dear twice running, not for one bad moment.
        """
        still_over, self._was_over = self._was_over and ratio > self.budget, ratio > self.budget
        may_rest = has_device and self.device_one_in < _MOST_REST
        if ratio > self.budget:
            if self.stretch < _MOST_STRETCH and (looks_ratio > self.budget / 8 or not may_rest):
                self.stretch *= 2
            elif may_rest and still_over:
                self.device_one_in *= 2
        elif ratio < _RELAX_AT * self.budget:
            if self.device_one_in > 1:
                self.device_one_in //= 2
            elif self.stretch > 1:
                self.stretch //= 2
