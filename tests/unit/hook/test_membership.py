"""A process's place in a distributed run: from the environment, then torch.distributed; settled by the first step."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest

from gpuwatch import wire
from gpuwatch.hook.identity import Membership
from tests.unit.hook.fakes import Clock, connect, fake_watch, reported, turn


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
    assert who.update(False, False) and (who.identity.rank, who.identity.world_size) == (1, 2)
    distributed.place = (5, 8)
    who.update(False, False)
    assert (who.identity.run, who.identity.rank, who.identity.world_size) == ("r", 5, 8)


def test_after_the_first_step_nothing_changes_any_more(distributed: FakeDistributed) -> None:
    who = Membership(environ={})
    who.update(True, True)
    distributed.place = (1, 2)
    assert who.update(True, True) and who.identity.rank == 0


def test_a_world_of_one_leaves_what_the_scheduler_says(distributed: FakeDistributed) -> None:
    """A sweep: each Slurm task trains alone, and all are tasks of one job."""
    who = Membership(environ={"SLURM_JOB_ID": "9", "SLURM_PROCID": "3", "SLURM_NTASKS": "4"})
    distributed.place = (0, 1)
    who.update(False, False)
    assert (who.identity.run, who.identity.rank) == ("slurm-9", 3)


def test_spawned_ranks_share_their_parent_and_have_no_run_before_they_have_a_rank(
    distributed: FakeDistributed, child: None
) -> None:
    who = Membership(environ=(environ := {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29501"}))
    assert not who.update(False, False)
    distributed.place = (1, 4)
    assert who.update(False, False)
    start = Membership(environ=environ)
    start.update(False, False)
    assert who.identity.run == start.identity.run
    assert f"-{os.getppid()}-" in who.identity.run and who.identity.run.endswith("-29501")
    found = who.identity
    assert (found.rank, found.world_size, found.local_world_size) == (1, 4, 4)


def test_a_spawned_child_without_torch_distributed_is_a_run_once_it_makes_a_step(
    distributed: FakeDistributed, child: None
) -> None:
    who = Membership(environ={})
    assert not who.update(False, False) and who.update(True, False) and who.update(False, True)


def test_a_forked_child_of_a_run_has_an_id_of_its_own_until_it_is_a_rank(distributed: FakeDistributed) -> None:
    who = Membership(forked=True, environ={"GPUWATCH_RUN": "r"})
    assert who.identity.run == f"r-fork{os.getpid()}"
    distributed.place = (1, 2)
    who.update(False, False)
    assert who.identity.run == "r"


class Store:
    """torch's key-value store, as far as it is used; `get` of a key that is not there would wait."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        assert key in self.values, "this would wait"
        return self.values[key]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    made = Store()
    module = SimpleNamespace(_get_default_store=lambda: made)
    monkeypatch.setitem(sys.modules, "torch.distributed.distributed_c10d", module)
    return made


TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "10.0.0.1"}


def test_ranks_of_two_nodes_without_a_declared_run_take_rank_0_s_id(distributed: FakeDistributed, store: Store) -> None:
    first = Membership(environ={**TORCHRUN, "RANK": "0"})
    second = Membership("-2", environ={**TORCHRUN, "RANK": "1", "GPUWATCH_X": ""})
    second._run = "node-b-77-1"
    assert not second.update(False, False, ask=True), "it is known that there are others: it waits to speak"
    distributed.place = (1, 2)
    assert not second.update(True, False, ask=True), "rank 0 has not stored it yet"
    assert not second.update(True, True), "and the training thread does not ask at all"
    distributed.place = (0, 2)
    assert not first.update(False, False) and first.update(False, False, ask=True)
    distributed.place = (1, 2)
    assert second.update(True, True, ask=True)
    assert first.identity.run == store.values["gpuwatch/run"].decode()
    assert second.identity.run == first.identity.run + "-2"
    assert (second.identity.rank, second.identity.world_size) == (1, 2)


def test_ranks_of_a_node_that_no_launcher_started_take_rank_0_s_id(distributed: FakeDistributed, store: Store) -> None:
    """Ray gives its workers torchrun's variables, but none with an id."""
    who = Membership(environ={"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
    distributed.place = (1, 2)
    assert not who.update(False, False, ask=True), "rank 0 has not stored it yet"
    store.set("gpuwatch/run", "node-a-77-1")
    assert who.update(True, True, ask=True) and who.identity.run == "node-a-77-1"
    assert (who.identity.rank, who.identity.world_size) == (1, 2)


def test_a_named_run_asks_no_store(distributed: FakeDistributed, store: Store) -> None:
    distributed.place = (1, 2)
    who = Membership(environ={**TORCHRUN, "RANK": "1", "TORCHELASTIC_RUN_ID": "job-7"})
    assert who.update(False, False, ask=True) and who.identity.run == "elastic-job-7"
    assert store.values == {}


def test_without_a_store_or_rank_0_a_rank_speaks_under_its_own_id(
    distributed: FakeDistributed, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    distributed.place = (1, 2)
    who = Membership(environ={**TORCHRUN, "RANK": "1"})
    spoke = [who.update(True, True, ask=True) for _ in range(121)]
    assert spoke.index(True) == 119, "rank 0 is not watched: after a minute"
    monkeypatch.delitem(sys.modules, "torch.distributed.distributed_c10d")
    other = Membership(environ={**TORCHRUN, "RANK": "1"})
    assert other.update(True, True, ask=True), "no store: at once"
    ending = Membership(environ={**TORCHRUN, "RANK": "1"})
    ending.stop_asking()
    assert ending.update(False, True), "the end does not wait"


def test_a_rank_that_is_named_late_ends_what_was_reported_before(
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
    messages = reported(agent)
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
    watch._publisher._publish(hello=True, bye=True)
    assert reported(agent) == []
    with watch.step():
        turn(watch, hello=True)
    assert isinstance(reported(agent)[0], wire.Hello)


def test_messages_have_the_time_of_the_clock_that_the_ledger_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else an agent takes them for messages from the future, and tests depend on how long the machine is up."""
    clock = Clock(10**18)  # 30 years after the boot
    watch = fake_watch(clock, monkeypatch)
    agent = connect(watch)
    with watch.step():
        clock.sleep_ms(10)
    turn(watch)
    assert {message.origin.monotonic_ns for message in reported(agent)} == {clock.now_ns}
