"""`gpuwatch doctor` as a user runs it: with and without an agent, beside other programs, in a pipe and a terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from gpuwatch import __version__
from gpuwatch.alerting.render import render
from gpuwatch.alerting.thresholds import AlertThresholds
from gpuwatch.tools.doctor import CHECKS
from tests.nvml.fake import FakeGpu, FakeNvml
from tests.programs import agent, hook_environment
from tests.servers import free_port, prometheus_config, start_prometheus, wait_for

ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("GPUWATCH_")}

BARE = """
import sys
missing = {missing!r}
for name in missing:
    sys.modules[name] = None
from importlib import metadata, util
version, find = metadata.version, util.find_spec
def hidden(name):
    if name.replace("-", "_").lower() in {distributions!r}:
        raise metadata.PackageNotFoundError(name)
    return version(name)
metadata.version = hidden
util.find_spec = lambda name, *rest: None if name.split(".")[0] in missing else find(name, *rest)
sys.argv = ["gpuwatch", "doctor", "--json"]
from gpuwatch.cli import main
main()
"""


def doctor(*arguments: str, environment: Mapping[str, str] = ENVIRONMENT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gpuwatch", "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, env=dict(environment))


def checks(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    """Return the checks of a `--json` run by name, after a look at the document's shape."""
    document = json.loads(done.stdout)
    assert document.keys() == {"version", "host", "counts", "checks"}
    assert document["version"] == __version__
    assert [(check["group"], check["name"]) for check in document["checks"]] == [(g, n) for g, n, _ in CHECKS]
    for check in document["checks"]:
        assert check.keys() == {"group", "name", "status", "found", "remedy"}
        assert check["status"] in document["counts"]
        assert (check["remedy"] is not None) >= (check["status"] in ("problem", "warning")), check
        assert "the check itself failed" not in check["found"], check
    statuses = [check["status"] for check in document["checks"]]
    assert document["counts"] == {status: statuses.count(status) for status in document["counts"]}
    assert done.returncode == (1 if "problem" in statuses else 0), done.stdout
    return {check["name"]: check for check in document["checks"]}


def settled(run: Callable[[], subprocess.CompletedProcess[str]], *names: str) -> dict[str, dict[str, Any]]:
    """Return the checks of the first run in which these had their answers in time: a busy machine delays some."""

    def look() -> dict[str, dict[str, Any]] | None:
        found = checks(run())
        late = [name for name in names if re.search("no result within|timed out|NVML hangs", found[name]["found"])]
        return None if late else found

    return wait_for(f"an answer of each of {names}", look, 40, 1)


def test_with_a_live_agent(tmp_path: Path) -> None:
    with agent(tmp_path) as server:
        environment = {**ENVIRONMENT, **only_endpoint(tmp_path)}
        asks = lambda: doctor("--json", "--agent", server.url, environment=environment)  # noqa: E731
        found = settled(asks, "agent", "version", "hook socket", "history", "collectors")
        assert found["agent"]["found"].startswith(f"{server.url} is ready, gpuwatch {__version__}")
        assert [found[name]["status"] for name in ("version", "hook socket")] == ["ok"] * 2
        assert found["history"]["found"].startswith(f"{tmp_path}/history.db, ")
        assert re.match(r"\d+ of \d+ work", found["collectors"]["found"])

        server.process.send_signal(signal.SIGSTOP)
        try:
            stopped = checks(doctor("--json", "--agent", server.url))
        finally:
            server.process.send_signal(signal.SIGCONT)
        assert stopped["agent"]["status"] == "problem"
        assert re.search("timed out|no result within 3 s", stopped["agent"]["found"]), (
            "its own deadline, or that of all checks"
        )

        server.process.kill()
        server.process.wait()
    killed = settled(asks, "agent", "hook socket")
    assert killed["agent"]["found"] == f"{server.url}: Connection refused"
    assert killed["hook socket"]["status"] == "problem" and "stale socket" in killed["hook socket"]["found"]


def only_endpoint(directory: Path) -> dict[str, str]:
    return {"GPUWATCH_ENDPOINT": hook_environment(directory)["GPUWATCH_ENDPOINT"]}


def test_without_an_agent_nothing_is_wrong_with_that() -> None:
    environment = {**ENVIRONMENT, "GPUWATCH_HTTP": f"127.0.0.1:{free_port()}"}
    found = settled(lambda: doctor("--json", environment=environment), "agent", "collectors")
    assert found["agent"]["status"] == "skipped" and found["collectors"]["status"] == "skipped"


def test_a_port_that_another_program_has_is_found() -> None:
    http = free_port()
    command = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(http)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as other:
        try:
            wait_for("it listens", lambda: socket.create_connection(("127.0.0.1", http)).close() or True, 10)
            environment = {**ENVIRONMENT, "GPUWATCH_HTTP": f"0.0.0.0:{http}"}
            found = settled(lambda: doctor("--json", environment=environment), "agent")
        finally:
            other.kill()
    assert found["agent"]["status"] == "problem"
    assert found["agent"]["found"] == f"http://127.0.0.1:{http}: another program answers there (status 404)"
    assert "another --http" in found["agent"]["remedy"]


def test_gpus_through_nvml_and_a_typo_in_the_list_of_them(tmp_path: Path) -> None:
    nvml = FakeNvml(tmp_path)
    nvml.write([FakeGpu(), FakeGpu(uuid="GPU-b", minor=1)])
    environment = {**nvml.environment(), "CUDA_VISIBLE_DEVICES": "0,2"}
    found = settled(lambda: doctor("--json", environment=environment), "driver", "visible GPUs")
    assert found["driver"]["status"] == "ok" and "2 × NVIDIA H100 80GB HBM3" in found["driver"]["found"]
    assert found["visible GPUs"]["status"] == "problem" and "1 of 2 GPUs" in found["visible GPUs"]["found"]


def test_a_driver_that_hangs_is_one_problem_and_takes_three_seconds_at_most(tmp_path: Path) -> None:
    nvml = FakeNvml(tmp_path)
    nvml.write([FakeGpu()], hangs_s={"nvmlInitWithFlags": 170.0})
    begun_s = time.monotonic()
    found = checks(doctor("--json", environment=nvml.environment()))
    assert time.monotonic() - begun_s < 60  # with the interpreter's start, on a busy machine
    assert found["driver"]["status"] == "problem" and "NVML hangs" in found["driver"]["found"]
    assert found["visible GPUs"]["status"] == "skipped"


@pytest.mark.alone  # it depends on deadlines of the product
def test_prometheus_that_scrapes_an_agent_and_one_that_does_not(tmp_path: Path) -> None:
    with agent(tmp_path) as server:
        targets = {"gpuwatch": server.url}
        with start_prometheus(tmp_path / "good", prometheus_config(targets), render(AlertThresholds())) as good:
            wait_for("a scrape", lambda: good.value('up{job="gpuwatch"}') == 1, 20)
            found = checks(doctor("--json", "--agent", server.url, "--prometheus", f"{good.url}/"))
        assert found["targets"]["found"] == f"{good.url}: 1 of 1 targets up"
        assert found["alert rules"]["status"] == "ok"
    no_agent = prometheus_config({"gpuwatch": f"127.0.0.1:{free_port()}"})
    with start_prometheus(tmp_path / "bad", no_agent) as bad:
        wait_for("a scrape", lambda: bad.value('up{job="gpuwatch"}') == 0, 20)
        found = checks(doctor("--json", "--prometheus", bad.url))
    assert found["targets"]["status"] == "problem" and "connection refused" in found["targets"]["found"]
    assert found["alert rules"]["status"] == "warning"


def test_with_the_base_installation_missing_extras_are_findings() -> None:
    missing = ["pynvml", "uvicorn", "starlette", "prometheus_client", "streamlit", "torch", "yaml"]
    gone = [*missing, "nvidia_ml_py"]
    code = BARE.format(missing=missing, distributions=gone)
    command, printed = [sys.executable, "-c", code], list[str]()

    def bare() -> subprocess.CompletedProcess[str]:
        done = subprocess.run(command, capture_output=True, text=True, timeout=180, env=ENVIRONMENT)
        printed.append(done.stderr)
        return done

    found = settled(bare, "hook", "agent extra", "dashboard extra", "torch", "pynvml", "history")
    assert found["hook"]["status"] == "ok"
    assert found["agent extra"]["status"] == "warning" and "uvicorn" in found["agent extra"]["found"]
    assert "pip install --upgrade 'gpuwatch-training[agent]'" in found["agent extra"]["remedy"]
    assert found["dashboard extra"]["found"] == "missing: streamlit"
    assert [found[name]["status"] for name in ("torch", "pynvml", "history")] == ["skipped"] * 3
    assert "Traceback" not in "".join(printed)


def test_through_a_pipe_it_is_plain_and_a_line_a_check() -> None:
    done = doctor(environment={**ENVIRONMENT, "COLUMNS": "40"})
    assert "\x1b" not in done.stdout and done.stderr == ""
    lines = [line for line in done.stdout.splitlines() if re.match(r"(ok|warning|problem|skipped) ", line)]
    assert len(lines) == len(CHECKS)
    assert done.stdout.splitlines()[-1].startswith("problem: ")


def test_in_a_terminal_it_keeps_to_the_width() -> None:
    screen, inside = pty.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 80, 0, 0))
    environment = {name: value for name, value in ENVIRONMENT.items() if name not in ("COLUMNS", "NO_COLOR", "CI")}
    environment |= {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-m", "gpuwatch", "doctor"]
    with subprocess.Popen(command, stdout=inside, stderr=inside, stdin=inside, env=environment) as process:
        os.close(inside)
        shown = b""
        while True:
            try:
                shown += os.read(screen, 65536)
            except OSError:  # EIO: its other side is closed
                break
        process.wait(60)
    os.close(screen)
    text = shown.decode().replace("\r", "")
    assert "\x1b[32mok\x1b[0m" in text
    plain = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in text.splitlines()]
    assert max(map(len, plain)) <= 80
    assert any(re.match(r"ok +python ", line) for line in plain)


def test_wrong_use_is_2() -> None:
    for arguments in (["--agent", "node-17"], ["--prometheus", "ftp://x"], ["--agent", "http://h:99999"], ["--jsn"]):
        done = doctor(*arguments)
        assert done.returncode == 2 and arguments[0] in done.stderr and "Traceback" not in done.stderr
        assert done.stdout == ""
