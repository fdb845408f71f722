"""The agent's own view, and the socket through which a hook finds it."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuwatch.api import Status
from gpuwatch.api.client import Reply
from gpuwatch.tools.doctor.machine import Machine, Outcome, ask_agent
from gpuwatch.tools.doctor.services import agent, agent_version, collectors, hook_socket
from gpuwatch.wire import endpoint
from tests.unit.doctor.machines import STATUS, alive, answers

MakeMachine = Callable[..., Machine]
URL = "http://127.0.0.1:9478"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A short path for sockets, which may have 107 bytes."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="gw-") as directory:
        yield Path(directory)


@pytest.fixture
def listener(place: Path) -> Iterator[Path]:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(place / "hook.sock"))
        server.listen()
        yield place / "hook.sock"


def asked(page: Any, wanted: bool = False, **pages: Any) -> tuple[Status | None, Outcome]:
    """Return what the doctor finds where an agent gives this as its status."""
    return ask_agent(
        URL, wanted, answers({f"{URL}/api/v1/status": page, **{f"{URL}/{n}": p for n, p in pages.items()}})
    )


def test_agent(machine: MakeMachine) -> None:
    status, outcome = alive()
    assert status is not None and status.host == "node-17"
    assert agent(machine(agent=(status, outcome))) == outcome
    assert (outcome.status, outcome.found) == ("ok", f"{URL} is ready, gpuwatch 0.1.0 on node-17")
    assert agent(machine()).status == "skipped"
    status, stale = asked(STATUS, readyz=Reply(503, b"the last sample is 9 s old\n"))
    assert status is not None and stale.status == "problem"
    assert stale.found == f"{URL} is not ready: the last sample is 9 s old"


def test_collectors(machine: MakeMachine) -> None:
    assert collectors(machine(agent=alive())).found == "1 of 2 work; nothing to measure here: gpu"
    assert collectors(machine()).status == "skipped"
    failing = [{"name": "shm", "success": False, "message": "EACCES"}]
    outcome = collectors(machine(agent=alive(collectors=failing)))
    assert (outcome.status, outcome.found) == ("problem", "shm: EACCES")


def test_agent_version(machine: MakeMachine) -> None:
    assert agent_version(machine(agent=alive())).status == "ok"
    assert agent_version(machine()).status == "skipped"
    outcome = agent_version(machine(agent=alive(version="0.2.0")))
    assert outcome.status == "warning" and "'gpuwatch-training==0.2.0'" in str(outcome.remedy)


@pytest.mark.parametrize(
    ("page", "found", "remedy"),
    [
        (ConnectionRefusedError(111, "Connection refused"), "Connection refused", "--agent URL names one elsewhere"),
        (TimeoutError("timed out"), "timed out", "--agent URL names one elsewhere"),
        (Reply(401, b'{"error": "no token"}'), "it answers with status 401: no token", "it runs: "),
        (Reply(403, b'{"error": "it is off"}'), "it answers with status 403: it is off", "it runs: "),
        (ConnectionResetError("closed"), "closed", "check http:// or https:// in the URL"),
        (Reply(200, b"<html>"), "another program answers there (not the agent's JSON)", "another --http"),
        (Reply(404, b"{}"), "another program answers there (status 404)", "another --http"),
        ({"version": 3}, "another program answers there (not the agent's JSON)", "another --http"),
    ],
)
def test_who_answers_at_the_agents_address(page: Any, found: str, remedy: str) -> None:
    status, outcome = asked(page, wanted=True)
    assert (status, outcome.status, outcome.found) == (None, "problem", f"{URL}: {found}")
    assert outcome.remedy and remedy in outcome.remedy
    missing = isinstance(page, ConnectionRefusedError)
    assert asked(page)[1].status == ("skipped" if missing else "problem")


def test_no_socket_is_no_problem(machine: MakeMachine, tmp_path: Path) -> None:
    outcome = hook_socket(machine())
    assert outcome.status == "skipped" and str(tmp_path / "run") in outcome.found


def test_a_socket_that_is_listened_to(machine: MakeMachine, listener: Path) -> None:
    uid = listener.stat().st_uid
    outcome = hook_socket(machine(socket_directories=(listener.parent,), uid=uid))
    assert outcome.status == "ok" and f"{listener} (" in outcome.found


def test_a_socket_that_a_dead_agent_left(machine: MakeMachine, place: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(place / "hook.sock"))
    host = machine(socket_directories=(place,), uid=os.getuid())
    assert hook_socket(host).status == "warning" and "stale socket" in hook_socket(host).found
    declared = machine(environ={"GPUWATCH_ENDPOINT": f"ipc://{place}/hook.sock"}, uid=os.getuid())
    assert hook_socket(declared).status == "problem"


def test_a_socket_that_this_user_may_not_use(machine: MakeMachine, listener: Path) -> None:
    owner = listener.stat().st_uid
    refused = hook_socket(
        machine(socket_directories=(listener.parent,), uid=owner, writes=lambda path: path != listener)
    )
    assert refused.status == "problem" and "usermod -aG gpuwatch" in str(refused.remedy)
    assert refused.found.endswith(": permission denied; ask for the group gpuwatch")
    if owner == 0:  # root's: the permission decides, whoever it is
        member = machine(socket_directories=(listener.parent,), uid=4242)
        assert hook_socket(member).status == "ok"
    else:
        foreign = machine(socket_directories=(listener.parent,), uid=owner + 4242)
        assert hook_socket(foreign).status == "warning" and "another user's" in hook_socket(foreign).found


def test_the_first_socket_that_works_is_taken_and_a_plain_file_is_not_one(
    machine: MakeMachine, listener: Path, tmp_path: Path
) -> None:
    (tmp_path / "run/hook.sock").write_text("")
    uid = listener.stat().st_uid
    both = machine(socket_directories=(tmp_path / "run", listener.parent), uid=uid)
    assert hook_socket(both).status == "ok"
    alone = hook_socket(machine(uid=os.getuid()))
    assert alone.status == "problem" and "is not a socket" in alone.found


def test_a_folder_that_cannot_be_looked_into_is_a_problem(machine: MakeMachine, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    outcome = hook_socket(machine(socket_directories=(tmp_path / "file",)))  # stat fails with ENOTDIR, not ENOENT
    assert outcome.status == "problem" and "Not a directory" in outcome.found


def test_the_doctor_finds_what_the_hook_finds(
    machine: MakeMachine, listener: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "SYSTEM_DIRECTORY", listener.parent)
    assert endpoint.find({}) == f"ipc://{listener}"
    host = machine(socket_directories=endpoint.directories({}), uid=os.getuid())
    assert hook_socket(host).status == "ok"


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        ("tcp://node-17:9479", "or another IP address"),
        ("ipc:///none/hook.sock", "there is no /none/hook.sock"),
    ],
)
def test_a_declared_endpoint_that_cannot_be_reached(machine: MakeMachine, declared: str, words: str) -> None:
    outcome = hook_socket(machine(environ={"GPUWATCH_ENDPOINT": declared}))
    assert outcome.status == "problem" and words in outcome.found
