"""Permissions and limits: which processes the agent can read; the /dev/shm, files, processes and cores of workers."""

import resource
from collections.abc import Iterator
from pathlib import Path

from gpuwatch.diagnosis.thresholds import THRESHOLDS
from gpuwatch.formatting import size
from gpuwatch.host import proc
from gpuwatch.host.cgroup import folders, quota, tasks_limit
from gpuwatch.tools.doctor.machine import Machine, Outcome, ok, problem, skipped, warning

_MIB, _GIB = 1 << 20, 1 << 30
_LARGER = "docker run --shm-size=16g; compose: shm_size: 16gb; Kubernetes: an emptyDir with medium: Memory"
_FEW, _ENOUGH = 256, 4096
_NODE_PID_NAMESPACE = "pid:[4026531836]"
"""PROC_PID_INIT_INO of include/linux/proc_ns.h: the inode of the kernel's first pid namespace is a constant."""
_SAMPLED = 20
_HOST_PIDS = "pid: host in compose, docker run --pid=host, hostPID: true in Kubernetes"
_PTRACE = (
    "docker run --cap-add SYS_PTRACE --cap-add DAC_READ_SEARCH (compose: cap_add), or run the agent as root; if it has both, "
    "AppArmor or a user namespace forbids it: docker run --security-opt apparmor=unconfined"
)
"""Both: /proc/PID/io is mode 0400 as well, which SYS_PTRACE alone does not pass."""


def pid_namespace(machine: Machine) -> Outcome:
    """Whether /proc is the node's: NVML reports pids of the node, which are meaningless in another pid namespace."""
    try:
        namespace = str((machine.procfs / "self/ns/pid").readlink())
    except OSError:
        return skipped(f"{machine.procfs}/self/ns/pid cannot be read")
    if namespace == _NODE_PID_NAMESPACE:
        return ok("/proc is the node's")
    found = f"/proc is a container's ({namespace})"
    commands = (proc.text_of(machine.procfs / str(pid) / "cmdline").split("\0") for pid in _pids(machine.procfs))
    if any("gpuwatch_agent" in command for command in commands):  # what `gpuwatch agent` goes on as
        return problem(f"{found}: the agent here cannot match GPUs to processes", f"give it the node's: {_HOST_PIDS}")
    return warning(f"{found}: fine for training, not for an agent", f"for an agent: {_HOST_PIDS}")


def ptrace(machine: Machine) -> Outcome:
    """Whether /proc/PID/io and /proc/PID/root of other users' processes are readable; Yama restricts only py-spy."""
    scope = proc.text_of(machine.procfs / "sys/kernel/yama/ptrace_scope")
    yama = "" if scope in ("", "0") else f"; yama ptrace_scope {scope}: py-spy needs root"
    others, refused = 0, 0
    for pid in _pids(machine.procfs):
        place = machine.procfs / str(pid)
        try:
            if place.stat().st_uid == machine.uid or not (place / "io").exists():
                continue
        except OSError:
            continue
        others += 1
        refused += not (machine.reads(place / "io") and machine.reads(place / "root"))
        if others == _SAMPLED:
            break
    if not others:
        return skipped(f"there is no process of another user to try it on{yama}")
    if not refused:
        return ok(f"processes of other users can be read{yama}")
    found = f"I/O and /dev/shm of {refused} of {others} processes of other users cannot be read"
    return warning(f"{found}: an agent would lack them{yama}", _PTRACE)


def _pids(procfs: Path) -> Iterator[int]:
    return (int(path.name) for path in procfs.glob("[0-9]*") if path.name.isdigit())


def shm(machine: Machine) -> Outcome:
    """The size of this namespace's /dev/shm: loader workers pass batches through it, and crash with SIGBUS if it is
    full."""
    try:
        total, used, _ = machine.space(machine.shm)
    except OSError as error:
        return problem(f"{machine.shm}: {error.strerror}: loader workers cannot start", "mount -t tmpfs shm /dev/shm")
    if not total:
        return ok("no limit")
    found = f"{size(total)}, {size(used)} used"
    if used / total >= THRESHOLDS.shm_used:
        return problem(f"{found}: nearly full", f"ls -lS {machine.shm} lists what fills it; or enlarge it: {_LARGER}")
    remedy = f"{_LARGER} (a limit, not reserved)"
    if total <= 64 * _MIB:
        return problem(f"{found}: Docker's default, less than two workers' batches", remedy)
    if total < _GIB:
        return warning(f"{found}: little for several workers' batches", remedy)
    return ok(found)


def open_files(machine: Machine) -> Outcome:
    """The limit of open files: workers pass each tensor as a file descriptor, and fail beyond it: "Too many open
    files"."""
    soft, hard = machine.limits(resource.RLIMIT_NOFILE)
    return _enough(
        soft,
        f"{_limit(soft)} open files (at most {_limit(hard)})",
        "ulimit -n 65536 before training; docker run --ulimit nofile=65536:65536; systemd: LimitNOFILE=65536",
    )


def tasks(machine: Machine) -> Outcome:
    """The limits of processes and threads, of the user and of the cgroup: a worker has a few threads per core."""
    limits = [(machine.limits(resource.RLIMIT_NPROC)[0], "the user's")]
    if (of_group := tasks_limit(folders("pids", machine.procfs, machine.sysfs))) is not None:
        limits.append((of_group, "the cgroup's"))
    least, whose = min(limits, key=lambda each: each[0])
    remedy = "ulimit -u 32768; systemd: LimitNPROC=32768" if whose == "the user's" else "docker run --pids-limit 32768"
    return _enough(least, f"{_limit(least)} processes and threads ({whose})", remedy)


def cores(machine: Machine) -> Outcome:
    """Usable cores against the CPU quota: torch starts one thread per core, and a lower quota throttles all of them."""
    usable, limit = machine.cores(), quota(folders("cpu", machine.procfs, machine.sysfs))
    if limit is None or limit.cores >= usable:
        return ok(f"{usable} usable, no quota below them")
    held = f"; throttled in {limit.throttled / limit.periods:.0%} of {limit.periods} periods" if limit.periods else ""
    return warning(
        f"{usable} cores are seen, {limit.cores:g} may be used{held}",
        f"raise it (docker run --cpus, limits.cpu), or num_workers + OMP_NUM_THREADS of at most {max(1, int(limit.cores))}",
    )


def pressure(machine: Machine) -> Outcome:
    """Whether the kernel reports pressure stall information (PSI): how long tasks waited for CPU, I/O and memory."""
    folder = machine.procfs / "pressure"
    if missing := [kind for kind in ("cpu", "io", "memory") if proc.optional(proc.pressure_s, folder / kind) is None]:
        remedy = "a kernel of 4.20 or later, booted with psi=1"
        return warning(f"no pressure figures for {', '.join(missing)}: causes are less certain", remedy)
    return ok("cpu, io and memory")


def _enough(limit: float, found: str, remedy: str) -> Outcome:
    if limit < _FEW:
        return problem(found, remedy)
    if limit < _ENOUGH:
        return warning(f"{found}: too few for many loader workers", remedy)
    return ok(found)


def _limit(limit: float) -> str:
    return "unlimited" if limit == float("inf") else f"{limit:.0f}"
