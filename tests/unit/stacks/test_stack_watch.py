"""When the agent looks at stacks by itself, of whom, and how often."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from gpuwatch import wire
from gpuwatch.config import StackSettings
from gpuwatch.diagnosis.finding import Finding
from gpuwatch.errors import GpuwatchError
from gpuwatch.tools.stacks.records import HotLine, ProcessStacks, Stacks
from gpuwatch.tools.stacks.spy import Target
from gpuwatch_agent.evaluator import FindingTracker
from gpuwatch_agent.processes import ProcessTable
from gpuwatch_agent.processes.stacks import StackWatch
from gpuwatch_agent.runs import Run
from gpuwatch_agent.runs.views import finding_view
from tests.unit.agent.hooks import BOOT, FakeHook, S

SLOW = Finding("input_cpu", "warning", "too few workers", 0.6, (), "more workers")
HUNG = Finding("hung", "critical", "no progress", 0.9, (), "look at the stacks")
BURST = Finding("burst_every_n", "warning", "one slow step in every 2", 0.6, (), "feed the step first")
GOOD = Finding("gpu_saturated", "info", "nothing to gain", 0.9, (), "")
DECODE = HotLine("/home/alice/dataset.py", 88, "decode", 0.71, 0.71)


class Table(ProcessTable):
    """Every process is there, under the number that it has itself."""

    def __init__(self) -> None:
        super().__init__(Path("/nowhere"))

    def host_pid(self, hello: wire.Hello) -> int | None:
        return hello.pid

    def is_of_user(self, pid: int, uid: int | None) -> bool:
        return True


class Spy:
    """Stands for py-spy: notes who is asked for."""

    def __init__(self, error: Exception | None = None) -> None:
        self.asked: list[list[int]] = []
        self.error = error

    def __call__(self, targets: Sequence[Target], seconds: float, rate_hz: int) -> Stacks:
        self.asked.append([target.pid for target in targets])
        if self.error is not None:
            raise self.error
        processes = tuple(
            ProcessStacks(t.rank, t.pid + i, kind, 0, 50, (DECODE,), 0.29)
            for t in targets
            for i, kind in enumerate(("training", "worker"))
        )
        return Stacks(1.0, seconds, rate_hz, processes, tuple(str(target.flame_graph) for target in targets))


class AtOnce:
    """Stands for the thread: a capture has ended when it was started."""

    def offer(self, work: Callable[[], Any], wait_s: float) -> Any:
        return work()


def world(tmp_path: Path, spy: Spy, **settings: Any) -> StackWatch:
    watch = StackWatch(StackSettings(**{"automatic": True, **settings}), tmp_path, spy)
    watch._thread = AtOnce()  # type: ignore[assignment]
    return watch


def ranks(*numbers: int) -> list[Run]:
    runs = []
    for rank in numbers:
        run = Run("run-a", rank, BOOT)
        hook = FakeHook(rank=rank, pid=100 * (rank + 1))
        run.apply(hook.hello(), hook.at_ns, 0.0)
        runs.append(run)
    return runs


def found(book: FindingTracker, finding: Finding, *ranks: int, begin_s: int = 0) -> FindingTracker:
    for second in (begin_s, begin_s + 4):
        for rank in ranks:
            book.update("run-a", rank, [finding], second * S, float(second))
    return book


def test_a_finding_is_looked_at_once_and_says_what_was_seen(tmp_path: Path) -> None:
    spy = Spy()
    watch, book, runs = world(tmp_path, spy), found(FindingTracker(), SLOW, 0), ranks(0)
    for second in (4, 5, 700):  # ten minutes later it is the same finding still
        watch.tick(runs, book, Table(), second * S, float(second))
    assert spy.asked == [[100]]
    (entry,) = book.active("run-a", 0)
    view = finding_view(entry)
    assert view.evidence[-1].text == "dataset.py:88 decode: 71% of samples (worker 0)"
    assert view.stacks is not None and list(view.stacks.flame_graphs) == [
        str(tmp_path / "4-run-a-rank0-input_cpu.speedscope.json")
    ]


def test_a_run_is_looked_at_once_in_ten_minutes(tmp_path: Path) -> None:
    spy = Spy()
    watch, runs = world(tmp_path, spy), ranks(0)
    watch.tick(runs, found(FindingTracker(), SLOW, 0), Table(), 4 * S, 4.0)
    again = found(FindingTracker(), SLOW, 0, begin_s=100)
    watch.tick(runs, again, Table(), 104 * S, 104.0)
    watch.tick(runs, again, Table(), 603 * S, 603.0)
    assert len(spy.asked) == 1
    watch.tick(runs, again, Table(), 605 * S, 605.0)
    assert len(spy.asked) == 2


def test_of_a_hung_run_all_ranks_are_looked_at_together(tmp_path: Path) -> None:
    spy = Spy()
    watch, book, runs = world(tmp_path, spy), found(FindingTracker(), HUNG, 0, 1), ranks(0, 1)
    watch.tick(runs, book, Table(), 4 * S, 4.0)
    watch.tick(runs, book, Table(), 5 * S, 5.0)
    assert spy.asked == [[100, 200]]
    for rank in (0, 1):
        (entry,) = book.active("run-a", rank)
        assert finding_view(entry).evidence[-1].text == "dataset.py:88 decode: 71% of samples (2 of 2 ranks)"


def test_a_hang_is_looked_at_though_its_loader_was_a_minute_before(tmp_path: Path) -> None:
    spy = Spy()
    watch, book, runs = world(tmp_path, spy), found(FindingTracker(), SLOW, 0), ranks(0, 1)
    watch.tick(runs, book, Table(), 4 * S, 4.0)
    found(book, HUNG, 0, 1, begin_s=60)
    watch.tick(runs, book, Table(), 64 * S, 64.0)
    assert spy.asked == [[100], [100, 200]]


def test_findings_about_the_same_processes_share_a_look(tmp_path: Path) -> None:
    spy = Spy()
    watch, book, runs = world(tmp_path, spy), found(FindingTracker(), BURST, 0), ranks(0, 1)
    watch.tick(runs, book, Table(), 4 * S, 4.0)
    found(book, SLOW, 0, 1, begin_s=8)  # proven a little later, and the root of the other one
    watch.tick(runs, book, Table(), 12 * S, 12.0)
    first, second = (finding_view(entry) for entry in book.active("run-a", 0))
    assert (first.cause, second.cause) == ("input_cpu", "burst_every_n")
    assert first.stacks == second.stacks is not None
    (other_rank,) = book.active("run-a", 1)
    assert other_rank.stacks is None and spy.asked == [[100]]


def test_a_finding_of_minutes_later_is_not_explained_by_an_old_sample(tmp_path: Path) -> None:
    spy = Spy()
    watch, book, runs = world(tmp_path, spy), found(FindingTracker(), BURST, 0), ranks(0)
    watch.tick(runs, book, Table(), 4 * S, 4.0)
    found(book, SLOW, 0, begin_s=66)
    watch.tick(runs, book, Table(), 70 * S, 70.0)
    assert book.active("run-a", 0)[0].stacks is None and spy.asked == [[100]]


@pytest.mark.parametrize("finding", [GOOD, SLOW])
def test_nothing_is_looked_at_unasked_or_for_what_stacks_do_not_explain(tmp_path: Path, finding: Finding) -> None:
    spy = Spy()
    watch = world(tmp_path, spy, automatic=finding is GOOD)
    watch.tick(ranks(0), found(FindingTracker(), finding, 0), Table(), 4 * S, 4.0)
    assert spy.asked == []


def test_the_sampler_does_not_wait_for_a_look(tmp_path: Path) -> None:
    spy, may_end = Spy(), Event()

    def slow(*asked: Any) -> Stacks:
        assert may_end.wait(60)
        return spy(*asked)

    watch, book, runs = StackWatch(StackSettings(automatic=True), tmp_path, slow), FindingTracker(), ranks(0)
    found(book, SLOW, 0)
    for second in (4, 5):
        watch.tick(runs, book, Table(), second * S, float(second))
    assert spy.asked == []
    assert finding_view(book.active("run-a", 0)[0]).stacks is None
    may_end.set()
    end_s = time.monotonic() + 60
    while finding_view(book.active("run-a", 0)[0]).stacks is None:
        assert time.monotonic() < end_s
        watch.tick(runs, book, Table(), 6 * S, 6.0)
    assert spy.asked == [[100]]


def test_a_look_that_fails_is_said_once_and_not_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    spy = Spy(GpuwatchError("the memory of pid 100 may not be read; run it as root (sudo)"))
    watch, book, runs = world(tmp_path, spy), found(FindingTracker(), SLOW, 0), ranks(0)
    for second in (4, 5, 700):
        watch.tick(runs, book, Table(), second * S, float(second))
    assert len(spy.asked) == 1
    assert [record.message for record in caplog.records] == [
        "no stacks for input_cpu of run run-a: the memory of pid 100 may not be read; run it as root (sudo)"
    ]


def test_only_the_newest_flame_graphs_are_kept(tmp_path: Path) -> None:
    watch = world(tmp_path, Spy(), keep=3)
    for age in range(6):
        (tmp_path / f"{age}.speedscope.json").write_text("")
        os.utime(tmp_path / f"{age}.speedscope.json", (1000 - age, 1000 - age))
    (tmp_path / "notes.txt").write_text("")
    watch.tick(ranks(0), found(FindingTracker(), SLOW, 0), Table(), 4 * S, 4.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *(f"{n}.speedscope.json" for n in range(3)),
        "notes.txt",
    ]
