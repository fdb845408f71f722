"""What a run costs, from the price in the configuration to API, report and comparison: scripted NVML, a real hook."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.integration.agent_process import Agent, Trainer
from tests.nvml.fake import FakeGpu, FakeNvml
from tests.servers import wait_for

PRICES = """
[prices]
gpu_hour = 2.0
currency = "EUR"
models = {"NVIDIA H200" = 3600.0}
"""
"""An H200 at one euro a second: a second of a state is a euro."""


def gpuwatch(*arguments: object) -> str:
    command = [sys.executable, "-m", "gpuwatch", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, check=True).stdout


def test_the_price_of_the_model_times_the_time_of_each_state(tmp_path: Path) -> None:
    config = tmp_path / "gpuwatch.toml"
    config.write_text(PRICES)
    nvml = FakeNvml(tmp_path)
    agent = Agent(tmp_path, "--config", str(config), environment=nvml.environment())
    with ExitStack() as stack:
        trainer = stack.enter_context(Trainer(agent, data_s=0.03, compute_s=0.01, seconds=600, run="priced"))
        held = ((trainer.pid, 1 << 30),)  # before the agent starts: it asks who holds a GPU every ten seconds
        nvml.write(
            [FakeGpu(uuid="GPU-0", name="NVIDIA H200", processes=held), FakeGpu(uuid="GPU-1", name="NVIDIA A10")]
        )
        stack.enter_context(agent)
        wait_for("the run's GPU", lambda: (agent.run("priced") or {}).get("gpus") == ["NVIDIA H200"], 30)
        trainer.signal(signal.SIGINT)
        trainer.process.wait(30)
        run = agent.wait_run("priced", 20, status="ended")
        assert run["gpus"] == ["NVIDIA H200"]
        cost = run["cost"]
        assert (cost["currency"], cost["gpus"], cost["per_hour"]) == ("EUR", 1, 3600.0)
        assert cost["states"] == pytest.approx(run["states"])
        assert cost["total"] == pytest.approx(sum(run["states"].values()))
        wait_for("the run in the history", lambda: agent.stop() == 0, 20)
    report = json.loads(gpuwatch("report", "priced", "--history", agent.history, "--config", config, "--json"))
    assert report["cost"]["states"] == pytest.approx(run["states"], rel=1e-6)
    assert json.loads(gpuwatch("report", "priced", "--history", agent.history, "--json"))["cost"] is None
    page = gpuwatch("report", "priced", "--history", agent.history, "--config", config, "-o", "-")
    assert "outside compute" in page and " EUR" in page
    kept = tmp_path / "kept.json"
    kept.write_text(json.dumps(report))
    both = gpuwatch("compare", kept, "priced", "--history", agent.history, "--config", config, "--markdown", "-o", "-")
    assert "cost of 1,000 steps" in both and " EUR" in both
