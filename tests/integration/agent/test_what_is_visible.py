"""What of a training others can read, and what gpuwatch opens in its process: the claims of SECURITY.md."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import psutil

from tests.integration.agent_process import Agent
from tests.servers import wait_for

TRAINING = """
import sys, time, gpuwatch
with gpuwatch.Watch(quiet=True) as w:
    for _ in w.steps(range(10_000)):
        time.sleep(0.05)
"""
PAGES = (
    "/metrics", "/api/v1/status", "/api/v1/runs", "/api/v1/runs?kept=all", "/api/v1/findings", "/api/v1/jobs", "/api/v1/ledger",
    "/api/v1/runs/visible/steps", "/api/v1/runs/visible/findings", "/api/v1/series?metric=gpuwatch_run_seconds_total",
)  # fmt: skip


def test_a_trainings_environment_arguments_and_files_are_on_no_page(tmp_path: Path) -> None:
    script = tmp_path / "hunter2-folder" / "train.py"
    script.parent.mkdir()
    script.write_text(TRAINING)
    with Agent(tmp_path) as agent:
        environment = {
            **os.environ, "GPUWATCH_RUN": "visible", "GPUWATCH_ENDPOINT": agent.endpoint, "API_TOKEN": "hunter2-environment",
        }  # fmt: skip
        training = subprocess.Popen([sys.executable, str(script), "--password=hunter2-argument"], env=environment)
        try:
            pages = wait_for("step records are kept", lambda: _pages(agent), 30)
            assert "visible" in pages and "hunter2" not in pages
            process = psutil.Process(training.pid)
            assert [each for each in process.net_connections("inet") if each.status == psutil.CONN_LISTEN] == []
            assert [each.path for each in process.open_files() if each.mode != "r"] == []
        finally:
            training.kill()
            training.wait(10)


def test_the_socket_and_the_history_are_their_owners(tmp_path: Path) -> None:
    with Agent(tmp_path) as agent:
        assert stat.S_IMODE((tmp_path / "hook.sock").stat().st_mode) in (0o600, 0o660)
        assert stat.S_IMODE(agent.history.stat().st_mode) == 0o600


def _pages(agent: Agent) -> str | None:
    texts = [agent.get_text(path) for path in PAGES]
    return "".join(texts) if all("visible" in texts[number] for number in (0, 2, 7)) else None
