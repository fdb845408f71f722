"""Run one program with its own agent, and record reports: every second by the agent, at the end by the hook."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import ROOT
from tests.nvml.fake import FakeGpu, FakeNvml
from tests.servers import stop

from .alone import Alone
from .gpu import FOLDER
from .program import Program

ALARMS = ("warning", "critical")
_SMALL_SHM = 'mount -t tmpfs -o size={}m tmpfs /dev/shm && exec "$@"'


@dataclass
class Outcome:
    """The diagnosis of one program. Findings are as in docs/reference/api.md, roots first."""

    program: Program
    agent: list[dict[str, Any]] = field(default_factory=list)
    """Active in the agent's last answer while the program ran."""
    ever: dict[str, float] = field(default_factory=dict)
    """Seconds after the start at which each cause was first active in the agent; alarms only, but for a true cause."""
    hook: list[dict[str, Any]] = field(default_factory=list)
    """In the hook's own report at the end."""
    skipped: str | None = None
    """Why it cannot be run on this machine."""
    failed: str | None = None
    """Why it did not run to its end."""
    busy_cores: float = 0.0
    """Cores of the machine that were in use meanwhile, by whatever process."""


def stage(program: Program, number: int, stretch: float = 1.0) -> Outcome:
    """Return the outcome of a program. It is ended, with all that it started, whatever happens."""
    outcome = Outcome(program)
    if program.shm_mib and not _may_mount():
        outcome.skipped = "needs a mount namespace of its own (root, or user namespaces)"
        return outcome
    if program.cuda and not torch.cuda.is_available():
        outcome.skipped = "needs a GPU"
        return outcome
    with tempfile.TemporaryDirectory(prefix="gpuwatch-diagnosis-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        alone = Alone(folder / "proc") if program.node == "alone" else None
        environment = {**os.environ, FOLDER: name, "GPUWATCH_QUIET": "1", "GPUWATCH_RUN": f"program-{number}"}
        environment["GPUWATCH_ENDPOINT"] = f"ipc://{name}/hook.sock"
        environment["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT, ROOT / "agent", ROOT / "dashboards")))
        try:
            with _agent(folder, program, environment, alone) as url:
                _run(program, (str(number), str(stretch)), url, environment, alone, outcome)
        finally:
            if alone is not None:
                alone.close()
    return outcome


def _run(
    program: Program,
    arguments: tuple[str, str],
    url: str,
    environment: dict[str, str],
    alone: Alone | None,
    outcome: Outcome,
) -> None:
    before = _busy_s()
    begin = time.monotonic()
    command = [sys.executable, "-m", "benchmarks.diagnosis.programs", *arguments]
    if program.ranks > 1:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(program.ranks)}
        ranks = [{**place, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(program.ranks)]
    else:
        ranks = [{}]
    if program.shm_mib:
        command = ["unshare", "-m", "sh", "-c", _SMALL_SHM.format(program.shm_mib), "sh", *command]
    processes = []
    try:
        for rank in ranks:
            out = tempfile.TemporaryFile("w+")  # noqa: SIM115 - read when the program has ended
            started = subprocess.Popen(
                command, stdout=out, cwd=ROOT, env={**environment, **rank}, start_new_session=True
            )
            processes.append((started, out))
        if alone is not None:
            alone.follow(processes[0][0].pid)
        _watch(url, [process for process, _ in processes], begin, outcome)
        for process, out in processes:
            out.seek(0)
            lines = out.read().splitlines()
            if process.returncode != 0 or not lines:
                outcome.failed = f"the program failed with status {process.returncode}"
                continue
            outcome.hook += json.loads(lines[-1])
    finally:
        for process, out in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            out.close()
    outcome.busy_cores = (_busy_s() - before) / (time.monotonic() - begin)


def _watch(url: str, processes: list[subprocess.Popen[bytes]], begin: float, outcome: Outcome) -> None:
    """Query once a second until every process has ended."""
    deadline = begin + 3 * outcome.program.seconds + 180
    while any(process.poll() is None for process in processes):
        if time.monotonic() > deadline:
            outcome.failed = "the program did not end in time"
            return
        with contextlib.suppress(OSError):
            found = _get(f"{url}/api/v1/findings")["findings"]
            runs = _get(f"{url}/api/v1/runs")["runs"]
            if not runs or any(run["status"] == "running" for run in runs):  # not the moment after a run's good-bye
                outcome.agent = _once(found)
            for finding in found:
                if finding["severity"] in ALARMS or finding["cause"] in outcome.program.causes:
                    outcome.ever.setdefault(finding["cause"], time.monotonic() - begin)
        time.sleep(1.0)


def _once(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the findings of all ranks and GPUs, each cause once, by severity and share: roots before consequences."""
    severities = ("critical", "warning", "info")
    ordered = sorted(found, key=lambda f: (f["root"] is not None, severities.index(f["severity"]), -f["ratio"]))
    return list({finding["cause"]: finding for finding in reversed(ordered)}.values())[::-1]


@contextlib.contextmanager
def _agent(folder: Path, program: Program, environment: dict[str, str], alone: Alone | None) -> Iterator[str]:
    port = _free_port()
    command = [sys.executable, "-m", "gpuwatch", "agent", "--http", f"127.0.0.1:{port}"]
    command += ["--listen", environment["GPUWATCH_ENDPOINT"], "--history", str(folder / "history.db")]
    if program.thresholds:
        lines = [f"{name} = {value!r}" for name, value in program.thresholds.items()]
        (folder / "gpuwatch.toml").write_text("\n".join(["[thresholds]", *lines, ""]))
        command += ["--config", str(folder / "gpuwatch.toml")]
    if alone is not None:
        command += ["--procfs", str(alone.folder)]
    if program.gpu:
        nvml = FakeNvml(folder)
        nvml.write([FakeGpu(utilization_percent=0, memory_used_bytes=1 << 30)])
        environment = {
            **environment,
            **{k: v for k, v in nvml.environment().items() if "NVML" in k or k == "LD_LIBRARY_PATH"},
        }
    url = f"http://127.0.0.1:{port}"
    with (folder / "agent.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 180
        while not _ready(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the agent did not start:\n{(folder / 'agent.log').read_text()[-3000:]}")
            time.sleep(0.2)
        yield url
    finally:
        stop(process)


def _ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=2) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=5) as response:
        return json.load(response)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _busy_s() -> float:
    ticks = [int(value) for value in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def _may_mount() -> bool:
    try:
        done = subprocess.run(
            ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], capture_output=True, check=False
        )
    except OSError:
        return False
    return done.returncode == 0
