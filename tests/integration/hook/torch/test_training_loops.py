"""Real torch loops as people write them: compiled, in mixed precision, accumulating, with loaders that keep state."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, Dataset  # noqa: E402

from benchmarks.fakes import FakeDevice  # noqa: E402
from gpuwatch.hook.watch import Watch  # noqa: E402

pytestmark = pytest.mark.alone

NO_AGENT = "ipc:///no/listener/here.sock"


class Numbers(Dataset[Any]):  # type: ignore[misc]  # torch is not read by mypy here
    def __init__(self, items: int, item_s: float = 0.0) -> None:
        self.items, self.item_s = items, item_s

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.item_s)
        return torch.full((4,), float(index))


@pytest.fixture
def watch() -> Iterator[Watch]:
    with Watch(quiet=True, endpoint=NO_AGENT) as watch:
        yield watch


def trained(device: FakeDevice, watch: Watch) -> dict[str, float]:
    """Let the device come to its end and return seconds by state, which close."""
    device.synchronize()
    time.sleep(0.001)
    watch._recorder.poll(watch._recorder.clock())
    report = watch.report()
    assert sum(report.states.values()) == pytest.approx(report.duration_s, rel=1e-9)
    return dict(report.states)


# torch.compile --------------------------------------------------------------------------------------------------------


def test_compiled_models_stay_one_graph_are_compiled_once_and_their_compilation_is_compile(watch: Watch) -> None:
    def graphs(loop: Any) -> tuple[int, int]:
        torch._dynamo.reset()
        seen = 0

        def backend(graph: Any, inputs: Any) -> Any:
            nonlocal seen
            seen += 1
            time.sleep(0.2)
            return graph.forward

        @torch.compile(backend=backend, fullgraph=True)
        def step(x: Any) -> Any:
            return (x.to(torch.float64).to("cpu") * 2).sum()

        results = [float(step(batch)) for batch in loop]
        return seen, len(results)

    batches = [torch.full((4,), float(index)) for index in range(6)]
    assert graphs(watch.steps(batches)) == graphs(batches) == (1, 6)
    report = watch.report()
    assert report.steps == 6
    assert 0.2 <= report.states["compile"] <= report.duration_s
    assert sum(report.states.values()) == pytest.approx(report.duration_s, rel=1e-9)


def test_a_compilation_inside_a_step_is_not_the_step_s_time(watch: Watch) -> None:
    """A step that compiles for 0.3 s is no step of 0.3 s: its own time goes on after it."""
    torch._dynamo.reset()

    def backend(graph: Any, inputs: Any) -> Any:
        time.sleep(0.3)
        return graph.forward

    def step(x: Any) -> Any:
        return x + 1

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    torch.compile(lambda x: x - 1, backend="eager")(torch.zeros(2))  # dynamo itself is imported now
    for batch in watch.steps([torch.zeros(2)] * 5):
        compiled(batch)
    report = watch.report()
    assert report.states["compile"] >= 0.3
    assert report.states["compute"] < 0.3 + 0.5 * report.states["compile"]
    assert report.steps == 5


class Net(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)

    def forward(self, batch: Any) -> Any:
        return self.second(self.first(batch))


@pytest.mark.filterwarnings("ignore:.*non-leaf Tensor:UserWarning")
@pytest.mark.parametrize("loader", [True, False], ids=["passes over a loader", "without a loader"])
@pytest.mark.parametrize("kind", ["model", "model in place", "function that calls it"])
def test_steps_bounded_by_the_optimizer_change_nothing_of_what_is_compiled(kind: str, loader: bool) -> None:
    """Hooks of modules are compiled, too: each step did so again, `fullgraph` failed, and torch warned of them."""
    from torch._dynamo.testing import CompileCounter

    def trained(watch: Watch | None) -> tuple[int, list[str]]:
        torch._dynamo.reset()
        counter, model = CompileCounter(), Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        if kind == "model in place":
            model.compile(backend=counter, fullgraph=True)
        called = torch.compile(model, backend=counter, fullgraph=True) if kind == "model" else model

        def loss_of(batch: Any) -> Any:
            return called(batch).sum()

        if kind == "function that calls it":
            loss_of = torch.compile(loss_of, backend=counter, fullgraph=True)

        def step(batch: Any) -> None:
            optimizer.zero_grad()
            loss_of(batch).backward()
            optimizer.step()
            time.sleep(0.002)

        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for _ in range(4):
                batches = [torch.ones(2, 4)] * 6
                for batch in watch.steps(batches) if watch is not None and loader else batches:
                    step(batch)
                with torch.no_grad():
                    for batch in batches[:3]:
                        loss_of(batch)
        return counter.frame_count, sorted({str(each.message) for each in warned})

    from torch._dynamo.eval_frame import OptimizedModule

    bare, texts = trained(None)
    call = OptimizedModule.__call__
    with Watch(quiet=True, endpoint=NO_AGENT) as watch:
        watch.session.torch_hooks.optimizer.install()
        compiled, texts_then = trained(watch)
        report = watch.report()
    assert compiled <= bare and texts_then == texts
    assert report.steps == (24 if loader else 23)
    hooks = torch.nn.modules.module
    assert not hooks._global_forward_pre_hooks and not hooks._global_forward_hooks and OptimizedModule.__call__ is call
    assert trained(None) == (bare, texts)


# Mixed precision ------------------------------------------------------------------------------------------------------


def test_mixed_precision_with_a_scaler_that_skips_a_step(watch: Watch) -> None:
    """The scaler skips `optimizer.step()` after an overflow: such a step has no last launch, but it is a step."""
    device = FakeDevice()
    watch.session.torch_hooks.attach(device)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for number, batch in enumerate(watch.steps(DataLoader(Numbers(12, 0.004), batch_size=1))):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(batch).sum() * (float("inf") if number == 5 else 1.0)
        device.launch(0.002)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        device.synchronize()
        time.sleep(0.01)
    states = trained(device, watch)
    report = watch.report()
    assert report.steps == 12 and report.coverage == 1.0 and report.samples == 12
    assert states["host_wait"] >= 11 * 0.009, "in the 11 steps that have a last launch"
    assert states["input_wait"] >= 12 * 0.0035
    assert scaler.get_scale() == 2.0


# Gradient accumulation -----------------------------------------------------------------------------------------------


def test_gradient_accumulation_measures_each_micro_batch(watch: Watch) -> None:
    """Three of four micro-batches have no optimizer step.

    They end when the next batch is asked for, and no host wait is claimed of them.
    """
    device = FakeDevice()
    watch.session.torch_hooks.attach(device)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number, batch in enumerate(watch.steps(DataLoader(Numbers(16, 0.02), batch_size=1))):
        device.launch(0.008)
        (model(batch).sum() / 4).backward()
        if number % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
    states = trained(device, watch)
    report = watch.report()
    assert report.steps == 16 and report.coverage == 1.0
    felt = device.idle_ns / 1e9
    assert states["input_wait"] == pytest.approx(felt, abs=0.02 + 0.1 * felt)
    assert states["compute"] == pytest.approx(16 * 0.008, abs=0.02 + 0.05 * report.duration_s)


# Loaders that keep their state, or their workers ---------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*set_vital.*:UserWarning")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_saves_and_resumes_through_the_watch(watch: Watch, workers: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    options = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    loader: Any = watch.steps(stateful(Numbers(10), batch_size=1, **options))
    seen, state = [], None
    for number, batch in enumerate(loader):
        seen.append(int(batch[0][0]))
        if number == 3:
            state = loader.state_dict()
            break
    resumed: Any = watch.steps(stateful(Numbers(10), batch_size=1, **options))
    resumed.load_state_dict(state)
    rest = [int(batch[0][0]) for batch in resumed]
    assert seen == [0, 1, 2, 3] and rest == [4, 5, 6, 7, 8, 9]
    assert watch.report().steps == 10
    assert len(resumed) == 10
    facts = watch._publisher.accounts.loader
    assert facts is not None and len(facts.worker_pids) == workers


def test_spawned_workers_that_persist_start_once_and_are_the_same_in_every_pass(watch: Watch) -> None:
    spawned: Any = DataLoader(
        Numbers(6), batch_size=1, num_workers=1, persistent_workers=True, multiprocessing_context="spawn"
    )
    loader, pids = watch.steps(spawned), set()
    starts = []
    for _ in range(3):
        begin = time.perf_counter()
        for number, _batch in enumerate(loader):
            if number == 0:
                starts.append(time.perf_counter() - begin)
        facts = watch._publisher.accounts.loader
        assert facts is not None
        pids.add(facts.worker_pids)
    assert len(pids) == 1 and len(next(iter(pids))) == 1
    report = watch.report()
    assert report.steps == 18
    assert report.states["input_wait"] >= starts[0] > max(starts[1:])
    counts = watch._recorder.fetches
    assert counts.worker_fetches == 18


def test_the_use_of_the_cpu_of_workers_that_live_for_a_second_is_known(watch: Watch) -> None:
    """They were sampled every two seconds: of passes that are as short nothing was known but the wait."""
    for _ in range(3):
        for _batch in watch.steps(DataLoader(Numbers(48, 0.05), batch_size=1, num_workers=2)):
            pass
    pids = watch._publisher.accounts.loader.worker_pids
    times = watch._publisher.accounts.watcher.workers.times
    assert len(pids) == 2 and all(len(times[pid]) >= 2 for pid in pids)
    window, _, _ = watch._publisher._window(closed=True)
    assert window.worker_cpu_ratios is not None and max(window.worker_cpu_ratios) < 0.5


def test_the_queue_of_ready_batches_tells_workers_that_keep_up_from_those_that_do_not() -> None:
    def share_empty(item_s: float, step_s: float) -> float:
        with Watch(quiet=True, endpoint=NO_AGENT) as watch:
            for _ in watch.steps(DataLoader(Numbers(20, item_s), batch_size=1, num_workers=1, prefetch_factor=4)):
                time.sleep(step_s)
            watch.report()  # counts what the fetches have shown until now
            counts = watch._recorder.fetches
            totals = watch._publisher._totals()
        assert counts.worker_fetches == totals.worker_fetches == 20 and counts.thread_time is not None
        assert 0 <= counts.ready_batches <= 4 * 20
        return counts.empty_fetches / counts.worker_fetches

    assert share_empty(item_s=0.06, step_s=0.0) > 0.6
    assert share_empty(item_s=0.0, step_s=0.05) < 0.4


class Decoded(Numbers):
    def __getitem__(self, index: int) -> Any:
        return self.decode(index)

    def decode(self, index: int) -> Any:
        time.sleep(self.item_s)
        return torch.full((4,), float(index))


def one_thread(worker_id: int) -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_name_the_function_that_their_fetches_are_in(watch: Watch, context: str) -> None:
    init = None if context == "fork" else one_thread
    loader = DataLoader(Decoded(80, 0.025), 4, num_workers=2, multiprocessing_context=context, worker_init_fn=init)
    assert [float(batch[0, 0]) for batch in watch.steps(loader)] == [4.0 * number for number in range(20)]
    assert loader.worker_init_fn is init
    window, _, _ = watch._publisher._window(closed=False)
    place = window.worker_place
    assert place is not None and place.function.endswith("Decoded.decode") and place.ratio > 0.7, place
    assert place.file == __file__ and place.line == Decoded.decode.__code__.co_firstlineno + 1
