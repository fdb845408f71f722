"""The truth that a ledger is compared with: clocks in the scenario's own code, and the device's own account.

Nothing here is taken from gpuwatch. A `Truth` cuts the wall clock into sections, switched by the scenario itself; a
device keeps the spans in which it worked. Laid over each other they give what every moment was. gpuwatch finds the
device by itself, as in any training.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic_ns
from typing import Any

import torch

from benchmarks import async_device
from benchmarks.async_device import COMPUTE, TRANSFER, Span
from gpuwatch import Watch
from gpuwatch.diagnosis.report import Report

STARTUP, DATA, LAUNCH, AFTER, BETWEEN, OTHER = "startup", "data", "launch", "after", "between", "other"
"""Sections of the host's time; declared phases are sections by their own names.

`transfer`: a copy to the device is asked for. `launch`: batch in hand, until the step's last launch (or the step's end,
where no optimizer steps). `after`: the rest of the step, in which nothing is launched. `between`: after one step and
before the next, in a loop without a loader.
"""

HOST_STATES = {DATA: "input_wait", LAUNCH: "compute", AFTER: "compute", BETWEEN: "other"}
IDLE_STATES = {DATA: "input_wait", LAUNCH: "compute", AFTER: "host_wait", BETWEEN: "host_wait"}
"""What a moment is in which the device is idle. Between launches of a step it is compute: events cannot see it."""


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


OPERATION_S = 5e-6
"""What each of torch's own operations takes on the device without hardware: a short kernel's time."""


class AsyncDevice:
    """The torch device without hardware. It accounts for its own work."""

    def __init__(self) -> None:
        async_device.load()
        async_device.settings(op_s=OPERATION_S)
        self.target = async_device.NAME

    def launch(self, seconds: float, kind: str = COMPUTE) -> None:
        async_device.launch(seconds, kind)

    def work(self, do: Callable[[], Any], operation_s: float) -> Any:
        """Run a part of a training whose operations take so long each."""
        with _set(op_s=operation_s):
            return do()

    @contextmanager
    def copies(self, seconds: float) -> Iterator[None]:
        """While this lasts a copy to the device takes so long."""
        with _set(to_device_s=seconds):
            yield

    def spans(self) -> list[Span]:
        return async_device.spans()


@contextmanager
def _set(**values: float) -> Iterator[None]:
    async_device.settings(**values)
    yield
    async_device.settings(**(dict.fromkeys(values, 0.0) | {"op_s": OPERATION_S}))


class TimedDevice:
    """Any accelerator, kept busy by kernels that spin.

    Its truth is its own: events around each launch and copy, read at the end.
    """

    def __init__(self, target: str, spin: Callable[[float], None]) -> None:
        self.target = target
        self._spin = spin
        self._spans: list[tuple[Any, Any, str]] = []
        torch.ones(1, device=target)
        torch.accelerator.synchronize()
        self._origin, self._origin_ns = self._event(), monotonic_ns()

    def launch(self, seconds: float, kind: str = COMPUTE) -> None:
        self._timed(lambda: self._spin(seconds), kind)

    def work(self, do: Callable[[], Any], operation_s: float) -> Any:
        """Run a part of a training; its operations take what they take."""
        return self._timed(do, COMPUTE)

    @contextmanager
    def copies(self, seconds: float) -> Iterator[None]:
        """Time copies to the device while this lasts; they take what they take. gpuwatch calls this as torch's own."""
        original = torch.Tensor.to

        def to(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if not args or args[0] != self.target:
                return original(tensor, *args, **kwargs)
            return self._timed(lambda: original(tensor, *args, **kwargs), TRANSFER)

        torch.Tensor.to = to
        try:
            yield
        finally:
            del torch.Tensor.to

    def spans(self) -> list[Span]:
        torch.accelerator.synchronize()

        def at_ns(event: Any) -> int:
            return self._origin_ns + int(self._origin.elapsed_time(event) * 1e6)

        return async_device.flattened((at_ns(begin), at_ns(end), kind) for begin, end, kind in self._spans)

    def _timed(self, do: Callable[[], Any], kind: str) -> Any:
        begin = self._event()
        result = do()
        self._spans.append((begin, self._event(), kind))
        return result

    def _event(self) -> Any:
        event = torch.Event(device=self.target, enable_timing=True)
        event.record()
        return event


def cuda_device() -> TimedDevice:
    """Return the first CUDA device, its spinning kernel calibrated."""
    torch.ones(1, device="cuda")
    for _ in range(20):  # to the clock rate that it will have
        torch.cuda._sleep(10_000_000)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    torch.cuda._sleep(100_000_000)
    end.record()
    torch.cuda.synchronize()
    cycles_per_s = 100_000_000 / begin.elapsed_time(end) * 1e3
    return TimedDevice("cuda", lambda seconds: torch.cuda._sleep(int(seconds * cycles_per_s)))


class Lab:
    """What a scenario is given: a watch, a device, and the truth to keep."""

    def __init__(self, seconds: float, device: AsyncDevice | TimedDevice, by_device: bool, budget: float) -> None:
        self.device = device
        self._by_device = by_device
        self.parameter = torch.nn.Parameter(torch.zeros(1, device=device.target))
        self.parameter.grad = torch.zeros_like(self.parameter)
        self.optimizer = torch.optim.SGD([self.parameter], lr=0.1)
        self.optimizer.step()
        self.seconds = seconds
        self.watch, self.truth = _opened(by_device, budget)

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
        """Do a step: a launch, host work meanwhile, the optimizer, other host work; then ask for the next batch."""
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

    def copy(self, batch: Any, blocking: bool) -> Any:
        """Move a batch as users do; then work on it is launched."""
        self.truth.now(TRANSFER)
        moved = batch.to(self.device.target, non_blocking=not blocking)
        self.truth.now(LAUNCH)
        return moved

    def read(self) -> None:
        """Wait for the device at a step's end, as reading a loss does: without it a device could lag ever further."""
        self.truth.now(AFTER)
        self.parameter.detach()[0].item()
        self.truth.now(DATA)

    def finish(self) -> Report:
        """End the run when the device is done, and return what gpuwatch reports."""
        self.truth.now(OTHER)
        torch.accelerator.synchronize()
        self.truth.now(OTHER)
        self.watch.close()
        return self.watch.report()

    def true_ns(self) -> dict[str, int]:
        """Return the truth by state, for the ledger that was asked for."""
        return self.truth.device_ns(self.device.spans()) if self._by_device else self.truth.host_ns()


_OPENED_WITHIN_NS = 1_000_000
_STARTED_S = 0.05
"""The hook's background thread begins meanwhile: start-up, to both."""


def _opened(by_device: bool, budget: float) -> tuple[Watch, Truth]:
    """Return a watch and a truth that begin together: what the machine did between the two would be neither's error."""
    while True:
        truth = Truth()
        watch = Watch(
            run="accuracy",
            quiet=True,
            endpoint="ipc:///no/listener.sock",
            device_events=by_device,
            budget=budget,
        )
        opened = monotonic_ns() - truth.begin_ns < _OPENED_WITHIN_NS
        if opened:
            watch.__enter__()
            time.sleep(_STARTED_S)
            return watch, truth
        watch.close()
