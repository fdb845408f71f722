"""gpuwatch on torch's own CUDA code: it never waits for the device, disturbs a capture, or shows its calls' errors."""

from __future__ import annotations

import gc
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

import gpuwatch
from tests.cuda_runtime.runtime import (
    CAPTURE_CHECK,
    ELAPSED,
    GLOBAL,
    ILLEGAL_ADDRESS,
    INVALID_VALUE,
    OUT_OF_MEMORY,
    QUERY,
    RECORD,
    RELAXED,
    THREAD_LOCAL,
    Runtime,
    loaded,
    optimizer_of,
    pinned_batch,
)

loaded()  # skips all of them
torch = pytest.importorskip("torch")
pytestmark = pytest.mark.cuda_runtime

MS = 1_000_000
CREATE = "cudaEventCreateWithFlags"
ALLOWED = {RECORD, QUERY, ELAPSED, CAPTURE_CHECK, CREATE, "cudaEventDestroy", "cudaGetDevice", "cudaGetLastError"}
ALLOWED |= {"cudaThreadExchangeStreamCaptureMode"}
"""What gpuwatch may call. All of it returns at once."""


@dataclass
class Training:
    """A loop with two copies a step, that says where it is. `at` is called at each place: (step, place)."""

    runtime: Runtime
    at: Callable[[int, str], None] = lambda step, place: None
    steps: int = 40
    work_ns: int = 1 * MS
    place: tuple[int, str] = (0, "before")
    done: int = 0
    batch: tuple[Any, ...] = field(default_factory=pinned_batch)

    def loader(self) -> Iterator[tuple[Any, ...]]:
        for step in range(1, self.steps + 1):
            self._is_at(step, "loader")
            yield self.batch

    def run(self, batches: Iterable[tuple[Any, ...]]) -> None:
        optimizer = optimizer_of(self.runtime, self.work_ns // 2)
        for step, (inputs, labels) in enumerate(batches, 1):
            self._is_at(step, "copies")
            inputs.to("cuda", non_blocking=True)
            labels.to("cuda", non_blocking=True)
            self._is_at(step, "launch")
            self.runtime.launch(self.work_ns // 2)
            self._is_at(step, "optimizer")
            optimizer.step()
            self._is_at(step, "end")
            self.done = step
            self.place = (step + 1, "asks for a batch")

    def _is_at(self, step: int, place: str) -> None:
        self.place = (step, place)
        self.at(step, place)


def outcome(training: Training, is_watched: bool) -> tuple[tuple[int, str], str, str]:
    """Run it and return where it ended, and with which error: its type and first line."""
    try:
        if is_watched:
            with gpuwatch.Watch(quiet=True, budget=1.0) as watch:
                training.run(watch.steps(training.loader()))
        else:
            training.run(training.loader())
    except Exception as error:
        return training.place, type(error).__name__, str(error).splitlines()[0]
    return training.place, "", ""


def passes_of(runtime: Runtime) -> Callable[[int, str], None]:
    """Return an `at` that lets the device's time pass: in turns it is done before the step ends, and runs behind."""

    def at(step: int, place: str) -> None:
        if place == "loader":
            runtime.advance((2 if step % 4 < 2 else 0) * MS)
        elif place == "end":
            runtime.advance(MS // 2)

    return at


# Nothing waits, and few calls ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("regime", "most_us"), [("device lags", 11), ("device starved", 11), ("short steps", 11)])
def test_no_call_waits_for_the_device_and_few_are_made_a_step(runtime: Runtime, regime: str, most_us: float) -> None:
    """The cost is that of the middle of what the calls take on GPUs. The goal is 10 µs; 11 are allowed.

    A busy machine makes steps vary, and more of them are measured: then it is tried again.
    `tests/unit/ledger/test_device.py` counts the calls of steps that are alike.
    """
    from benchmarks.overhead.device_calls import REGIMES, added_calls

    calls = added_calls(runtime, REGIMES[regime], steps=200)
    for _ in range(2):
        if calls.cost_us("middle") > most_us:
            calls = added_calls(runtime, REGIMES[regime], steps=200)
    assert calls.synchronising == 0
    assert {name for name, count in calls.by_name.items() if count > 0} <= ALLOWED
    assert calls.measured_ratio > 0.2
    assert calls.cost_us("middle") <= most_us, calls.by_kind


def test_events_are_few_and_serve_the_next_watch(runtime: Runtime) -> None:
    """None is destroyed: that could wait for the device."""
    before, alive = runtime.events_alive, []
    most = 0

    def at(step: int, place: str) -> None:
        nonlocal most
        passes_of(runtime)(step, place)
        most = max(most, runtime.events_alive - before)

    for _ in range(2):
        with runtime.manual_clock():
            assert outcome(Training(runtime, at, steps=400), is_watched=True)[1:] == ("", "")
        gc.collect()
        alive.append(runtime.events_alive - before)
    assert 2 <= most <= 200
    assert alive[0] == alive[1] <= most


def test_a_training_on_the_cpu_makes_no_call_of_cuda(runtime: Runtime) -> None:
    program = """
import torch, gpuwatch
from tests.cuda_runtime.runtime import loaded
runtime = loaded()
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = [torch.ones(1, 2)] * 50
for loader in (batches, gpuwatch.watch(batches)):
    runtime.reset()
    for inputs in loader:
        model(inputs.to("cpu")).sum().backward()
        optimizer.step()
print(dict(runtime.calls()), torch.cuda.is_initialized(), runtime.cuda.sim_has_context())
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={**_environment(), "GPUWATCH_QUIET": "1"},
    )
    assert done.stdout.strip() == "{} False 0"


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


# Captures ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_a_graph_of_a_step_is_captured_as_without_gpuwatch(runtime: Runtime, mode: str) -> None:
    """Copy, launches and the optimizer's step are all in the graph; what follows is measured again."""
    graph = torch.cuda.CUDAGraph()
    optimizer, batch = optimizer_of(runtime, 1 * MS), pinned_batch()
    with runtime.manual_clock():
        with gpuwatch.Watch(quiet=True, budget=1.0) as watch:
            for step, (inputs, _) in enumerate(watch.steps([batch] * 60)):
                if step == 10:
                    with torch.cuda.graph(graph, capture_error_mode=mode):
                        inputs.to("cuda", non_blocking=True)
                        runtime.launch(2 * MS)
                        optimizer.step()
                elif step > 10:
                    graph.replay()
                runtime.advance(4 * MS)
            torch.cuda.synchronize()
            report = watch.report()
        before = runtime.now_ns()
        graph.replay()
        assert runtime.end_ns() - before == pytest.approx(3 * MS, abs=0.05 * MS)
    assert report.steps == 60
    assert report.timeline == "device" and report.coverage > 0.5


def test_a_batch_is_asked_for_in_a_capture(runtime: Runtime) -> None:
    """Steps 10 to 12 of a training on its own stream are one graph: the capture contains fetches and ends of steps."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.set_stream(stream)
    with runtime.manual_clock(), gpuwatch.Watch(quiet=True, budget=1.0) as watch:
        optimizer, batch = optimizer_of(runtime, 1 * MS), pinned_batch()
        for step, (inputs, _) in enumerate(watch.steps([batch] * 60)):
            if step == 10:
                graph.capture_begin()
            inputs.to("cuda", non_blocking=True)
            optimizer.step()
            if step == 12:
                graph.capture_end()
            runtime.advance(2 * MS)
        before = runtime.now_ns()
        graph.replay()
        report = watch.report()
        assert runtime.end_ns() - before == pytest.approx(3 * MS, abs=0.05 * MS)
    assert report.steps == 60
    assert report.timeline == "device" and report.coverage > 0.5


MODES = pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL, RELAXED], ids=["global", "thread-local", "relaxed"])


class RawCapture:
    """A capture begun and ended in the runtime itself, as C++ libraries do. `ended`: the error of its end, or 0."""

    def __init__(self, runtime: Runtime, mode: int) -> None:
        self._runtime, self._mode, self._stream = runtime, mode, runtime.stream()
        self.ended: int | None = None

    def begin(self) -> None:
        assert self._runtime.begin_capture(self._stream, self._mode) == 0

    def end(self) -> None:
        if self.ended is None:
            self.ended = self._runtime.end_capture(self._stream)


class GraphCapture:
    """The same by `torch.cuda.CUDAGraph`. `ended` is 0, or the text of the error."""

    def __init__(self, runtime: Runtime, mode: int) -> None:
        self._graph, self._mode = torch.cuda.CUDAGraph(), ("global", "thread_local", "relaxed")[mode]
        self._on = torch.cuda.stream(torch.cuda.Stream())
        self.ended: int | str | None = None

    def begin(self) -> None:
        self._on.__enter__()
        self._graph.capture_begin(capture_error_mode=self._mode)

    def end(self) -> None:
        if self.ended is None:
            try:
                self._graph.capture_end()
                self.ended = 0
            except Exception as error:
                self.ended = str(error).splitlines()[0]


def beside_a_capture(runtime: Runtime, capture: Any, by_other_thread: bool, is_watched: bool) -> tuple[Any, Any]:
    """Run a training while another stream is captured in steps 10 to 30; return its outcome, and the capture's."""
    wanted: queue.Queue[Callable[[], None] | None] = queue.Queue()

    def do(work: Callable[[], None]) -> None:
        if by_other_thread:
            wanted.put(work)
            wanted.join()
        else:
            work()

    def at(step: int, place: str) -> None:
        passes_of(runtime)(step, place)
        if (step, place) == (10, "launch"):
            do(capture.begin)
        if (step, place) == (30, "launch"):
            do(capture.end)

    def other() -> None:
        while (work := wanted.get()) is not None:
            work()
            wanted.task_done()

    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    with runtime.manual_clock():
        result = outcome(Training(runtime, at), is_watched)
    do(capture.end)  # where the training has failed meanwhile
    wanted.put(None)
    thread.join(10)
    return result, capture.ended


UNINTERRUPTED = (((41, "asks for a batch"), "", ""), 0)


@MODES
@pytest.mark.parametrize("capture", [GraphCapture, RawCapture])
def test_a_capture_in_another_thread_is_not_broken_and_breaks_nothing(
    runtime: Runtime, mode: int, capture: Any
) -> None:
    for is_watched in (False, True):
        assert (
            beside_a_capture(runtime, capture(runtime, mode), by_other_thread=True, is_watched=is_watched)
            == UNINTERRUPTED
        )


@MODES
def test_a_capture_on_another_stream_of_the_training_thread_is_not_broken(runtime: Runtime, mode: int) -> None:
    """The current stream is not the one that is captured: to ask only that one is not enough."""
    for is_watched in (False, True):
        assert (
            beside_a_capture(runtime, RawCapture(runtime, mode), by_other_thread=False, is_watched=is_watched)
            == UNINTERRUPTED
        )


# Errors --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nth", [1, 2, 7])
@pytest.mark.parametrize(
    ("call", "error"),
    [(CREATE, OUT_OF_MEMORY), (RECORD, INVALID_VALUE), (QUERY, INVALID_VALUE), (ELAPSED, INVALID_VALUE)],
)
def test_an_error_of_one_call_of_ours_stays_with_us(
    runtime: Runtime, call: str, error: int, nth: int, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(runtime, passes_of(runtime))
    runtime.fail(call, nth, error)
    caplog.set_level(logging.WARNING, "gpuwatch")
    with runtime.manual_clock(), gpuwatch.Watch(quiet=True, budget=1.0) as watch:
        training.run(watch.steps(training.loader()))
    report = watch.report()
    if call == CREATE and nth > runtime.calls()[CREATE]:
        pytest.skip(f"only {runtime.calls()[CREATE]} events were made")
    assert runtime.calls()[call] >= nth  # the error was met
    assert training.done == report.steps == 40
    assert sum(report.states.values()) == pytest.approx(report.duration_s, rel=1e-6)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("nth", [1, 2, 7])
@pytest.mark.parametrize("call", [CREATE, RECORD, QUERY, ELAPSED])
def test_a_sticky_error_that_a_call_of_ours_meets_is_raised_by_the_users_next_call(
    runtime: Runtime, call: str, nth: int
) -> None:
    training = Training(runtime, passes_of(runtime))
    runtime.fail(call, nth, ILLEGAL_ADDRESS, sticky=True)
    with runtime.manual_clock():
        place, kind, text = outcome(training, is_watched=True)
    if call == CREATE and nth > runtime.calls()[CREATE]:
        pytest.skip(f"only {runtime.calls()[CREATE]} events were made")
    assert runtime.calls()[call] >= nth
    assert (kind, text) == ("AcceleratorError", "CUDA error: an illegal memory access was encountered")
    assert place[1] in ("copies", "launch", "optimizer")  # calls of the user's own


@pytest.mark.parametrize(
    ("call", "place"), [(CAPTURE_CHECK, "optimizer"), (CAPTURE_CHECK, "end"), ("cudaGetDevice", "end")]
)
def test_an_error_of_what_is_asked_before_an_event_stays_with_us(runtime: Runtime, call: str, place: str) -> None:
    """All calls of that name fail from one place of step 20 to the next one, where a bare loop makes none of them."""

    def at(step: int, now_at: str) -> None:
        passes_of(runtime)(step, now_at)
        if step == 20 and now_at == place:
            runtime.fail(call, 0, INVALID_VALUE)
        elif now_at in ("end", "loader"):
            runtime.reset()

    with runtime.manual_clock():
        assert outcome(Training(runtime, at), is_watched=False) == ((41, "asks for a batch"), "", "")
        assert outcome(Training(runtime, at), is_watched=True) == ((41, "asks for a batch"), "", "")


@pytest.mark.parametrize("passes_at", ["copies", "launch", "optimizer", "end", "loader"])
def test_the_users_own_asynchronous_error_is_raised_where_it_is_without_gpuwatch(
    runtime: Runtime, passes_at: str
) -> None:
    """A kernel of step 10 fails; the device reaches it when its time passes, at one place of the loop or another."""

    def run(is_watched: bool) -> tuple[tuple[int, str], str, str]:
        def at(step: int, place: str) -> None:
            if (step, place) == (10, "launch"):
                runtime.launch(1 * MS, fails_with=ILLEGAL_ADDRESS)
            if place == passes_at:
                runtime.advance(5 * MS)

        runtime.reset()
        with runtime.manual_clock():
            return outcome(Training(runtime, at), is_watched)

    bare = run(is_watched=False)
    assert bare[1:] == ("AcceleratorError", "CUDA error: an illegal memory access was encountered")
    assert bare[0][0] in (10, 11)
    assert run(is_watched=True) == bare


def exit_of_a_child(do: Callable[[], Any]) -> int:
    """Return how a forked child ended that did this: 0, or the negative number of the signal that ended it."""
    child = os.fork()
    if child == 0:
        do()
        gc.collect()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_loader_worker_may_collect_what_a_run_has_left(runtime: Runtime) -> None:
    """In a forked child CUDA fails, and destroying an event aborts it: seen with DataLoader workers on an H100."""
    kept: list[Any] = [torch.cuda.Event(enable_timing=True)]
    kept[0].record()
    assert exit_of_a_child(kept.clear) == -signal.SIGABRT, "the simulated runtime behaves as CUDA does"

    training = Training(runtime)
    watches = [gpuwatch.Watch(quiet=True)]
    training.run(watches[0].steps(training.loader()))
    watches[0].close()
    made = runtime.calls()[CREATE]
    assert exit_of_a_child(watches.clear) == 0
    watches.clear()
    for _ in range(9):  # each takes the events of those before, and more only where it has more under way
        with gpuwatch.Watch(quiet=True) as watch:
            training.run(watch.steps(training.loader()))
            assert watch.report().timeline == "device"
        del watch
        gc.collect()
    calls = runtime.calls()
    assert calls[CREATE] < 4 * made and calls["cudaEventDestroy"] == 0


# What is measured ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loader_ms", "before_ms", "after_ms"),
    [(1.0, 3.0, 0.0), (4.0, 2.0, 0.0), (4.0, 1.0, 3.5), (4.0, 1.0, 1.5)],
    ids=["device lags", "starved", "work after the optimizer", "work after the optimizer, starved"],
)
def test_starvation_is_what_the_stream_was_empty(
    runtime: Runtime, loader_ms: float, before_ms: float, after_ms: float
) -> None:
    least_ns = most_ns = 0  # until a batch is there; and until each launch has returned
    optimizer, batch = optimizer_of(runtime, int(before_ms * MS) // 2), pinned_batch()
    batch[0].to("cuda", non_blocking=True)  # the first of all takes its time

    def batches() -> Iterator[Any]:
        for _ in range(150):
            time.sleep(loader_ms / 1e3)
            yield batch

    with gpuwatch.Watch(quiet=True, budget=1.0) as watch:
        begin = runtime.now_ns()
        for step, (inputs, _) in enumerate(watch.steps(batches())):
            empty_ns = max(begin, runtime.end_ns())
            least_ns += max(0, runtime.now_ns() - empty_ns) if step else 0
            launches = [
                partial(inputs.to, "cuda", non_blocking=True),
                partial(runtime.launch, int(before_ms * MS) // 2),
            ]
            launches += [optimizer.step, *([partial(runtime.launch, int(after_ms * MS))] if after_ms else [])]
            for launch in launches:
                launch()
                launched_ns = runtime.now_ns()
                most_ns += max(0, launched_ns - empty_ns)
                empty_ns = max(launched_ns, runtime.end_ns())
            if step % 20 == 19:
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        wall_s = (runtime.now_ns() - begin) / 1e9
        report = watch.report()
    reported = (report.states.get("input_wait", 0.0) + report.states.get("host_wait", 0.0)) / wall_s
    assert report.timeline == "device"
    assert least_ns / 1e9 / wall_s - 0.02 < reported < most_ns / 1e9 / wall_s + 0.02


def test_a_wait_for_a_side_stream_with_copies_is_transfer(runtime: Runtime) -> None:
    """Each step waits for another stream, which has a copy and 12 ms of work, then works for 6 ms.

    Before that, the other stream waits for this one.
    """
    main, side, batch = torch.cuda.current_stream(), torch.cuda.Stream(), pinned_batch()
    optimizer, waited_ns = optimizer_of(runtime, 3 * MS), 0
    own = vars(torch.cuda.Event)["wait"]
    with gpuwatch.Watch(quiet=True, budget=1.0) as watch:
        begin = runtime.now_ns()
        for _ in watch.steps(range(60)):
            side.wait_stream(main)
            with torch.cuda.stream(side):
                batch[0].to("cuda", non_blocking=True)
                runtime.launch(12 * MS)
            before_ns = max(runtime.now_ns(), runtime.end_ns())
            main.wait_stream(side)
            waited_ns += runtime.end_ns() - before_ns
            runtime.launch(3 * MS)
            optimizer.step()
            torch.cuda.synchronize()
        wall_s = (runtime.now_ns() - begin) / 1e9
        assert vars(torch.cuda.Event)["wait"] is not own
        report = watch.report()
    assert vars(torch.cuda.Event)["wait"] is own
    assert waited_ns / 1e9 > 0.5 * wall_s
    assert report.states["transfer"] / wall_s == pytest.approx(waited_ns / 1e9 / wall_s, abs=0.02)
    assert report.unverified_ratio == 0
