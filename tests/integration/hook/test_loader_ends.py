"""Loaders that fail: the forecast before a real small /dev/shm is full, and workers killed by real signals."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.agent_process import Agent
from tests.memory_limit import memory_limit

PROGRAM = Path(__file__).with_name("loader_ends_program.py")


def train(agent: Agent | None, kill: str, numbers: int, step_s: float = 0.001, before: tuple[str, ...] = ()) -> str:
    """Run the program to its end; return what it printed on stderr."""
    environment = {**os.environ, "GPUWATCH_RUN": "doomed"}
    environment["GPUWATCH_ENDPOINT"] = agent.endpoint if agent is not None else "ipc:///nonexistent/hook.sock"
    command = [*before, sys.executable, str(PROGRAM), kill, str(numbers), str(step_s)]
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, timeout=120, errors="replace")
    assert done.returncode != 0, "the loader was to fail"
    return done.stderr


def found(agent: Agent) -> dict[str, Any]:
    """Return the finding of the run that has ended, as the API and as a report say it."""
    run = agent.wait_run("doomed", 20, status="ended")
    (finding,) = run["findings"]
    command = [sys.executable, "-m", "gpuwatch", "report", "doomed", "--agent", agent.url, "--json"]
    report = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=180, check=True).stdout)
    assert report["findings"][0]["title"] == finding["title"]
    return dict(finding)


def test_a_worker_killed_by_sigkill_is_called_so_in_verdict_api_and_report(tmp_path: Path) -> None:
    with Agent(tmp_path) as agent:
        output = train(agent, "SIGKILL", 16)
        finding = found(agent)
    assert finding["cause"] == "worker_killed" and finding["severity"] == "critical"
    assert finding["evidence"][0]["text"].endswith("ended with SIGKILL")
    assert finding["title"].startswith("a loader worker was killed with SIGKILL")
    # torch raises when the loader is asked, or from its signal handler anywhere in the training, with or without a
    # verdict before it.
    assert output.count("gpuwatch: a loader worker was killed with SIGKILL") == 1
    # If that happens while the interpreter prints the broken connection to the worker, only the latter is printed, or
    # what the interpreter prints of an exception that it cannot print.
    assert any(each in output for each in ("RuntimeError: DataLoader worker", "ConnectionResetError", "object address"))
    verdict = output[output.rindex("gpuwatch · ") :]
    assert "why   a loader worker was killed with SIGKILL" in verdict


@pytest.mark.alone  # the kernel chooses whom it kills, by what else takes memory
def test_a_worker_that_the_kernel_kills_for_lack_of_memory_is_called_so(tmp_path: Path) -> None:
    with Agent(tmp_path) as agent, memory_limit(1024) as within:
        output = train(agent, "eat", 16, before=within)
        finding = found(agent)
    assert finding["cause"] == "worker_killed" and finding["title"] == "a loader worker was killed by the OOM killer"
    assert [each["value"] for each in finding["evidence"]] == [9, 1]
    assert finding["evidence"][1]["text"] == (
        "the OOM killer killed 1 process at that time (oom_kill); its cgroup is limited to 1 GiB"
    )
    assert (
        "num_workers 2 → 1" in finding["advice"]
        and "raise the job's memory limit of 1 GiB (docker run --memory=" in finding["advice"]
    )
    assert output.count("gpuwatch: a loader worker was killed by the OOM killer") == 1
    assert "why   a loader worker was killed by the OOM killer" in output[output.rindex("gpuwatch · ") :]


def test_a_worker_that_writes_into_a_full_dev_shm_is_said_to_have_no_room_there(tmp_path: Path) -> None:
    inside = small_shm(14)
    with Agent(tmp_path) as agent:
        output = train(agent, "fill", 16, before=inside)
        finding = found(agent)
    assert finding["title"] == "a loader worker was killed by a bus error: /dev/shm was full"
    assert [each["value"] for each in finding["evidence"]] == [7, 14 << 20]
    assert finding["evidence"][1]["text"].startswith("/dev/shm has 14 MiB, ")
    assert finding["evidence"][1]["text"].endswith(
        ("0 B of it free right afterwards", "4 KiB of it free right afterwards")
    )
    assert "docker run --shm-size=" in finding["advice"]
    assert "why   a loader worker was killed by a bus error: /dev/shm was full" in output


def test_a_worker_whose_mapped_file_was_shortened_is_not_said_to_lack_room(tmp_path: Path) -> None:
    with Agent(tmp_path) as agent:
        output = train(agent, "shorten", 16)
        finding = found(agent)
    assert finding["title"] == "a loader worker was killed by a bus error although /dev/shm was not full"
    assert finding["evidence"][0]["value"] == 7 and "memory-mapped" in finding["advice"]
    assert "why   a loader worker was killed by a bus error although /dev/shm was not full" in output


def test_a_small_dev_shm_is_forecast_before_it_is_full_with_the_size_to_give() -> None:
    inside = small_shm(14)
    output = train(None, "none", 130_000, 1.0, inside)
    forecast = output.index("gpuwatch: /dev/shm")
    failure = min(at for word in ("allocate shared memory", "Bus error", "bus error") if (at := output.find(word, forecast + 200)) > 0)  # fmt: skip
    assert forecast < failure
    line = output[forecast:].splitlines()[0]
    assert "2 workers × 2 batches of 3.97 MiB need up to 15.9 MiB" in line
    assert "docker run --shm-size=20m" in line


@pytest.mark.alone  # whether a batch arrives before the memory is full depends on the machine
def test_a_dev_shm_too_small_for_the_first_batches_is_reported_with_the_size_to_give() -> None:
    output = train(None, "none", 260_000, 1.0, small_shm(14))  # 7.93 MiB a batch: one fits
    line = next(line for line in output.splitlines() if line.startswith("gpuwatch: "))
    assert line.startswith("gpuwatch: /dev/shm ")
    size_known = "2 workers × 2 batches " in line and "of 7.93 MiB need" in line and "docker run --shm-size=40m" in line
    assert size_known or "the batch size is unknown because no batch arrived" in line


def small_shm(mib: int) -> tuple[str, ...]:
    """Return the command that runs a program with its own /dev/shm of so many MiB; skip without mount namespaces."""
    if os.getuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("a /dev/shm of its own needs root and unshare")
    inside = f'mount -t tmpfs -o size={mib}m tmpfs /dev/shm && exec "$@"'
    before = ("unshare", "-m", "sh", "-c", inside, "sh")
    tried = subprocess.run([*before, "true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"no mount namespace can be had here: {tried.stderr.strip()[-200:]}")
    return before
