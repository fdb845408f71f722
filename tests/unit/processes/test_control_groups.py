"""The kernel's kills between a run's last sign of life and its loss: /proc and /sys as folders, versions 1 and 2."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest

from gpuwatch.diagnosis.window import MemoryKills
from gpuwatch.host import cgroup
from gpuwatch.host.proc import PAGE_BYTES
from gpuwatch_agent.exporter import run_samples
from gpuwatch_agent.processes import ProcessTable
from gpuwatch_agent.processes.workers import OomWatch
from gpuwatch_agent.runs import Run, read_record
from tests.unit.agent.hooks import BOOT, MS, FakeHook, S

MIB = 1 << 20
STAT = "4711 (python) S 1 4711 4711 0 -1 4194560 9000 0 12 0 250 40 0 0 20 0 1 0 77 1000000 {pages} 1844\n"
OWN, JOB = "sys/fs/cgroup/slurm/job_7/step_0", "sys/fs/cgroup/slurm/job_7"


class Node:
    """One run whose process is in a control group, looked at once a second while its hook speaks every half."""

    def __init__(self, root: Path, version: int = 2) -> None:
        self.root = root
        self.own, self.job = (OWN, JOB) if version == 2 else (OWN.replace("cgroup/", "cgroup/memory/"), "")
        self.write("proc/4711", stat=STAT.format(pages=1000))
        self.write("proc/4711", cgroup="0::/slurm/job_7/step_0\n" if version == 2 else "4:memory:/slurm/job_7/step_0\n")
        if version == 2:
            self.write(
                self.job, memory__max=f"{512 * MIB}\n", memory__current=f"{300 * MIB}\n", memory__stat="anon 5\n"
            )
        else:
            used = {"memory__limit_in_bytes": f"{512 * MIB}\n", "memory__usage_in_bytes": f"{300 * MIB}\n"}
            self.write(self.own, **used, memory__max_usage_in_bytes=f"{400 * MIB}\n")
        self.counts(own=3, job=5, node=9)
        self.hook = FakeHook()
        self.run = Run("run-a", 0, BOOT)
        self.table = ProcessTable(root / "proc", root / "sys")
        self.watch = OomWatch(self.table)
        self.run.apply(self.hook.hello(), self.hook.at_ns, 0.0)
        self.tick(0)
        self.send_and_tick()

    def write(self, directory: str, **files: str) -> None:
        path = self.root / directory
        path.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (path / name.replace("__", ".")).write_text(text)

    def counts(self, own: int | None = None, job: int | None = None, node: int | None = None) -> None:
        if own is not None and "memory" in self.own.split("/"):
            self.write(self.own, memory__oom_control=f"oom_kill_disable 0\nunder_oom 0\noom_kill {own}\n")
        elif own is not None:
            self.write(self.own, memory__events=f"low 0\noom 8\noom_kill {own}\n")
        if job is not None and self.job:
            self.write(self.job, memory__events=f"low 0\noom 8\noom_kill {job}\n")
        if node is not None:
            self.write("proc", vmstat=f"nr_free_pages 7\noom_kill {node}\nnuma_hit 1\n")

    def send_and_tick(self) -> None:
        """The hook speaks, and half a second later it is looked at."""
        self.hook.spend("compute", 500 * MS)
        self.run.apply(self.hook.message(), self.hook.at_ns, 0.0)
        self.tick(500 * MS)

    def tick(self, passed_ns: int) -> None:
        self.hook.at_ns += passed_ns
        self.table.begin_tick()
        self.run.pass_time(self.hook.at_ns, 0.0, self.table.alive(self.run.hello))
        self.watch.update([self.run], self.hook.at_ns)

    def die(self) -> MemoryKills | None:
        """Let the process be gone until it is lost; return what was noted."""
        (self.root / "proc/4711/stat").unlink(missing_ok=True)
        for _ in range(3):
            self.tick(S)
        assert self.run.status == "lost"
        return self.run.oom

    def remove_group(self) -> None:
        for file in (self.root / self.own).iterdir():
            file.unlink()
        (self.root / self.own).rmdir()


def test_version_2_own_group_with_the_limit_of_the_job_around_it(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.write(node.job, memory__current=f"{500 * MIB}\n", memory__peak=f"{500 * MIB}\n")
    node.write("proc/4711", stat=STAT.format(pages=2000))
    node.tick(S)
    node.write("proc/4711", stat=STAT.format(pages=1))  # killed, and its memory taken back before it is gone
    node.write(node.job, memory__current=f"{2 * MIB}\n", memory__peak=f"{512 * MIB}\n")
    node.counts(own=4, job=6, node=10)
    node.tick(S)
    assert node.die() == MemoryKills("group", 1, 512 * MIB, 500 * MIB, 512 * MIB, 2000 * PAGE_BYTES)


def test_a_group_is_read_once_a_tick_for_all_ranks_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node, read = Node(tmp_path), list[Path]()
    other = Run("run-a", 1, BOOT)
    other.apply(msgspec.structs.replace(node.hook.hello(), rank=1), node.hook.at_ns, 0.0)
    monkeypatch.setattr(cgroup, "kills_in", lambda folder: read.append(folder))
    node.watch.update([node.run, other], node.hook.at_ns)
    assert read == [tmp_path / OWN, tmp_path / JOB, (tmp_path / JOB).parent, (tmp_path / JOB).parent.parent]


def test_version_1_own_group(tmp_path: Path) -> None:
    node = Node(tmp_path, version=1)
    node.counts(own=5)
    assert node.die() == MemoryKills("group", 2, 512 * MIB, 300 * MIB, 400 * MIB, 1000 * PAGE_BYTES)


def test_a_kill_right_after_the_last_word_counts_though_a_look_came_between(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.hook.spend("compute", 200 * MS)
    node.run.apply(node.hook.message(), node.hook.at_ns, 0.0)
    node.counts(own=4)
    node.tick(300 * MS)  # still there: the kernel is at it
    found = node.die()
    assert found is not None and found.kills == 1


def test_kills_before_the_last_sign_of_life_are_none_of_its(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.counts(own=4, job=6, node=10)
    for _ in range(3):
        node.send_and_tick()
    assert node.die() is None


@pytest.mark.parametrize("version", [1, 2])
def test_own_group_that_tells_of_none_is_believed(tmp_path: Path, version: int) -> None:
    node = Node(tmp_path, version)
    node.counts(job=9, node=99)
    assert node.die() is None


def test_group_that_went_with_its_process_version_2_asks_the_one_around_it(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.remove_group()
    node.counts(job=7, node=12)
    found = node.die()
    assert found is not None and (found.where, found.kills) == ("around", 2)


def test_group_that_went_with_its_process_version_1_leaves_the_nodes_count(tmp_path: Path) -> None:
    node = Node(tmp_path, version=1)
    node.remove_group()
    node.counts(node=12)
    found = node.die()
    assert found is not None and (found.where, found.kills, found.limit_bytes) == ("node", 3, 512 * MIB)


def test_nothing_is_reported_where_no_count_is_reported(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.remove_group()
    for path in (f"{node.job}/memory.events", "proc/vmstat"):
        (tmp_path / path).unlink()
    assert node.die() is None


def test_a_process_that_was_stopped_for_long_was_not_killed_back_then(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.tick(S)
    node.counts(own=4)
    for _ in range(40):
        node.tick(S)
    assert node.die() is None


def test_it_outlives_the_agent_and_ends_when_the_run_speaks_again(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.counts(own=4)
    assert node.die() is not None
    record = read_record(node.run.record())
    assert record.restore(BOOT, node.hook.at_ns, 0.0).oom == node.run.oom
    node.run.apply(node.hook.message(), node.hook.at_ns, 0.0)
    assert node.run.status == "running" and node.run.oom is None


@pytest.mark.parametrize("version", [1, 2])
def test_a_job_is_over_once_its_own_group_is_gone_and_not_with_that_of_a_step(tmp_path: Path, version: int) -> None:
    node = Node(tmp_path, version)
    node.remove_group()
    node.die()
    assert not node.run.job_over, "a process died, and its job goes on"
    shutil.rmtree((tmp_path / node.own).parent)
    node.tick(S)
    assert node.run.job_over
    samples = {sample.metric: sample for sample in run_samples(node.run, 0)}
    assert samples["gpuwatch_run_job_over"].value == 1
    node.run.apply(node.hook.message(), node.hook.at_ns, 0.0)
    assert not node.run.job_over, "it was requeued"


@pytest.mark.parametrize(
    ("unit", "inner", "is_over"),
    [
        (
            "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{uid}.slice",
            "cri-containerd-{id}.scope",
            True,
        ),
        ("kubepods/besteffort/pod{uid}", "{id}", True),
        ("system.slice/slurmstepd.scope/job_7", "step_0/user/task_0", True),
        ("system.slice/docker-{id}.scope", "", False),
        ("user.slice/user-1000.slice/session-3.scope", "", False),
    ],
    ids=["pod by systemd", "pod", "slurm", "docker", "shell"],
)
def test_only_of_a_scheduler_s_job_or_pod_is_it_known_that_it_is_over(
    tmp_path: Path, unit: str, inner: str, is_over: bool
) -> None:
    """The death of a container of docker's, or of a program in a shell, is reported by nothing else."""
    node = Node(tmp_path)
    names = {"uid": "0f1e2d3c_4b5a_6978_8796_a5b4c3d2e1f0", "id": "a" * 64}
    group = f"{unit}/{inner}".rstrip("/").format(**names)
    (tmp_path / "sys/fs/cgroup" / group).mkdir(parents=True)
    node.write("proc/4711", cgroup=f"0::/{group}\n")
    for _ in range(31):  # for so many ticks the groups of a process are kept
        node.send_and_tick()
    shutil.rmtree(tmp_path / "sys/fs/cgroup" / unit.format(**names))
    node.die()
    assert node.run.job_over == is_over
