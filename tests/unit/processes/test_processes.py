"""Processes as /proc shows them: alive, ended, zombies, other namespaces; loader workers' CPU time."""

from __future__ import annotations

import errno
import os
import pwd
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from gpuwatch.host import proc
from gpuwatch.host.cgroup import within_quota
from gpuwatch.host.proc import TICKS_PER_S
from gpuwatch_agent.processes import ProcessTable
from gpuwatch_agent.processes.workers import WorkerWatch
from gpuwatch_agent.runs import Run, read_record
from tests.unit.agent.hooks import BOOT, FakeHook, S


def put(procfs: Path, pid: int, *, start_ticks: int = 77, state: str = "S", cpu_s: float = 0.0) -> None:
    """Show a process whose name has a bracket in it, as some do."""
    (procfs / str(pid)).mkdir(parents=True, exist_ok=True)
    fields = [state, *["0"] * 10, str(int(cpu_s * TICKS_PER_S)), "0", *["0"] * 6, str(start_ticks), "0", "0"]
    (procfs / str(pid) / "stat").write_text(f"{pid} (python) x) {' '.join(fields)}\n")


def remove(procfs: Path, pid: int) -> None:
    (procfs / str(pid) / "stat").unlink()
    (procfs / str(pid)).rmdir()


@pytest.fixture
def table(tmp_path: Path) -> ProcessTable:
    return ProcessTable(tmp_path)


def test_process_is_alive_until_it_is_gone(table: ProcessTable, tmp_path: Path) -> None:
    hello = FakeHook().hello()
    assert table.alive(hello) is False
    table.begin_tick()
    put(tmp_path, 4711)
    assert table.alive(hello) is True
    remove(tmp_path, 4711)
    table.begin_tick()
    assert table.alive(hello) is False


def test_zombie_is_not_alive(table: ProcessTable, tmp_path: Path) -> None:
    put(tmp_path, 4711, state="Z")
    assert table.alive(FakeHook().hello()) is False


def test_pid_that_was_given_to_another_process_is_not_the_run(table: ProcessTable, tmp_path: Path) -> None:
    put(tmp_path, 4711, start_ticks=78)
    assert table.alive(FakeHook().hello()) is False
    assert table.host_pid(FakeHook().hello()) is None


def test_process_of_another_namespace_is_not_known_to_be_dead(table: ProcessTable) -> None:
    assert table.alive(msgspec.structs.replace(FakeHook().hello(), pid_namespace=4026531836)) is None
    assert table.alive(None) is None


def test_container_process_is_searched_for_once_in_five_turns(
    table: ProcessTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    searches = []
    monkeypatch.setattr(table, "_search", lambda *process: searches.append(process))
    hello = msgspec.structs.replace(FakeHook().hello(), pid_namespace=4026531836)
    for _ in range(20):
        table.begin_tick()
        for _ in range(6):
            assert table.host_pid(hello) is None
    assert len(searches) == 4


def test_gpu_process_that_has_ended_is_distinguished_from_one_that_cannot_be_seen(
    table: ProcessTable, tmp_path: Path
) -> None:
    put(tmp_path, 1)
    put(tmp_path, 2)
    assert table.ended({1, 2, 3}) == set()
    remove(tmp_path, 1)
    put(tmp_path, 2, state="Z")
    table.begin_tick()
    assert table.ended({1, 2, 3}) == {1, 2}
    assert table.ended({1, 2, 3}) == {1, 2}
    assert table.ended({3}) == set()


def workers_run(procfs: Path, pids: tuple[int, ...]) -> Run:
    put(procfs, 4711)
    hook = FakeHook()
    run = Run("run-a", 0, BOOT)
    run.apply(hook.hello(worker_pids=pids), hook.at_ns, 0.0)
    run.apply(hook.message(), hook.at_ns, 0.0)
    return run


def test_a_user_directory_that_is_away_for_a_moment_renames_nobody_for_long(
    table: ProcessTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At boot the agent may start before sssd: for ten minutes alice was 1001, in the alerts and in the GPU-hours."""
    names, asked = dict[int, SimpleNamespace](), list[int]()
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: (asked.append(uid), names[uid])[1])
    put(tmp_path, 4711)

    def user_after(ticks: int) -> str:
        for _ in range(ticks):
            table.begin_tick()
            user = table.owner(4711).user
        return user

    assert user_after(1) == str(os.getuid())
    names[os.getuid()] = SimpleNamespace(pw_name="alice")
    assert user_after(90) == "alice"
    asked.clear()
    assert user_after(1200) == "alice" and len(asked) == 2  # who is known is asked for every ten minutes
    names.clear()  # it is restarted
    assert user_after(1200) == "alice"


def test_workers_cpu_time_is_counted_once_over_a_restart_of_the_agent(table: ProcessTable, tmp_path: Path) -> None:
    run = workers_run(tmp_path, (21, 22))
    put(tmp_path, 21, cpu_s=10.0)
    put(tmp_path, 22, cpu_s=5.0)
    WorkerWatch(table).update([run], S)
    assert run.worker_totals["cpu_s"] == 15.0
    record = run.record()
    assert record is not None
    kept = read_record(record)
    run = kept.restore(BOOT, 2 * S, 0.0)
    put(tmp_path, 21, cpu_s=13.0)
    table.begin_tick()
    WorkerWatch(table).update([run], 3 * S)
    assert run.worker_totals["cpu_s"] == 18.0


def test_worker_that_ended_keeps_its_part_and_is_not_alive(table: ProcessTable, tmp_path: Path) -> None:
    run = workers_run(tmp_path, (21, 22))
    put(tmp_path, 21, cpu_s=10.0)
    put(tmp_path, 22, cpu_s=5.0)
    watch = WorkerWatch(table)
    watch.update([run], S)
    remove(tmp_path, 21)
    put(tmp_path, 22, cpu_s=6.0)
    table.begin_tick()
    watch.update([run], 2 * S)
    assert run.worker_totals["cpu_s"] == 16.0
    assert watch.count(run) == 1
    assert watch.of(run).workers.ratios() == (1.0,)


def test_workers_that_a_sender_makes_up_cost_little(
    table: ProcessTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_up = range(100_000, 200_000)
    run = workers_run(tmp_path, tuple(made_up))
    asked: list[int] = []
    table.read = lambda reader, pid: asked.append(pid) if reader is proc.stat and pid in made_up else None  # type: ignore[method-assign]
    monkeypatch.setattr(table, "host_pid", lambda hello: hello.pid)
    WorkerWatch(table).update([run], S)
    assert len(asked) == 256


def test_cores_and_memory_are_those_that_the_job_may_use(tmp_path: Path) -> None:
    table = ProcessTable(tmp_path / "proc", tmp_path / "sys")
    job = tmp_path / "sys/fs/cgroup/slurm/job_7"
    for path, text in (
        (tmp_path / "proc/7/cgroup", "0::/slurm/job_7"),
        (tmp_path / "proc/7/status", "Cpus_allowed_list:\t0-63"),
        (tmp_path / "proc/8/cgroup", "0::/"),
        (tmp_path / "proc/8/status", "Cpus_allowed_list:\t0-63"),
        (job / "cpu.max", "800000 100000"),
        (job / "memory.max", str(16 << 30)),
        (job / "memory.current", str(10 << 30)),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    assert [within_quota(len(table.read(proc.allowed_cores, pid) or ()), table.quota(pid)) for pid in (7, 8)] == [8, 64]
    room = table.memory_room(7)
    assert room is not None and room.available_bytes == 6 << 30
    assert table.memory_room(8) is None


@pytest.mark.parametrize("name", [b"\xff\x1b", "训练进程的名".encode()[:15]])
def test_a_command_s_name_may_be_any_bytes(table: ProcessTable, tmp_path: Path, name: bytes) -> None:
    """The kernel cuts it after 15 bytes, also within a character, as setproctitle's."""
    put(tmp_path, 4711)
    folder = tmp_path / "4711"
    (folder / "stat").write_bytes((folder / "stat").read_bytes().replace(b"python", name))
    (folder / "comm").write_bytes(name + b"\n")
    (folder / "status").write_bytes(b"Name:\t" + name + b"\nNSpid:\t4711\t7\n")
    (folder / "ns").mkdir()
    (folder / "ns/pid").touch()
    inside = (folder / "ns/pid").stat().st_ino
    assert table.alive(FakeHook().hello()) is True
    assert table.name(4711).encode()
    contained = msgspec.structs.replace(FakeHook(pid=7).hello(), pid_namespace=inside)
    assert table._search(contained.pid_namespace, contained.pid) == 4711
    assert table.is_peer(contained, 4711)
    assert not table.is_peer(FakeHook(pid=8).hello(), 4711)


def test_a_control_group_s_name_may_be_any_bytes(tmp_path: Path) -> None:
    group = os.fsencode(tmp_path) + b"/fs/cgroup/user/\xff"
    folder = Path(os.fsdecode(group))
    folder.mkdir(parents=True)
    (folder / "cpu.max").write_text("50000 100000")
    put(tmp_path, 4711)
    (tmp_path / "4711/cgroup").write_bytes(b"0::/user/\xff\n")
    quota = ProcessTable(tmp_path, tmp_path).quota(4711)
    assert quota is not None and quota.cores == 0.5


def test_without_a_free_descriptor_a_container_s_process_is_not_found(
    table: ProcessTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Path, "iterdir", full)
    assert table.alive(msgspec.structs.replace(FakeHook().hello(), pid_namespace=4026531836)) is None


def test_a_container_s_first_process_that_starts_again_is_searched_for_at_once(
    table: ProcessTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number is 1 again, and the kernel gives a namespace's inode again."""
    found = [4711, 4800]
    monkeypatch.setattr(table, "_search", lambda namespace, number: found.pop(0))
    stats = {4711: 100, 4800: 200}
    monkeypatch.setattr(table, "read", lambda reader, pid: proc.Stat("R", 1, 0.0, 1, stats[pid], 0))
    hello = msgspec.structs.replace(FakeHook(pid=1).hello(), pid_namespace=4026531836, process_start_ticks=100)
    table.begin_tick()
    assert table.host_pid(hello) == 4711
    table.begin_tick()
    assert table.host_pid(msgspec.structs.replace(hello, process_start_ticks=200)) == 4800
