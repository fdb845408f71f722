"""What loader workers run out of: /dev/shm, open files, locked memory, processes."""

from __future__ import annotations

import resource
from pathlib import Path

from gpuwatch.diagnosis.thresholds import THRESHOLDS
from gpuwatch.errors import NoData
from gpuwatch.host.cgroup import folders
from gpuwatch.host.proc import memory_bytes
from gpuwatch.tools.doctor.outcome import Outcome, ok, problem, skipped, warning
from gpuwatch.tools.doctor.surroundings import Surroundings

_MIB, _GIB = 1 << 20, 1 << 30
_FEW_FILES, _ENOUGH_FILES = 256, 4096
_FEW_TASKS, _ENOUGH_TASKS = 256, 4096


def shm(around: Surroundings) -> Outcome:
    """The size of this namespace's /dev/shm: batches of loader workers pass through it, and a full one is a bus error."""
    gib = _recommended_gib(around.procfs)
    line = f"docker run --shm-size={gib}g; compose: shm_size: {gib}gb; Kubernetes: an emptyDir with medium: Memory"
    try:
        size, used = around.space(around.shm)
    except OSError as error:
        return problem(f"{around.shm}: {error.strerror}: loader workers cannot start", "mount -t tmpfs shm /dev/shm")
    found = f"{_bytes(size)}, {_bytes(used)} used"
    if size and used / size >= THRESHOLDS.shm_used:
        return problem(f"{found}: nearly full", f"ls -lS {around.shm} shows by what; or more of it: {line}")
    if size <= 64 * _MIB:
        return problem(f"{found}: Docker's default, less than two workers' batches", f"{line} (a limit, not reserved)")
    if size < _GIB:
        return warning(f"{found}: little for several workers' batches", f"{line} (a limit, not reserved)")
    return ok(found)


def open_files(around: Surroundings) -> Outcome:
    """The limit of open files: workers pass each tensor as a descriptor, and "Too many open files" is its end."""
    soft, hard = around.limits(resource.RLIMIT_NOFILE)
    remedy = "ulimit -n 65536 before training; docker run --ulimit nofile=65536:65536; systemd: LimitNOFILE=65536"
    found = f"{_limit(soft)} open files (at most {_limit(hard)})"
    if _below(soft, _FEW_FILES):
        return problem(found, remedy)
    if _below(soft, _ENOUGH_FILES):
        return warning(f"{found}: few for many workers", remedy)
    return ok(found)


def locked_memory(around: Surroundings) -> Outcome:
    """The limit of locked memory: RDMA registers its buffers under it. Memory that CUDA pins does not count."""
    soft, _ = around.limits(resource.RLIMIT_MEMLOCK)
    found = "unlimited" if soft == resource.RLIM_INFINITY else _bytes(soft)
    if not any((around.sysfs / "class/infiniband").glob("*")):
        return skipped(f"{found}; it matters to RDMA alone, and there is no such adapter")
    if _below(soft, _GIB):
        return warning(
            f"{found}: NCCL cannot register its buffers for RDMA",
            "ulimit -l unlimited; docker run --ulimit memlock=-1; systemd: LimitMEMLOCK=infinity",
        )
    return ok(found)


def tasks(around: Surroundings) -> Outcome:
    """The limit of processes and threads, the user's and the cgroup's: a worker has a few threads for each core."""
    limits = {"the user's": around.limits(resource.RLIMIT_NPROC)[0]}
    for folder in folders("pids", around.procfs, around.sysfs):
        try:
            text = (folder / "pids.max").read_text().strip()
        except OSError:
            continue
        if text != "max":
            limits["the cgroup's"] = min(int(text), limits.get("the cgroup's", int(text)))
    whose, least = min(limits.items(), key=lambda item: _finite(item[1]))
    if least == resource.RLIM_INFINITY:
        return ok("unlimited processes and threads")
    found = f"{least} processes and threads ({whose})"
    remedy = (
        "docker run --pids-limit 32768" if whose == "the cgroup's" else "ulimit -u 32768; systemd: LimitNPROC=32768"
    )
    if least < _FEW_TASKS:
        return problem(found, remedy)
    if least < _ENOUGH_TASKS:
        return warning(f"{found}: few for many workers", remedy)
    return ok(found)


def _recommended_gib(procfs: Path) -> int:
    """Return half of the memory, as the kernel itself would, and at most 16 GiB."""
    try:
        return max(1, min(16, memory_bytes(procfs)["MemTotal"] // (2 << 30)))
    except (NoData, KeyError, ValueError):
        return 8


def _finite(limit: int) -> float:
    return float("inf") if limit == resource.RLIM_INFINITY else limit


def _below(limit: int, least: int) -> bool:
    return _finite(limit) < least


def _limit(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)


def _bytes(count: int) -> str:
    for unit, name in ((_GIB, "GiB"), (_MIB, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count} B"
