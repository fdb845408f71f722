"""/dev/shm, ulimits, cores and quota, pressure, clocks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gpuwatch.host.cgroup import Quota, folders, quota
from gpuwatch.tools.doctor.limits import cores, open_files, pressure, shm, tasks
from gpuwatch.tools.doctor.machine import Machine
from tests.unit.doctor.machines import GIB, UNLIMITED, write

MakeMachine = Callable[..., Machine]
MIB = 1 << 20


@pytest.mark.parametrize(
    ("size", "used", "status", "words"),
    [
        (64 * MIB, 0, "problem", "64 MiB, 0 B used: Docker's default"),
        (512 * MIB, 0, "warning", "512 MiB"),
        (GIB, 0, "ok", "1 GiB"),
        (32 * GIB, 8 * GIB, "ok", "32 GiB, 8 GiB used"),
        (32 * GIB, 31 * GIB, "problem", "nearly full"),
        (0, 0, "ok", "no limit"),  # a tmpfs with size=0
    ],
)
def test_shm(machine: MakeMachine, size: int, used: int, status: str, words: str) -> None:
    outcome = shm(machine(disk=(size, used)))
    assert outcome.status == status and words in outcome.found
    if status != "ok":
        assert outcome.remedy and "docker run --shm-size=16g" in outcome.remedy


def test_shm_that_is_not_mounted(machine: MakeMachine) -> None:
    def absent(path: Path) -> tuple[int, int]:
        raise FileNotFoundError(2, "No such file or directory")

    assert shm(machine(space=absent)).status == "problem"


@pytest.mark.parametrize(
    ("soft", "status"), [(128, "problem"), (1024, "warning"), (4095, "warning"), (4096, "ok"), (UNLIMITED, "ok")]
)
def test_open_files(machine: MakeMachine, soft: int, status: str) -> None:
    outcome = open_files(machine(limit=(soft, 1 << 20)))
    assert outcome.status == status
    assert (outcome.remedy is None) == (status == "ok")
    assert outcome.found.startswith(
        "unlimited open files" if soft == UNLIMITED else f"{soft} open files (at most 1048576)"
    )


@pytest.mark.parametrize(
    ("soft", "cgroup", "status", "words"),
    [
        (65536, None, "ok", "65536 processes and threads (the user's)"),
        (UNLIMITED, None, "ok", "unlimited"),
        (UNLIMITED, "max", "ok", "unlimited"),
        (65536, "100", "problem", "100 processes and threads (the cgroup's)"),
        (UNLIMITED, "2048", "warning", "2048 processes and threads (the cgroup's)"),
        (1024, "20000", "warning", "1024 processes and threads (the user's)"),
    ],
)
def test_tasks(machine: MakeMachine, tmp_path: Path, soft: int, cgroup: str | None, status: str, words: str) -> None:
    host = machine(limit=(soft, UNLIMITED))
    if cgroup:
        write(tmp_path / "sys/fs/cgroup", {"job/pids.max": "max\n", "pids.max": f"{cgroup}\n"})
    outcome = tasks(host)
    assert outcome.status == status and words in outcome.found


def test_the_tightest_quota_above_counts_with_its_own_throttling(machine: MakeMachine, tmp_path: Path) -> None:
    host = machine()
    assert quota(folders("cpu", host.procfs, host.sysfs)) is None
    write(
        tmp_path / "sys/fs/cgroup",
        {
            "job/cpu.max": "max 100000\n",
            "cpu.max": "250000 100000\n",
            "cpu.stat": "usage_usec 5\nnr_periods 200\nnr_throttled 62\n",
        },
    )
    assert quota(folders("cpu", host.procfs, host.sysfs)) == Quota(2.5, 200, 62, f"{tmp_path}/sys/fs/cgroup")
    outcome = cores(host)
    assert outcome.status == "warning"
    assert outcome.found == "8 cores are seen, 2.5 may be used; throttled in 31% of 200 periods"
    assert outcome.remedy and outcome.remedy.endswith("at most 2")
    assert cores(machine(cores=lambda: 2)).status == "ok"


def test_of_two_quotas_the_smaller_one_counts(machine: MakeMachine, tmp_path: Path) -> None:
    host = machine()
    for inner, outer, tightest in ((2, 6, "/job"), (6, 2, "")):
        files = {"job/cpu.max": f"{inner}00000 100000\n", "cpu.max": f"{outer}00000 100000\n"}
        write(tmp_path / "sys/fs/cgroup", files)
        assert quota(folders("cpu", host.procfs, host.sysfs)) == Quota(2.0, 0, 0, f"{tmp_path}/sys/fs/cgroup{tightest}")


def test_a_quota_of_cgroup_version_1(machine: MakeMachine, proc: Path, tmp_path: Path) -> None:
    host = machine()
    write(proc, {"self/cgroup": "5:cpu,cpuacct:/docker/abc\n4:memory:/x\n0::/\n"})
    write(  # a container: the path is the node's, the mount its own
        tmp_path / "sys/fs/cgroup/cpu",
        {"cpu.cfs_quota_us": "400000\n", "cpu.cfs_period_us": "100000\n", "cpu.stat": "nr_periods 0\nnr_throttled 0\n"},
    )
    assert quota(folders("cpu", host.procfs, host.sysfs)) == Quota(4.0, 0, 0, f"{tmp_path}/sys/fs/cgroup/cpu")
    assert cores(host).found == "8 cores are seen, 4 may be used"
    write(tmp_path / "sys/fs/cgroup/cpu", {"cpu.cfs_quota_us": "-1\n"})
    assert quota(folders("cpu", host.procfs, host.sysfs)) is None


def test_each_controller_of_version_1_has_a_place_of_its_own(machine: MakeMachine, proc: Path, tmp_path: Path) -> None:
    host = machine()
    write(proc, {"self/cgroup": "5:cpu,cpuacct:/right\n4:memory:/wrong\n"})
    for name, quota_us in (("right", 300000), ("wrong", 100000)):
        write(
            tmp_path / "sys/fs/cgroup/cpu" / name,
            {"cpu.cfs_quota_us": f"{quota_us}\n", "cpu.cfs_period_us": "100000\n"},
        )
    assert quota(folders("cpu", host.procfs, host.sysfs)) == Quota(3.0, 0, 0, f"{tmp_path}/sys/fs/cgroup/cpu/right")


def test_pressure(machine: MakeMachine, proc: Path) -> None:
    assert pressure(machine()).status == "ok"
    (proc / "pressure/io").unlink()
    outcome = pressure(machine())
    assert outcome.status == "warning" and "for io:" in outcome.found and "psi=1" in str(outcome.remedy)
