"""Bad options, bad files and bad messages: each named with its remedy, none of them the end of the agent."""

from __future__ import annotations

import os
import re
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from gpuwatch import wire
from gpuwatch.metrics import BY_NAME
from tests.integration.agent_process import Agent, Series, Trainer, watch_counters
from tests.servers import wait_for
from tests.unit.agent.hooks import FakeHook


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    with Agent(tmp_path_factory.mktemp("agent")) as agent:
        yield agent


@pytest.fixture
def push(agent: Agent) -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context()
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.LINGER, 2000)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.connect(agent.endpoint)
    yield socket
    socket.close()
    context.term()


def hook(**names: str) -> FakeHook:
    import time

    return FakeHook(time.monotonic_ns(), wall_offset_ns=time.time_ns() - time.monotonic_ns(), **names)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--http", "9478"], "--http 9478: give HOST:PORT"),
        (["--http", "127.0.0.1:99999"], "give HOST:PORT"),
        (["--http", "no.such.host.invalid:0"], "--http no.such.host.invalid:0: "),
        (["--listen", "tcp://0.0.0.0:9479"], "TCP needs a token"),
        (["--listen", "ipc://relative"], "give ipc:///absolute/path.sock"),
        (["--history", "/proc/history.db"], "--history /proc/history.db: "),
        (["--history", "/"], "--history / is a folder, or no regular file; name one"),
        (["--histroy", "x"], "No such option"),
    ],
)
def test_wrong_options_are_named_with_the_remedy(tmp_path: Path, options: list[str], says: str) -> None:
    assert says in Agent(tmp_path).refused(*options)


def test_newer_history_is_refused_and_a_damaged_one_set_aside(tmp_path: Path) -> None:
    agent = Agent(tmp_path)
    with sqlite3.connect(agent.history) as connection:
        connection.execute("PRAGMA user_version=99")
    connection.close()
    assert "newer gpuwatch" in agent.refused() and "update gpuwatch, or choose another file" in agent.refused()
    agent.history.write_bytes(b"\x00garbage" * 4096)
    with agent, Trainer(agent, run="after", seconds=30):
        agent.wait_run("after")
        assert "cannot be used" in agent.log.read_text() and "a new one is created" in agent.log.read_text()
        assert agent.get("/api/v1/status")["history"]["failures"] == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 300 kB, by root only."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(place)]
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small file system can be mounted by root only, outside of most containers")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_full_disk_is_counted_and_the_agent_goes_on(tmp_path: Path, small_disk: Path) -> None:
    agent = Agent(tmp_path, general=("--verbose",))  # its log has recoveries too
    agent.history = small_disk / "history.db"
    with agent, Trainer(agent, run="full", data_s=0.0, compute_s=0.001):
        before = agent.wait_run("full")["steps"]
        failures = ("gpuwatch_history_failures_total",)
        wait_for("the disk is full", lambda: agent.metrics().get(failures, 0) >= 2, 20)
        page = agent.metrics()
        assert page["gpuwatch_steps_total", "full", "0"] > before
        log = agent.log.read_text()
        failed = re.findall(r"cannot be (.+) \(database or disk is full\)", log)
        recovered = re.findall(r"can be (.+) again", log)  # a small write may still fit
        assert failed and all(failed.count(each) <= 1 + recovered.count(each) for each in failed)
        wait_for("it goes on", lambda: agent.metrics()["gpuwatch_steps_total", "full", "0"] > before + 2, 20)
        assert agent.get_text("/readyz") == "ok\n"

        # What was served is not on the disk: after a kill -9 it is not served again until it is as high.
        served, pages = agent.metrics(), list[Series]()
        agent.kill()
        agent.start()
        wait_for("it is heard", lambda: ("gpuwatch_steps_total", "full", "0") in agent.metrics(), 20, 0.05)
        watch_counters(agent, 1.5, pages)
        counters = [key for key in served if key[1:2] == ("full",) and BY_NAME[key[0]].kind == "counter"]
        assert len(counters) > 5
        for key in counters:
            values = [page[key] for page in (served, *pages) if key in page]
            assert values == sorted(values), key


def test_a_run_whose_name_is_in_another_encoding_is_seen(tmp_path: Path) -> None:
    script = Path(os.fsdecode(os.fsencode(tmp_path) + b"/entra\xeen\xe9.py"))
    script.write_text(
        "import time, gpuwatch\nwith gpuwatch.Watch(quiet=True) as w:\n for _ in w.steps(range(20)): time.sleep(0.3)\n"
    )
    environment = {**os.environ, "GPUWATCH_JOB": "caf\udce9", "GPUWATCH_ENDPOINT": f"ipc://{tmp_path}/hook.sock"}
    with Agent(tmp_path) as agent:
        for names in ({"GPUWATCH_RUN": "caf\udce9"}, {}):
            subprocess.run([sys.executable, str(script)], env={**environment, **names}, check=True, timeout=120)
        assert agent.wait_run("caf?", status="ended")["steps"] == 20

        def unnamed() -> list[int]:
            return [run["steps"] for run in agent.get("/api/v1/runs")["runs"] if run["name"] == "entra?n?.py"]

        wait_for("the other one is seen", lambda: unnamed() == [20], 20)


def test_bad_messages_are_counted_and_the_agent_goes_on(agent: Agent, push: zmq.Socket[bytes]) -> None:
    good = hook(run="good").message()
    bad = {
        "malformed": [
            b"",
            b"\x91" * 100_000,
            b"rubbish",
            *(wire.encode(msgspec.structs.replace(good, run=run)) for run in ("", "r" * 300)),
        ],
        "version": [wire.encode(msgspec.structs.replace(good, origin=msgspec.structs.replace(good.origin, version=9)))],
        "unbalanced": [
            wire.encode(
                msgspec.structs.replace(good, totals=msgspec.structs.replace(good.totals, states_ns={"compute": 5}))
            )
        ],
        "impossible": [
            wire.encode(
                msgspec.structs.replace(
                    good,
                    totals=msgspec.structs.replace(
                        good.totals, watermark_ns=good.totals.watermark_ns + 10**12, states_ns={"compute": 10**12}
                    ),
                )
            )
        ],
    }
    for frames in bad.values():
        for frame in frames * 3:
            push.send(frame)
    push.send(bytes(wire.MAX_MESSAGE_BYTES + 1))  # ZeroMQ itself ends that connection, and makes a new one
    wait_for("the good one", lambda: push.send(wire.encode(good)) or agent.run("good"), 20, 0.2)
    page = agent.metrics()
    counted = {key[1]: value for key, value in page.items() if key[0] == "gpuwatch_messages_rejected_total"}
    assert {reason: counted[reason] for reason in bad} == {reason: 3 * len(frames) for reason, frames in bad.items()}
    log = agent.log.read_text()
    for reason in bad:
        assert log.count(f"message of a hook rejected ({reason})") == 1
    assert "Traceback" not in log


def test_second_agent_is_reported_what_is_taken(agent: Agent, tmp_path: Path) -> None:
    other = Agent(tmp_path)
    other.port = agent.port
    assert f"--http 127.0.0.1:{agent.port}: Address already in use" in other.refused()
    other = Agent(tmp_path)
    output = other.refused("--listen", agent.endpoint)
    assert f"--listen {agent.endpoint}: another agent uses it already" in output
    output = other.refused("--history", str(agent.history))
    assert f"--history {agent.history}: another agent uses it already" in output
    assert agent.get_text("/healthz") == "ok\n"


def test_an_address_that_is_not_this_machines_is_said_to_be_none(tmp_path: Path) -> None:
    other = Agent(tmp_path)
    token = tmp_path / "token"
    for address in ("192.0.2.1:9478", "nosuch.invalid:9478"):
        assert "; give an address of this machine and a free port" in other.refused("--http", address)
    tcp = ("--listen", "tcp://192.0.2.1:9479", "--token-file", str(token))
    assert "Cannot assign requested address" in (error := other.refused(*tcp)) and "no address of this machine" in error


def test_the_url_of_an_ipv6_address_has_brackets(tmp_path: Path) -> None:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as free:
            port = free.getsockname()[1]
    except OSError:
        pytest.skip("IPv6 is off on this machine")
    agent = Agent(tmp_path, "--http", f"[::1]:{port}")
    agent.url = f"http://[::1]:{port}"
    with agent:
        assert f"gpuwatch agent: {agent.url}/metrics\n" in agent.log.read_text()


def test_ten_thousand_run_names_are_bounded_and_counted(agent: Agent, push: zmq.Socket[bytes]) -> None:
    """The last one here: from then on the agent has 512 runs to look after."""
    for number in range(10_000):
        push.send(wire.encode(hook(run=f"run-{number}").message()))

    def refused() -> float:
        """Beyond the process's quota, and beyond the runs that an agent takes."""
        page = agent.metrics()
        return sum(page.get(("gpuwatch_messages_rejected_total", reason), 0) for reason in ("rate", "too_many_runs"))

    wait_for("all are taken", lambda: refused() >= 9_480, 30, 1.0)
    runs = {key[1] for key in agent.metrics() if key[0] == "gpuwatch_steps_total"}
    assert len(runs) <= 512
    assert len(runs) + refused() >= 10_000
    assert agent.log.read_text().count("further ones are refused") == 1
    assert agent.get_text("/readyz") == "ok\n"
