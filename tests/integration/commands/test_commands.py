"""The commands as a user runs them: what they print, what they leave behind, how they end."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import gpuwatch.commands.demo
from tests.integration.agent_process import Agent
from tests.programs import ROOT
from tests.servers import free_port, get_json, wait_for

commands_demo: Any = sys.modules["gpuwatch.commands.demo"]  # `gpuwatch.commands.demo` is the function
BARE = """
import sys
for name in {missing!r}:
    sys.modules[name] = None
from importlib import util
find = util.find_spec
util.find_spec = lambda name, *rest: None if name.split(".")[0] in {missing!r} else find(name, *rest)
sys.argv = ["gpuwatch", *{arguments!r}]
from gpuwatch.cli import main
main()
"""


def gpuwatch(*arguments: str, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gpuwatch", *arguments],
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, "COLUMNS": "200", **(environment or {})},
    )


def without(missing: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command as it is where these modules are not installed."""
    code = BARE.format(missing=missing, arguments=list(arguments))
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180)


def test_an_unknown_option_is_named() -> None:
    done = gpuwatch("agent", "--htpp", "127.0.0.1:1")
    assert done.returncode == 2
    assert "No such option: --htpp" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--keep-gib", "inf"), "command line: keep_gib = inf: expected `float` <= 1000000.0"),
        (("--series", "all"), "command line: series = 'all': give standard or full"),
    ],
)
def test_a_value_of_an_option_has_the_bounds_of_the_configuration(arguments: tuple[str, ...], message: str) -> None:
    done = gpuwatch("agent", *arguments)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


def test_the_address_that_an_agent_prints_is_a_url_on_ipv6_too(tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("no IPv6 here")
    own = ["--history", str(tmp_path / "history.db"), "--listen", f"ipc://{tmp_path}/hook.sock"]
    command = [sys.executable, "-m", "gpuwatch", "agent", "--http", "[::1]:0", *own]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as agent:
        assert agent.stderr is not None
        try:
            lines = (line for line in agent.stderr if line.startswith("gpuwatch agent: "))
            url = next(lines).removeprefix("gpuwatch agent: ").strip()
            assert re.fullmatch(r"http://\[::1\]:\d+/metrics", url), url
        finally:
            agent.terminate()


def test_an_unknown_command_is_named() -> None:
    done = gpuwatch("pu")
    assert done.returncode == 2
    assert "pu" in done.stderr


@pytest.mark.parametrize(
    ("missing", "arguments", "line"),
    [
        (["typer"], ["run", "--", "train.py"], "pip install 'gpuwatch-training[agent]'"),
        (["typer"], ["top"], "pip install 'gpuwatch-training[dashboard]'"),
        (["typer"], ["up"], "pip install 'gpuwatch-training[all]'"),
        (["numpy"], ["top", "--once"], "pip install 'gpuwatch-training[dashboard]'"),  # typer brings rich
        (["uvicorn"], ["agent"], "pip install 'gpuwatch-training[agent]'"),
        (["streamlit"], ["dashboard"], "pip install 'gpuwatch-training[dashboard]'"),
        (["torch"], ["demo"], "pip install torch"),
    ],
)
def test_a_missing_extra_is_named_with_its_pip_line(missing: list[str], arguments: list[str], line: str) -> None:
    done = without(missing, *arguments)
    assert done.returncode == 2
    assert missing[0].replace("torch", "PyTorch") in done.stderr and line in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no PYTHONSAFEPATH")
@pytest.mark.parametrize("arguments", [("agent", "--http", "nonsense"), ("up", "--http", "nonsense")])
def test_modules_in_the_current_folder_hide_none_of_ours(arguments: tuple[str, ...], tmp_path: Path) -> None:
    for name in ("queue", "statistics", "struct", "zlib"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the current folder')")
    command = [str(Path(sys.executable).with_name("gpuwatch")), *arguments]
    command += ["--port", str(free_port())] if arguments[0] == "up" else []
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=180)
    assert done.returncode == 2, done.stderr
    assert "--http nonsense: give HOST:PORT" in done.stderr


def test_a_busy_page_port_is_named_with_the_option_that_changes_it() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = gpuwatch("dashboard", "--port", str(port))
    assert done.returncode == 2
    assert f"127.0.0.1:{port} is in use; choose another with --port" in done.stderr


def test_an_unknown_demo_is_named() -> None:
    done = gpuwatch("demo", "--bottleneck", "transfers")
    assert done.returncode == 2
    assert (
        "--bottleneck transfers: no such bottleneck; choose one of input, epoch-start, eval, crash, none" in done.stderr
    )


def test_the_demo_trains_with_one_thread() -> None:
    """OpenMP's threads wait for each other: on busy cores a demo of 40 s came to 11 steps."""
    code = "import torch; from gpuwatch.tools.demo_training import Training; Training(1.0, 8); print(torch.get_num_threads())"
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180, env=environment)
    assert done.stdout == "1\n", done.stderr


def test_no_live_verdict_of_the_demo_follows_that_of_the_whole_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Exiting:
        """A training whose process ends ten seconds after its run has."""

        def __init__(self) -> None:
            self.polls = ["running", "ended"]

        def wait(self, timeout_s: float) -> None:
            if self.polls:
                raise subprocess.TimeoutExpired("demo", timeout_s)

        def runs(self) -> list[Any]:
            status = self.polls.pop(0)
            return [SimpleNamespace(status=status, verdict=SimpleNamespace(sentence=f"it is {status}"))]

    training: Any = Exiting()
    monkeypatch.setattr(commands_demo, "Client", lambda _: training)
    commands_demo._print_verdicts(training, "http://agent", 0.0)
    out = capsys.readouterr().out
    assert "it is running" in out and "it is ended" not in out


def test_the_rules_that_are_printed_are_those_that_are_shipped() -> None:
    shipped = ROOT / "deploy/prometheus/rules/gpuwatch.yml"
    assert gpuwatch("rules").stdout == shipped.read_text()


def test_up_says_two_urls_that_answer_and_ctrl_c_stops_both(tmp_path: Path) -> None:
    http, page = free_port(), free_port()
    command = [sys.executable, "-m", "gpuwatch", "up", "--http", f"127.0.0.1:{http}", "--port", str(page)]
    command += ["--listen", f"ipc://{tmp_path}/hook.sock", "--history", str(tmp_path / "history.db")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        output = [process.stdout.readline() for _ in range(2)]
        assert output == [f"page    http://127.0.0.1:{page}\n", f"agent   http://127.0.0.1:{http}/metrics\n"]
        assert get_json(f"http://127.0.0.1:{http}/api/v1/runs") == {"runs": []}
        with urllib.request.urlopen(f"http://127.0.0.1:{page}") as answer:
            assert b"<title>" in answer.read()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0
    assert "Traceback" not in err and "Error" not in err
    for port in (http, page):
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0
    assert not (tmp_path / "hook.sock").exists()


def test_up_killed_outright_leaves_nothing_running(tmp_path: Path) -> None:
    http, page = free_port(), free_port()
    command = [sys.executable, "-m", "gpuwatch", "up", "--http", f"127.0.0.1:{http}", "--port", str(page)]
    command += ["--listen", f"ipc://{tmp_path}/hook.sock", "--history", str(tmp_path / "history.db")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()

    def gone() -> bool:
        with socket.socket() as a, socket.socket() as b:
            return a.connect_ex(("127.0.0.1", http)) != 0 and b.connect_ex(("127.0.0.1", page)) != 0

    assert wait_for("both have ended", gone, 20)


def test_up_with_a_busy_agent_port_says_so_and_ends(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        http = taken.getsockname()[1]
        done = gpuwatch(
            "up", "--http", f"127.0.0.1:{http}", "--port", str(free_port()), "--history", str(tmp_path / "h.db")
        )
    assert done.returncode == 2
    assert f"--http 127.0.0.1:{http}: Address already in use" in done.stderr


def test_up_where_an_agent_answers_already_names_the_page_alone(tmp_path: Path) -> None:
    """It printed "Press Ctrl-C to stop both": the other agent had answered for its own, which could not start."""
    with Agent(tmp_path) as agent:
        done = gpuwatch("up", "--http", agent.url.removeprefix("http://"), "--port", str(free_port()))
    assert (done.returncode, done.stdout) == (2, "")
    assert f"an agent answers there already; its page is `gpuwatch dashboard --agent {agent.url}`" in done.stderr


def test_help_shows_every_word_of_every_option(monkeypatch: pytest.MonkeyPatch) -> None:
    """Help is Markdown: what looks like HTML, as `<Alert>` does, would be dropped."""
    import typer
    from typer.testing import CliRunner

    from gpuwatch.cli import build

    monkeypatch.setenv("COLUMNS", "1000")
    app = build(typer)
    commands: dict[str, Any] = {}
    for name, command in typer.main.get_command(app).commands.items():
        subcommands = getattr(command, "commands", {"": command})
        commands |= {f"{name} {sub}".strip(): each for sub, each in subcommands.items()}
    assert len(commands) >= 14
    for name, command in commands.items():
        shown = " ".join(CliRunner().invoke(app, [*name.split(), "--help"]).stdout.split())
        for parameter in command.params:
            text = getattr(parameter, "help", None) or ""
            assert " ".join(text.replace("`", "").split()) in shown, (name, parameter.name)


def test_options_of_the_agent_override_the_environment_and_both_override_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import typer
    from typer.testing import CliRunner

    import gpuwatch_agent.__main__ as agent_main
    from gpuwatch.cli import build

    started = []
    monkeypatch.setattr(agent_main, "go_on_as_agent", started.append)
    file = tmp_path / "gpuwatch.toml"
    file.write_text(
        '[agent]\nhttp = "0.0.0.0:1"\nlisten = ["ipc:///a", "ipc:///b"]\nkeep_days = 3\nprocfs = "/host/proc"\nseries = "full"\n'
    )
    for variable in ("GPUWATCH_HTTP", "GPUWATCH_HISTORY"):
        monkeypatch.delenv(variable, raising=False)
    run, app = CliRunner().invoke, build(typer)
    run(app, ["agent"], catch_exceptions=False)
    run(app, ["agent", "--config", str(file)], catch_exceptions=False)
    monkeypatch.setenv("GPUWATCH_HTTP", "127.0.0.1:2")
    run(app, ["agent", "--keep-days", "9", "--listen", "ipc:///c", "--config", str(file)], catch_exceptions=False)
    run(app, ["agent", "--http", "127.0.0.1:3", "--series", "standard", "--config", str(file)], catch_exceptions=False)
    shown = [(o.http, o.listen, o.keep_days, o.procfs, o.series == "full") for o in (each.agent for each in started)]
    assert shown == [
        ("127.0.0.1:9478", (), 7.0, "/proc", False),
        ("0.0.0.0:1", ("ipc:///a", "ipc:///b"), 3.0, "/host/proc", True),
        ("127.0.0.1:2", ("ipc:///c",), 9.0, "/host/proc", True),
        ("127.0.0.1:3", ("ipc:///a", "ipc:///b"), 3.0, "/host/proc", False),
    ]
