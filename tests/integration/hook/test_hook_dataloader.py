"""The hook around torch's own DataLoader: nothing changes for the user, and the seconds are where they were spent."""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset  # noqa: E402

import gpuwatch  # noqa: E402
from gpuwatch.hook.watch import Watch  # noqa: E402

pytestmark = pytest.mark.alone

spent_s: defaultdict[str, float] = defaultdict(float)
"""What `busy` took by what it was for: on a machine that does other things too, it is more than was asked for."""


def busy(seconds: float, what: str = "") -> None:
    """Work for so long."""
    begin = time.perf_counter()
    while time.perf_counter() < begin + seconds:
        pass
    spent_s[what] += time.perf_counter() - begin


@pytest.fixture(autouse=True)
def nothing_spent() -> None:
    spent_s.clear()


class Slow(Dataset[Any]):  # type: ignore[misc]  # torch is not read by mypy here
    def __init__(
        self, items: int = 8, item_s: float = 0.0, pickling_s: float = 0.0, fails_at: int = -1, what: str = ""
    ) -> None:
        self.items, self.item_s, self.pickling_s, self.fails_at, self.what = items, item_s, pickling_s, fails_at, what

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, index: int) -> Any:
        if index == self.fails_at:
            raise OSError(f"sample {index} cannot be read")
        busy(self.item_s, self.what)
        return torch.full((3,), index)

    def __getstate__(self) -> dict[str, Any]:
        time.sleep(self.pickling_s)
        return self.__dict__


class Stream(IterableDataset[Any]):  # type: ignore[misc]
    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        for index in range(6):
            if info is None or index % info.num_workers == info.id:
                yield torch.tensor([index])


@pytest.fixture
def watch() -> Iterator[Watch]:
    with Watch(quiet=True, endpoint="ipc:///no/listener/here.sock") as watch:
        yield watch


def closes(watch: Watch) -> dict[str, float]:
    report = watch.report()
    assert sum(report.states.values()) == pytest.approx(report.duration_s, rel=1e-9)
    return dict(report.states)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_workers": 2, "multiprocessing_context": "fork"},
        {"num_workers": 2, "multiprocessing_context": "fork", "persistent_workers": True},
    ],
    ids=["in process", "fork", "fork persistent"],
)
@pytest.mark.parametrize("make", [Slow, Stream], ids=["map", "iterable"])
def test_the_same_batches_in_two_passes(watch: Watch, make: Callable[[], Any], options: dict[str, Any]) -> None:
    loader: Any = DataLoader(make(), batch_size=2, **options)
    watched = watch.steps(loader)
    for _ in range(2):
        plain = [batch.tolist() for batch in loader]
        assert sorted(batch.tolist() for batch in watched) == sorted(plain)
    report = watch.report()
    assert report.steps == 2 * len(plain)
    assert report.samples == 2 * sum(map(len, plain))
    facts = watch._publisher.accounts.loader
    assert facts is not None and facts.num_workers == options.get("num_workers", 0)
    assert len(facts.worker_pids) == options.get("num_workers", 0)


def test_starting_spawned_workers_is_a_wait_and_pickling_too(watch: Watch) -> None:
    loader = DataLoader(Slow(4, pickling_s=0.4), batch_size=2, num_workers=2, multiprocessing_context="spawn")
    begin = time.perf_counter()
    for _ in watch.steps(loader):
        busy(0.01, "compute")
    waited = time.perf_counter() - begin - spent_s["compute"]
    assert waited > 0.8
    states = closes(watch)
    assert states["input_wait"] == pytest.approx(waited, rel=0.03)
    assert states["compute"] == pytest.approx(spent_s["compute"], abs=0.02)


def test_iter_starts_the_workers_at_once_and_has_a_length(watch: Watch) -> None:
    loader: Any = DataLoader(Slow(4, item_s=0.2), batch_size=1, num_workers=2, multiprocessing_context="fork")
    iterator = iter(watch.steps(loader))
    assert len(iterator) == 4  # type: ignore[arg-type]
    time.sleep(0.9)  # the head start
    begin = time.perf_counter()
    next(iterator)
    assert time.perf_counter() - begin < 0.15
    del iterator


def test_the_loaders_attributes_are_reached_through_it(watch: Watch) -> None:
    dataset = TensorDataset(torch.arange(8))
    sampler: Any = torch.utils.data.DistributedSampler(dataset, num_replicas=2, rank=0)
    loader: Any = watch.steps(DataLoader(dataset, batch_size=2, sampler=sampler))
    loader.sampler.set_epoch(3)
    assert sampler.epoch == 3
    assert (len(loader), loader.batch_size, loader.dataset) == (2, 2, dataset)


def test_a_worker_that_fails_mid_epoch_is_reported_by_torch_as_ever(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    # torch waits so long for each worker of a loader that has failed, watched or not.
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
    loader = DataLoader(Slow(8, fails_at=4), batch_size=2, num_workers=2, multiprocessing_context="fork")
    seen = 0
    with pytest.raises(OSError, match="sample 4 cannot be read") as caught:
        for _ in watch.steps(loader):
            seen += 1
    assert seen == 2 and "Caught OSError in DataLoader worker process 0" in str(caught.value)
    assert watch.report().steps == 2
    del caught
    gc.collect()


def test_an_evaluation_without_gradients_inside_training_is_no_training(watch: Watch) -> None:
    training = DataLoader(Slow(4), batch_size=1)
    slow = DataLoader(Slow(5, item_s=0.02, what="eval"), batch_size=1)
    for _ in watch.steps(training):
        busy(0.02, "compute")
        with torch.no_grad():
            for index, _batch in enumerate(watch.steps(slow)):
                if index == 3:
                    break
    report = watch.report()
    assert report.steps == 4
    assert report.states["eval"] == pytest.approx(spent_s["eval"], rel=0.1)
    assert report.states["compute"] == pytest.approx(spent_s["compute"], rel=0.1)
    assert report.states["input_wait"] < 0.03


def test_a_prefetching_thread_of_the_users_counts_as_the_loader(watch: Watch) -> None:
    import queue
    import threading

    class Prefetched:
        def __init__(self, loader: Any) -> None:
            self.loader = loader

        def __iter__(self) -> Iterator[Any]:
            batches: queue.Queue[Any] = queue.Queue(2)

            def fill() -> None:
                for batch in self.loader:
                    batches.put(batch)
                batches.put(None)

            threading.Thread(target=fill, daemon=True).start()
            return iter(batches.get, None)

    inner: Any = gpuwatch.watch(DataLoader(Slow(10, item_s=0.0), batch_size=1))
    for _ in watch.steps(Prefetched(inner)):
        busy(0.02, "compute")
    report = watch.report()
    assert report.steps == 10
    assert report.states["compute"] == pytest.approx(spent_s["compute"], rel=0.05)


def test_injected_times_are_reported_within_two_points(watch: Watch) -> None:
    """Input wait, transfer, compute, evaluation, checkpoint and host work between steps, of known length."""
    loader = DataLoader(Slow(30, item_s=0.015, what="input_wait"), batch_size=1)
    evaluation = DataLoader(Slow(2, item_s=0.01, what="eval"), batch_size=1)
    before = watch.report().states
    for _ in watch.steps(loader):
        with watch.transfer():
            busy(0.01, "transfer")
        busy(0.02, "compute")
        with watch.phase("checkpoint"):
            busy(0.01, "checkpoint")
        with watch.phase("eval"):
            for _ in watch.steps(evaluation):
                pass
        with watch.phase("logging"):
            busy(0.01, "other")
    report = watch.report()
    states = {state: seconds - before.get(state, 0.0) for state, seconds in report.states.items()}
    elapsed, injected = sum(states.values()), sum(spent_s.values())
    assert set(spent_s) == {"input_wait", "transfer", "compute", "checkpoint", "eval", "other"}
    for state, seconds in spent_s.items():
        assert states[state] / elapsed == pytest.approx(seconds / injected, abs=0.02), state
    assert sum(report.states.values()) == pytest.approx(report.duration_s, rel=0.002)
    assert report.steps == 30


def test_30_ms_between_7_ms_steps_are_seen(watch: Watch) -> None:
    for _ in range(20):
        with watch.step():
            busy(0.007, "compute")
        busy(0.03, "other")
    report = watch.report()
    assert report.states["compute"] == pytest.approx(spent_s["compute"], rel=0.02)
    assert report.states["other"] == pytest.approx(spent_s["other"], rel=0.02)
    assert report.duration_s / 20 >= 0.037
