"""What the agent does with the pids that a message gives, in a made-up /proc."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from gpuwatch import wire
from gpuwatch.errors import ProtocolError
from gpuwatch.wire.sockets import Peer
from gpuwatch_agent.processes import ProcessTable
from gpuwatch_agent.processes.workers import _worker_pids
from gpuwatch_agent.runs import SILENCE_NS, Run, RunRegistry, read_record
from tests.unit.agent.hooks import BOOT, NOW_S, FakeHook, S


def process(procfs: Path, pid: int, parent: int, numbers: str = "") -> None:
    folder = procfs / str(pid)
    (folder / "ns").mkdir(parents=True)
    (folder / "ns/pid").touch()
    (folder / "stat").write_text(f"{pid} (python) S {parent} " + " ".join(["0"] * 17) + " 77 0 0")
    (folder / "status").write_text(f"Name:\tpython\nNSpid:\t{numbers or pid}\n")


@pytest.fixture
def table(tmp_path: Path) -> ProcessTable:
    process(tmp_path, 100, 1)  # the training
    process(tmp_path, 101, 100)  # a worker
    process(tmp_path, 102, 100)  # a fork server, and its worker
    process(tmp_path, 103, 102)
    process(tmp_path, 200, 1)  # somebody else's
    process(tmp_path, 201, 200)
    process(tmp_path, 300, 1, "300\t7")  # a container's
    return ProcessTable(tmp_path)


def hello(pid: int, workers: tuple[int, ...] = (), namespace: int = 0) -> wire.Hello:
    return msgspec.structs.replace(FakeHook(pid=pid).hello(worker_pids=workers), pid_namespace=namespace)


def test_a_claimed_pid_is_the_peers(table: ProcessTable, tmp_path: Path) -> None:
    inside = (tmp_path / "300/ns/pid").stat().st_ino
    assert table.is_peer(hello(100), 100)
    assert not table.is_peer(hello(200), 100)
    assert table.is_peer(hello(7, namespace=inside), 300)
    assert table.host_pid(hello(7, namespace=inside)) == 300, "known without a search of /proc"
    assert not table.is_peer(hello(8, namespace=inside), 300)
    assert not table.is_peer(hello(7, namespace=inside + 999), 300)
    assert not table.is_peer(hello(5), 999), "of a process that is gone, too, the kernel knew the pid"
    assert table.is_peer(hello(999), 999)
    assert table.is_peer(hello(5, namespace=inside), 999), (
        "in another namespace it has another one: that cannot be checked"
    )


@pytest.mark.parametrize(("uid", "expected"), [(1000, (101, 103)), (None, (101, 103, 200, 201, 999, 100))])
def test_workers_are_descendants_of_a_verified_process(
    table: ProcessTable, uid: int | None, expected: tuple[int, ...]
) -> None:
    run, hook = Run("run-a", 0, BOOT), FakeHook(pid=100)
    run.apply(hello(100, (101, 103, 200, 201, 999, 100)), hook.at_ns, 0.0)
    run.uid = uid
    assert _worker_pids(run, table) == expected


def test_stacks_are_of_the_runs_user_only(table: ProcessTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = (tmp_path / "100").stat().st_uid
    assert table.is_of_user(100, owner) and not table.is_of_user(100, owner + 1)
    assert not table.is_of_user(999, owner)
    monkeypatch.setattr("os.getuid", lambda: 0)
    assert not table.is_of_user(100, None), "root's agent reads no process without a verified user"


class Sends:
    """A registry, and what it says to a message of a peer `at_s` seconds after the first."""

    def __init__(self) -> None:
        self.runs = RunRegistry(BOOT, lambda hello: None)
        self.begin_ns = 100 * S

    def __call__(self, peer: Peer, sender: str, at_s: float = 0.0, run: str = "run-a", rank: int = 0) -> str:
        now_ns = self.begin_ns + int(at_s * S)
        hook = FakeHook(now_ns - 10 * S, run=run, rank=rank, sender=sender, pid=100).step()
        try:
            for message in (hook.hello(worker_pids=(101,)), hook.message()):
                self.runs.apply(message, now_ns, NOW_S + now_ns / 1e9, peer)
        except ProtocolError as error:
            return error.reason
        return "taken"


POD, OTHER, LOCAL = Peer(address="10.0.0.5"), Peer(address="10.0.0.6"), Peer(1000, 100, "localhost:1000:1000:100")


def test_a_run_over_tcp_is_of_one_address_while_that_is_heard() -> None:
    sends = Sends()
    assert sends(POD, "a") == "taken"
    assert (sends(OTHER, "b", 1), sends(LOCAL, "c", 1)) == ("wrong_address", "wrong_address")
    assert sends(OTHER, "b", 1, rank=1) == "taken", "another pod's rank of the same run"
    assert sends(POD, "a2", 2) == "taken", "it began again"
    run = sends.runs.runs["run-a", 0]
    assert (run.address, run.uid) == ("10.0.0.5", None)
    assert read_record(run.record() or b"").address == "10.0.0.5", "the next agent knows it too"
    silent_s = 2 + SILENCE_NS / S
    assert sends(OTHER, "b", silent_s - 1) == "wrong_address"
    assert sends(OTHER, "b", silent_s + 1) == "taken", "its pod was replaced"
    assert sends.runs.runs["run-a", 0].address == "10.0.0.6"


def test_a_user_s_run_is_never_taken_over_tcp() -> None:
    sends = Sends()
    assert sends(LOCAL, "a") == "taken"
    assert (sends(POD, "b", 1), sends(POD, "b", 60), sends(POD, "b", 60, rank=1)) == ("wrong_user",) * 3


def test_what_is_claimed_over_tcp_about_processes_is_forgotten(table: ProcessTable) -> None:
    sends = Sends()
    for peer, expected in ((LOCAL, 100), (POD, None)):
        sends(peer, str(expected), run=str(expected))
        run = sends.runs.runs[str(expected), 0]
        assert table.host_pid(run.hello) == expected
        assert _worker_pids(run, table) == ((101,) if expected else ())
    assert table.alive(run.hello) is None


def test_an_address_with_many_runs_makes_room_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunRegistry, "MAX_RUNS", 20)
    sends = Sends()
    assert {sends(POD, f"a{n}", run=f"run-{n}") for n in range(20)} == {"taken"}
    assert sends(OTHER, "b", run="honest") == "taken"
    assert ("honest", 0) in sends.runs.runs and ("run-19", 0) not in sends.runs.runs
    assert sends(POD, "c", run="one-more") == "too_many_runs"
