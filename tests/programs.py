"""Start gpuwatch's own programs and a training with a known truth, for tests that run the whole path."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.servers import Server, free_port, wait_for

ROOT = Path(__file__).parents[1]
"""The repository's own: programs run there, and its pages and deployment files are read from there."""
TRAINER = ROOT / "tests/trainer.py"


@contextmanager
def agent(directory: Path, environment: Mapping[str, str] | None = None, port: int | None = None) -> Iterator[Server]:
    """Run `gpuwatch agent` with a history and a socket in `directory`; hooks find it with `hook_environment`."""
    directory.mkdir(parents=True, exist_ok=True)
    port = port or free_port()
    command = [sys.executable, "-m", "gpuwatch", "agent", "--http", f"127.0.0.1:{port}"]
    command += ["--listen", endpoint(directory), "--history", str(directory / "history.db")]
    with _server(command, f"http://127.0.0.1:{port}", "/readyz", directory / "agent.log", environment) as server:
        yield server


@contextmanager
def dashboard(directory: Path, agent_url: str, prometheus_url: str | None = None) -> Iterator[Server]:
    """Run `gpuwatch dashboard`."""
    directory.mkdir(parents=True, exist_ok=True)
    port = free_port()
    command = [sys.executable, "-m", "gpuwatch", "dashboard", "--port", str(port), "--agent", agent_url]
    if prometheus_url is not None:
        command += ["--prometheus", prometheus_url]
    log = directory / "dashboard.log"
    with _server(command, f"http://127.0.0.1:{port}", "/_stcore/health", log, None) as server:
        yield server


def endpoint(directory: Path) -> str:
    return f"ipc://{directory}/hook.sock"


def hook_environment(directory: Path, **others: str) -> dict[str, str]:
    """Return the environment of a training whose hook finds the agent of `directory`."""
    return {**os.environ, "GPUWATCH_ENDPOINT": endpoint(directory), **others}


@contextmanager
def training(environment: Mapping[str, str], *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run tests/trainer.py, whose last line on stdout is the truth as JSON; it is ended with the `with`."""
    command = [sys.executable, str(TRAINER), *arguments]
    process = subprocess.Popen(
        command, env=dict(environment), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def end(process: subprocess.Popen[str]) -> None:
    """Have a training that is under way end after its step, whatever its `--seconds`."""
    process.send_signal(signal.SIGUSR1)


def truth(
    process: subprocess.Popen[str], timeout_s: float = 180, *, begin: float = 0.0, end: float = float("inf")
) -> dict[str, float]:
    """Wait for a training's end and return what it injected from `begin` to `end` (Unix time, to about a second).

    Seconds by state, "wall", "steps".
    """
    out, err = process.communicate(timeout=timeout_s)
    assert process.returncode == 0, err
    rows = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    last = max((row for row in rows if row["at"] <= end), key=lambda row: row["at"])
    first = max(
        (row for row in rows if row["at"] <= begin), key=lambda row: row["at"], default=dict.fromkeys(last, 0.0)
    )
    return {name: last[name] - first[name] for name in last}


@contextmanager
def _server(
    command: list[str], url: str, ready: str, log: Path, environment: Mapping[str, str] | None
) -> Iterator[Server]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=dict(environment) if environment else None
        )
    server = Server(url, process, log)

    def answers() -> bool:
        assert process.poll() is None, f"{command} ended:\n{log.read_text()[-4000:]}"
        with urllib.request.urlopen(url + ready, timeout=2) as response:
            return bool(response.status == 200)

    with server:
        wait_for(f"{url}{ready} answers", answers, 40, 0.1)
        yield server
