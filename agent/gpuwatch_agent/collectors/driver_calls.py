"""Calls into a driver: made in a thread that can be given up on, and as seldom as their cost demands."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any, TypeVar

from gpuwatch.metrics import Sample

T = TypeVar("T")


class _Call:
    """One function on its way through the thread."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.done = threading.Event()
        self.begin_s = time.monotonic()
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self.function()
        except BaseException as error:  # given on to the caller, who waits for it
            self.error = error
        self.done.set()


class DeadlineThread:
    """A daemon thread that runs one call at a time, which its caller waits for until a deadline and no longer.

    A call in a driver cannot be killed. Past the deadline it is left alone, no second one is started meanwhile, and
    once it has come back (to `call` its late result is nothing) the next call goes ahead. The interpreter's exit does not wait
    for it. For one calling thread.
    """

    def __init__(self, what: str, deadline_s: float) -> None:
        self._what = what
        self._deadline_s = deadline_s
        self._calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._overdue: _Call | None = None

    def call(self, function: Callable[[], T]) -> T:
        """Return what `function` returns, or raise what it raises.

        Raises: TimeoutError if it does not come back before the deadline, and at once while an earlier call is away.
        """
        late = f"{self._what} did not answer within {self._deadline_s:g} s"
        if self._overdue is not None and not self._overdue.done.is_set():
            raise TimeoutError(late)
        self._overdue = None
        call = self._begin(function)
        if not call.done.wait(self._deadline_s):
            self._overdue = call
            raise TimeoutError(late)
        if call.error is not None:
            raise call.error
        result: T = call.result
        return result

    def offer(self, function: Callable[[], T], wait_s: float) -> T | None:
        """Begin `function` unless an earlier one is under way, and wait a moment; return its result, None while it is not done.

        A result that came late is given at the next call. Raises: what the function raises, and TimeoutError for one
        that is away for longer than the deadline.
        """
        call = self._overdue or self._begin(function)
        if not call.done.wait(wait_s):
            self._overdue = call
            if time.monotonic() - call.begin_s > self._deadline_s:
                raise TimeoutError(f"{self._what} did not answer within {self._deadline_s:g} s")
            return None
        self._overdue = None
        if call.error is not None:
            raise call.error
        result: T = call.result
        return result

    def _begin(self, function: Callable[[], Any]) -> _Call:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"gpuwatch-{self._what}", daemon=True)
            self._thread.start()
        call = _Call(function)
        self._calls.put(call)
        return call

    def _run(self) -> None:
        while True:
            self._calls.get().run()


BUDGET_RATIO = 0.01
"""Share of one core's time that a kind of call may take, all GPUs together. A dearer one is made less often."""
_LONGEST_S = 300.0
_ROUNDS, _ROUNDS_TO_JUDGE = 5, 3
_SLACK_S = 0.25
"""A tick that begins a little early still counts."""


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
        """Return whether this call is due. Every kind of call is known from the first time this is called."""
        cost = self.calls.setdefault(name, CallCost(planned_s))
        return self._clock() >= cost.due_s - _SLACK_S

    def samples(self) -> Iterator[Sample]:
        """Yield what each kind of call has cost so far, and how often it is made."""
        for name, cost in list(self.calls.items()):
            yield Sample("gpuwatch_nvml_call_seconds_total", cost.seconds, (name,))
            yield Sample("gpuwatch_nvml_call_interval_seconds", cost.interval_s, (name,))

    def done(self, name: str, seconds: float) -> None:
        """Note what a round of this call took, and when the next one is due."""
        cost = self.calls[name]
        cost.rounds_s.append(seconds)
        cost.seconds += seconds
        cost.due_s = self._clock() + cost.interval_s

    def forget_due_times(self) -> None:
        """Make every call due: the GPUs were listed again."""
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
