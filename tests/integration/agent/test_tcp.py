"""Hooks that reach a real agent over TCP: with its token, without one, and with what they then may do."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuwatch import wire
from gpuwatch.host.proc import boot_id, stat
from gpuwatch.wire.sockets import ZmqSender
from tests.integration.agent_process import Agent, Trainer
from tests.servers import free_port, wait_for
from tests.unit.agent.hooks import FakeHook, S

TOKEN = "0123456789abcdef0123456789abcdef"


class TcpAgent(Agent):
    """An agent that listens on TCP and on its socket."""

    def __init__(self, folder: Path) -> None:
        (folder / "token").write_text(TOKEN)
        super().__init__(folder, "--token-file", str(folder / "token"))
        self.tcp = f"tcp://127.0.0.1:{free_port()}"
        self._options = (*self._options, "--listen", self.tcp, "--listen", self.endpoint)


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TcpAgent]:
    for name in ("GPUWATCH_TOKEN", "GPUWATCH_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    with TcpAgent(tmp_path) as agent:
        yield agent


def rejected(agent: Agent, reason: str) -> float:
    return agent.metrics().get(("gpuwatch_messages_rejected_total", reason), 0.0)


def test_a_training_with_the_token_is_seen_and_its_ledger_closes(
    agent: TcpAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUWATCH_TOKEN_FILE", str(agent.directory / "token"))
    socket, agent.endpoint = agent.endpoint, agent.tcp
    with Trainer(agent, run="over-tcp") as trainer:
        run = agent.wait_run("over-tcp", status="running")
        assert run["pid"] is None, "nothing proves the process, so it is not read"
        time.sleep(3)
        trainer.finish()
        report = trainer.report()
    agent.endpoint = socket
    ended = agent.wait_run("over-tcp", status="ended")
    assert ended["states"] == pytest.approx({state: s for state, s in report["states"].items() if s}, abs=1e-6)
    assert ended["steps"] == report["steps"] and ended["user"] == ""
    assert [
        key for key in agent.metrics() if key[0].startswith("gpuwatch_run_resident") or key[0] == "gpuwatch_run_threads"
    ] == []


_PROGRAM = """
import sys, time
import gpuwatch
for _ in gpuwatch.watch(range(int(sys.argv[1]))):
    time.sleep(0.1)
"""


@pytest.mark.parametrize(
    ("token", "output"),
    [
        ("", "TCP needs the agent's token; set GPUWATCH_TOKEN, or GPUWATCH_TOKEN_FILE"),
        ("another-" + TOKEN, "the agent refuses this token; GPUWATCH_TOKEN is not the one of its --token-file"),
        ("short", "a token has 16 or more ASCII characters"),
    ],
)
def test_a_training_without_the_token_goes_on_and_says_why_once(agent: TcpAgent, token: str, output: str) -> None:
    environment = {**os.environ, "GPUWATCH_ENDPOINT": agent.tcp, "GPUWATCH_TOKEN": token, "GPUWATCH_RUN": "unseen"}
    steps = "120" if token.startswith("another") else "40"  # the agent's answer may take a while
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, steps], env=environment, capture_output=True, text=True, timeout=120
    )
    assert (
        done.returncode == 0 and done.stderr.count("nothing is sent to an agent") == done.stderr.count(output) == 1
    ), done.stderr
    assert agent.run("unseen") is None
    if token.startswith("another"):
        wait_for("refused connections are counted", lambda: rejected(agent, "wrong_token") >= 2, 10)
        assert len(re.findall("connection refused: over TCP", agent.log.read_text())) == 1


def test_doctor_knows_whether_the_token_is_accepted(agent: TcpAgent) -> None:
    def found(**environment: str) -> tuple[str, str]:
        command = [sys.executable, "-m", "gpuwatch", "doctor", "--json"]
        given = {**os.environ, "GPUWATCH_ENDPOINT": agent.tcp, **environment}
        done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=120, check=False)
        check = next(each for each in json.loads(done.stdout)["checks"] if each["name"] == "hook socket")
        return check["status"], check["found"]

    accepted = ("ok", f"{agent.tcp}: an agent accepts the token")  # within half a second, else it is asked again
    wait_for("it is accepted", lambda: found(GPUWATCH_TOKEN=TOKEN) == accepted, 20, 1)
    assert found(GPUWATCH_TOKEN="x" * 20)[0] == found()[0] == "problem"
    assert "does not accept this token" in found(GPUWATCH_TOKEN="x" * 20)[1] and "needs the agent's token" in found()[1]


def test_a_pid_that_is_claimed_over_tcp_is_not_read(agent: TcpAgent) -> None:
    """It owns nothing, its workers are not read; and a run of the socket stays its user's."""
    with Trainer(agent, run="honest") as victim:
        agent.wait_run("honest", status="running", pid=victim.pid)
        at_ns = time.monotonic_ns()
        boot, ticks = boot_id(Path("/proc")), stat(victim.pid).start_ticks

        def forged(run: str) -> FakeHook:
            offset_ns = time.time_ns() - at_ns
            return FakeHook(
                at_ns - S, run=run, sender=run, wall_offset_ns=offset_ns, pid=victim.pid, boot_id=boot
            ).step()

        sender = ZmqSender(agent.tcp, TOKEN)
        mine, stolen = forged("forged"), forged("honest")
        output = wire.encode(mine.hello(worker_pids=(victim.pid,), start_ticks=ticks))
        wait_for("it is connected", lambda: sender.send(output) or None, 20)
        sender.send(wire.encode(mine.message()))
        agent.wait_run("forged", pid=None, user="")
        sender.send(wire.encode(stolen.message()))
        wait_for("it is refused", lambda: rejected(agent, "wrong_user"), 20)
        time.sleep(6)  # what processes use is read every five seconds
        read = {key[0] for key in agent.metrics() if len(key) > 1 and key[1] == "forged"}
        assert "gpuwatch_run_info" in read
        assert not read & {"gpuwatch_run_threads", "gpuwatch_run_resident_memory_bytes", "gpuwatch_loader_workers"}
        assert agent.wait_run("honest")["pid"] == victim.pid
        sender.close()


def test_tcp_is_not_listened_on_without_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GPUWATCH_TOKEN", "GPUWATCH_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    for address in ("127.0.0.1", "0.0.0.0"):
        output = Agent(tmp_path).refused("--listen", f"tcp://{address}:{free_port()}")
        assert "TCP needs a token; give --token-file FILE" in output
