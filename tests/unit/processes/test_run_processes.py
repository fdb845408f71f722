"""What a run's processes and its control group take of the node: /proc and /sys as directory trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuwatch.errors import NoData
from gpuwatch.host.proc import PAGE_BYTES, Stat, io_bytes, optional, run_queue_s, stat
from gpuwatch_agent.processes import ProcessTable
from gpuwatch_agent.processes.workers import WorkerWatch, group_samples
from gpuwatch_agent.runs import Run, read_record
from tests.catalogue import check
from tests.unit.agent.hooks import BOOT, FakeHook, S

Values = dict[tuple[str, ...], float]
STAT = "4711 (python) x) {state} 1 4711 4711 0 -1 4194560 9000 0 12 0 250 40 0 0 20 0 {threads} 0 77 1000000 {pages} 1844\n"


class Node:
    """A /proc and a /sys, and one run on them."""

    def __init__(self, root: Path) -> None:
        self.procfs, self.sysfs = root / "proc", root / "sys"
        self.put(4711)
        self.table = ProcessTable(self.procfs, self.sysfs)
        self.processes = WorkerWatch(self.table)
        self.now_ns = 0

    def put(
        self, pid: int, *, state: str = "S", threads: int = 1, pages: int = 1, read: int = 0, wait_s: float = 0, files=0
    ) -> None:
        directory = self.procfs / str(pid)
        (directory / "fd").mkdir(parents=True, exist_ok=True)
        (directory / "stat").write_text(STAT.format(state=state, threads=threads, pages=pages))
        (directory / "io").write_text(f"rchar: 9\nread_bytes: {read}\nwrite_bytes: 64\ncancelled_write_bytes: 60\n")
        (directory / "schedstat").write_text(f"123456 {int(wait_s * 1e9)} 7\n")
        for number in range(files):
            (directory / "fd" / str(number)).touch()

    def gone(self, pid: int) -> None:
        (self.procfs / str(pid) / "stat").unlink()

    def group(self, cgroup: str, *, pid: int = 4711, **files: str) -> None:
        (self.procfs / str(pid) / "cgroup").write_text(cgroup)
        self.write("fs/cgroup" + cgroup.rpartition(":")[2].rstrip(), **files)

    def write(self, directory: str, **files: str) -> None:
        path = self.sysfs / directory
        path.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (path / name.replace("__", ".")).write_text(text)

    def update(self, run: Run, seconds: float = 5) -> Values:
        self.now_ns += int(seconds * S)
        self.table.begin_tick()
        self.processes.update([run], self.now_ns)
        return {(s.metric, *s.labels[2:]): s.value for s in check(self.processes.samples(run))}

    def groups(self, *runs: Run) -> Values:
        self.table.begin_tick()
        samples = check(group_samples(runs, self.table))
        return {(s.metric.removeprefix("gpuwatch_run_"), *s.labels): s.value for s in samples}


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def a_run(*workers: int, pid: int = 4711, rank: int = 0, name: str = "run-a") -> Run:
    hook = FakeHook(pid=pid, rank=rank, run=name, sender=f"{name}-{rank}")
    run = Run(name, rank, BOOT)
    run.apply(hook.hello(worker_pids=workers), hook.at_ns, 0.0)
    run.apply(hook.message(), hook.at_ns, 0.0)
    return run


def test_training_process(node: Node) -> None:
    node.put(4711, threads=33, pages=1000, files=12)
    found = node.update(a_run())
    assert found == {
        ("gpuwatch_run_resident_memory_bytes",): 1000 * PAGE_BYTES,
        ("gpuwatch_run_threads",): 33,
        ("gpuwatch_run_open_files",): 12,
    }


def test_workers_are_summed_and_one_that_ended_keeps_its_part(node: Node) -> None:
    run = a_run(21, 22)
    node.put(21, read=1000, wait_s=1.5)
    node.put(22, read=200, wait_s=0.5, state="D")
    found = node.update(run)
    assert found["gpuwatch_loader_worker_read_bytes_total",] == 1200
    assert found["gpuwatch_loader_worker_written_bytes_total",] == 8
    assert found["gpuwatch_loader_worker_run_queue_seconds_total",] == 2.0
    assert found["gpuwatch_loader_workers_in_disk_wait",] == 1
    node.gone(21)
    node.put(22, read=700, wait_s=0.75)
    found = node.update(run)
    assert found["gpuwatch_loader_worker_read_bytes_total",] == 1700
    assert found["gpuwatch_loader_worker_run_queue_seconds_total",] == 2.25
    assert found["gpuwatch_loader_workers_in_disk_wait",] == 0


def test_processes_are_looked_at_every_five_seconds(node: Node) -> None:
    run = a_run()
    node.put(4711, threads=1)
    node.update(run)
    node.put(4711, threads=2)
    assert node.update(run, 4)["gpuwatch_run_threads",] == 1
    assert node.update(run, 1)["gpuwatch_run_threads",] == 2


def test_workers_bytes_are_counted_once_over_a_restart_of_the_agent(node: Node) -> None:
    run = a_run(21)
    node.put(21, read=1000)
    node.update(run)
    record = read_record(run.record())
    again = record.restore(BOOT, 0, 0.0)
    again.status = "running"
    node.put(21, read=1600)
    fresh = WorkerWatch(node.table)
    fresh.update([again], 0)
    values = {s.metric: s.value for s in fresh.samples(again)}
    assert values["gpuwatch_loader_worker_read_bytes_total"] == 1600


def test_what_another_users_process_hides_is_absent(node: Node) -> None:
    run = a_run(21)
    for name in ("io", "schedstat"):
        (node.procfs / "4711" / name).unlink()
    node.put(21)
    (node.procfs / "21" / "io").unlink()
    (node.procfs / "4711" / "fd").rmdir()
    found = node.update(run)
    assert {key[0] for key in found} == {
        "gpuwatch_run_resident_memory_bytes",
        "gpuwatch_run_threads",
        "gpuwatch_loader_workers",
        "gpuwatch_loader_workers_in_disk_wait",
        "gpuwatch_loader_worker_cpu_seconds_total",
        "gpuwatch_loader_worker_run_queue_seconds_total",
    }


def test_ended_run_keeps_its_totals_and_has_no_process(node: Node) -> None:
    run = a_run(21)
    node.put(21, read=1000)
    node.update(run)
    run.status = "ended"
    found = node.update(run)
    assert found["gpuwatch_loader_workers",] == 0
    assert {key[0] for key in found} == {
        "gpuwatch_loader_workers",
        "gpuwatch_loader_worker_cpu_seconds_total",
        "gpuwatch_loader_worker_read_bytes_total",
        "gpuwatch_loader_worker_written_bytes_total",
        "gpuwatch_loader_worker_run_queue_seconds_total",
    }


def test_control_group_of_version_2(node: Node) -> None:
    """The least limit of the group and those around it counts; the root is the node."""
    node.group(
        "0::/kubepods.slice/pod1/c1\n",
        memory__max="max\n",
        memory__current="3000\n",
        memory__events="low 0\noom 2\noom_kill 1\n",
        cpu__pressure="some avg10=0.00 avg60=0.00 avg300=0.00 total=1500000\nfull avg10=0 avg60=0 avg300=0 total=0\n",
        io__pressure="some avg10=0.00 avg60=0.00 avg300=0.00 total=250000\n",
    )
    node.write("fs/cgroup/kubepods.slice/pod1", memory__max="9000\n")
    node.write("fs/cgroup/kubepods.slice", memory__max="50000\n")
    node.write("fs/cgroup", memory__max="7\n")
    assert node.groups(a_run()) == {
        ("memory_limit_bytes", "run-a", "0"): 9000,
        ("memory_used_bytes", "run-a", "0"): 3000,
        ("oom_kills_total", "run-a", "0"): 1,
        ("pressure_cpu_waiting_seconds_total", "run-a", "0"): 1.5,
        ("pressure_io_waiting_seconds_total", "run-a", "0"): 0.25,
    }


def test_control_group_of_version_1_with_pressure_of_version_2(node: Node) -> None:
    node.group("5:memory:/slurm/job_1\n3:cpu,cpuacct:/slurm/job_1\n0::/slurm/job_1\n")
    node.write("fs/cgroup/memory/slurm/job_1", memory__limit_in_bytes=f"{1 << 63}\n", memory__usage_in_bytes="512\n")
    node.write("fs/cgroup/memory/slurm/job_1", memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    node.write("fs/cgroup/memory/slurm", memory__limit_in_bytes="4096\n")
    node.write(
        "fs/cgroup/unified/slurm/job_1", memory__pressure="some avg10=0.00 avg60=0.00 avg300=0.00 total=2000000\n"
    )
    assert node.groups(a_run()) == {
        ("memory_limit_bytes", "run-a", "0"): 4096,
        ("memory_used_bytes", "run-a", "0"): 512,
        ("oom_kills_total", "run-a", "0"): 2,
        ("pressure_memory_waiting_seconds_total", "run-a", "0"): 2.0,
    }


@pytest.mark.parametrize("cgroup", ["0::/\n", "0::/../../docker-1\n", "", "rubbish\n"])
def test_root_group_and_one_that_cannot_be_found_say_nothing(node: Node, cgroup: str) -> None:
    (node.procfs / "4711" / "cgroup").write_text(cgroup)
    node.write("fs/cgroup", memory__max="7\n", memory__current="7\n", cpu__pressure="some total=1\n")
    assert node.groups(a_run()) == {}


def test_group_that_ranks_share_is_reported_once(node: Node) -> None:
    for pid in (4711, 4712, 4713):
        node.put(pid)
        node.group("0::/job\n" if pid < 4713 else "0::/other\n", pid=pid, memory__current=f"{pid}\n")
    node.group("0::/job\n", memory__current="100\n")
    runs = [a_run(pid=4713, rank=2), a_run(pid=4712, rank=1), a_run(rank=0)]
    assert node.groups(*runs) == {
        ("memory_used_bytes", "run-a", "0"): 100,
        ("memory_used_bytes", "run-a", "2"): 4713,
    }


def test_what_a_process_uses_and_files_that_are_not_as_documented(node: Node) -> None:
    node.put(7, state="R", threads=3, pages=9, read=5, wait_s=2.5)
    assert stat(7, node.procfs) == Stat("R", 1, 2.9, 3, 77, 9 * PAGE_BYTES)
    assert (io_bytes(7, node.procfs), run_queue_s(7, node.procfs)) == ((5, 4), 2.5)
    for name in ("io", "schedstat", "stat"):
        (node.procfs / "7" / name).write_text("x")
    for read in (io_bytes, run_queue_s, stat):
        with pytest.raises(NoData):
            read(7, node.procfs)
    assert optional(stat, 7, node.procfs) is None
