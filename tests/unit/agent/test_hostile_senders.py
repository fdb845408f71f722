"""What the agent does with the pids that a message gives, in a made-up /proc."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from gpuwatch import wire
from gpuwatch_agent.processes import ProcessTable
from gpuwatch_agent.processes.workers import _worker_pids
from gpuwatch_agent.runs import Run
from tests.unit.agent.hooks import BOOT, FakeHook


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
    assert table.is_peer(hello(5), 999), "that process is gone: nothing can be said"


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
    assert not table.is_of_user(100, None), "root's agent reads no process that nobody vouches for"
