"""Real DistributedDataParallel trainings over gloo: who reports, who is late, and what their waits are booked as."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import gpuwatch
from gpuwatch.ledger.states import RUN_STATES
from tests.integration.agent_process import Agent
from tests.programs import ROOT
from tests.servers import free_port, wait_for

pytest.importorskip("torch")
TRAINER = ROOT / "tests/ddp_trainer.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--master-addr=127.0.0.1"]


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    with Agent(tmp_path) as started:
        yield started


@contextmanager
def training(agent: Agent, *command: str, **environ: str) -> Iterator[subprocess.Popen[str]]:
    """Run a command line; all that it started is ended with the `with`."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("GPUWATCH_", "SLURM_"))}
    process = subprocess.Popen(
        [*command],
        env={**clean, "GPUWATCH_ENDPOINT": agent.endpoint, "OMP_NUM_THREADS": "1", **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def spawned(agent: Agent, ranks: int, *options: str) -> Any:
    place = ["--spawn", str(ranks), "--port", str(free_port())]
    return training(agent, sys.executable, str(TRAINER), *place, *options)


def reports(process: subprocess.Popen[str]) -> dict[int, dict[str, Any]]:
    """Return what each rank printed at its end."""
    out, err = process.communicate(timeout=180)
    assert process.returncode == 0, err
    reported = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    return {each["rank"]: each for each in reported}


def stragglers(agent: Agent) -> list[dict[str, Any]]:
    return [each for each in agent.get("/api/v1/findings")["findings"] if each["cause"] == "straggler"]


def straggler(agent: Agent, process: subprocess.Popen[str], excess_s: float, rel: float) -> list[dict[str, Any]]:
    """Return the findings of stragglers once the excess is right.

    In the first seconds, or while a core is taken, ranks are slow by turns.
    """

    def look() -> list[dict[str, Any]] | None:
        assert process.poll() is None, "the training ended before"
        found = stragglers(agent)
        return found if all(evidence(each, "excess") == pytest.approx(excess_s, rel=rel) for each in found) else None

    return wait_for(f"a straggler's excess of {excess_s:g} s is found", look, 40, 0.2)


def evidence(finding: dict[str, Any], what: str) -> float:
    return float(next(each["value"] for each in finding["evidence"] if each["what"] == what))


def runs(agent: Agent) -> dict[int, dict[str, Any]]:
    return {each["rank"]: each for each in agent.get("/api/v1/runs")["runs"]}


@pytest.mark.alone
def test_torchrun_ranks_are_one_run_and_the_one_with_the_slow_input_is_named(agent: Agent, tmp_path: Path) -> None:
    launch = [*TORCHRUN, f"--master-port={free_port()}", "--nproc-per-node=3", str(TRAINER)]
    options = ["--steps=3000", f"--end-file={tmp_path / 'end'}", "--slow-rank=1", "--slow-data=0.06"]
    with training(agent, *launch, *options) as process:
        # Where cores are short, the late rank computes alone, and so faster than the others did.
        found = straggler(agent, process, 0.06, 0.25)
        named = [(each["rank"], each["severity"]) for each in found]
        series = agent.metrics()
        (tmp_path / "end").touch()
        reported = reports(process)
    assert named == [(1, "critical")]
    assert evidence(found[0], "cost") == pytest.approx(2 * evidence(found[0], "excess"), rel=0.01)
    assert evidence(found[0], "rank 1") == pytest.approx(0.09, rel=0.25), (
        "its time before communication, as DDP waits are measured unaided"
    )
    assert found[0]["advice"].startswith("on rank 1: prepare batches in the background")
    late = {key[2]: value for key, value in series.items() if key[0] == "gpuwatch_straggler_excess_ratio"}
    assert list(late) == ["1"] and late["1"] == pytest.approx(0.06 / 0.09, rel=0.25)
    assert {key[2] for key in series if key[0] == "gpuwatch_finding_active" and "straggler" in key} == {"straggler"}
    assert sorted(reported) == [0, 1, 2] and len({each["run"] for each in reported.values()}) == 1
    at_agent = wait_for("all have closed their runs", lambda: _ended(agent, 3), 10, 0.2)
    assert {each["run"] for each in at_agent.values()} == {reported[0]["run"]}
    assert [each["world_size"] for each in at_agent.values()] == [3, 3, 3]
    (steps,) = {each["steps"] for each in reported.values()}
    assert {each["steps"] for each in at_agent.values()} == {steps}
    assert stragglers(agent) == []


@pytest.mark.alone
@pytest.mark.parametrize("slow", ["--slow-data=0.06", "--slow-compute=0.06"])
def test_rank_0_prints_one_verdict_of_all_ranks_without_an_agent(slow: str, tmp_path: Path) -> None:
    """Code that is slow on one rank looks slow on all ranks, but for their waits for each other.

    Those are measured without `watch_communication`.
    """
    command = [sys.executable, str(TRAINER), "--spawn=3", "--method=fork", f"--port={free_port()}"]
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("GPUWATCH_", "SLURM_"))}
    done = subprocess.run(
        [*command, "--steps=150", "--slow-rank=1", slow, "--verdict"],
        env={**clean, "GPUWATCH_ENDPOINT": f"ipc://{tmp_path}/none.sock", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("gpuwatch ·") == 1, done.stderr
    assert "rank 0 of 3, all compared" in done.stderr and "healthy" not in done.stderr
    late = re.search(r"straggler: the other ranks wait for rank 1 for (\d+)% of every step", done.stderr)
    assert late is not None and int(late[1]) == pytest.approx(100 * 0.06 / 0.09, abs=8), done.stderr


def test_ranks_of_two_launchers_without_a_name_are_one_run(agent: Agent) -> None:
    """As on two nodes: each launcher knows its own ranks, and nothing but torch's store knows them all."""
    port = free_port()
    place = [*TORCHRUN, "--nnodes=2", f"--master-port={port}", "--nproc-per-node=1"]
    with (
        training(agent, *place, "--node-rank=0", str(TRAINER), "--steps=60") as one,
        training(agent, *place, "--node-rank=1", str(TRAINER), "--steps=60") as other,
    ):
        reported = {**reports(one), **reports(other)}
    assert sorted(reported) == [0, 1] and reported[0]["run"] == reported[1]["run"]
    at_agent = wait_for("both have closed their runs", lambda: _ended(agent, 2), 10, 0.2)
    assert {each["run"] for each in at_agent.values()} == {reported[0]["run"]}
    assert len(agent.get("/api/v1/runs")["runs"]) == 2, "and neither was ever reported under another id"


def test_a_rank_for_which_the_others_wait_is_named_with_the_line_that_it_is_in(agent: Agent) -> None:
    """By torch's flight recorder, which the hook reads while the training thread waits in a collective."""
    with spawned(agent, 3, "--hang-rank=2", "--steps=40", "--method=fork"):
        found = wait_for("a hang is found", lambda: _stalled(agent, 3), 90, 0.5)
    assert {each["title"] for each in found} == {"training makes no progress: the other ranks wait for rank 2"}
    line = next(n for n, text in enumerate(TRAINER.read_text().splitlines(), 1) if "sleep(3600)" in text)
    (late,) = {each["text"] for one in found for each in one["evidence"] if each["what"] == "late"}
    issued = re.fullmatch(
        r"rank 2 has not issued all_reduce (\d+) of group default_pg 0, in which other ranks wait: (.*)", late
    )
    assert issued is not None and issued[2] == f"it is in save (ddp_trainer.py:{line})", late
    assert "stacks) to see where rank 2 is blocked" in found[0]["advice"]


def _stalled(agent: Agent, ranks: int) -> list[dict[str, Any]] | None:
    found = [each for each in agent.get("/api/v1/findings")["findings"] if each["cause"] == "stalled"]
    return found if len(found) == ranks else None


def _ended(agent: Agent, count: int) -> dict[int, dict[str, Any]] | None:
    found = runs(agent)
    return found if len(found) == count and all(each["status"] == "ended" for each in found.values()) else None


@pytest.mark.alone
def test_spawned_equal_ranks_are_one_run_without_a_straggler(agent: Agent) -> None:
    """The Watch is opened before the process group: nothing may be reported under rank 0 by all four."""
    with spawned(agent, 4, "--steps=110", "--watch-communication", "--method=fork") as process:
        wait_for("four ranks train", lambda: sum(each["steps"] > 5 for each in runs(agent).values()) == 4, 40, 0.2)
        seen = []
        while process.poll() is None:
            seen += stragglers(agent)
            time.sleep(0.2)
        reported = reports(process)
    assert seen == []
    assert sorted(reported) == [0, 1, 2, 3] and {each["world_size"] for each in reported.values()} == {4}
    at_agent = wait_for("all have closed their runs", lambda: _ended(agent, 4), 10, 0.2)
    assert {(each["run"], each["steps"]) for each in at_agent.values()} == {(reported[0]["run"], 110)}
    counted = {key[2]: value for key, value in agent.metrics().items() if key[0] == "gpuwatch_comm_steps_total"}
    assert counted == {"0": 110, "1": 110, "2": 110, "3": 110}


@pytest.mark.alone
def test_waiting_for_a_rank_with_slow_code_is_comm_wait_and_nothing_twice(agent: Agent, tmp_path: Path) -> None:
    """Gradients are accumulated: with no_sync no rank waits, and at each second step for twice the delay."""
    delay, compute = 0.04, 0.02
    options = ["--steps=3000", f"--end-file={tmp_path / 'end'}", f"--compute={compute}", f"--slow-compute={delay}"]
    options += ["--slow-rank=0", "--accumulate=2", "--watch-communication", "--method=fork"]
    with spawned(agent, 2, *options) as process:
        found = straggler(agent, process, delay, 0.1)
        (tmp_path / "end").touch()
        reported = reports(process)
    assert [each["rank"] for each in found] == [0]
    (steps,) = {each["steps"] for each in reported.values()}
    assert found[0]["advice"].startswith("check the host of rank 0")
    fast, slow = reported[1]["states"], reported[0]["states"]
    assert fast["comm_wait"] == pytest.approx(steps * delay, rel=0.1)
    assert slow.get("comm_wait", 0.0) < 0.1 * steps * delay
    assert slow["compute"] == pytest.approx(steps * (compute + delay), rel=0.1)
    for each in reported.values():
        assert each["states"]["compute"] + each["states"]["comm_wait"] == pytest.approx(each["body_s"], rel=0.02)
        assert set(each["states"]) <= set(RUN_STATES)
        assert sum(each["states"].values()) == pytest.approx(each["duration_s"], abs=1e-6)


def test_a_rank_that_dies_is_lost_and_the_others_end_as_they_would(agent: Agent) -> None:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "GPUWATCH_RUN": "dying"}
    command = [sys.executable, str(TRAINER), "--steps=100000"]
    with (
        training(agent, *command, **place, RANK="0") as stays,
        training(agent, *command, **place, RANK="1") as dies,
    ):
        wait_for("both train", lambda: sum(each["steps"] > 5 for each in runs(agent).values()) == 2, 40, 0.2)
        dies.send_signal(signal.SIGKILL)
        ends = wait_for("both are over", lambda: _over(agent), 20, 0.2)
        _, err = stays.communicate(timeout=60)
    assert ends == {0: "ended", 1: "lost"}
    assert stays.returncode == 1 and "RuntimeError" in err and f"{Path(gpuwatch.__file__).parent}/" not in err
    assert stragglers(agent) == []


def _over(agent: Agent) -> dict[int, str] | None:
    statuses = {rank: each["status"] for rank, each in sorted(runs(agent).items())}
    return statuses if "running" not in statuses.values() else None
