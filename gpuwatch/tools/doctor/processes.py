"""Processes in /proc: which of them the agent can read; and the ports of agent and page."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from gpuwatch.tools.doctor.machine import Machine, is_local
from gpuwatch.tools.doctor.outcome import Outcome, ok, problem, skipped, warning

_NODE_PID_NAMESPACE = "pid:[4026531836]"
"""PROC_PID_INIT_INO of include/linux/proc_ns.h: the inode of the kernel's first pid namespace is a constant."""
_SAMPLED = 20
_HOST_PIDS = "pid: host in compose, docker run --pid=host, hostPID: true in Kubernetes"
_PTRACE = (
    "docker run --cap-add SYS_PTRACE --cap-add DAC_READ_SEARCH (compose: cap_add), or run the agent as root; where both are there, "
    "AppArmor or a user namespace forbids it: docker run --security-opt apparmor=unconfined"
)
"""Both: /proc/PID/io is mode 0400 as well, which SYS_PTRACE alone does not pass."""


def pid_namespace(machine: Machine) -> Outcome:
    """Whether /proc is the node's: NVML reports the node's pids, which mean nothing in another pid namespace."""
    try:
        namespace = str((machine.procfs / "self/ns/pid").readlink())
    except OSError:
        return skipped(f"{machine.procfs}/self/ns/pid cannot be read")
    if namespace == _NODE_PID_NAMESPACE:
        return ok("/proc is the node's")
    found = f"/proc is a container's ({namespace})"
    if any(_is_agent(pid, machine.procfs) for pid in pids(machine.procfs)):
        return problem(f"{found}: the agent here cannot match GPUs to processes", f"give it the node's: {_HOST_PIDS}")
    return warning(f"{found}: fine for training, not for an agent", f"for an agent: {_HOST_PIDS}")


def ptrace(machine: Machine) -> Outcome:
    """Whether /proc/PID/io and /proc/PID/root of other users' processes can be read; yama restricts only py-spy."""
    yama = _yama(machine.procfs)
    others, refused = 0, 0
    for pid in pids(machine.procfs):
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
        return skipped(f"there is no process of another user to try{yama}")
    if not refused:
        return ok(f"processes of other users can be read{yama}")
    found = (
        f"I/O and /dev/shm of {refused} of {others} processes of other users cannot be read: an agent would lack them"
    )
    return warning(f"{found}{yama}", _PTRACE)


def _yama(procfs: Path) -> str:
    try:
        scope = (procfs / "sys/kernel/yama/ptrace_scope").read_text().strip()
    except OSError:
        return ""
    return "" if scope == "0" else f"; yama ptrace_scope {scope}: py-spy needs root"


def agent_port(machine: Machine) -> Outcome:
    """The port of the agent's /metrics and API: free, gpuwatch's, or taken by another program."""
    if not is_local(machine.agent_url):
        return skipped(f"{machine.agent_url} is another machine's")
    parts = urlsplit(machine.agent_url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    if (status := machine.agent().status) is not None:
        return ok(f"{port} is answered by gpuwatch {status.version}")
    if not machine.connects("127.0.0.1", port):
        return ok(f"{port} is free")
    return problem(
        f"{port} is taken, and no agent answers there",
        f"ss -ltnp shows by which program; stop it, or gpuwatch agent --http 127.0.0.1:{port + 2}",
    )


def page_port(machine: Machine) -> Outcome:
    """The port of the live page: free, a Streamlit page's, or taken by another program."""
    port = machine.page_port
    if not machine.connects("127.0.0.1", port):
        return ok(f"{port} is free")
    with suppress(OSError):
        if machine.fetch(f"http://127.0.0.1:{port}/_stcore/health").body.strip() == b"ok":
            return ok(f"{port} is answered by a Streamlit page")
    remedy = f"ss -ltnp shows which; stop it, or gpuwatch up --port {port + 1}"
    return warning(f"{port} is taken by another program", remedy)


def pids(procfs: Path) -> Iterator[int]:
    return (int(path.name) for path in procfs.glob("[0-9]*") if path.name.isdigit())


def _is_agent(pid: int, procfs: Path) -> bool:
    """Return whether a process is what `gpuwatch agent` goes on as, see gpuwatch_agent/__main__.py."""
    try:
        return b"gpuwatch_agent" in (procfs / str(pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
