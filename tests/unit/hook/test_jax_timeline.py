"""JAX's timeline on arrays that become ready by a clock that tests set, and what is claimed of a framework that was not measured."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from gpuwatch import wire
from gpuwatch.diagnosis.report import give_verdict
from gpuwatch.diagnosis.rules import diagnose
from gpuwatch.hook.account import device
from gpuwatch.hook.jax_timeline import POLLED, JaxArrays, JaxTimeline, Moment, asynchronous_framework, torch_steps
from gpuwatch.hook.watch import Watch
from tests.unit.hook.fakes import MS, Clock, connect, fake_watch, told, turn
from tests.unit.rules.windows import STARVED


class Array:
    """Is ready from a moment on."""

    def __init__(self, clock: Clock, ready_ns: int) -> None:
        self._clock, self._ready_ns, self._deleted = clock, ready_ns, False
        self.times_asked = 0

    def is_deleted(self) -> bool:
        return self._deleted

    def delete(self) -> None:
        self._deleted = True

    def is_ready(self) -> bool:
        assert not self._deleted, "jaxlib crashes the process here"
        self.times_asked += 1
        return self._clock() >= self._ready_ns


class Jax:
    """A device that computes one thing after another, a watch on it, and its polling thread, turned by hand every millisecond."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = Clock()
        self.watch: Watch = fake_watch(self.clock, monkeypatch, device_events=False)
        self.live: list[Array] = []
        self.busy_until_ns = 0
        self.arrays = JaxArrays(lambda: self.live, self.clock)
        self.timeline = JaxTimeline(self.arrays)
        self.watch._recorder.adopt_device(self.timeline)

    def launch(self, ms: float, donates: bool = False) -> None:
        if donates:
            for array in self.live:
                array.delete()
        self.busy_until_ns = max(self.busy_until_ns, self.clock()) + int(ms * MS)
        self.live = [Array(self.clock, self.busy_until_ns), *([] if donates else self.live[:3])]

    def sleep(self, ms: float) -> None:
        for _ in range(int(ms)):
            self.clock.sleep_ms(1)
            self.arrays.poll()

    def batches(self, waits_ms: list[float]) -> Iterator[int]:
        for number, wait in enumerate(waits_ms):
            self.sleep(wait)
            yield number

    def states(self) -> dict[str, float]:
        self.watch._recorder.poll(self.clock())
        report = self.watch.report()
        assert sum(report.states.values()) == pytest.approx(report.duration_s)
        return {state: round(seconds * 1e3, 6) for state, seconds in report.states.items() if seconds > 0}


@pytest.fixture
def jax(monkeypatch: pytest.MonkeyPatch) -> Jax:
    return Jax(monkeypatch)


@pytest.mark.parametrize("donates", [False, True])
def test_a_hidden_wait_is_not_starvation(jax: Jax, donates: bool) -> None:
    for _ in jax.watch.steps(jax.batches([8.0] * 50)):
        jax.launch(20, donates)
    states = jax.states()
    assert states["input_wait"] == 8  # the first one, before anything was launched
    assert jax.watch.report().verdict.state == "compute"


@pytest.mark.parametrize("donates", [False, True])
def test_of_a_longer_wait_that_part_counts_in_which_the_device_was_idle(jax: Jax, donates: bool) -> None:
    for _ in jax.watch.steps(jax.batches([40.0] * 50)):
        jax.launch(19.5, donates)
    states = jax.states()
    assert states["input_wait"] == pytest.approx(40 + 49 * 20.5)
    assert jax.watch.report().coverage == 1.0


def test_work_that_is_waited_for_in_the_loop_leaves_the_whole_wait_exposed(jax: Jax) -> None:
    for _ in jax.watch.steps(jax.batches([10.0] * 20)):
        jax.launch(30)
        jax.sleep(30)
    assert jax.states() == {"input_wait": 200, "compute": 600}


def test_a_declared_wait_inside_a_declared_step_is_measured_alike(jax: Jax) -> None:
    for _ in range(20):
        with jax.watch.step():
            with jax.watch.data():
                jax.sleep(40)
            jax.launch(19.5)
    jax.sleep(20)
    assert jax.states()["input_wait"] == pytest.approx(40 + 19 * 20.5)


def test_steps_while_the_timeline_rests_are_estimated_and_measured_again_after(jax: Jax) -> None:
    jax.watch._recorder.meter.device_one_in = 2
    for _ in jax.watch.steps(jax.batches([40.0] * 60)):
        jax.launch(20)
    assert jax.states()["input_wait"] == pytest.approx(40 + 59 * 20, rel=0.05)
    assert 0.4 < jax.watch.report().coverage < 0.6


def test_no_array_is_kept_alive_and_none_that_is_gone_counts_as_ready(jax: Jax) -> None:
    array = Array(jax.clock, jax.clock() + 50 * MS)
    moment, gone = Moment([array], jax.clock()), weakref.ref(array)
    moment.poll(jax.clock)
    assert not moment.is_closed
    del array
    gc.collect()
    assert gone() is None
    moment.poll(jax.clock)
    assert (moment.is_closed, moment.ready_ns) == (True, None)


def test_the_device_was_done_halfway_between_two_looks(jax: Jax) -> None:
    begin = jax.clock()
    arrays = [Array(jax.clock, begin + 7 * MS), Array(jax.clock, begin + 3 * MS)]
    moment = Moment(arrays, begin)
    for _ in range(4):
        jax.clock.sleep_ms(2)
        moment.poll(jax.clock)
    assert moment.ready_ns == begin + 7 * MS
    assert [array.times_asked for array in arrays] == [4, 3]  # one that is ready is not asked again


def test_of_thousands_of_arrays_some_are_asked(jax: Jax) -> None:
    jax.live = [Array(jax.clock, 0) for _ in range(5000)]
    assert jax.arrays.note(jax.clock()).ready_ns == jax.clock()
    asked = [number for number, array in enumerate(jax.live) if array.times_asked]
    assert asked[:POLLED] == list(range(POLLED)) and POLLED < len(asked) <= 2 * POLLED
    assert asked[-1] > 4800


def test_an_error_of_jax_ends_the_timeline_and_not_the_training(jax: Jax, caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> list[Any]:
        raise RuntimeError("backend gone")

    done = 0
    for number in jax.watch.steps(jax.batches([10.0] * 10)):
        jax.launch(5)
        done += 1
        if number == 4:
            jax.arrays._live_arrays = broken
    assert done == 10 and jax.watch._recorder.timeline is None
    assert caplog.text.count("backend gone") == 1
    assert sum(jax.states().values()) == pytest.approx(100)


def test_the_thread_that_asks_ends_with_the_timeline() -> None:
    clock = Clock()
    arrays = JaxArrays(list, clock)
    arrays.start()
    thread = next(each for each in threading.enumerate() if each.name == "gpuwatch-jax")
    JaxTimeline(arrays).abandon()
    thread.join(timeout=5)
    assert not thread.is_alive()


# What is claimed where nothing was measured ----------------------------------------------------------------------------


@pytest.fixture
def jax_on_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """JAX as it is once it has set up a GPU, without `live_arrays`: it cannot be measured."""
    monkeypatch.setattr(torch_steps, "seen", False)
    client = SimpleNamespace(platform_version="PJRT C API\ncuda 12080")
    jax = SimpleNamespace(default_backend=lambda: "gpu", devices=lambda: [SimpleNamespace(client=client)])
    bridge = SimpleNamespace(backends_are_initialized=lambda: True)
    monkeypatch.setitem(sys.modules, "jax", jax)
    monkeypatch.setitem(sys.modules, "jax._src.xla_bridge", bridge)
    return bridge


def test_a_jax_run_that_was_not_measured_is_not_called_input_bound(
    jax_on_gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    watch = fake_watch(clock, monkeypatch)
    sender = connect(watch)

    def batches() -> Iterator[int]:
        for number in range(100):
            clock.sleep_ms(62)
            yield number

    for _ in watch.steps(batches()):
        clock.sleep_ms(38)
    report = watch.report()
    assert (report.device, report.timeline, report.findings) == ("jax:cuda", "host", ())
    assert (report.verdict.state, report.verdict.ratio) == ("unknown", pytest.approx(0.62))
    assert report.verdict.sentence == (
        "by the host clock the loop waited for data 62% of the time; JAX runs asynchronously, "
        "and for how much of that the device idled was not measured"
    )
    assert "throughput" not in str(report)
    turn(watch, hello=True)
    hello = next(message for message in told(sender) if isinstance(message, wire.Hello))
    assert (hello.device, hello.timeline) == ("jax:cuda", "host")


def test_no_rule_of_the_input_family_speaks_of_an_unmeasured_framework() -> None:
    assert diagnose(STARVED) != []
    for device_name, words in (("jax:tpu", "JAX runs"), ("tensorflow", "TensorFlow runs")):
        window = replace(STARVED, device=device_name)
        assert [finding for finding in diagnose(window) if finding.predicted_speedup is not None] == []
        assert [finding.cause for finding in diagnose(window) if finding.cause.startswith("input")] == []
        assert words in give_verdict(window).sentence
    assert give_verdict(replace(STARVED, device="jax:tpu", timeline="device")).state == "input"


def test_jax_that_only_was_imported_is_not_asked_and_torch_that_trains_decides(
    jax_on_gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert device() == "jax:cuda"
    monkeypatch.setattr(torch_steps, "seen", True)
    assert (asynchronous_framework(), device()) == (None, "cpu")
    monkeypatch.setattr(torch_steps, "seen", False)
    jax_on_gpu.backends_are_initialized = lambda: False
    assert (asynchronous_framework(), device()) == (None, "cpu")


def test_the_first_step_of_a_torch_optimizer_is_noticed(jax_on_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    watch = fake_watch(Clock(), monkeypatch)
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for number in watch.steps([1, 2]):
        assert device() == ("jax:cuda" if number == 1 else "cpu")
        weight.sum().backward()
        optimizer.step()
    watch.close()
    monkeypatch.setattr(torch_steps, "seen", False)
    optimizer.step()
    assert not torch_steps.seen  # the hook is gone


@pytest.mark.parametrize(("devices", "expected"), [(["CPU"], None), (["CPU", "GPU"], "tensorflow"), ([], "tensorflow")])
def test_tensorflow_is_synchronous_on_the_cpu_alone(
    devices: list[str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_steps, "seen", False)
    logical = [SimpleNamespace(device_type=name) for name in devices]
    context = SimpleNamespace(_initialized=True, _logical_devices=logical)
    monkeypatch.setitem(sys.modules, "tensorflow.python.eager.context", SimpleNamespace(_context=context))
    assert asynchronous_framework() == expected
    context._initialized = False
    assert asynchronous_framework() is None
