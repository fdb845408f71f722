"""A process's place in a distributed run: the environment first, torch.distributed once it is up, settled by the first step."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest

from gpuwatch import wire
from gpuwatch.membership import Membership
from tests.unit.hook_fakes import Clock, connect, fake_watch, told, turn


class FakeDistributed:
    """torch.distributed, initialised when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.place: tuple[int, int] | None = None
        monkeypatch.setitem(sys.modules, "torch.distributed", self)

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return self.place is not None

    def get_rank(self) -> int:
        assert self.place is not None
        return self.place[0]

    def get_world_size(self) -> int:
        assert self.place is not None
        return self.place[1]


@pytest.fixture
def distributed(monkeypatch: pytest.MonkeyPatch) -> FakeDistributed:
    for name in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "GPUWATCH_RUN",
        "TORCHELASTIC_RUN_ID",
    ):
        monkeypatch.delenv(name, raising=False)
    return FakeDistributed(monkeypatch)


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process was made by multiprocessing."""
    monkeypatch.setattr("multiprocessing.process.parent_process", lambda: SimpleNamespace(pid=os.getppid()))


def test_the_environment_tells_the_rank_until_torch_distributed_does(distributed: FakeDistributed) -> None:
    who = Membership(environ={"RANK": "1", "WORLD_SIZE": "2", "GPUWATCH_RUN": "r"})
    assert who.look(False, False) and (who.identity.rank, who.identity.world_size) == (1, 2)
    distributed.place = (5, 8)
    who.look(False, False)
    assert (who.identity.run, who.identity.rank, who.identity.world_size) == ("r", 5, 8)


def test_after_the_first_step_nothing_changes_any_more(distributed: FakeDistributed) -> None:
    who = Membership(environ={})
    who.look(True, True)
    distributed.place = (1, 2)
    assert who.look(True, True) and who.identity.rank == 0


def test_a_world_of_one_leaves_what_the_scheduler_says(distributed: FakeDistributed) -> None:
    """A sweep: each Slurm task trains alone, and all are tasks of one job."""
    who = Membership(environ={"SLURM_JOB_ID": "9", "SLURM_PROCID": "3", "SLURM_NTASKS": "4"})
    distributed.place = (0, 1)
    who.look(False, False)
    assert (who.identity.run, who.identity.rank) == ("slurm-9", 3)


def test_spawned_ranks_share_their_parent_and_are_nobody_before_they_have_a_rank(
    distributed: FakeDistributed, child: None
) -> None:
    who = Membership(environ=(environ := {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29501"}))
    assert not who.look(False, False)
    distributed.place = (1, 4)
    assert who.look(False, False)
    start = Membership(environ=environ)
    start.look(False, False)
    assert who.identity.run == start.identity.run
    assert f"-{os.getppid()}-" in who.identity.run and who.identity.run.endswith("-29501")
    found = who.identity
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (1, 4, 1, 4)


def test_a_spawned_child_without_torch_distributed_is_a_run_once_it_makes_a_step(
    distributed: FakeDistributed, child: None
) -> None:
    who = Membership(environ={})
    assert not who.look(False, False) and who.look(True, False) and who.look(False, True)


def test_a_forked_child_of_a_run_has_an_id_of_its_own_until_it_is_a_rank(distributed: FakeDistributed) -> None:
    who = Membership(forked=True, environ={"GPUWATCH_RUN": "r"})
    assert who.identity.run == f"r-fork{os.getpid()}"
    distributed.place = (1, 2)
    who.look(False, False)
    assert who.identity.run == "r"


def test_a_rank_that_is_named_late_ends_what_was_told_before(
    distributed: FakeDistributed, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    watch = fake_watch(clock, monkeypatch)
    agent = connect(watch)
    clock.sleep_ms(500)
    turn(watch, hello=True)
    distributed.place = (3, 4)
    clock.sleep_ms(500)
    turn(watch)
    with watch.step():
        clock.sleep_ms(10)
    turn(watch)
    messages = told(agent)
    assert [(type(m).__name__, m.rank) for m in messages] == [
        ("Hello", 0),
        ("Steps", 0),
        ("Bye", 0),
        ("Hello", 3),
        ("Steps", 3),
        ("Steps", 3),
    ]
    senders = [m.origin.sender for m in messages]
    assert len(set(senders[:3])) == 1 and len(set(senders[3:])) == 1 and senders[0] != senders[3]
    last = messages[-1]
    assert isinstance(last, wire.Steps) and last.totals.steps == 1
    assert last.totals.watermark_ns - last.totals.start_ns == 1_010_000_000


def test_a_child_that_never_trains_tells_nothing(
    distributed: FakeDistributed, child: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    watch = fake_watch(clock, monkeypatch)
    agent = connect(watch)
    with watch.phase("startup"):
        clock.sleep_ms(500)
        turn(watch, hello=True)
    watch._publisher._tell(hello=True, bye=True)
    assert told(agent) == []
    with watch.step():
        turn(watch, hello=True)
    assert isinstance(told(agent)[0], wire.Hello)
