"""A job that is killed and goes on at its checkpoint, with real processes and a real agent: its ledger closes, and its redone steps are exact."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.programs import agent, hook_environment
from tests.servers import Server, wait_for

PROGRAM = """
import sys, time
import gpuwatch

def batches(count):
    for _ in range(count):
        time.sleep(0.03)
        yield 0

first, count = int(sys.argv[1]), int(sys.argv[2])
with gpuwatch.Watch(quiet=True) as w:
    print(time.time(), flush=True)
    for _ in w.steps(batches(count), start=first):
        time.sleep(0.02)
        print(time.time(), flush=True)
    if len(sys.argv) > 3:
        time.sleep(600)  # to be killed
"""

RANK = """
import os, sys, time
import gpuwatch

attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), os.environ["RANK"]
first, until = ((0, 30), (20, 50))[attempt]
open(f"{sys.argv[1]}/{rank}-begin-{attempt}", "w").write(str(time.time()))
with gpuwatch.Watch(quiet=True) as w:
    for _ in w.steps(range(first, until), start=first):
        time.sleep(0.02)
    if attempt == 0:
        time.sleep(1.5 if rank == "1" else 60)  # rank 0 waits for rank 1, as in a collective
        os._exit(1)
open(f"{sys.argv[1]}/{rank}-end", "w").write(str(time.time()))
"""


def job_of(server: Server) -> dict[str, Any]:
    (job,) = server.get("/api/v1/jobs")["jobs"]
    return dict(job)


def test_a_killed_job_that_goes_on_at_its_checkpoint(tmp_path: Path) -> None:
    environment = hook_environment(tmp_path, GPUWATCH_RUN="resumed", GPUWATCH_JOB="llm-7")
    with agent(tmp_path) as node:
        first = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "0", "60", "hang"], env=environment, stdout=subprocess.PIPE, text=True
        )
        assert first.stdout is not None
        times = [float(first.stdout.readline()) for _ in range(61)]
        wait_for("60 steps arrived", lambda: job_of(node)["steps"] == 60, 20)
        first.send_signal(signal.SIGKILL)
        first.communicate()
        killed = time.time()
        wait_for("it is lost", lambda: job_of(node)["status"] == "lost", 20)
        time.sleep(2)
        resumed = time.time()
        second = subprocess.run(
            [sys.executable, "-c", PROGRAM, "40", "50"], env=environment, check=True, capture_output=True, text=True
        )
        end = time.time()
        wait_for("it has ended", lambda: job_of(node)["status"] == "ended", 20)
        job = job_of(node)
        run = node.get("/api/v1/runs")["runs"][0]
        report = [sys.executable, "-m", "gpuwatch", "report", "--agent", node.url, "--job"]
        text = subprocess.run([*report, "llm-7"], check=True, capture_output=True, text=True).stdout
        unknown = subprocess.run([*report, "other"], capture_output=True, text=True)

    assert (job["job"], job["attempts"], job["interruptions"]) == ("llm-7", 2, 1)
    assert (job["steps"], job["redone_steps"]) == (110, 20)
    assert "steps   110, of which 20 redone" in text
    assert unknown.returncode == 2 and "known: llm-7" in " ".join(unknown.stderr.split())
    states = job["states"]
    assert sum(states.values()) == pytest.approx(job["last_message_s"] - job["started_s"], rel=0.002)
    assert sum(states.values()) == pytest.approx(end - times[0], abs=2.0)
    assert resumed - killed - 0.1 < states["down"] < resumed - killed + 1.5  # up to a second was not yet sent
    assert 0 < states["restart"] < end - resumed
    again = [float(line) for line in second.stdout.split()]
    assert states["redone"] == pytest.approx(again[20] - again[0], abs=0.3)  # it is split by steps within a message
    assert states["compute"] < run["states"]["compute"]


def test_ranks_that_torchrun_restarts_are_two_attempts_of_one_job(tmp_path: Path) -> None:
    """By its run id and nothing else. The ranks import no torch: torchrun tells them apart by the environment."""
    pytest.importorskip("torch")
    program = tmp_path / "train.py"
    program.write_text(RANK)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=2", "--rdzv-id=llm-8"]
    torchrun += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--max-restarts=1", "--monitor-interval=0.1"]
    with agent(tmp_path) as node:
        subprocess.run([*torchrun, str(program), str(tmp_path)], env=hook_environment(tmp_path), check=True)
        wait_for("it has ended", lambda: job_of(node)["status"] == "ended", 20)
        job = job_of(node)
    assert (job["job"], job["runs"], job["attempts"], job["interruptions"]) == ("llm-8", ["elastic-llm-8"], 2, 1)
    assert (job["steps"], job["redone_steps"], job["lost_steps"]) == (60, 10, 0)
    begin_s, end_s = (float((tmp_path / f"0-{name}").read_text()) for name in ("begin-0", "end"))
    assert sum(job["states"].values()) == pytest.approx(end_s - begin_s, rel=0.002)
