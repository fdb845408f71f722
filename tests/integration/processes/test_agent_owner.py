"""Who owns a run and a GPU, from a real process; and nothing else of its environment or command line leaves it."""

from __future__ import annotations

import getpass
import json
import subprocess
import sys
from pathlib import Path

from tests.integration.agent_process import Agent
from tests.nvml.fake import FakeGpu, FakeNvml
from tests.servers import wait_for

TRAINING = """
import time, gpuwatch
with gpuwatch.Watch(quiet=True) as w:
    while True:
        with w.step():
            time.sleep(0.02)
"""
SECRET = "hunter2-0b5f"


def test_owner_is_reported_and_nothing_else_is(tmp_path: Path) -> None:
    nvml = FakeNvml(tmp_path)
    environment = {
        **nvml.environment(),
        "GPUWATCH_RUN": "owned",
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "2",
        "POD_NAMESPACE": "vision",
        "POD_NAME": "train-0",
        "CONTAINER_NAME": "trainer",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "SLURM_JWT": f"{SECRET}-token",
    }
    agent = Agent(tmp_path, environment=nvml.environment())
    environment["GPUWATCH_ENDPOINT"] = agent.endpoint
    command = [sys.executable, "-c", TRAINING, f"--api-key={SECRET}"]
    training = subprocess.Popen(command, env=environment)
    try:
        nvml.write([FakeGpu(uuid="GPU-0", processes=((training.pid, 1 << 30),))])
        with agent:
            user = getpass.getuser()
            wait_for("the GPU has an owner", lambda: owner(agent)[:2] == ("owned", "0"), 15, 0.2)
            assert owner(agent) == ("owned", "0", user, "4711", "vision", "train-0", "trainer")
            run = agent.wait_run("owned")
            reported = {"job": "4711", "step": "2", "namespace": "vision", "pod": "train-0", "container": "trainer"}
            assert reported.items() <= run["owner"].items()
            training.kill()
            training.wait(10)
            ended = agent.wait_run("owned", status="lost")
            assert (ended["user"], ended["owner"]["pod"]) == (user, "train-0")
            wait_for("the GPU is free", lambda: owner(agent)[2] == "", 15, 0.2)
            assert agent.stop() == 0
            agent.start()  # and it is still known whose it was
            assert agent.wait_run("owned")["user"] == user
            pages = [agent.get_text("/metrics"), *(json.dumps(agent.get(f"/api/v1/{p}")) for p in ("runs", "status"))]
            assert any("train-0" in page for page in pages)
            agent.stop()
            written = [path.read_bytes() for path in tmp_path.iterdir() if path.is_file()]
            assert not any(SECRET in page for page in pages)
            assert not any(SECRET.encode() in content for content in written)
            assert any(b"train-0" in content for content in written)
    finally:
        training.kill()
        training.wait(10)


def owner(agent: Agent) -> tuple[str, ...]:
    """Return run, rank, user, job, namespace, pod and container of the GPU."""
    return next((key[3:] for key in agent.metrics() if key[0] == "gpuwatch_gpu_owner_info"), ("",) * 7)
