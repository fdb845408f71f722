"""Batches that were ready when one was asked for: counted for loaders with workers alone."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from random import Random
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from gpuwatch.diagnosis.rules.input import input_unexplained, queue_evidence
from gpuwatch.hook.metering import FetchEvidence, ready_batches
from tests.unit.hook.fakes import MS, Clock, connect, fake_watch, reported, turn
from tests.unit.rules.windows import STARVED


class Queue:
    def __init__(self) -> None:
        self.size = 0
        self.fails = False

    def qsize(self) -> int:
        if self.fails:
            raise NotImplementedError
        return self.size


class Workers:
    """An iterator made like torch's own with workers."""

    def __init__(self, sizes: list[int], early: frozenset[int] = frozenset()) -> None:
        self._workers = [object()]
        self._data_queue = Queue()
        self._rcvd_idx = 0
        self._task_info = {index: (0, "data") if index in early else (0,) for index in range(len(sizes))}
        self._sizes = sizes

    def __iter__(self) -> Workers:
        self._data_queue.size = self._sizes[0]
        return self

    def __next__(self) -> int:
        if self._rcvd_idx >= len(self._sizes):
            raise StopIteration
        self._task_info.pop(self._rcvd_idx, None)
        self._rcvd_idx += 1
        self._data_queue.size = self._sizes[self._rcvd_idx] if self._rcvd_idx < len(self._sizes) else 0
        return self._rcvd_idx


def test_every_fetch_from_workers_counts_what_was_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = fake_watch(Clock(), monkeypatch)
    sender = connect(watch)
    sizes = [0, 0, 2, 3, 0]
    for _ in watch.steps(Workers(sizes)):
        pass
    turn(watch, hello=True)
    totals = reported(sender)[-1].totals  # type: ignore[union-attr]
    # The request that finds the end is none: of passes of 6 batches, all ready, it was one in seven that was empty.
    assert (totals.worker_fetches, totals.ready_batches, totals.empty_fetches) == (5, 5, 3)
    watch.close()


def test_a_batch_that_came_out_of_its_turn_is_ready() -> None:
    look = ready_batches(iter(Workers([0, 0], early=frozenset({0}))))
    assert look is not None and look() == 1


def test_batches_of_faster_workers_are_not_ready_while_the_next_one_is_missing() -> None:
    """With one slow worker 3.8 batches were "ready", and "it is taking them over that takes the time"."""

    class OutOfOrder(Workers):
        def __next__(self) -> int:
            self._task_info[self._rcvd_idx + 1] = (0, "came first")
            return super().__next__()

    slow, evidence = OutOfOrder([3, 3, 3]), FetchEvidence()
    fetch = evidence.counting(slow)
    slow._data_queue.size = 3
    assert (fetch(), evidence.ready_batches, evidence.empty_fetches, evidence.out_of_order) == (1, 0, 1, 1)

    # A single later batch came before its turn by chance: two workers of one speed deliver so at every other fetch.
    even, evidence = OutOfOrder([1] * 4), FetchEvidence()
    fetch = evidence.counting(even)
    even._data_queue.size = 1
    assert (fetch(), evidence.empty_fetches, evidence.out_of_order) == (1, 1, 0)

    # The queue is empty, and what the faster workers have made is out of it already.
    late, evidence = Workers([0] * 4, early=frozenset({1, 2})), FetchEvidence()
    assert (evidence.counting(late)(), evidence.empty_fetches, evidence.out_of_order) == (1, 1, 1)


def test_loaders_that_take_turns_are_both_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of zip's two loaders only the first was ever sampled: "100% of a fetch is CPU work" where the other one slept."""
    clock = Clock()
    watch = fake_watch(clock, monkeypatch)
    monkeypatch.setattr("gpuwatch.hook.loop.random", lambda: 0.0)

    def slow() -> Iterator[int]:
        for number in range(20):
            clock.sleep_ms(30)
            yield number

    for _ in zip(watch.steps(range(20)), watch.steps(slow()), strict=True):
        clock.sleep_ms(10)
    turn(watch)
    fetches = watch._recorder.fetches
    assert fetches.wall_ns == 20 * 30 * MS and fetches.cpu_ratio is not None and fetches.cpu_ratio < 0.5
    watch.close()


@pytest.mark.parametrize("after", range(4))
@pytest.mark.parametrize("workers", [2, 4, 8, 16])
def test_the_wait_of_one_in_each_turn_of_workers_is_sampled(
    workers: int, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every fetch sampled was one without a wait: the agent named `input_handover`, with 100% of a fetch on the CPU."""
    clock = Clock()
    watch = fake_watch(clock, monkeypatch)
    monkeypatch.setattr("gpuwatch.hook.metering.random", Random(1).random)

    def in_turns() -> Iterator[int]:
        for number in range(12_000):
            clock.sleep_ms(0.1 if (number + after) % workers else 40)
            yield number

    for _ in watch.steps(in_turns()):
        clock.sleep_ms(1)
    fetches, mean_ms = watch._recorder.fetches, (40 + 0.1 * (workers - 1)) / workers
    turn(watch)
    assert mean_ms / 2 < fetches.wall_ns / fetches.fetches_sampled / MS < min(4 * mean_ms, 30)
    watch.close()


@pytest.mark.parametrize("order", ["slow first", "fast first", "now and then"])
@pytest.mark.parametrize("passes", [1, 3])
def test_of_loaders_that_feed_a_step_the_one_waited_for_is_diagnosed(
    order: str, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loader that was made last was diagnosed: 4 of its batches were ready.

    The advice was "collate in the worker", where the other loader had no workers.
    """
    clock = Clock()
    watch = fake_watch(clock, monkeypatch)

    class Slow(SimpleNamespace):
        num_workers, dataset, _iterator = 0, 1.5, None

        def __iter__(self) -> Iterator[int]:
            for number in range(40):
                clock.sleep_ms(30)
                yield number

    class Fast(Workers):
        num_workers, dataset = 2, "a"

        def __next__(self) -> int:
            clock.sleep_ms(1)
            return super().__next__()

    for _ in range(passes):
        slow, fast = watch.steps(Slow()), watch.steps(Fast([4] * 40))
        others = iter(fast) if order == "now and then" else None
        both = {"slow first": (slow, fast), "fast first": (fast, slow), "now and then": (slow,)}[order]
        for number, _ in enumerate(zip(*both, strict=False)):
            clock.sleep_ms(10)
            if others and number % 10 == 9:
                clock.sleep_ms(20)
                next(others)
        del others
        turn(watch)
    loader, fetches = watch._publisher.accounts.loader, watch._recorder.fetches
    assert loader is not None and (loader.num_workers, loader.dataset) == (0, "float")
    assert loader.wait_ratio == pytest.approx(30 / 31 if order != "now and then" else 300 / 301, abs=0.002)
    assert (
        fetches.worker_fetches == 0
        and fetches.fetches_sampled > 0
        and fetches.wall_ns == fetches.fetches_sampled * 30 * MS
    )
    report = watch.report()
    finding = next(each for each in report.findings if each.cause == "input_single_process")
    assert finding.advice.startswith("for the loader over float (num_workers=0), one of several that feed a step: ")
    assert "for the loader over float" in finding.evidence[0].text and "collate" not in str(report)
    for _ in watch.steps(Fast([1, 1])):  # alone, it is the one that counts
        pass
    turn(watch)
    assert fetches.worker_fetches == 2 and watch._publisher.accounts.loader.wait_ratio is None  # type: ignore[union-attr]
    watch.close()


@pytest.mark.parametrize("other", [iter([1]), (i for i in range(2))], ids=["list", "generator"])
def test_without_workers_nothing_is_counted(other: object) -> None:
    evidence = FetchEvidence()
    assert ready_batches(other) is None
    assert evidence.counting(other) == other.__next__  # type: ignore[attr-defined]


def test_a_queue_that_cannot_tell_is_not_asked_again_at_every_step_and_does_no_harm() -> None:
    silent = Workers([1, 1])
    silent._data_queue.fails = True
    assert ready_batches(silent) is None
    later, evidence = Workers([1, 1]), FetchEvidence()
    fetch = evidence.counting(later)
    later._data_queue.fails = True
    assert [fetch(), fetch()] == [1, 2] and evidence.worker_fetches == 0
    with pytest.raises(StopIteration):
        fetch()


def test_an_empty_queue_is_evidence_and_what_was_not_counted_is_none() -> None:
    assert queue_evidence(STARVED) == []
    starved = replace(STARVED, ready_batches=0.1, empty_fetch_ratio=0.96)
    assert [evidence.text for evidence in queue_evidence(starved)] == [
        "the next batch was not ready in 96% of the fetches (0.1 batches ready on average)"
    ]
    finding = input_unexplained(starved)
    assert finding is not None and "empty queue" in [evidence.what for evidence in finding.evidence]


def test_where_the_first_batch_of_a_run_is_made_is_known_apart_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    watch = fake_watch(clock, monkeypatch)
    accounts = watch._publisher.accounts

    def sample() -> None:
        for _ in range(8):
            accounts.sample_frames()

    def build_index() -> None:
        others.submit(sample).result()

    def batches() -> Iterator[int]:
        build_index()
        for number in range(20):
            yield number
            if number == 9:
                others.submit(sample).result()

    with ThreadPoolExecutor(1) as others:
        for _ in watch.steps(batches()):
            clock.sleep_ms(10)
            turn(watch)
    window = watch._publisher._window(closed=True)[0]
    places = [
        each and (each.function.rpartition(".")[2], each.ratio) for each in (window.first_place, window.fetch_place)
    ]
    assert places == [("build_index", 1.0), ("batches", 1.0)]
    watch.close()


def test_the_wait_at_the_end_of_the_only_pass_is_no_share_of_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spawned workers took 4 s to end: "56% of the time (4.09 ms of 13.9 ms)" where 29% of each step was a wait."""
    clock = Clock()
    watch = fake_watch(clock, monkeypatch)

    def batches() -> Iterator[int]:
        for number in range(40):
            clock.sleep_ms(3)
            yield number
        clock.sleep_ms(4000)

    for passes in (1, 2):
        for _ in watch.steps(batches()):
            clock.sleep_ms(7)
        window = watch._publisher._window(closed=False)[0]
        assert window.end_s == (4.0 if passes == 1 else 0.0)
        assert window.share("input_wait") == pytest.approx(0.3 if passes == 1 else 8.24 / 8.8)
    watch.close()
