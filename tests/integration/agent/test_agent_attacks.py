"""Attacks on a real agent by real processes, as another user and in masses, beside an honest run.

The results are in docs/evidence/faults.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpuwatch import __version__, wire
from tests.integration.agent_process import Agent, Trainer
from tests.programs import ROOT
from tests.servers import wait_for

NO_AGENT = 65534
MOST_MB = 150

_ATTACKER = """
import os, sys, time
from pathlib import Path
import msgspec, zmq
from gpuwatch import wire
from tests.unit.agent.hooks import FakeHook

endpoint, kind, seconds, victim, user = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
if user:
    os.setgid(user)
    os.setuid(user)
context = zmq.Context()
pushes = [context.socket(zmq.PUSH) for _ in range(30 if kind == "large" else 1)]
for push in pushes:
    push.setsockopt(zmq.LINGER, 0)
    push.setsockopt(zmq.SNDHWM, 1000 if len(pushes) == 1 else 10)
    push.connect(endpoint)

def hook(run, pid=None, **names):
    at_ns = time.monotonic_ns()
    found = FakeHook(at_ns - 10**9, run=run, wall_offset_ns=time.time_ns() - at_ns, pid=pid or os.getpid(), boot_id=boot, **names)
    return found.step(100_000_000, 100_000_000)

boot = open("/proc/sys/kernel/random/boot_id").read().strip()
end, sent = time.monotonic() + seconds, 0
while time.monotonic() < end:
    if kind == "forge":
        forged = hook("honest", sender=str(sent))
        frames = [forged.hello(), forged.spend("stalled", 10**8).message(), forged.bye()]
        rank = hook("honest", rank=1, sender=f"rank {sent}")
        frames += [rank.hello(), rank.message()]
        frames += [hook("mine", pid=victim, sender=f"pid {sent}").hello()]
        frames += [hook("spy", sender="spy").hello(worker_pids=(victim, 1))]
        frames = [wire.encode(frame) for frame in frames]
        time.sleep(0.1)
    elif kind == "name":
        Path("/proc/self/comm").write_bytes(b"\\xff\\x1b")
        frames = [wire.encode(hook("nameless", pid=victim, sender="nameless").hello())]
        time.sleep(0.1)
    elif kind == "hello":
        frames = [wire.encode(hook(f"flood", sender="flood").hello())] * 200
    elif kind == "runs":
        frames = [wire.encode(hook(f"forged-{sent}-{n}", sender=f"{sent}-{n}").message()) for n in range(20)]
    else:
        large = hook("large", sender="large").message()
        column = wire.pack([large.origin.monotonic_ns - 10**9] + [0] * (wire.MAX_STEPS_A_MESSAGE - 1))
        columns = {name: column if name == "start_ns" else bytes(8 * wire.MAX_STEPS_A_MESSAGE) for name in wire.STEP_COLUMNS}
        frames = [wire.encode(msgspec.structs.replace(large, columns=columns))]
    for frame, push in [(frame, push) for frame in frames for push in pushes]:
        try:
            push.send(frame, zmq.NOBLOCK)
            sent += 1
        except zmq.Again:
            time.sleep(0.001)
print(sent)
"""


@pytest.fixture
def agent() -> Iterator[Agent]:
    """An agent whose socket any user of the machine may use, as those of the group `gpuwatch` may."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        with Agent(Path(folder)) as agent:
            (Path(folder) / "hook.sock").chmod(0o666)
            yield agent


def attack(agent: Agent, kind: str, seconds: int, victim: int = 0, user: int = 0) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _ATTACKER, agent.endpoint, kind, *map(str, (seconds, victim, user))]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ), cwd=ROOT)


def sent_by(attacker: subprocess.Popen[str]) -> int:
    out, _ = attacker.communicate(timeout=120)
    assert attacker.returncode == 0
    return int(out)


def resident_peak_mb(agent: Agent) -> float:
    assert agent.process is not None
    lines = Path(f"/proc/{agent.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:"))


def rejected(agent: Agent, reason: str) -> float:
    return agent.metrics().get(("gpuwatch_messages_rejected_total", reason), 0.0)


def check_honest(agent: Agent, trainer: Trainer) -> dict[str, Any]:
    """The honest run has every step and every record, and its ledger is the hook's own."""
    trainer.finish()
    report = trainer.report(60)
    run = agent.wait_run("honest", status="ended")
    kept = agent.get("/api/v1/runs/honest/steps", last=100_000)
    assert (run["steps"], run["records_lost"], len(kept["time_s"])) == (report["steps"], 0, report["steps"])
    assert run["states"] == pytest.approx(report["states"], abs=1e-6)
    assert agent.get_text("/healthz") == "ok\n"
    return run


def test_another_user_can_neither_speak_for_a_run_nor_name_its_processes(agent: Agent) -> None:
    if os.getuid() != 0:
        pytest.skip("a process of a second user can be started by root only")
    with Trainer(agent, run="honest") as trainer:
        agent.wait_run("honest", activity="data_wait")
        sent_by(attack(agent, "forge", 4, trainer.pid, NO_AGENT))

        def refused() -> bool:
            return rejected(agent, "wrong_user") >= 20 and rejected(agent, "wrong_process") >= 4

        wait_for("it is refused", refused, 10)
        page = agent.metrics()
        assert agent.run("mine") is None, "it named another process as its own"
        spy = agent.run("spy")
        assert spy is None or ("gpuwatch_loader_workers", "spy", "0") not in page
        assert not [key for key in page if key[0] == "gpuwatch_loader_worker_read_bytes_total" and key[1] == "spy"]
        assert [run["rank"] for run in agent.get("/api/v1/runs")["runs"] if run["run"] == "honest"] == [0]
        assert check_honest(agent, trainer)["states"].get("stalled", 0) == 0
    assert agent.log.read_text().count("(wrong_user)") == 1


def test_a_process_whose_name_is_no_text_stops_no_tick(agent: Agent) -> None:
    with Trainer(agent, run="honest") as trainer:
        agent.wait_run("honest", activity="data_wait")
        attacker = attack(agent, "name", 8, 1)
        wait_for("it is refused", lambda: rejected(agent, "wrong_process") >= 10, 20)
        before = agent.metrics()["gpuwatch_sample_timestamp_seconds",]
        wait_for("ticks go on", lambda: agent.metrics()["gpuwatch_sample_timestamp_seconds",] > before + 2, 20)
        sent_by(attacker)
        assert not [key for key in agent.metrics() if key[0] == "gpuwatch_run_failures_total"]
        check_honest(agent, trainer)


@pytest.mark.parametrize(("kind", "reason"), [("hello", "rate"), ("large", "rate"), ("runs", "too_many_runs")])
def test_a_flood_costs_an_honest_run_nothing_and_the_agent_little(agent: Agent, kind: str, reason: str) -> None:
    with Trainer(agent, run="honest") as trainer:
        agent.wait_run("honest", activity="data_wait")
        sent = sent_by(attack(agent, kind, 6))
        assert sent > 500
        wait_for("it is refused", lambda: rejected(agent, reason) > 0, 20, 0.5)
        check_honest(agent, trainer)
        print(f"{kind}: {sent} sent, {rejected(agent, 'rate'):.0f} beyond the quota, {resident_peak_mb(agent):.0f} MB")
        assert resident_peak_mb(agent) <= MOST_MB


def test_the_largest_frames_of_eight_processes_do_not_keep_an_honest_run_waiting(agent: Agent) -> None:
    """Together they are within the quotas of processes, and beyond that of a user."""
    with Trainer(agent, run="honest") as trainer:
        agent.wait_run("honest", activity="data_wait")
        for attacker in [attack(agent, "large", 4) for _ in range(8)]:
            assert sent_by(attacker) > 100
        check_honest(agent, trainer)
        print(f"eight: {rejected(agent, 'rate'):.0f} beyond the quota, {resident_peak_mb(agent):.0f} MB")
        assert rejected(agent, "rate") > 0


def test_a_new_run_is_taken_while_512_are_forged(agent: Agent) -> None:
    assert sent_by(attack(agent, "runs", 3)) > 512
    with Trainer(agent, run="honest") as trainer:
        agent.wait_run("honest", activity="data_wait")
        check_honest(agent, trainer)


def test_many_long_queries_at_once_are_bounded_in_memory(agent: Agent) -> None:
    begin_ns, column = 1_790_000_000 * 10**9, wire.pack(range(1000, 2000))
    with contextlib.closing(sqlite3.connect(agent.history, timeout=180)) as connection, connection:
        for first in range(0, 100_000, 1000):
            columns = dict.fromkeys(wire.STEP_COLUMNS, column) | {"start_ns": wire.pack(range(first, first + 1000))}
            row = ("long", 0, first, 1000, int(time.time() * 1000), begin_ns, msgspec.msgpack.encode(columns))
            names = "run, rank, first_step, count, time_ms, offset_ns, columns"
            connection.execute(f"INSERT INTO steps ({names}) VALUES (?, ?, ?, ?, ?, ?, ?)", row)
    with ThreadPoolExecutor(20) as pool:
        sizes = list(pool.map(lambda _: len(_get(agent, "/api/v1/runs/long/steps?last=100000")), range(20)))
    print(f"{min(sizes) / 1e6:.1f} MB each, {resident_peak_mb(agent):.0f} MB")
    assert min(sizes) > 5_000_000
    assert resident_peak_mb(agent) <= MOST_MB
    wait_for("it is ready", lambda: agent.get_text("/readyz") == "ok\n", 10)


_PARALLEL = (
    ("/metrics", 100),
    ("/api/v1/runs", 50),
    ("/api/v1/ledger", 50),
    ("/api/v1/series?metric=gpuwatch_run_seconds_total&pick=extremes", 50),
    ("/api/v1/runs/bench/steps?points=500", 50),
)


def test_many_clients_at_once_cost_64_ranks_nothing(agent: Agent) -> None:
    """64 processes of a user, the agent restarted under them, and then everything asked for at once."""
    command = [sys.executable, "-m", "benchmarks.agent.load", agent.endpoint, "64", "20", "0", "25"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as load:
        assert load.stdout is not None
        pids = json.loads(load.stdout.readline())
        wait_for("all are seen", lambda: len(agent.get("/api/v1/runs")["runs"]) == len(pids) == 64, 20)
        assert agent.stop() == 0
        agent.start()
        took_s = []
        with ThreadPoolExecutor(100) as pool:
            for path, many in _PARALLEL:
                answers = pool.map(_get_at_last, [agent] * many, [path] * many)
                begin_s = time.monotonic()
                assert agent.metrics()["gpuwatch_build_info", __version__, ""] == 1
                took_s.append(time.monotonic() - begin_s)
                assert all(answer.startswith(b"HTTP/1.1 200") for answer in answers)
        sent = json.loads(load.stdout.readline())
        wait_for(
            "all steps are seen",
            lambda: sum(run["steps"] for run in agent.get("/api/v1/runs")["runs"]) == sent["steps"],
            20,
        )
    print(f"{max(took_s):.2f} s for a scrape meanwhile, {resident_peak_mb(agent):.0f} MB")
    assert resident_peak_mb(agent) <= MOST_MB
    assert rejected(agent, "too_many_connections") == rejected(agent, "rate") == 0


def _get_at_last(agent: Agent, path: str) -> bytes:
    """Ask again where the connection was closed before an answer: beyond 64 of them, the agent closes the oldest."""
    for _ in range(5):
        with contextlib.suppress(ConnectionError):
            if answer := _get(agent, path):
                return answer
    return _get(agent, path)


def _get(agent: Agent, path: str) -> bytes:
    with socket.create_connection(("127.0.0.1", agent.port), timeout=180) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        return b"".join(iter(lambda: connection.recv(1 << 20), b""))


_CONNECTOR = """
import os, resource, socket, sys, time

path, seconds, user = sys.argv[1], *map(int, sys.argv[2:])
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
if user:
    os.setgid(user)
    os.setuid(user)
end, held = time.monotonic() + seconds, []
while time.monotonic() < end:
    one = socket.socket(socket.AF_UNIX)
    one.settimeout(1)
    try:
        one.connect(path)
        held.append(one)
    except OSError:
        one.close()
    if len(held) == 3000:
        time.sleep(0.5)
        held.clear()
print("done")
"""


def test_thousands_of_connections_of_a_process_cost_an_honest_run_nothing() -> None:
    """Without a free descriptor libzmq 4.3.5 ends the whole program."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        agent = Agent(Path(folder))
        command = agent.command
        agent.command = lambda *options: ["sh", "-c", 'ulimit -n 2400; exec "$@"', "sh", *command(*options)]  # type: ignore[method-assign]
        with agent, Trainer(agent, run="honest") as trainer:
            agent.wait_run("honest", activity="data_wait")
            path = Path(folder) / "hook.sock"
            path.chmod(0o666)
            user = NO_AGENT if os.getuid() == 0 else 0
            given = [sys.executable, "-S", "-c", _CONNECTOR, str(path), "6", str(user)]
            with subprocess.Popen(given, stdout=subprocess.PIPE) as attacker:
                wait_for("it is refused", lambda: rejected(agent, "too_many_connections") > 1000, 20)
                with Trainer(agent, run="late", seconds=3) as late:
                    report = late.report(60)
                assert agent.wait_run("late", status="ended")["steps"] == report["steps"]
                out, _ = attacker.communicate(timeout=60)
            assert out == b"done\n"
            check_honest(agent, trainer)
            assert agent.log.read_text().count("connection refused") <= 2


def test_500_connections_with_256_descriptors_leave_room_for_a_scrape() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with tempfile.TemporaryDirectory() as folder:
        agent = Agent(Path(folder))
        command = agent.command
        agent.command = lambda *options: ["sh", "-c", 'ulimit -n 256; exec "$@"', "sh", *command(*options)]  # type: ignore[method-assign]
        with agent:
            open_ones = [socket.create_connection(("127.0.0.1", agent.port), timeout=5) for _ in range(500)]
            try:
                for connection in open_ones[::2]:
                    with contextlib.suppress(OSError):
                        connection.sendall(b"GET /metr")
                time.sleep(2)
                assert agent.metrics()["gpuwatch_build_info", __version__, ""] == 1
                assert agent.get_text("/readyz") == "ok\n"
                assert agent.log.stat().st_size < 20_000
            finally:
                for connection in open_ones:
                    connection.close()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (soft, hard)
