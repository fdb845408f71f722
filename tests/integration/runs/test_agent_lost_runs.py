"""Processes that are killed, stopped, or end while no agent listens."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.integration.agent_process import Agent, Trainer, run_states
from tests.memory_limit import job_group
from tests.servers import wait_for


@pytest.mark.alone
def test_killed_stopped_and_ended_unheard(tmp_path: Path) -> None:
    with (
        Agent(tmp_path) as agent,
        Trainer(agent, run="killed") as killed,
        Trainer(agent, run="stopped", data_s=0.05, compute_s=0.0) as stopped,
        Trainer(agent, run="unheard", seconds=600) as unheard,
    ):
        for trainer in (killed, stopped, unheard):
            agent.wait_run(trainer.run, activity="data_wait")
        time.sleep(1.5)

        stopped.signal(signal.SIGSTOP)
        stopped_at = time.monotonic()
        killed.signal(signal.SIGKILL)  # and no process waits for it: it stays a zombie
        killed_at = time.monotonic()
        run = agent.wait_run("killed", status="lost", timeout_s=5)
        assert time.monotonic() - killed_at < 4.0
        assert 1.5 < run["states"]["unknown"] < 4.5
        assert sum(run["states"].values()) == pytest.approx(run["watermark_s"] - run["started_s"], abs=0.05)
        assert agent.metrics()["gpuwatch_run_up", "killed", "0"] == 0

        time.sleep(max(0.0, 13 - (time.monotonic() - stopped_at)))
        silent = agent.wait_run("stopped", activity="silent")
        assert silent["status"] == "running"
        stopped.signal(signal.SIGCONT)
        stopped_s = time.monotonic() - stopped_at
        run = agent.wait_run("stopped", activity="data_wait")
        unknown_s = run["states"]["unknown"]
        assert stopped_s - 1.5 < unknown_s < stopped_s + 1.5
        before = run_states(agent.metrics(), "stopped")
        time.sleep(2)
        after = run_states(agent.metrics(), "stopped")
        assert after["unknown"] == unknown_s
        assert 1.0 < after["input_wait"] - before["input_wait"] < 3.2
        run = agent.wait_run("stopped")
        assert sum(run["states"].values()) == pytest.approx(run["watermark_s"] - run["started_s"], abs=0.05)

        agent.kill()
        known = unheard.process
        known.terminate()
        known.wait(10)
        agent.start()
        run = agent.wait_run("unheard", status="lost", timeout_s=6)
        assert "unknown" not in run["states"], "it is not billed for the time in which it may have been over"
        assert sum(run["states"].values()) == pytest.approx(run["watermark_s"] - run["started_s"], abs=0.05)
        assert agent.run("killed") is not None


def test_agent_that_was_stopped_takes_the_waiting_messages_first(tmp_path: Path) -> None:
    """The agent's own absence is no run's silence, and a run that ended meanwhile ended well."""
    with Agent(tmp_path) as agent, Trainer(agent, run="patient") as trainer:
        agent.wait_run("patient", activity="data_wait")
        assert agent.process is not None
        agent.process.send_signal(signal.SIGSTOP)
        trainer.finish()
        report = trainer.report()
        time.sleep(3)
        agent.process.send_signal(signal.SIGCONT)
        run = agent.wait_run("patient", status="ended", timeout_s=20)
        assert run["states"] == pytest.approx(report["states"], abs=1e-6)
        wait_for("ready again", lambda: agent.get_text("/readyz") == "ok\n", 20)


def test_a_cancelled_job_is_over_with_its_control_group_and_a_program_that_is_killed_is_not(tmp_path: Path) -> None:
    with (
        job_group() as group,
        Agent(tmp_path) as agent,
        Trainer(agent, run="cancelled") as cancelled,
        Trainer(agent, run="killed") as killed,
    ):
        step = group / "step_0"
        step.mkdir()
        (step / "cgroup.procs").write_text(str(cancelled.pid))
        for trainer in (cancelled, killed):
            agent.wait_run(trainer.run, activity="data_wait")
        time.sleep(1.5)
        for trainer in (cancelled, killed):
            trainer.signal(signal.SIGTERM)
            trainer.process.wait(10)
            agent.wait_run(trainer.run, status="lost", timeout_s=8)
        assert ("gpuwatch_run_job_over", "cancelled", "0") not in agent.metrics(), "its job goes on"
        for each in (step, group):
            each.rmdir()
        wait_for("the job is over", lambda: agent.metrics().get(("gpuwatch_run_job_over", "cancelled", "0")) == 1, 5)
        assert ("gpuwatch_run_job_over", "killed", "0") not in agent.metrics()
