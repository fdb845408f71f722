"""Shared by the GPU collectors: what a GPU is, and driver calls in a thread with a deadline, as rarely as their cost demands."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any, TypeVar

from gpuwatch.metrics import Sample

T = TypeVar("T")
log = logging.getLogger(__name__)

Value = tuple[str, float, tuple[str, ...]]
"""A metric, its value, and the labels it has beyond gpu and UUID."""


@dataclass(frozen=True)
class GpuDevice:
    """A GPU as the driver lists it."""

    index: int
    """NVML's, in PCI order: neither CUDA's nor the minor number; it changes when a GPU before it is lost."""
    uuid: str
    name: str
    pci_bus_id: str
    """With a domain of eight digits, as in "00000000:3B:00.0"."""
    minor: int | None
    """The N of /dev/nvidiaN. None where there is none (WSL, some virtual GPUs)."""


@dataclass(frozen=True)
class GpuProcess:
    """A process with a compute context on a GPU."""

    pid: int
    """In the node's pid namespace."""
    used_memory_bytes: int | None
    """Over all of the GPU's MIG instances. None where the driver has no figure."""


@dataclass(frozen=True)
class Gpu:
    """A GPU that answers."""

    device: GpuDevice
    handle: Any
    driver: str = ""
    """The driver's version."""

    @property
    def info(self) -> Value:
        return ("gpuwatch_gpu_info", 1, (self.device.name, self.device.pci_bus_id, self.driver))

    def __str__(self) -> str:
        return f"GPU {self.device.index} ({self.device.uuid})"


@dataclass(frozen=True)
class Reading:
    """Something that is read of every GPU, and how often."""

    name: str
    read: Callable[[Gpu], list[Value]]
    interval_s: float


def gpu_samples(device: GpuDevice, values: Iterable[Value]) -> list[Sample]:
    return [Sample(metric, value, (str(device.index), device.uuid, *more)) for metric, value, more in values]


class WarnOnce:
    """Logs each message once."""

    def __init__(self) -> None:
        self._messages: set[str] = set()

    def __call__(self, message: str) -> None:
        if message not in self._messages:
            self._messages.add(message)
            log.warning("%s", message)

    def clear(self) -> None:
        self._messages.clear()


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
        except BaseException as error:  # raised again in the calling thread
            self.error = error
        self.done.set()

    def take(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.result


class DeadlineThread:
    """A daemon thread that runs one call at a time, for which its caller waits until a deadline.

    A call in a driver cannot be killed. Past the deadline it is abandoned, no other one is started until it returns (`call` drops its late
    result), and the interpreter's exit does not wait for it. For one calling thread.
    """

    def __init__(self, what: str, deadline_s: float) -> None:
        self._what = what
        self._deadline_s = deadline_s
        self._calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._overdue: _Call | None = None

    def call(self, function: Callable[[], T]) -> T:
        """Return what `function` returns, or raise what it raises.

        Raises: TimeoutError if it does not return before the deadline, and at once while an earlier call is overdue.
        """
        if self._overdue is not None and self._overdue.done.is_set():
            self._overdue = None  # its late result is dropped
        call = self._overdue or self._begin(function)
        if self._overdue is not None or not call.done.wait(self._deadline_s):
            self._overdue = call
            raise self._late()
        result: T = call.take()
        return result

    def offer(self, function: Callable[[], T], wait_s: float) -> T | None:
        """Start `function` unless an earlier one is running, and wait `wait_s`; return its result, None while it is not done.

        A late result is returned by the next call. Raises: what the function raises, and TimeoutError past the deadline.
        """
        call, self._overdue = self._overdue or self._begin(function), None
        if not call.done.wait(wait_s):
            self._overdue = call
            if time.monotonic() - call.begin_s > self._deadline_s:
                raise self._late()
            return None
        result: T = call.take()
        return result

    def _late(self) -> TimeoutError:
        return TimeoutError(f"{self._what} did not answer within {self._deadline_s:g} s")

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
"""Share of one core's time that a kind of call may take, all GPUs together. A more expensive one is made less often."""
_LONGEST_S = 300.0
_ROUNDS, _ROUNDS_TO_JUDGE = 5, 3
_SLACK_S = 0.25
"""A tick may begin a little early."""


@dataclass
class CallCost:
    """One kind of call, over all GPUs."""

    planned_s: float
    """Its interval while it is cheap."""
    seconds: float = 0.0
    rounds_s: deque[float] = field(default_factory=lambda: deque(maxlen=_ROUNDS))
    """Duration of the last rounds over all GPUs."""
    due_s: float = float("-inf")

    @property
    def interval_s(self) -> float:
        """Its interval now, by the median: one call that hung does not predict the next one."""
        median_s = median(self.rounds_s) if len(self.rounds_s) >= _ROUNDS_TO_JUDGE else 0.0
        return min(_LONGEST_S, max(self.planned_s, median_s / BUDGET_RATIO))


class CallCosts:
    """The costs of all kinds of calls that one thread makes, in rounds over all GPUs."""

    def __init__(self, clock: Callable[[], float], timer: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._timer = timer
        self.calls: dict[str, CallCost] = {}
        self.current = ""
        """The call in progress, for a timeout's message."""

    def due(self, name: str, planned_s: float) -> bool:
        """Return whether this call is due."""
        cost = self.calls.setdefault(name, CallCost(planned_s))
        return self._clock() >= cost.due_s - _SLACK_S

    def samples(self) -> Iterator[Sample]:
        """Yield the time spent in each kind of call, and its interval."""
        for name, cost in list(self.calls.items()):
            yield Sample("gpuwatch_nvml_call_seconds_total", cost.seconds, (name,))
            yield Sample("gpuwatch_nvml_call_interval_seconds", cost.interval_s, (name,))

    def done(self, name: str, seconds: float) -> None:
        """Record the duration of a round of this call, and schedule the next one."""
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
        """Name the call in progress; the yielded list has its duration afterwards."""
        self.current, begin, took = what, self._timer(), [0.0]
        try:
            yield took
        finally:
            took[0] = self._timer() - begin
            self.current = ""
