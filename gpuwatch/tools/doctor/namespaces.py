"""What the agent may see of other processes: their pids, and their files under /proc."""

from __future__ import annotations

from gpuwatch.tools.doctor.outcome import Outcome, ok, problem, skipped, warning
from gpuwatch.tools.doctor.processes import gpuwatch_part, pids
from gpuwatch.tools.doctor.surroundings import Surroundings

_NODE_PID_NAMESPACE = "pid:[4026531836]"
"""PROC_PID_INIT_INO of include/linux/proc_ns.h: the inode of the kernel's first pid namespace is a constant."""
_CAP_SYS_PTRACE = 19
_LOOKED_AT = 20
_HOST_PIDS = "pid: host in compose, docker run --pid=host, hostPID: true in Kubernetes"
_PTRACE = (
    "cap_add: [SYS_PTRACE, DAC_READ_SEARCH] in compose, docker run --cap-add SYS_PTRACE --cap-add DAC_READ_SEARCH; "
    "or run the agent as root"
)
"""Both: /proc/PID/io is mode 0400 as well, which SYS_PTRACE alone does not pass."""


def pid_namespace(around: Surroundings) -> Outcome:
    """Whether /proc is the node's: NVML speaks of the node's pids, which in a pid namespace of one's own mean nothing."""
    try:
        namespace = str((around.procfs / "self/ns/pid").readlink())
    except OSError:
        return skipped(f"{around.procfs}/self/ns/pid cannot be read")
    if namespace == _NODE_PID_NAMESPACE:
        return ok("/proc is the node's")
    strangers = sorted(pid for pid in around.nvml().pids if not (around.procfs / str(pid)).exists())
    proof = f"; NVML lists pid {strangers[0]}, which is not in it" if strangers else ""
    found = f"/proc is a container's ({namespace}){proof}"
    if any(gpuwatch_part(pid, around.procfs) in ("agent", "up") for pid in pids(around.procfs)):
        return problem(f"{found}: the agent here cannot tell whose a GPU is", f"give it the node's: {_HOST_PIDS}")
    return warning(f"{found}: fine for training, not for an agent", f"for an agent: {_HOST_PIDS}")


def ptrace(around: Surroundings) -> Outcome:
    """Whether /proc/PID/io and /proc/PID/root of other users' processes can be read; yama matters to py-spy alone."""
    yama = _yama(around)
    capable = _has_capability(around)
    others, refused = 0, 0
    for pid in pids(around.procfs):
        place = around.procfs / str(pid)
        try:
            if place.stat().st_uid == around.uid or not (place / "io").exists():
                continue
        except OSError:
            continue
        others += 1
        refused += not (around.reads(place / "io") and around.reads(place / "root"))
        if others == _LOOKED_AT:
            break
    if refused and capable:
        return warning(
            f"SYS_PTRACE is there, and {refused} of {others} processes of other users refuse all the same{yama}",
            "docker run --cap-add DAC_READ_SEARCH, for files that are their owner's; where that is there, AppArmor or a user "
            "namespace forbids it: docker run --security-opt apparmor=unconfined",
        )
    if refused:
        return warning(
            f"I/O and /dev/shm of other users' processes cannot be read (no SYS_PTRACE): an agent would lack them{yama}",
            _PTRACE,
        )
    if others:
        return ok(f"processes of other users can be read{yama}")
    if capable:
        return ok(f"SYS_PTRACE is there; there is no process of another user to try it on{yama}")
    return skipped(f"no SYS_PTRACE, and no process of another user to read{yama}", _PTRACE)


def _has_capability(around: Surroundings) -> bool:
    """Source: /proc/self/status CapEff, capabilities(7)."""
    try:
        lines = (around.procfs / "self/status").read_text().splitlines()
    except OSError:
        return False
    masks = [int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")]
    return any(mask >> _CAP_SYS_PTRACE & 1 for mask in masks)


def _yama(around: Surroundings) -> str:
    try:
        scope = (around.procfs / "sys/kernel/yama/ptrace_scope").read_text().strip()
    except OSError:
        return ""
    return "" if scope == "0" else f"; yama ptrace_scope {scope}: py-spy needs root"
