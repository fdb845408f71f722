"""The truth that a ledger is compared with: clocks in the scenario's own code, and the device's own account.

Nothing here is taken from gpuwatch. A `Truth` cuts the wall clock into sections, switched by the scenario itself; a device keeps the spans in
which it worked. Laid over each other they say what every moment was.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic_ns
from typing import Any

import torch

from gpuwatch import Watch
from gpuwatch.report import Report
from gpuwatch.testing import FakeDevice

STARTUP, DATA, TRANSFER, LAUNCH, AFTER, BETWEEN, OTHER = (
    "startup",
    "data",
    "transfer",
    "launch",
    "after",
    "between",
    "other",
)
"""Sections of the host's time; declared phases are sections by their own names.

`launch`: batch in hand, until the optimizer has stepped (or the step's end, where there is none). `after`: the rest of the step. `between`: after one step and
before the next, in a loop without a loader.
"""

HOST_STATES = {DATA: "input_wait", LAUNCH: "compute", AFTER: "compute", BETWEEN: "other"}
IDLE_STATES = {DATA: "input_wait", LAUNCH: "compute", AFTER: "host_wait", BETWEEN: "host_wait"}
"""What a moment is in which the device has nothing to do. Between launches of a step it counts as compute: events cannot see it."""

Span = tuple[int, int, str]
"""Begin and end in monotonic ns, and what it was."""


class Truth:
    """What the host did at each moment, in the scenario's own words."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._section = STARTUP
        self._since = self.begin_ns = monotonic_ns()

    def now(self, section: str) -> None:
        """From now on the host does this."""
        at = monotonic_ns()
        self._spans.append((self._since, at, self._section))
        self._since, self._section = at, section

    @contextmanager
    def during(self, section: str) -> Iterator[None]:
        """The host does this, then goes on with what it did before."""
        before = self._section
        self.now(section)
        yield
        self.now(before)

    @property
    def wall_ns(self) -> int:
        return self._since - self.begin_ns

    def host_ns(self) -> dict[str, int]:
        """Return ns by state as the host's clock must see them."""
        states: defaultdict[str, int] = defaultdict(int)
        for begin, end, section in self._spans:
            states[HOST_STATES.get(section, section)] += end - begin
        return states

    def device_ns(self, busy: list[Span]) -> dict[str, int]:
        """Return ns by state as the device must feel them: its own work first, else what the host did meanwhile."""
        states: defaultdict[str, int] = defaultdict(int)
        first = 0
        for begin, end, section in self._spans:
            at = begin
            while first < len(busy) and busy[first][1] <= begin:
                first += 1
            for work_begin, work_end, kind in busy[first:]:
                if work_begin >= end:
                    break
                low, high = max(at, work_begin), min(end, work_end)
                states[IDLE_STATES.get(section, section)] += low - at
                states[kind] += high - low
                at = high
            states[IDLE_STATES.get(section, section)] += end - at
        return states


class ModelDevice(FakeDevice):
    """A device that is only time, and remembers when it worked on what. A copy is work like any other."""

    target = "meta"

    def __init__(self) -> None:
        super().__init__()
        self._worked: list[Span] = []

    def launch(self, seconds: float, kind: str = "compute") -> None:
        super().launch(seconds)
        end = self._end_ns or 0
        self._worked.append((end - round(seconds * 1e9), end, kind))

    def copy(self, do: Callable[[], Any], seconds: float, blocking: bool) -> Any:
        """Copy a batch. From pageable memory the host waits for it, and so for all that was queued before it."""
        self.launch(seconds, TRANSFER)
        if blocking:
            self.synchronize()
        return do()

    def watch_with(self, watch: Watch) -> None:
        """Let the watch measure by this device's events."""
        watch._taps.attach(self)

    def spans(self) -> list[Span]:
        return self._worked


class CudaDevice:
    """The first CUDA device, kept busy by kernels that spin. Its truth is its own: events around each launch, read at the end."""

    target = "cuda"

    def __init__(self) -> None:
        self._launches: list[tuple[int, Any, Any, str]] = []
        torch.ones(1, device="cuda")
        for _ in range(20):  # to the clock rate that it will have
            torch.cuda._sleep(10_000_000)
        begin, end = self._event(), self._event()
        torch.cuda._sleep(100_000_000)
        end.record()
        torch.cuda.synchronize()
        self._cycles_per_s = 100_000_000 / begin.elapsed_time(end) * 1e3

    def launch(self, seconds: float, kind: str = "compute") -> None:
        self._timed(lambda: torch.cuda._sleep(int(seconds * self._cycles_per_s)), kind)

    def copy(self, do: Callable[[], Any], seconds: float, blocking: bool) -> Any:
        return self._timed(do, TRANSFER)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def watch_with(self, watch: Watch) -> None:
        """Nothing to do: the watch finds the device by itself, once the loop begins."""

    def spans(self) -> list[Span]:
        """Return when it worked: from the launch or the end of the work before, for as long as the events say."""
        spans: list[Span] = []
        end_ns = 0
        for at_ns, begin, end, kind in self._launches:
            begin_ns = max(at_ns, end_ns)
            end_ns = begin_ns + int(begin.elapsed_time(end) * 1e6)
            spans.append((begin_ns, end_ns, kind))
        return spans

    def _timed(self, do: Callable[[], Any], kind: str) -> Any:
        at_ns, begin = monotonic_ns(), self._event()
        result = do()
        end = self._event()
        self._launches.append((at_ns, begin, end, kind))
        return result

    def _event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class Lab:
    """What a scenario is given: a watch, a device, and the truth to keep."""

    def __init__(self, seconds: float, device: ModelDevice | CudaDevice, by_device: bool) -> None:
        self.device = device
        self._by_device = by_device
        self._copy_s = 0.0
        parameter = torch.nn.Parameter(torch.zeros(1, device="cuda" if device.target == "cuda" else "cpu"))
        parameter.grad = torch.zeros_like(parameter)
        self.optimizer = torch.optim.SGD([parameter], lr=0.1)
        self.optimizer.step()
        self.seconds = seconds
        self.watch, self.truth = _opened(by_device)
        if by_device:
            device.watch_with(self.watch)

    @property
    def time_is_up(self) -> bool:
        return monotonic_ns() - self.truth.begin_ns > self.seconds * 1e9

    def over(self) -> bool:
        """Return whether the loop is to be left now; says so to the truth."""
        if self.time_is_up:
            self.truth.now(OTHER)
            return True
        return False

    def loop(self, loader: Any, **options: Any) -> Any:
        """Return the loader, watched: the host waits for data from here on."""
        self.truth.now(DATA)
        return self.watch.steps(loader, **options)

    def train(self, launch_s: float, host_s: float = 0.0, after_s: float = 0.0, optimizer: bool = True) -> None:
        """One step's body: a launch, host work beside it, the optimizer, other host work; then the next batch is asked for."""
        self.truth.now(LAUNCH)
        self.device.launch(launch_s)
        if host_s:
            time.sleep(host_s)
        if optimizer:
            self.optimizer.step()
            self.truth.now(AFTER)
        if after_s:
            time.sleep(after_s)
        self.truth.now(DATA)

    def copy(self, batch: Any, seconds: float, blocking: bool) -> Any:
        """Move a batch as users do; the copy takes so long on a model device, and what it takes on a real one."""
        self.truth.now(TRANSFER)
        self._copy_s = seconds
        moved = batch.to(self.device.target, non_blocking=not blocking)
        self.truth.now(LAUNCH)
        return moved

    def keep_near(self) -> None:
        """Wait for the device at the end of a step, as reading a loss now and then does: no device lags for ever."""
        self.truth.now(AFTER)
        self.device.synchronize()
        self.truth.now(DATA)

    @contextmanager
    def copies_are_work(self) -> Iterator[None]:
        """While this lasts, `.to(device)` is work on the device's stream, launched through torch's own method."""
        original = torch.Tensor.to

        def to(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if not args or args[0] != self.device.target:
                return original(tensor, *args, **kwargs)
            blocking = not kwargs.get("non_blocking", False)
            return self.device.copy(lambda: original(tensor, *args, **kwargs), self._copy_s, blocking)

        torch.Tensor.to = to
        try:
            yield
        finally:
            del torch.Tensor.to

    def finish(self) -> Report:
        """End the run when the device is done, and return what gpuwatch says of it."""
        self.truth.now(OTHER)
        self.device.synchronize()
        self.truth.now(OTHER)
        self.watch.close()
        return self.watch.report()

    def true_ns(self) -> dict[str, int]:
        """Return the truth by state, for the ledger that was asked for."""
        return self.truth.device_ns(self.device.spans()) if self._by_device else self.truth.host_ns()


_BUDGET = 0.2
"""The model device's own Python is in the hook's cost: on a loaded machine that was over 1 % of the time, the device's events rested, and a row told
how well rested steps are estimated instead of how well steps are measured."""
_OPENED_WITHIN_NS = 1_000_000
_STARTED_S = 0.05
"""The hook's background thread begins meanwhile: start-up, to both."""


def _opened(by_device: bool) -> tuple[Watch, Truth]:
    """Return a watch and a truth that begin together: what the machine did between the two would be neither's error."""
    while True:
        truth = Truth()
        watch = Watch(
            run="accuracy",
            quiet=True,
            endpoint="ipc:///nobody/listens.sock",
            device_events=by_device,
            budget=_BUDGET,
        )
        opened = monotonic_ns() - truth.begin_ns < _OPENED_WITHIN_NS
        if opened:
            watch.__enter__()
            time.sleep(_STARTED_S)
            return watch, truth
        watch.close()
