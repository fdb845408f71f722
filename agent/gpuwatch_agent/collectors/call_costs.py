"""What calls into the driver cost, and how seldom each must be made so as to stay within its budget."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

BUDGET_RATIO = 0.01
"""Share of one core's time that a kind of call may take, all GPUs together. A dearer one is made less often."""
_LONGEST_S = 300.0
_ROUNDS, _ROUNDS_TO_JUDGE = 5, 3
_SLACK_S = 0.25
"""A turn that begins a little early still counts."""


@dataclass
class CallCost:
    """One kind of call, over all GPUs."""

    planned_s: float
    """How often it is made as long as it is cheap."""
    seconds: float = 0.0
    rounds_s: deque[float] = field(default_factory=lambda: deque(maxlen=_ROUNDS))
    """What the last rounds over all GPUs took."""
    due_s: float = float("-inf")

    @property
    def interval_s(self) -> float:
        """How often it is made now: by the median, for one call that hung says nothing of the next one."""
        usual_s = median(self.rounds_s) if len(self.rounds_s) >= _ROUNDS_TO_JUDGE else 0.0
        return min(_LONGEST_S, max(self.planned_s, usual_s / BUDGET_RATIO))


class CallCosts:
    """The costs of all kinds of calls that one thread makes, in rounds over all GPUs."""

    def __init__(self, clock: Callable[[], float], timer: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._timer = timer
        self.calls: dict[str, CallCost] = {}
        self.current = ""
        """The call that is being made, for whoever waits for it in vain."""

    def due(self, name: str, planned_s: float) -> bool:
        """Return whether it is this call's turn. Every kind of call is known from the first time it is asked about."""
        cost = self.calls.setdefault(name, CallCost(planned_s))
        return self._clock() >= cost.due_s - _SLACK_S

    def done(self, name: str, seconds: float) -> None:
        """Note what a round of this call took, and when the next one is due."""
        cost = self.calls[name]
        cost.rounds_s.append(seconds)
        cost.seconds += seconds
        cost.due_s = self._clock() + cost.interval_s

    def forget_dues(self) -> None:
        """Make every call anew at the next opportunity: the GPUs were listed anew."""
        for cost in self.calls.values():
            cost.due_s = float("-inf")

    @contextmanager
    def calling(self, what: str) -> Iterator[list[float]]:
        """Name the call under way; the list that this gives holds its time afterwards."""
        self.current, begin, took = what, self._timer(), [0.0]
        try:
            yield took
        finally:
            took[0] = self._timer() - begin
            self.current = ""
