"""Run a program in its own control group with a real memory limit, so that the kernel's OOM killer acts only there."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

_CGROUPS = Path("/sys/fs/cgroup")


@contextmanager
def memory_limit(mib: int) -> Iterator[tuple[str, ...]]:
    """Give what to put before a command so that it runs within so much memory and no swap; skip if that is impossible.

    A group is made by hand where root may (version 1 or 2), else by systemd.
    """
    if os.getuid() != 0:
        pytest.skip("a control group with a memory limit needs root")
    group, why = _made(mib)
    if group is not None:
        try:
            yield ("sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh")
        finally:
            _removed(group)
        return
    scope = ("systemd-run", "--scope", "--quiet", "-p", f"MemoryMax={mib}M", "-p", "MemorySwapMax=0")
    if shutil.which("systemd-run") is None or subprocess.run([*scope, "true"], capture_output=True).returncode:
        pytest.skip(f"no control group with a memory limit can be had: {why}; and no systemd that gives one")
    yield scope


@contextmanager
def job_group() -> Iterator[Path]:
    """Give a control group that is named as that of Slurm's job 7, and may be removed; skip where none can be made."""
    first_version = _CGROUPS / "memory"
    around = (first_version if first_version.is_dir() else _CGROUPS) / f"gpuwatch-test-{os.getpid()}"
    group = around / "job_7"
    try:
        group.mkdir(parents=True)
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    try:
        yield group
    finally:
        for folder, _, _ in os.walk(around, topdown=False):
            _removed(Path(folder))


def _made(mib: int) -> tuple[Path | None, str]:
    """Return (a new group that is limited, ""), or (None, why there is none)."""
    first_version = _CGROUPS / "memory"
    group = (first_version if first_version.is_dir() else _CGROUPS) / f"gpuwatch-test-{os.getpid()}"
    limit, swap = ("memory.max", "memory.swap.max")
    if first_version.is_dir():
        limit, swap = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
    try:
        group.mkdir()
    except OSError as error:
        return None, str(error)
    try:
        (group / limit).write_text(str(mib << 20))
    except OSError as error:  # version 2: its parent gives no memory controller away
        group.rmdir()
        return None, str(error)
    with suppress(OSError):  # a kernel that does not account swap
        (group / swap).write_text("0" if limit == "memory.max" else str(mib << 20))
    return group, ""


def _removed(group: Path) -> None:
    """Remove a group once the last of its processes is reaped."""
    for _ in range(100):
        with suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.05)
    pytest.fail(f"{group} still has processes: {(group / 'cgroup.procs').read_text().split()}")
