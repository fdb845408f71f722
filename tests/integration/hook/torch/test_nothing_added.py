"""Under torch's own profiler: a watched loop runs the same operations as the bare one, and nothing that waits."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.profiler import ProfilerActivity, profile  # noqa: E402

from benchmarks.fakes import FakeDevice  # noqa: E402
from gpuwatch.hook.watch import Watch  # noqa: E402

STEPS = 80


class Training:
    """Forward, backward, an optimizer's step, and every tenth loss read, as people train."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.model = torch.nn.Linear(16, 1, device=device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)

    def batches(self) -> Iterable[Any]:
        return [torch.ones(8, 16) for _ in range(STEPS)]

    def run(self, batches: Iterable[Any]) -> None:
        for number, batch in enumerate(batches):
            self.optimizer.zero_grad()
            loss = self.model(batch.to(self.device)).sum()
            loss.backward()
            self.optimizer.step()
            if number % 10 == 0:
                float(loss.detach())

    def profiled(self, batches: Iterable[Any]) -> Counter[str]:
        """Return how often each operation, and on a GPU each call of its runtime, was made."""
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self.device != "cpu")
        with profile(activities=activities, acc_events=True) as profiler:
            self.run(batches)
        return Counter(event.name for event in profiler.events())


def test_the_program_s_random_numbers_are_those_without() -> None:
    """A sampler that calls `random.random()` gave other batches: the hook took numbers of the same generator."""
    random.seed(7)
    before = random.getstate(), torch.random.get_rng_state()
    with Watch(quiet=True, endpoint="ipc:///no/listener/here.sock") as watch:
        first, second = ([torch.ones(2)] * 40 for _ in range(2))
        for _ in zip(watch.steps(first), watch.steps(second), strict=True):
            time.sleep(0.02)
        watch._publisher.accounts.sample_frames()
        assert watch.report().steps >= 40
    assert random.getstate() == before[0]
    assert torch.equal(torch.random.get_rng_state(), before[1])


def test_the_operations_are_the_bare_loops() -> None:
    training = Training("cpu")
    training.run(training.batches())
    bare = training.profiled(training.batches())
    assert bare["aten::item"] == STEPS // 10
    with Watch(quiet=True, endpoint="ipc:///no/listener/here.sock") as watch:
        assert training.profiled(watch.steps(training.batches())) == bare
        watch.session.torch_hooks.attach(FakeDevice())  # with a device's timeline, whose events are its own
        assert training.profiled(watch.steps(training.batches())) == bare
        assert watch.report().steps == 2 * STEPS


@pytest.mark.gpu
def test_no_synchronise_is_added_on_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    training = Training("cuda")
    training.run(training.batches())
    bare = training.profiled(training.batches())
    with Watch(quiet=True, endpoint="ipc:///no/listener/here.sock") as watch:
        watched = training.profiled(watch.steps(training.batches()))
        assert watch.report().timeline == "device"
    added = set(watched - bare)
    assert "cudaEventRecord" in {name.partition("WithFlags")[0] for name in added}, "the device's timeline did measure"
    assert not [name for name in added if any(word in name for word in ("ynchronize", "Memcpy", "Launch", "aten::"))]
