"""The ports of agent and page: free, gpuwatch's own, or taken by a program that is named."""

from __future__ import annotations

from gpuwatch.tools.doctor.outcome import Outcome, ok, problem, skipped, warning
from gpuwatch.tools.doctor.processes import command, gpuwatch_part, holder, listening
from gpuwatch.tools.doctor.surroundings import Surroundings
from gpuwatch.tools.doctor.web import is_local, port_of


def agent_port(around: Surroundings) -> Outcome:
    """The port of the agent's /metrics and API."""
    if not is_local(around.agent_url):
        return skipped(f"{around.agent_url} is another machine's")
    port = port_of(around.agent_url)
    try:
        inode = listening(port, around.procfs)
    except OSError:
        return skipped(f"{port}: {around.procfs}/net/tcp cannot be read")
    status = around.agent().status
    if status is not None:  # it may be forwarded into a container, with no listener here
        by = "" if inode is None else _by(inode, around)
        return ok(f"{port} is answered by gpuwatch {status.version}{by}")
    if inode is None:
        return ok(f"{port} is free")
    pid = holder(inode, around.procfs)
    if pid is not None and gpuwatch_part(pid, around.procfs):
        return ok(f"{port} is held by gpuwatch{_by(inode, around)}")
    return problem(
        f"{port} is taken by another program{_by(inode, around)}",
        f"stop that one, or give the agent another port: gpuwatch agent --http 127.0.0.1:{port + 2}",
    )


def page_port(around: Surroundings) -> Outcome:
    """The port of the live page. A page in a container shows as its port forwarder: any Streamlit behind one is taken for it."""
    port = around.page_port
    try:
        inode = listening(port, around.procfs)
    except OSError:
        return skipped(f"{port}: {around.procfs}/net/tcp cannot be read")
    if inode is None:
        return ok(f"{port} is free")
    pid = holder(inode, around.procfs)
    if pid is not None and gpuwatch_part(pid, around.procfs):
        return ok(f"{port} is held by gpuwatch{_by(inode, around)}")
    if (pid is None or command(pid, around.procfs) == "docker-proxy") and _is_streamlit(port, around):
        return ok(f"{port} is answered by a Streamlit page{_by(inode, around)}")
    return warning(
        f"{port} is taken by another program{_by(inode, around)}",
        f"stop that one, or give the page another port: gpuwatch up --port {port + 1}",
    )


def _by(inode: int, around: Surroundings) -> str:
    pid = holder(inode, around.procfs)
    if pid is None:
        return " (whose process does not show: another user's, or another container's)"
    return f": {command(pid, around.procfs) or 'a program'}, pid {pid}"


def _is_streamlit(port: int, around: Surroundings) -> bool:
    try:
        answer = around.fetch(f"http://127.0.0.1:{port}/_stcore/health")
    except OSError:
        return False
    return answer.status == 200 and answer.body.strip() == b"ok"
