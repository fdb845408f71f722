"""Processes in /proc: which of them the agent can read, and who listens on the ports of agent and page.

A process is named by its program alone: a whole command line may hold secrets.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

from gpuwatch.tools.doctor.machine import Machine, is_local
from gpuwatch.tools.doctor.outcome import Outcome, ok, problem, skipped, warning

_LOOPBACK = ("0100007F", "0" * 8, "0" * 24 + "01000000", "0" * 32)
"""127.0.0.1, 0.0.0.0, ::1 and :: as /proc/net/tcp writes them on a little-endian machine."""
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
    unknown = sorted(pid for pid in machine.nvml().pids if not (machine.procfs / str(pid)).exists())
    proof = f"; NVML lists pid {unknown[0]}, which is not in it" if unknown else ""
    found = f"/proc is a container's ({namespace}){proof}"
    if any(gpuwatch_part(pid, machine.procfs) in ("agent", "up") for pid in pids(machine.procfs)):
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
        return skipped(f"no process of another user to read{yama}", _PTRACE)
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
    status = machine.agent().status
    answers = "" if status is None else f"gpuwatch {status.version}"  # it may be forwarded into a container
    return _port(machine, port, lambda program: answers, problem, f"gpuwatch agent --http 127.0.0.1:{port + 2}")


def page_port(machine: Machine) -> Outcome:
    """The port of the live page. With a page in a container only the port forwarder shows: any Streamlit behind it counts."""
    port = machine.page_port

    def answers(program: str) -> str:
        return "a Streamlit page" if program in ("", "docker-proxy") and _is_streamlit(port, machine) else ""

    return _port(machine, port, answers, warning, f"gpuwatch up --port {port + 1}")


def _port(
    machine: Machine, port: int, answers: Callable[[str], str], taken: Callable[[str, str], Outcome], other: str
) -> Outcome:
    """Return whether a port is free. `answers` returns which part of gpuwatch answers behind a program, "" for none."""
    procfs = machine.procfs
    try:
        inode = listening(port, procfs)
    except OSError:
        return skipped(f"{port}: {procfs}/net/tcp cannot be read")
    pid = None if inode is None else holder(inode, procfs)
    program = "" if pid is None else command(pid, procfs)
    by = "" if inode is None else " (whose process is not visible: another user's, or another container's)"
    if pid is not None:
        by = f": {program or 'a program'}, pid {pid}"
    if answering := answers(program):
        return ok(f"{port} is answered by {answering}{by}")
    if inode is None:
        return ok(f"{port} is free")
    if pid is not None and gpuwatch_part(pid, procfs):
        return ok(f"{port} is held by gpuwatch{by}")
    return taken(f"{port} is taken by another program{by}", f"stop that one, or use another port: {other}")


def _is_streamlit(port: int, machine: Machine) -> bool:
    try:
        answer = machine.fetch(f"http://127.0.0.1:{port}/_stcore/health")
    except OSError:
        return False
    return answer.status == 200 and answer.body.strip() == b"ok"


def pids(procfs: Path) -> Iterator[int]:
    return (int(path.name) for path in procfs.glob("[0-9]*") if path.name.isdigit())


def _command_line(pid: int, procfs: Path) -> list[str]:
    """Return a process's arguments; [""] where there are none or it is gone."""
    try:
        return (procfs / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return [""]


def command(pid: int, procfs: Path) -> str:
    """Return a process's program without its options: "python3 -m http.server". "" if it is gone."""
    words = _command_line(pid, procfs)
    program = Path(words[0]).name
    if not program.startswith("python"):
        return program
    if words[1:2] == ["-m"]:
        return " ".join([program, *words[1:3]])
    return " ".join([program, *(Path(word).name for word in words[1:2] if not word.startswith("-"))])


def gpuwatch_part(pid: int, procfs: Path) -> str:
    """Return "agent", "dashboard", … for a process of gpuwatch, "" for any other."""
    words = _command_line(pid, procfs)
    if any("gpuwatch_dashboards" in word for word in words):
        return "dashboard"
    if "gpuwatch_agent" in words:  # what `gpuwatch agent` goes on as, see gpuwatch_agent/__main__.py
        return "agent"
    for before, word in pairwise(words):
        if Path(before).name == "gpuwatch" and word.isalpha():
            return word
    return ""


def listening(port: int, procfs: Path) -> int | None:
    """Return the inode of a socket that keeps a program from listening on loopback at a TCP port; None for none.

    Source: /proc/net/tcp and tcp6, proc(5): state 0A is LISTEN, addresses are hexadecimal words in host order.
    Raises: OSError where there is no such table.
    """
    for name in ("tcp", "tcp6"):
        path = procfs / "net" / name
        if name == "tcp6" and not path.exists():  # IPv6 is off
            continue
        for line in path.read_text().splitlines()[1:]:
            fields = line.split()
            address, _, hexadecimal = fields[1].rpartition(":")
            if fields[3] == "0A" and int(hexadecimal, 16) == port and address in _LOOPBACK:
                return int(fields[9])
    return None


def holder(inode: int, procfs: Path) -> int | None:
    """Return a process that has the socket open, None where none is visible: those of other users need SYS_PTRACE."""
    wanted = f"socket:[{inode}]"
    for pid in pids(procfs):
        try:
            descriptors = list((procfs / str(pid) / "fd").iterdir())
        except OSError:
            continue
        for descriptor in descriptors:
            with contextlib.suppress(OSError):  # closed meanwhile, as the one that listed them is
                if str(descriptor.readlink()) == wanted:
                    return pid
    return None
