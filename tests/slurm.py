"""A Slurm of our own for tests: the real controller and two real nodes on this machine, without munge.

with start_slurm(directory, prolog="…") as slurm:
    slurm.run("srun", "-N2", "hostname")
"""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.servers import free_port, require, stop, wait_for

NODES = ("n1", "n2")


@dataclass(frozen=True)
class Slurm:
    """A cluster that takes jobs."""

    env: Mapping[str, str]
    """The environment that points Slurm's commands to it."""

    def run(self, *command: str, env: Mapping[str, str] | None = None, timeout_s: float = 60) -> str:
        """Return a command's output. Raises AssertionError with its errors when it fails."""
        done = subprocess.run(
            command, env={**self.env, **(env or {})}, capture_output=True, text=True, timeout=timeout_s
        )
        assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}"
        return done.stdout

    def start(self, *command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/"
        )


def epilog_line(log: Path) -> str:
    """Return the line of docs/deploy/slurm.md that prints a job at its end, for this Python's gpuwatch and this log."""
    page = (Path(__file__).parents[1] / "docs/deploy/slurm.md").read_text()
    found = re.search(r"^timeout .* /opt/gpuwatch/bin/gpuwatch .*>>(/var/log/\S+) .*$", page, re.MULTILINE)
    assert found is not None
    line = found[0].replace("/opt/gpuwatch/bin/gpuwatch", f"{sys.executable} -m gpuwatch")
    return line.replace(found[1], str(log))


@contextlib.contextmanager
def start_slurm(directory: Path, **settings: str | Path) -> Iterator[Slurm]:
    """Give a cluster whose slurm.conf has these settings too. All that it writes is below `directory`."""
    programs = {name: require(name) for name in ("slurmctld", "slurmd")}
    require("srun")
    config = directory / "slurm.conf"
    config.write_text(_config(directory, settings))
    for number in range(2):
        with contextlib.suppress(PermissionError):  # jobs then have no GPUs
            os.mknod(directory / f"nvidia{number}", stat.S_IFCHR | 0o666, os.makedev(1, 3))  # as /dev/null
    (directory / "gres.conf").write_text(f"Name=gpu File={directory}/nvidia[0-1]\n")
    env = {**os.environ, "SLURM_CONF": str(config)}
    for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"):
        env.pop(name, None)
    commands = {"slurmctld": [programs["slurmctld"], "-D", "-f", str(config)]}
    commands |= {node: [programs["slurmd"], "-D", "-N", node, "-f", str(config)] for node in NODES}
    with contextlib.ExitStack() as stack:
        for name, command in commands.items():
            stack.enter_context(_daemon(command, env, directory / f"{name}.log"))
        slurm = Slurm(env)

        def idle() -> bool:
            try:
                return slurm.run("sinfo", "-h", "-o", "%D %t").split() == ["2", "idle"]
            except AssertionError:
                return False

        try:
            wait_for("both nodes are idle", idle, 60)
        except AssertionError as late:
            logs = "\n".join((directory / f"{name}.log").read_text()[-1500:] for name in commands)
            raise AssertionError(f"{late}\n{logs}") from late
        yield slurm


@contextlib.contextmanager
def _daemon(command: list[str], env: Mapping[str, str], log: Path) -> Iterator[None]:
    with log.open("w") as output:
        process = subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield
    finally:
        stop(process, 15)


def _config(directory: Path, settings: Mapping[str, str | Path]) -> str:
    """Return slurm.conf. Every port is a free one; each node is distinguished by its name and port alone."""
    host = socket.gethostname()
    lines = {
        "ClusterName": "gpuwatch",
        "SlurmctldHost": f"{host}(127.0.0.1)",
        "SlurmctldPort": free_port(),
        "AuthType": "auth/none",
        "CredType": "cred/none",
        "SlurmUser": getpass.getuser(),
        "SlurmdUser": getpass.getuser(),
        "StateSaveLocation": directory / "state",
        "SlurmdSpoolDir": directory / "spool-%n",
        "SlurmctldPidFile": directory / "slurmctld.pid",
        "SlurmdPidFile": directory / "%n.pid",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "SwitchType": "switch/none",
        "MpiDefault": "none",
        "SelectType": "select/cons_tres",
        "ReturnToService": 2,
        "GresTypes": "gpu",
        **settings,
    }
    ports = ",".join(str(free_port()) for _ in NODES)
    node = f"NodeName={','.join(NODES)} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports} CPUs=1 Gres=gpu:2 State=UNKNOWN"
    partition = "PartitionName=all Nodes=ALL Default=YES State=UP MaxTime=INFINITE"
    return "\n".join((*(f"{name}={value}" for name, value in lines.items()), node, partition, ""))
