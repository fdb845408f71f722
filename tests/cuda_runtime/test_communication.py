"""Torch's own DistributedDataParallel and FSDP on streams that only take time.

`comm_wait` is what the training's stream waited for the others. Of two ranks only one is there. The other one is late:
a collective takes until it has come, and then its own time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest

import gpuwatch

runtime_module = pytest.importorskip("tests.cuda_runtime.runtime", reason="the simulated CUDA runtime is not there")
Runtime, loaded = runtime_module.Runtime, runtime_module.loaded

loaded()  # skips all of them
torch = pytest.importorskip("torch")
pytestmark = pytest.mark.cuda_runtime

MS = 1_000_000


class OtherRank:
    """The process group of this rank and one that does not exist. As with NCCL, collectives run on their own stream."""

    def __init__(self, runtime: Any) -> None:
        self.takes_ns = 2 * MS
        self.late_ns = 0
        """How much later than this rank the other one comes to the next collective."""
        self.calls = 0
        self.done_ns = 0
        """When the last collective is done."""
        self._runtime = runtime
        self._stream = torch.cuda.Stream()

    def work(self, result: Any) -> Any:
        """Launch a collective after what the current stream has; return torch's handle of it."""
        self.calls += 1
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._runtime.launch(self.takes_ns + self.late_ns)
            self.late_ns = 0
            self.done_ns = self._runtime.end_ns()
            future = torch.futures.Future(devices=[torch.device("cuda:0")])
            future.set_result(result)
        return torch._C._distributed_c10d._create_work_from_future(future)


@contextmanager
def two_ranks(runtime: Any) -> Iterator[OtherRank]:
    """Initialise torch.distributed as rank 0 of two on a backend of this test's own."""
    import torch.distributed as dist

    other = OtherRank(runtime)

    class Group(dist.ProcessGroup):  # type: ignore[misc]
        def getBackendName(self) -> str:
            return "other-rank"

        @property
        def group_name(self) -> str:
            return str(dist.distributed_c10d._world.pg_names[self])

    def collective(self: Any, output: Any, *args: Any) -> Any:
        work = other.work([output] if isinstance(output, torch.Tensor) else output)
        asynchronous = getattr(args[-1], "asyncOp", True) if args else True
        if not asynchronous:  # as NCCL's: the current stream waits at once
            work.wait()
        return work

    names = ("allreduce", "broadcast", "allgather", "barrier", "allreduce_coalesced", "reduce_scatter")
    for name in (*names, "_allgather_base", "all_gather_single", "_reduce_scatter_base", "reduce_scatter_single"):
        setattr(Group, name, collective)
    dist.Backend.register_backend(
        "other-rank", lambda store, rank, size, timeout: Group(rank, size), devices=["cuda", "cpu"]
    )
    dist.init_process_group("other-rank", rank=0, world_size=2, store=dist.HashStore())
    try:
        yield other
    finally:
        dist.destroy_process_group()


computed_ns = [0]
"""When the last backward work that was launched is done."""


class Work(torch.autograd.Function):  # type: ignore[misc]
    """A layer's work: so long forward, twice as long backward."""

    @staticmethod
    def forward(ctx: Any, inputs: Any, weight: Any, runtime: Any, work_ns: int) -> Any:
        ctx.runtime, ctx.work_ns = runtime, work_ns
        ctx.save_for_backward(inputs, weight)
        runtime.launch(work_ns)
        return torch.empty_like(inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        inputs, weight = ctx.saved_tensors
        ctx.runtime.launch(2 * ctx.work_ns)
        computed_ns[0] = ctx.runtime.end_ns()
        return torch.empty_like(inputs), torch.empty_like(weight), None, None


class Layer(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, runtime: Any, work_ns: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(64, 64, device="cuda"))
        self._runtime, self._work_ns = runtime, work_ns

    def forward(self, inputs: Any) -> Any:
        return Work.apply(inputs, self.weight, self._runtime, self._work_ns)


def layers(runtime: Any, count: int, work_ns: int) -> Any:
    return torch.nn.Sequential(*(Layer(runtime, work_ns) for _ in range(count)))


def check(
    runtime: Any, model: Any, before: Callable[[int], Any], waited_ns: Callable[[], int], steps: int = 60
) -> float:
    """Train and check `comm_wait`, within two points of the run's time; return it in ms a step.

    `before(step)` returns the context of forward and backward; `waited_ns()` returns how long the training's stream
    waited in the step.
    """
    batch = torch.empty(4, 64, device="cuda", requires_grad=True)
    optimizer = runtime_module.optimizer_of(runtime, MS // 2)
    truth_ns = 0
    with gpuwatch.Watch(quiet=True, budget=1.0) as watch:
        watch.watch_communication(model)
        for step in watch.steps(range(steps)):
            with before(step):
                model(batch).sum().backward()
            truth_ns += waited_ns()
            optimizer.step()
            torch.cuda.synchronize()  # the loss is read
        report = watch.report()
    whole_s = sum(report.states.values())
    assert report.states["comm_wait"] / whole_s == pytest.approx(truth_ns / 1e9 / whole_s, abs=0.02)
    return truth_ns / 1e6 / steps


@pytest.mark.parametrize(("late_ms", "wait_ms"), [(0, 2), (10, 6), (20, 16)])
def test_ddp_waits_for_the_late_rank_and_for_what_is_not_hidden(runtime: Any, late_ms: int, wait_ms: float) -> None:
    """The first of four buckets is ready after 4 of 16 ms backward; the last one's own 2 ms are never hidden."""
    with two_ranks(runtime) as other:
        model = torch.nn.parallel.DistributedDataParallel(
            layers(runtime, 4, 2 * MS), bucket_cap_mb=0.01, init_sync=False
        )

        def before(step: int) -> Any:
            other.late_ns = late_ms * MS
            return nullcontext()

        waited_ms = check(runtime, model, before, lambda: max(0, other.done_ns - computed_ns[0]))
    assert waited_ms == pytest.approx(wait_ms, abs=1.5)


def test_ddp_waits_for_no_rank_while_it_accumulates_gradients(runtime: Any) -> None:
    with two_ranks(runtime) as other:
        model = torch.nn.parallel.DistributedDataParallel(layers(runtime, 1, 2 * MS), init_sync=False)

        def before(step: int) -> Any:
            other.late_ns = 6 * MS
            return nullcontext() if step % 2 else model.no_sync()

        waited_ms = check(runtime, model, before, lambda: max(0, other.done_ns - computed_ns[0]))
        assert waited_ms == pytest.approx(8 / 2, abs=0.5)
        assert 30 <= other.calls < 35  # and a few when DDP rebuilds its buckets


@pytest.mark.parametrize("late_ms", [0, 10])
def test_fsdp_waits_for_its_collectives_and_other_streams_are_none(
    runtime: Any, late_ms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first all-gather and the last reduce-scatter of a step are never hidden.

    The late rank delays the first collective.
    """
    from torch.distributed.fsdp import fully_shard

    own = torch.cuda.Stream.wait_event
    waited = [0]

    def wait_event(stream: Any, event: Any) -> None:
        before_ns = max(runtime.now_ns(), runtime.end_ns(stream.cuda_stream))
        own(stream, event)
        if stream == torch.cuda.current_stream():
            waited[0] += max(0, runtime.end_ns(stream.cuda_stream) - before_ns)

    monkeypatch.setattr(torch.cuda.Stream, "wait_event", wait_event)
    with two_ranks(runtime) as other:
        model = layers(runtime, 4, 2 * MS)
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        aside = torch.cuda.Stream()

        def before(step: int) -> Any:
            with torch.cuda.stream(aside):
                runtime.launch(3 * MS)
            torch.cuda.current_stream().wait_stream(aside)  # the training's own
            waited[0], other.late_ns = 0, late_ms * MS
            return nullcontext()

        waited_ms = check(runtime, model, before, lambda: waited[0])
        assert 4 + late_ms - 1 < waited_ms
        assert other.calls == 60 * 12
    assert torch.cuda.Stream.wait_event is wait_event
