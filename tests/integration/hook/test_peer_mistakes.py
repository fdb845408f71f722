"""What other tools get wrong, each as a test that gpuwatch passes. The names say the mistake."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, Dataset  # noqa: E402

import gpuwatch  # noqa: E402
from benchmarks.fakes import FakeDevice, FakeEvent  # noqa: E402
from gpuwatch import metrics, wire  # noqa: E402
from gpuwatch.hook.watch import Watch  # noqa: E402
from gpuwatch.ledger.device_timeline import COPY_CALL_NS  # noqa: E402
from gpuwatch_agent.exporter import run_samples  # noqa: E402
from gpuwatch_agent.runs import Run  # noqa: E402
from tests.unit.hook.fakes import Clock, connect, fake_watch, reported, states_ms, turn  # noqa: E402

pytestmark = pytest.mark.alone

NO_OWNER = "ipc:///no/listener/here.sock"


class Spent:
    """Seconds that the test's own code took, by what for: on a busy machine more than was asked for."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def sleep(self, what: str, seconds: float) -> None:
        begin = time.perf_counter()
        time.sleep(seconds)
        self.seconds[what] = self.seconds.get(what, 0.0) + time.perf_counter() - begin


class Slow(Dataset[Any]):  # type: ignore[misc]  # torch is not read by mypy here
    def __init__(self, items: int, item_s: float = 0.0, pickling_s: float = 0.0) -> None:
        self.items, self.item_s, self.pickling_s = items, item_s, pickling_s

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.item_s)
        return torch.full((3,), float(index))

    def __getstate__(self) -> dict[str, Any]:
        time.sleep(self.pickling_s)
        return self.__dict__


def loader(items: int, item_s: float = 0.0, pickling_s: float = 0.0, **options: Any) -> Any:
    return DataLoader(Slow(items, item_s, pickling_s), batch_size=1, **options)


@pytest.fixture
def spent() -> Spent:
    return Spent()


@pytest.fixture
def watch() -> Iterator[Watch]:
    with Watch(quiet=True, endpoint=NO_OWNER) as watch:
        yield watch


class Rig:
    """A watch on a clock that is set by hand, and a device that is only time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = Clock()
        self.device = FakeDevice(self.clock, lambda seconds: self.clock.sleep_ms(seconds * 1e3))
        self.watch = fake_watch(self.clock, monkeypatch)
        self.watch.session.torch_hooks.attach(self.device)

    def batches(self, count: int, wait_ms: float) -> Iterator[Any]:
        for _ in range(count):
            self.clock.sleep_ms(wait_ms)
            yield torch.zeros(2)

    def states(self) -> dict[str, float]:
        """Return ms by state once the device has done all; their sum is the whole time."""
        self.device.synchronize()
        self.watch._recorder.poll(self.clock())
        report = self.watch.report()
        assert sum(report.states.values()) == pytest.approx(report.duration_s)
        return states_ms(self.watch)


COPY_CALL_MS = COPY_CALL_NS / 1e6
"""The part of a copy's call that is its launch: an idle device waits for that as for any kernel's."""


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch)


# Blind outside the step --------------------------------------------------------------------------------------------


def test_30_ms_between_7_ms_steps_are_not_overlooked(watch: Watch, spent: Spent) -> None:
    """Reported elsewhere as an iteration of 6.7 ms, input-bound; it is one of 37 ms, and nothing waits for input."""
    for _ in range(15):
        with watch.step():
            spent.sleep("compute", 0.007)
        spent.sleep("other", 0.030)
    report = watch.report()
    assert report.duration_s / 15 >= 0.037
    for state, seconds in spent.seconds.items():
        assert report.states[state] == pytest.approx(seconds, abs=0.02 * report.duration_s), state
    assert report.states.get("input_wait", 0.0) == 0.0
    assert "input" not in report.verdict.sentence


def test_30_ms_of_python_in_a_loop_are_not_overlooked_by_the_device_either(rig: Rig) -> None:
    for _ in rig.watch.steps(rig.batches(20, wait_ms=0.1)):
        rig.device.launch(0.007)
        rig.clock.sleep_ms(7)
        rig.watch._recorder.launched()
        rig.clock.sleep_ms(30)
    states = rig.states()
    assert states["host_wait"] == pytest.approx(600)
    assert states["compute"] == pytest.approx(140)
    assert states["input_wait"] == pytest.approx(2)


# A slow evaluation blamed on training -------------------------------------------------------------------------------


@pytest.mark.parametrize("declared", [True, False])
def test_a_slow_eval_loader_is_not_blamed_on_training(declared: bool, watch: Watch) -> None:
    in_evals = 0.0
    for _ in watch.steps(loader(6)):
        time.sleep(0.01)
        begin = time.perf_counter()
        if declared:
            with watch.phase("eval"):
                for _ in watch.steps(loader(3, 0.02)):
                    pass
        else:
            with torch.no_grad():
                for _ in watch.steps(loader(3, 0.02)):
                    pass
        in_evals += time.perf_counter() - begin
    report = watch.report()
    assert report.steps == 6
    assert report.states["eval"] == pytest.approx(in_evals, abs=0.02 * report.duration_s)
    assert report.states["input_wait"] < 0.1 * report.duration_s
    assert "input-bound" not in report.verdict.sentence


# Workers' start ------------------------------------------------------------------------------------------------------


def test_the_start_of_spawned_workers_that_pickle_slowly_is_timed(watch: Watch) -> None:
    begin = time.perf_counter()
    steps = 0
    for _ in watch.steps(loader(8, pickling_s=0.4, num_workers=1, multiprocessing_context="spawn")):
        time.sleep(0.005)
        steps += 1
    elapsed = time.perf_counter() - begin
    report = watch.report()
    assert report.steps == steps == 8
    assert report.states["input_wait"] >= 0.4
    whole = sum(report.states[state] for state in ("input_wait", "compute"))
    assert whole + report.states["other"] == pytest.approx(elapsed, rel=0.02)


def test_the_iterator_is_as_eager_as_the_loader_s_own_and_has_its_length(watch: Watch) -> None:
    class Eager:
        """Begins to prefetch at `iter()`."""

        begun = False

        def __iter__(self) -> Iterator[int]:
            self.begun = True
            return iter([1, 2])

    eager = Eager()
    iterator = iter(watch.steps(eager))
    assert eager.begun
    assert list(iterator) == [1, 2]
    workers = iter(watch.steps(loader(6, num_workers=1)))
    assert len(workers) == 6  # type: ignore[arg-type]
    assert all(worker.is_alive() for worker in workers._workers)  # type: ignore[attr-defined]
    del workers


def test_a_head_start_of_the_workers_is_not_lost(watch: Watch) -> None:
    iterator = iter(watch.steps(loader(2, 0.3, num_workers=1, prefetch_factor=2)))
    time.sleep(1.0)  # the model is built meanwhile
    begin = time.perf_counter()
    next(iterator)
    assert time.perf_counter() - begin < 0.25, "the batch was there already"
    del iterator


# An agent that is not there ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["ipc:///no/listener/here.sock", "tcp://127.0.0.1:9", "not an endpoint"])
def test_an_absent_agent_blocks_nothing(where: str) -> None:
    """Elsewhere the start blocked for 10 s. Begin, 100 steps and the end take here what they take anyway."""
    begin = time.perf_counter()
    with Watch(quiet=True, endpoint=where) as watch:
        for _ in watch.steps(range(100)):
            pass
    assert time.perf_counter() - begin < 3.0
    assert watch.report().steps == 100


# What is compute, what is transfer -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("bound_by_host", "verdict"), [(True, "host"), (False, "compute")])
def test_launches_that_the_host_makes_too_slowly_are_not_taken_for_a_busy_device(
    bound_by_host: bool, verdict: str, rig: Rig
) -> None:
    """Idle moments between launches are no state, but a device that has no work queued is not called healthy."""
    for _ in rig.watch.steps(rig.batches(10, wait_ms=0.1)):
        for _ in range(5):
            rig.device.launch(0.0001 if bound_by_host else 0.004)
            rig.clock.sleep_ms(2)
        rig.watch._recorder.launched()
        rig.clock.sleep_ms(1)
    rig.device.synchronize()
    rig.watch._recorder.poll(rig.clock())
    report = rig.watch.report()
    assert (report.verdict.state, report.coverage) == (verdict, 1.0)


@pytest.mark.parametrize("method", ["to", "cuda"])
def test_a_copy_by_cuda_is_timed_like_one_by_to(method: str, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    original = torch.Tensor.to

    def copy(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        rig.device.launch(0.003)
        rig.clock.sleep_ms(0.05)
        return original(tensor, "meta")

    monkeypatch.setattr(torch.Tensor, method, copy)
    for batch in rig.watch.steps(rig.batches(10, wait_ms=1)):
        getattr(batch, method)("cuda")
        rig.device.launch(0.005)
        rig.watch._recorder.launched()
    assert rig.states()["transfer"] == pytest.approx(30 - COPY_CALL_MS)


def test_item_every_step_is_neither_transfer_nor_input_wait(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    original = torch.Tensor.to

    def pageable(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        rig.device.launch(0.001)
        rig.device.synchronize()
        return original(tensor, "meta")

    monkeypatch.setattr(torch.Tensor, "to", pageable)
    for batch in rig.watch.steps(rig.batches(10, wait_ms=2)):
        batch.to("cuda")
        rig.device.launch(0.020)
        rig.watch._recorder.launched()
        rig.device.synchronize()  # loss.item()
    states = rig.states()
    assert states["transfer"] == pytest.approx(10 - 10 * COPY_CALL_MS)
    assert states["input_wait"] == pytest.approx(20)
    assert states["compute"] == pytest.approx(200 + 10 * COPY_CALL_MS)
    # the host's own clock tells the wait for the loss from the copy too
    assert rig.watch._publisher.accounts.timeline.counts.phases_ns["transfer"] == pytest.approx(10e6)


def test_a_copy_that_waits_for_queued_work_is_charged_for_the_copy_alone(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without `.item()` the next pageable copy is the first to wait: by the host's clock all of it is transfer."""
    original = torch.Tensor.to

    def pageable(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        rig.device.launch(0.001)
        rig.device.synchronize()
        return original(tensor, "meta")

    monkeypatch.setattr(torch.Tensor, "to", pageable)
    for batch in rig.watch.steps(rig.batches(10, wait_ms=2)):
        batch.to("cuda")
        rig.device.launch(0.020)
        rig.watch._recorder.launched()
    states = rig.states()
    assert states["transfer"] == pytest.approx(10 - COPY_CALL_MS)
    assert states["compute"] == pytest.approx(200 + COPY_CALL_MS)
    assert rig.watch._publisher.accounts.timeline.counts.phases_ns["transfer"] > 150e6


# The device is never disturbed ---------------------------------------------------------------------------------------


class Guarded(FakeDevice):
    """Notes which thread makes each call, and what is called while a graph is captured."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[int] = set()
        self.in_capture: list[str] = []

    def _note(self, what: str) -> None:
        self.threads.add(threading.get_ident())
        if self.capturing:
            self.in_capture.append(what)

    def record(self, event: FakeEvent | None) -> FakeEvent:
        self._note("record")
        return super().record(event)

    def ready(self, event: FakeEvent) -> bool:
        self._note("ready")
        return super().ready(event)

    def elapsed_ns(self, first: FakeEvent, second: FakeEvent) -> int:
        self._note("elapsed")
        return super().elapsed_ns(first, second)

    def usable(self) -> bool:
        self.threads.add(threading.get_ident())
        return super().usable()


def test_events_are_never_touched_from_another_thread() -> None:
    device = Guarded()
    with Watch(quiet=True, endpoint=NO_OWNER) as watch:
        watch.session.torch_hooks.attach(device)
        reports: list[gpuwatch.Report] = []
        for number, _ in enumerate(watch.steps(range(60))):
            device.launch(0.01 if number < 59 else 30.0)  # the last one is still at work when the run is closed
            watch._recorder.launched()
            if number % 20 == 10:
                other = threading.Thread(target=lambda: reports.append(watch.report()))
                other.start()
                other.join()
            time.sleep(0.012)  # the background thread takes its turns meanwhile
        assert watch._publisher._thread is not None and watch._publisher._thread.is_alive()
        closer = threading.Thread(target=watch.close)
        closer.start()
        closer.join()
    assert device.threads == {threading.get_ident()}
    assert device.events_made > 0 and len(reports) == 3


def test_nothing_is_polled_or_recorded_while_a_graph_is_captured(watch: Watch) -> None:
    device = Guarded()
    watch.session.torch_hooks.attach(device)
    for number, _ in enumerate(watch.steps(range(30))):
        device.capturing = 10 <= number < 20
        device.launch(0.002)
        watch._recorder.launched()
        time.sleep(0.003)
    assert device.in_capture == []
    report = watch.report()
    assert report.steps == 30 and report.states["compute"] > 0.06


def test_nothing_synchronises_and_no_collective_runs_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("called in a training step")

    monkeypatch.setattr(torch.cuda, "synchronize", forbidden)
    monkeypatch.setattr(torch.accelerator, "synchronize", forbidden)
    distributed = torch.distributed
    if distributed.is_available():
        for name in ("all_gather_object", "all_gather", "all_reduce", "barrier", "broadcast", "gather_object"):
            monkeypatch.setattr(distributed, name, forbidden)
    device = FakeDevice()
    with Watch(quiet=True, endpoint=NO_OWNER) as watch:
        watch.session.torch_hooks.attach(device)
        for _ in watch.steps(range(50)):
            device.launch(0.05)  # far behind: whoever waits for it is caught
            watch._recorder.launched()
        watch.report()
    assert device.synchronized == 0
    assert watch._publisher.accounts.failures == 0


# Frameworks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["fetched_before_the_step", "several_micro_batches", "resumed"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_the_hugging_face_trainer_s_own_order_is_understood(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fetches before `on_step_begin`, takes N micro-batches a step, and skips batches in the first resumed step."""
    pytest.importorskip("transformers")
    monkeypatch.setenv("GPUWATCH_ENDPOINT", NO_OWNER)
    from gpuwatch.integrations.transformers import GpuWatchCallback
    from tests.integration.integrations import workload as w
    from tests.integration.integrations.loops import hf_trainer

    w.warm_up()
    options: dict[str, Any] = {"num_train_epochs": 1, "eval_strategy": "no", "save_strategy": "no"}
    resume, truth = None, w.Truth()
    steps, batches = w.BATCHES, w.BATCHES
    if case == "several_micro_batches":
        options["gradient_accumulation_steps"] = 3
        steps = w.BATCHES // 3
    elif case == "resumed":
        options |= {"save_strategy": "steps", "save_steps": 4}
        hf_trainer(w.Truth(), tmp_path, [], max_steps=4, **options).train()
        steps = batches = w.BATCHES - 4
        resume = str(tmp_path / "checkpoint-4")
    with Watch(quiet=True) as watch:
        hf_trainer(truth, tmp_path, [GpuWatchCallback(watch)], **options).train(resume)
        report = watch.report()
    assert (report.steps, report.samples) == (steps, batches * w.BATCH_SIZE)
    assert report.states["input_wait"] == pytest.approx(
        truth.spent_s["input_wait"], abs=truth.bound_s(report.duration_s)
    )


# Processes and queues ------------------------------------------------------------------------------------------------


def test_no_socket_thread_or_context_crosses_a_fork(tmp_path: Path) -> None:
    import zmq

    endpoint = f"ipc://{tmp_path}/hook.sock"
    receiver = zmq.Context()
    pull = receiver.socket(zmq.PULL)
    pull.bind(endpoint)
    with Watch(quiet=True, endpoint=endpoint) as watch:
        for number, _ in enumerate(watch.steps(range(20))):
            time.sleep(0.06)
            if number != 15:
                continue
            assert watch._publisher.send_buffer.sender is not None
            assert _fork(lambda: _child_is_clean(watch)) == 0
    last = None
    while pull.poll(200):
        last = wire.decode(pull.recv())
    assert isinstance(last, wire.Bye) and last.totals.steps == 20, "the parent's own socket goes on"
    pull.close(0)
    receiver.term()


def _child_is_clean(watch: Watch) -> bool:
    publisher = watch._publisher
    for _ in watch.steps(range(5)):
        pass
    return publisher.send_buffer.sender is None and publisher._thread is None and threading.active_count() == 1


def _fork(check: Callable[[], bool]) -> int:
    """Return the exit status of a child that checks: 0 if it holds, within 10 s."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that there are threads is the point
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = 0 if check() else 2
        finally:
            os._exit(status)
    until = time.monotonic() + 10
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    raise AssertionError("the child hung")


def test_every_drop_is_counted_and_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that is away for too long: what it receives in the end, its page shows as missing."""
    clock = Clock()
    watch = fake_watch(clock, monkeypatch)
    sender = connect(watch)
    sender.connected = False  # an agent that takes nothing
    steps, turns = 1024, 150
    for _ in range(turns):
        for _ in watch.steps(range(steps)):
            clock.sleep_ms(0.1)
        turn(watch)
    publisher = watch._publisher
    kept = sum(count for _, count in publisher.send_buffer.frames)
    dropped = publisher._totals().records_dropped
    assert dropped > 0 and dropped + kept == steps * turns
    sender.connected = True  # it is back
    turn(watch)
    run = Run(watch.run, 0, watch.identity.boot_id)
    for message in reported(sender):
        run.apply(message, clock(), 0.0)
    page = {sample.metric: sample.value for sample in run_samples(run, 0) if isinstance(sample, metrics.Sample)}
    assert page["gpuwatch_step_records_lost_total"] == dropped
    assert page["gpuwatch_steps_total"] == steps * turns, "the account loses nothing"


# The trap in the table of num_workers --------------------------------------------------------------------------------


def test_compute_does_not_grow_when_a_wait_shrinks_behind_a_busy_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timed by the host, `compute` grows as the wait shrinks and the total stays flat. The device knows better."""
    step_ms, count = 20.0, 40
    host_compute, device_compute, totals, hidden = [], [], [], []
    for wait_ms in (18.0, 12.0, 6.0, 0.0):
        rig = Rig(monkeypatch)
        for _ in rig.watch.steps(rig.batches(count, wait_ms)):
            rig.device.launch(step_ms / 1e3)
            rig.watch._recorder.launched()
            rig.clock.sleep_ms(step_ms - wait_ms)  # the launch queue is full: the host waits in a call for the device
        states = rig.states()
        timeline = rig.watch._publisher.accounts.timeline
        host_compute.append(timeline.counts.phases_ns["compute"] / 1e6 / count)
        totals.append(sum(timeline.counts.phases_ns.values()) / 1e6 / count)
        device_compute.append(states["compute"] / count)
        hidden.append(timeline.counts.hidden_ns / 1e6 / count)
        # the first batch alone is felt: nothing was queued before it
        assert states.get("input_wait", 0.0) == pytest.approx(wait_ms)
        rig.watch.close()
    assert host_compute == pytest.approx([2, 8, 14, 20])
    assert totals == pytest.approx([20] * 4)
    assert device_compute == pytest.approx([20] * 4)
    assert hidden == pytest.approx([wait * (count - 1) / count for wait in (18, 12, 6, 0)])
