"""What control groups grant, read from the files of both versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuwatch.host.cgroup import (
    MemoryRoom,
    Quota,
    folders,
    memory_room,
    oom_kills,
    quota,
    throttled_ratio,
    within_limit,
    within_quota,
)

GIB = 1 << 30
Tree = dict[str, str]


def tree(root: Path, files: Tree) -> tuple[Path, Path]:
    """Write files below a folder; return its (proc, sys)."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root / "proc", root / "sys"


SECOND: Tree = {
    "proc/self/cgroup": "0::/slurm/job_7/step_0",
    "sys/fs/cgroup/slurm/job_7/memory.max": str(4 * GIB),
    "sys/fs/cgroup/slurm/job_7/memory.current": str(3 * GIB),
    "sys/fs/cgroup/slurm/job_7/memory.stat": f"anon 5\ninactive_file {GIB // 2}",
    "sys/fs/cgroup/slurm/job_7/cpu.max": "250000 100000",
    "sys/fs/cgroup/slurm/job_7/step_0/memory.max": "max",
    "sys/fs/cgroup/slurm/job_7/step_0/memory.current": str(GIB),
    "sys/fs/cgroup/slurm/job_7/step_0/memory.events": "low 0\noom 2\noom_kill 1",
    "sys/fs/cgroup/slurm/job_7/step_0/cpu.max": "max 100000",
}
FIRST: Tree = {
    "proc/self/cgroup": "5:cpu,cpuacct:/docker/ab\n4:memory:/docker/ab\n0::/",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": str(4 * GIB),
    "sys/fs/cgroup/memory/memory.usage_in_bytes": str(3 * GIB),
    "sys/fs/cgroup/memory/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB // 2}",
    "sys/fs/cgroup/memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1",
    "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "250000",
    "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
}
"""A container's: its path is the node's, and its own group is what is mounted."""


@pytest.mark.parametrize("files", [SECOND, FIRST], ids=["version 2, in a job", "version 1, in a container"])
def test_the_tightest_group_counts_wherever_it_is(tmp_path: Path, files: Tree) -> None:
    proc, sys = tree(tmp_path, files)
    job = sys / "fs/cgroup" / ("slurm/job_7" if files is SECOND else "memory")
    memory, granted = folders("memory", proc, sys), quota(folders("cpu", proc, sys))
    room = memory_room(memory)
    assert room == MemoryRoom(GIB + GIB // 2, 4 * GIB, 3 * GIB, job)
    assert within_limit(100 * GIB, room) == within_limit(None, room) == GIB + GIB // 2
    assert within_limit(GIB, room) == GIB
    assert [within_quota(cores, granted) for cores in (2, 64)] == [2, 3]
    assert oom_kills(memory) == 1


def test_no_limit_is_none(tmp_path: Path) -> None:
    proc, sys = tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/a",
            "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "9223372036854771712",
            "sys/fs/cgroup/memory/a/memory.usage_in_bytes": "1",
        },
    )
    memory = folders("memory", proc, sys)
    assert memory and memory_room(memory) is None and oom_kills(memory) is None
    assert within_limit(7, None) == 7 and within_limit(None, None) is None
    assert quota(folders("cpu", proc, sys)) is None
    assert folders("cpu", tmp_path / "none", sys) == [] and quota([]) is None
    assert within_quota(6, None) == 6


@pytest.mark.parametrize("text", ["x", "max", "1", "1 0"])
def test_a_quota_that_cannot_be_read_is_none(tmp_path: Path, text: str) -> None:
    proc, sys = tree(tmp_path, {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": text})
    assert quota(folders("cpu", proc, sys)) is None


def test_a_quota_holds_back_in_a_share_of_its_periods() -> None:
    first, last = Quota(2.5, 100, 10), Quota(2.5, 300, 160)
    assert throttled_ratio(first, last) == 0.75
    assert throttled_ratio(first, first) is throttled_ratio(None, last) is throttled_ratio(first, None) is None


def test_half_a_core_is_one(tmp_path: Path) -> None:
    proc, sys = tree(tmp_path, {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "50000 100000"})
    assert within_quota(6, quota(folders("cpu", proc, sys))) == 1


def test_another_processs_group_is_not_taken_for_the_one_that_is_mounted_here(tmp_path: Path) -> None:
    proc, sys = tree(
        tmp_path,
        {
            "proc/7/cgroup": "0::/../training",
            "proc/8/cgroup": "0::/gone",
            "proc/9/cgroup": "0::/here",
            "sys/fs/cgroup/here/x": "",
        },
    )
    assert folders("memory", proc, sys, 7) == folders("memory", proc, sys, 8) == []
    assert folders("memory", proc, sys, 9) == [sys / "fs/cgroup/here", sys / "fs/cgroup"]
