"""The systemd unit: systemd itself reads it, its restrictions hold their score, its command starts the agent."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.agent_process import Agent
from tests.programs import ROOT
from tests.servers import require

UNIT = ROOT / "deploy/systemd/gpuwatch-agent.service"


def test_systemd_finds_no_fault_with_it(tmp_path: Path) -> None:
    """With a program that is there: the unit's own is installed by docs/deploy/systemd.md."""
    unit = tmp_path / UNIT.name
    unit.write_text(re.sub(r"(?m)^ExecStart=\S+", f"ExecStart={sys.executable}", UNIT.read_text()))
    done = _analyze("verify", str(unit))
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    unit.write_text(unit.read_text().replace("ProtectHome=yes", "ProtectHom=yes"))
    assert "ProtectHom" in _analyze("verify", str(unit)).stderr


def test_after_a_reboot_it_waits_for_the_address_that_it_listens_on(tmp_path: Path) -> None:
    """An address that is not there yet is an error of the configuration, after which systemd does not restart it."""
    refused = Agent(tmp_path).refused("--http", "192.0.2.1:9478")  # with status 2
    assert "Cannot assign requested address" in refused
    unit = UNIT.read_text()
    assert "RestartPreventExitStatus=2\n" in unit
    for setting in ("After", "Wants"):
        assert "network-online.target" in re.findall(rf"(?m)^{setting}=(.*)$", unit)[0].split()


def test_its_exposure_is_low() -> None:
    """3.1 of 10 with systemd 252; others count a little differently."""
    done = _analyze("security", "--offline=true", "--no-pager", "--threshold=40", str(UNIT))
    assert done.returncode == 0, done.stdout[-400:] + done.stderr
    assert re.search(r"Overall exposure level for gpuwatch-agent.service: \d\.\d OK", done.stdout)


def test_no_system_call_traces_a_process_or_reads_its_memory() -> None:
    """By systemd's own lists of system calls: the sets that the unit names, applied in their order."""
    allowed: set[str] = set()
    for line in re.findall(r"(?m)^SystemCallFilter=(.+)$", UNIT.read_text()):
        named = set().union(*(_system_calls(name) for name in line.removeprefix("~").split()))
        allowed = allowed - named if line.startswith("~") else allowed | named
    assert {"read", "openat", "sendmsg", "ioctl"} <= allowed
    assert not {"ptrace", "process_vm_readv", "process_vm_writev", "pidfd_getfd"} & allowed
    assert "process_vm_readv" in _system_calls("@system-service"), "which is why the unit takes it away"


def _system_calls(name: str) -> set[str]:
    """Return the system calls of a set, and of the sets in it."""
    if not name.startswith("@"):
        return {name}
    lines = _analyze("syscall-filter", "--no-pager", name).stdout.splitlines()
    members = {line.strip() for line in lines[1:] if line.strip() and not line.strip().startswith("#")}
    return set().union(*(_system_calls(member) for member in members))


def test_its_command_starts_the_agent(tmp_path: Path) -> None:
    command = re.search(r"(?m)^ExecStart=(.+)$", UNIT.read_text())
    assert command is not None
    program, verb, *options = shlex.split(command[1])
    assert (Path(program).name, verb) == ("gpuwatch", "agent")
    shipped = {"/etc/gpuwatch/gpuwatch.toml": str(ROOT / "deploy/gpuwatch.toml")}
    with Agent(tmp_path, *(shipped.get(option, option) for option in options)) as agent:
        assert agent.get_text("/readyz") == "ok\n"


def test_systemd_hears_that_it_is_ready_and_lives_until_it_is_stopped(tmp_path: Path) -> None:
    assert "WatchdogSec=60" in UNIT.read_text() and "Type=notify" in UNIT.read_text()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(60)
        with Agent(tmp_path, environment={**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify")}) as agent:
            assert systemd.recv(100) == b"READY=1"
            assert systemd.recv(100) == b"WATCHDOG=1"
            assert agent.process is not None
            os.kill(agent.process.pid, signal.SIGSTOP)
            systemd.settimeout(8)
            with pytest.raises(TimeoutError):  # one may have been under way
                systemd.recv(100), systemd.recv(100)
            os.kill(agent.process.pid, signal.SIGCONT)
            systemd.settimeout(60)
            assert systemd.recv(100) == b"WATCHDOG=1"


def _analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([require("systemd-analyze"), *arguments], capture_output=True, text=True, timeout=180)
