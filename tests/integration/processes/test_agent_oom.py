"""A training process that the kernel itself kills for lack of memory: a real OOM kill in a control group of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.integration.agent_process import Agent
from tests.memory_limit import memory_limit

MIB = 1 << 20
_EATER = """
import os, time
import gpuwatch

class Batch:
    shape, nbytes = (8,), 64

def batches():
    while True:
        time.sleep(0.01)
        yield Batch()

kept = []
for number, _ in enumerate(gpuwatch.watch(batches())):
    time.sleep(0.01)
    if number >= 150:  # after 3 s, 2 MiB a step; at most 2 GiB, should no limit hold
        kept.append(bytearray(os.urandom(1 << 20)) * 2)
    if len(kept) > 1024:
        raise SystemExit("no limit held")
"""


def test_a_training_process_that_the_kernel_kills_for_lack_of_memory_is_called_so(tmp_path: Path) -> None:
    with Agent(tmp_path) as agent, memory_limit(512) as within:
        environment = {**os.environ, "GPUWATCH_RUN": "eater", "GPUWATCH_ENDPOINT": agent.endpoint}
        done = subprocess.run(
            [*within, sys.executable, "-c", _EATER], env=environment, timeout=120, capture_output=True, text=True
        )
        assert done.returncode == -9, done.stderr
        run = agent.wait_run("eater", 20, status="lost")
        (finding,) = run["findings"]
        assert agent.metrics()["gpuwatch_finding_active", "eater", "training_killed"] == 1
        command = [sys.executable, "-m", "gpuwatch", "report", "eater", "--agent", agent.url, "--json"]
        report = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=180, check=True).stdout)
        agent.stop()
        agent.start()
        assert agent.wait_run("eater")["findings"][0]["evidence"] == finding["evidence"]
    assert finding["cause"] == report["findings"][0]["cause"] == "training_killed"
    assert finding["title"] == report["findings"][0]["title"] == "the training process was killed by the OOM killer"
    evidence = {each["what"]: each["value"] for each in finding["evidence"]}
    assert evidence["oom kills"] == 1 and evidence["memory limit"] == 512 * MIB
    assert 64 * MIB < evidence["memory used"] <= 512 * MIB and evidence["resident memory"] > 64 * MIB
    assert evidence.get("memory peak", 512 * MIB) > 480 * MIB
    assert "raise the job's memory limit of 512 MiB (docker run --memory=" in finding["advice"]


def test_one_that_is_killed_by_somebody_is_not_said_to_have_lacked_memory(tmp_path: Path) -> None:
    with Agent(tmp_path) as agent, memory_limit(2048) as within:
        environment = {**os.environ, "GPUWATCH_RUN": "shot", "GPUWATCH_ENDPOINT": agent.endpoint}
        shot = _EATER.replace("number >= 150", "number == 150 and not os.kill(os.getpid(), 9)")
        assert subprocess.run([*within, sys.executable, "-c", shot], env=environment, timeout=120).returncode == -9
        found = agent.wait_run("shot", 20, status="lost")["findings"]
        assert not [each for each in found if each["cause"] == "training_killed"]
