"""`gpuwatch stacks` and the agent's own looks, with the real py-spy on a real DataLoader with two workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gpuwatch.errors import GpuwatchError
from gpuwatch.tools.stacks.spy import check_readable
from tests.integration.agent_process import Agent
from tests.servers import wait_for

PROGRAM = Path(__file__).with_name("stacks_program.py")
RUN = "photos"


@contextmanager
def training(agent: Agent) -> Iterator[int]:
    """Run the program; give its pid once the agent knows its workers. Skips where no process may be looked at."""
    environment = {**os.environ, "GPUWATCH_RUN": RUN, "GPUWATCH_ENDPOINT": agent.endpoint}
    process = subprocess.Popen([sys.executable, str(PROGRAM), "300"], env=environment)
    try:
        wait_for("ten steps", lambda: (agent.run(RUN) or {}).get("steps", 0) >= 10, 90)
        try:
            check_readable(process.pid)
        except GpuwatchError as error:
            pytest.skip(str(error))
        yield process.pid
    finally:
        process.kill()
        process.wait(10)


def stacks(agent: Agent, directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gpuwatch", "stacks", *options, "--agent", agent.url, "-o", str(directory)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def check_hottest(found: dict[str, Any], pid: int) -> None:
    training, *workers = found["processes"]
    assert (training["kind"], training["pid"]) == ("training", pid)
    assert training["lines"][0]["function"] == "main"
    assert [worker["kind"] for worker in workers] == ["worker", "worker"]
    source = PROGRAM.read_text().splitlines()
    for worker in workers:
        assert worker["looks"] >= 10
        hottest = worker["lines"][0]
        assert Path(hottest["file"]) == PROGRAM and hottest["function"].endswith("decode"), worker
        assert "pixel" in source[hottest["line"] - 1]
        assert hottest["function_ratio"] > 0.5 and hottest["ratio"] <= hottest["function_ratio"]
        total = sum({line["function"]: line["function_ratio"] for line in worker["lines"]}.values())
        assert total + worker["elsewhere_ratio"] == pytest.approx(1, abs=0.1)


def test_the_hottest_line_of_each_worker_on_demand(tmp_path: Path) -> None:
    with Agent(tmp_path) as agent, training(agent) as pid:
        done = stacks(agent, tmp_path, RUN, "--seconds", "5", "--json")
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        check_hottest(found, pid)
        (graph,) = found["flame_graphs"]
        names = {frame["name"] for frame in json.loads(Path(graph).read_text())["shared"]["frames"]}
        assert {"Photos.decode", "_worker_loop"} <= names or {"decode", "_worker_loop"} <= names
        output = stacks(agent, tmp_path, RUN, "--seconds", "3").stdout
        assert output.count("stacks_program.py:") == 3 and output.count("decode: ") == 2 and "% of samples" in output
        assert "worker 0" in output and "worker 1" in output and "flame graph: " in output
        unknown = stacks(agent, tmp_path, "no-such-run")
        assert unknown.returncode == 2 and "has no run 'no-such-run'" in unknown.stderr
        gone = stacks(agent, tmp_path, "--pid", "4194303")
        assert gone.returncode == 1 and "pid 4194303 is gone" in gone.stderr


def test_a_finding_brings_its_stacks_into_api_and_report(tmp_path: Path) -> None:
    config = tmp_path / "gpuwatch.toml"
    config.write_text("[stacks]\nautomatic = true\nseconds = 3\n")  # on a busy machine one second may show little
    with Agent(tmp_path, "--config", str(config)) as agent, training(agent) as pid:

        def looked_at() -> dict[str, Any] | None:
            # The first finding starts the sampling, and may turn out to be a consequence: the one that is reported
            # first has stacks too.
            findings = (agent.run(RUN) or {}).get("findings", [])
            is_reported = findings and findings[0]["stacks"] is not None and findings[0]["cause"].startswith("input_")
            return findings[0] if is_reported else None

        finding = wait_for("stacks of why the loader is slow", looked_at, 60)
        check_hottest(finding["stacks"], pid)
        hottest = finding["evidence"][-1]
        assert hottest["what"] == "hottest line" and "stacks_program.py:" in hottest["text"], finding["evidence"]
        assert "decode: " in hottest["text"] and "worker" in hottest["text"]
        assert agent.get_text("/readyz") == "ok\n"
        (graph,) = (tmp_path / "stacks").iterdir()
        assert [str(graph)] == finding["stacks"]["flame_graphs"]

        command = [sys.executable, "-m", "gpuwatch", "report", RUN, "--agent", agent.url]
        text = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=180, check=True).stdout
        found = next(each for each in json.loads(text)["findings"] if each["stacks"] is not None)
        assert found["evidence"][-1]["text"] == hottest["text"]
        page = subprocess.run([*command, "-o", "-"], capture_output=True, text=True, timeout=180, check=True).stdout
        assert page.count("worker 1") >= 1 and "stacks_program.py:" in page
    assert len(list((tmp_path / "stacks").iterdir())) == 1
