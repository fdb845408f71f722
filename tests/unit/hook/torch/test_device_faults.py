"""Any training on a device whose every call may raise, be late or never complete.

It goes as without gpuwatch, and its seconds close.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from benchmarks.fakes import FakeDevice, FakeEvent
from gpuwatch.hook.watch import Watch
from gpuwatch.ledger.device_timeline import RING
from tests.unit.hook.fakes import MS, Clock, fake_watch, turn

Op = tuple[str, int]
CALLS = ("record", "record_aside", "ready", "elapsed_ns", "release", "usable", "saw")
ERRORS = (RuntimeError("CUDA error: an illegal memory access"), ValueError("nan"), AttributeError("query"))


class Preempted(Exception):
    """What the user's signal handler raises."""


class FaultyDevice(FakeDevice):
    """A device whose calls go wrong by plan: `faults[n]` is what happens in the n-th."""

    def __init__(self, clock: Clock, faults: dict[int, Any]) -> None:
        super().__init__(clock, lambda seconds: clock.sleep_ms(seconds * 1e3))
        self.clock = clock
        self.faults = faults
        self.calls = 0
        self.stuck = False
        self.live: set[int] = set()

    def fault(self) -> None:
        self.calls += 1
        fault = self.faults.get(self.calls)
        if isinstance(fault, Exception):
            raise fault
        if isinstance(fault, int):
            self.clock.sleep_ms(fault)
        elif fault == "stuck":
            self.stuck = True
        elif fault == "signal" and not _being_dropped():
            signal.raise_signal(signal.SIGUSR1)

    def ready(self, event: FakeEvent) -> bool:
        return not self.stuck and super().ready(event)


def _faulty(name: str) -> Callable[..., Any]:
    call = getattr(FaultyDevice, name)

    def wrapped(self: FaultyDevice, *args: Any) -> Any:
        self.fault()
        return call(self, *args)

    return wrapped


for _name in CALLS:
    setattr(FaultyDevice, _name, _faulty(_name))


def _being_dropped() -> bool:
    """Whether an iterator is being collected: Python itself swallows what is raised there."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _preemptions(error: BaseException | None) -> int:
    """Return how many errors of the signal handler an error carries."""
    count = 0
    while error is not None:
        count += isinstance(error, (Preempted, KeyboardInterrupt))
        error = error.__context__
    return count


class Training:
    """A training that follows its instructions, with a watch or without; `seen` is all that its user would notice."""

    def __init__(self, clock: Clock, device: FakeDevice, watch: Watch | None) -> None:
        self.clock, self.device, self.watch = clock, device, watch
        self.seen: list[Any] = []
        self.waits: list[tuple[int, int]] = []
        self.copied_ns = 0
        self.tensor = torch.zeros(2)
        self.was: dict[str, int] = {}
        self.reached = 0
        """Errors of the user's signal handler that came out of the loop."""

    # What a user's script calls --------------------------------------------------------------------------------------

    def steps(self, batches: Iterator[int], **options: Any) -> Any:
        return batches if self.watch is None else self.watch.steps(batches, **options)

    def context(self, name: str, *args: Any) -> AbstractContextManager[Any]:
        return nullcontext() if self.watch is None else getattr(self.watch, name)(*args)

    def batches(self, ops: Iterator[Op], count: int = 1000) -> Iterator[int]:
        for number in range(count):
            op = next(ops, None)
            if op is None:
                return
            if op[0] == "loader raises":
                raise OSError(number)
            self.wait(op[1])
            yield number

    def wait(self, milliseconds: float) -> None:
        begin = self.clock()
        self.clock.sleep_ms(milliseconds)
        self.waits.append((begin, self.clock()))

    def launch(self, milliseconds: float, host_ms: float = 0.15) -> None:
        self.device.launch(milliseconds / 1e3)
        self.clock.sleep_ms(host_ms)

    # One operation of a loop's body ----------------------------------------------------------------------------------

    def do(self, kind: str, ms: int, ops: Iterator[Op]) -> None:
        watch = self.watch
        if kind == "host":
            self.clock.sleep_ms(ms)
        elif kind == "launch":
            self.launch(ms)
        elif kind == "optimizer":
            self.launch(ms)
            if watch is not None:
                watch._recorder.launched()
        elif kind == "copy":
            with self.context("transfer"):
                self.copied_ns += ms * MS
                self.launch(ms, host_ms=0.001)
        elif kind == "to":
            self.seen.append(self.tensor.to("meta").is_meta)
        elif kind == "read":
            self.device.synchronize()
        elif kind == "data":
            with self.context("data"):
                self.wait(ms)
        elif kind == "phase":
            with self.context("phase", "eval"):
                self.body(ops, 2)
                self.device.synchronize()
        elif kind == "step":
            with self.context("step"):
                self.body(ops, 3)
        elif kind == "nested":
            for batch in self.steps(self.batches(ops, 2)):
                self.seen.append(("inner", batch))
                self.body(ops, 1)
        elif kind == "raise":
            raise KeyError(ms)
        else:
            self.disturb(kind, ms, ops)

    def disturb(self, kind: str, ms: int, ops: Iterator[Op]) -> None:
        watch, device = self.watch, self.device
        if kind == "capture":
            device.capturing = bool(ms % 2)
        elif kind == "elsewhere":
            device.elsewhere = bool(ms % 2)
        elif kind == "aside":
            device.launch_aside(ms / 1e3)
        elif kind == "waits aside":
            timeline = None if watch is None else watch._recorder.active_timeline
            token = None if timeline is None else timeline.awaits_asides(self.clock() if ms % 2 else None)
            device.wait_aside()
            if timeline is not None:
                timeline.copy_ends(token)
        elif kind == "data in transfer":
            with self.context("transfer"), self.context("data"):
                self.body(ops, 2)
        elif kind == "transfer in data":
            with self.context("data"), self.context("transfer"):
                self.body(ops, 2)
        elif kind == "transfer in transfer":
            with self.context("transfer"):
                self.body(ops, 2)
        elif kind == "zip":
            for pair in zip(self.steps(self.batches(ops, 2)), self.steps(self.batches(ops, 3)), strict=False):
                self.seen.append(pair)
                self.body(ops, 1)
        elif kind == "evaluation":
            with torch.no_grad():
                for batch in self.steps(self.batches(ops, 2), **({"to": "meta"} if watch else {})):
                    self.seen.append(("evaluated", batch))
        elif watch is not None:
            self.handle(kind, ms, watch)

    def handle(self, kind: str, ms: int, watch: Watch) -> None:
        """What gpuwatch's own threads, or its user, do meanwhile."""
        if kind == "rest":
            watch._recorder.rest_device(bool(ms % 2))
        elif kind == "adopt":
            watch.session.torch_hooks.attach(self.device)
        elif kind == "turn":
            turn(watch)
            self.check(watch)
        elif kind == "report":
            report = watch.report()
            assert sum(report.states.values()) == pytest.approx(report.duration_s)
            self.check(watch)
        elif kind == "close":
            watch.close()

    def check(self, watch: Watch) -> None:
        """The ledger closes, lies in the past, and never takes back what it has booked."""
        ledger = watch._publisher.accounts.timeline.ledger
        assert ledger.sum_ns == ledger.watermark_ns - ledger.start_ns
        assert ledger.watermark_ns <= self.clock()
        assert all(ledger.totals_ns[state] >= ns for state, ns in self.was.items())
        self.was = dict(ledger.totals_ns)

    def body(self, ops: Iterator[Op], count: int) -> None:
        for _ in range(count):
            op = next(ops, None)
            if op is None or op[0] == "end":
                return
            self.do(*op, ops)

    def run(self, ops: list[Op]) -> None:
        """Train until nothing is left to do; what reaches the user is noted, and the next loop begins."""
        left = iter(ops)
        for _ in range(20):
            try:
                for batch in self.steps(self.batches(left)):
                    self.seen.append(batch)
                    self.loop_body(left)
                self.seen.append("end")
            except (Exception, KeyboardInterrupt) as error:
                self.seen.append(repr(error))
                self.reached += _preemptions(error)

    def loop_body(self, ops: Iterator[Op]) -> None:
        for kind, ms in ops:
            if kind == "end":
                return
            self.do(kind, ms, ops)


ANY = [
    *("host", "launch", "optimizer", "copy", "to", "read", "data", "phase", "step", "nested", "raise", "capture"),
    *(
        "elsewhere",
        "aside",
        "waits aside",
        "zip",
        "evaluation",
        "rest",
        "adopt",
        "turn",
        "report",
        "close",
        "loader raises",
    ),
    *("data in transfer", "transfer in data", "transfer in transfer", *["end", "launch", "optimizer"] * 4),
]
any_ops = st.lists(st.tuples(st.sampled_from(ANY), st.sampled_from([0, 1, 2, 5, 30, 40_000, 400_000])), max_size=40)
faults = st.dictionaries(st.integers(1, 120), st.sampled_from([*ERRORS, 1, 50, 40_000, "stuck"]), max_size=4)


def trained(monkeypatch: pytest.MonkeyPatch, ops: list[Op], plan: dict[int, Any], watched: bool = True) -> Training:
    """Return the training after its end, closed."""
    clock = Clock()
    device = FaultyDevice(clock, dict(plan) if watched else {})
    with monkeypatch.context() as patch:
        patch.setattr("logging.Logger.warning", lambda *_: None)
        watch = fake_watch(clock, patch) if watched else None
        if watch is not None:
            watch.session.torch_hooks.attach(device)
        training = Training(clock, device, watch)
        training.run(ops)
        if watch is not None:
            try:
                watch.close()
            finally:
                left = [name for name in ("to", "cuda", "item", "cpu", "tolist") if name in torch.Tensor.__dict__]
                for name in left:
                    delattr(torch.Tensor, name)
                assert not left
            training.check(watch)
            if "close" not in {kind for kind, _ in ops}:
                assert sum(training.was.values()) == clock() - watch._publisher.accounts.timeline.start_ns
    return training


many = partial(settings, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


GIVEN_UP = ["host", "zip", "host", "host", "data in transfer", "nested", "host", "host", "host"]


@many(max_examples=150)
@given(any_ops, faults)
@example(
    [
        *[(kind, 0) for kind in GIVEN_UP],
        ("launch", 1),
        ("launch", 400_000),
        ("host", 0),
        ("host", 0),
        ("host", 400_000),
    ],
    {},
)
def test_a_training_goes_as_without_gpuwatch_whatever_the_device_does(
    monkeypatch: pytest.MonkeyPatch, ops: list[Op], plan: dict[int, Any]
) -> None:
    with_watch = trained(monkeypatch, ops, plan)
    assert with_watch.seen == trained(monkeypatch, ops, {}, watched=False).seen
    assert with_watch.device.events_made <= 4 * RING


signals = st.dictionaries(st.integers(1, 120), st.sampled_from(["signal", "signal", 1]), min_size=1, max_size=4)


@many(max_examples=150)
@given(any_ops, signals, st.sampled_from([Preempted, KeyboardInterrupt]), st.booleans())
def test_what_a_signal_handler_raises_inside_gpuwatch_reaches_the_user(
    monkeypatch: pytest.MonkeyPatch, ops: list[Op], plan: dict[int, Any], error: type[BaseException], once: bool
) -> None:
    raised = 0

    def handler(number: int, _frame: Any) -> None:
        nonlocal raised
        raised += 1
        if once:
            signal.signal(number, signal.SIG_IGN)
        raise error("the node is wanted")

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        training = trained(monkeypatch, ops, plan)
    except (Preempted, KeyboardInterrupt):  # in the last close: it reached the user
        return
    finally:
        signal.signal(signal.SIGUSR1, before)
        if "torch.optim.optimizer" in sys.modules:  # what an interrupted close has left
            sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks.clear()  # type: ignore[attr-defined]
    assert training.reached == raised


# Without faults: the states against the device's own account ----------------------------------------------------------

HONEST = ("launch", "launch", "host", "optimizer", "copy", "read", "no-op", "data")
honest_steps = st.lists(
    st.tuples(
        st.integers(0, 60),
        st.lists(st.tuples(st.sampled_from(HONEST), st.integers(0, 60)), max_size=8),
    ),
    min_size=1,
    max_size=30,
).flatmap(lambda steps: st.sampled_from([steps, steps * 2, steps * 10]))


class Honest(Training):
    """A training whose device follows its instructions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = Clock()
        device = FakeDevice(clock, lambda seconds: clock.sleep_ms(round(seconds * 1e3, 6)))
        self.own = fake_watch(clock, monkeypatch)
        super().__init__(clock, device, self.own)
        self.own.session.torch_hooks.attach(device)
        self.began_ns = clock()
        self.pauses: list[tuple[int, int]] = []
        """From an optimizer's launch, the last of its piece, to the next wait."""
        self.launched_ns = 0
        self.worked_on = False
        """Something was launched after an optimizer."""

    def wait(self, milliseconds: float) -> None:
        if self.launched_ns:
            self.pauses.append((self.launched_ns, self.clock()))
        self.launched_ns = 0
        super().wait(milliseconds)

    def do(self, kind: str, ms: int, ops: Iterator[Op]) -> None:
        if kind == "no-op":
            self.own._recorder.active_timeline.saw(self.tensor)  # type: ignore[union-attr]
        elif kind == "read":
            begin = self.clock()
            self.device.synchronize()
            self.own._recorder.active_timeline.read_back(begin, self.clock())  # type: ignore[union-attr]
        else:
            super().do(kind, ms, ops)
        if kind == "optimizer":
            self.launched_ns = self.clock()
        elif kind == "launch" and self.launched_ns:
            self.worked_on = True

    def truth_ms(self) -> dict[str, float]:
        """Return ms by state, by what the device itself knows."""
        device, now = self.device, self.clock()
        end_ns = device._end_ns or now
        first_ns = end_ns - device.busy_ns - device.idle_ns
        idle = [(self.began_ns, first_ns), *device.idle, (end_ns, now)]
        states = {
            "input_wait": _shared_ns(self.waits, idle),
            "transfer": self.copied_ns,
            "host_wait": _shared_ns(self.pauses, idle),
        }
        states["compute"] = now - self.began_ns - sum(states.values())
        return {state: ns / MS for state, ns in states.items()}


def _shared_ns(some: list[tuple[int, int]], others: list[tuple[int, int]]) -> int:
    return sum(max(0, min(a[1], b[1]) - max(a[0], b[0])) for a in some for b in others)


def honest(monkeypatch: pytest.MonkeyPatch, steps: list[tuple[int, list[Op]]], own_steps: bool) -> Honest:
    """Return a training after so many steps, of a loop over a loader or declared ones."""
    training = Honest(monkeypatch)
    left = iter(steps)
    if own_steps:
        for wait, ops in left:
            with training.own.step():
                with training.own.data():
                    training.wait(wait)
                training.body(iter(ops), 99)
    else:
        bodies: list[list[Op]] = []

        def batches() -> Iterator[int]:
            for wait, ops in left:
                training.wait(wait)
                bodies.append(ops)
                yield 1

        for _ in training.steps(batches()):
            training.body(iter(bodies.pop()), 99)
    training.wait(0)
    training.device.synchronize()
    training.own._recorder.poll(training.clock())
    return training


def booked_ms(training: Honest) -> dict[str, float]:
    report = training.own.report()
    training.check(training.own)
    return {state: seconds * 1e3 for state, seconds in report.states.items() if seconds}


@many(max_examples=150)
@given(honest_steps, st.booleans())
def test_no_more_is_called_starvation_than_the_stream_was_empty_in_waits(
    monkeypatch: pytest.MonkeyPatch, steps: list[tuple[int, list[Op]]], own_steps: bool
) -> None:
    training = honest(monkeypatch, steps, own_steps)
    assert booked_ms(training).get("input_wait", 0) <= training.truth_ms()["input_wait"] + 0.2 * len(steps)


@many(max_examples=150)
@given(honest_steps, st.booleans())
def test_each_state_is_within_a_point_of_what_the_device_did(
    monkeypatch: pytest.MonkeyPatch, steps: list[tuple[int, list[Op]]], own_steps: bool
) -> None:
    monkeypatch.setattr(
        "gpuwatch.ledger.device_timeline.DETAILED_NS", 0
    )  # of quick steps a sample is: alternating ones would need many
    training = honest(monkeypatch, steps, own_steps)
    booked, truth = booked_ms(training), training.truth_ms()
    if training.worked_on:  # idle before or after it, two events cannot tell
        for states in (booked, truth):
            states["compute"] = states.get("compute", 0) + states.pop("host_wait", 0)
    within = 0.01 * sum(truth.values()) + 0.02
    errors = {state: booked.get(state, 0) - ms for state, ms in truth.items()}
    assert all(abs(error) <= within for error in errors.values()), (errors, booked, truth)
