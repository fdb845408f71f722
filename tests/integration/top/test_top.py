"""`gpuwatch top` in a real pseudo-terminal: against known numbers, and against a real agent and training."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import programs
from tests.integration.dashboards.fake import a_run
from tests.integration.top.fake import NodeWithGpus
from tests.integration.top.pseudo_terminal import PseudoTerminal
from tests.servers import prometheus_config, start_prometheus, wait_for

TOP = [sys.executable, "-m", "gpuwatch", "top"]
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLORTERM", "COLUMNS", "LINES")},
    "PYTHONUTF8": "1",
}
BERT = {
    "verdict": {
        "state": "compute",
        "ratio": 0.93,
        "sentence": "healthy: 93% of the time is compute, the input keeps up",
    },
    "findings": [],
    "age_s": 3000.0,
}


@pytest.fixture
def agent() -> Iterator[NodeWithGpus]:
    fake = NodeWithGpus(runs=[a_run()])
    fake.start()
    yield fake
    fake.stop()


def top(
    url: str, columns: int = 80, rows: int = 24, *options: str, environment: dict[str, str] | None = None
) -> PseudoTerminal:
    return PseudoTerminal([*TOP, "--agent", url, *options], columns, rows, environment or ENVIRONMENT)


def piped(*options: str) -> subprocess.CompletedProcess[str]:
    for _ in range(5):
        done = subprocess.run([*TOP, *options], capture_output=True, text=True, env=ENVIRONMENT, timeout=180)
        if "did not answer within" not in done.stderr:  # on a busy machine
            break
    return done


def test_verdict_ledger_step_and_advice_at_80_by_24(agent: NodeWithGpus) -> None:
    with top(agent.url) as terminal:
        text = terminal.wait_for(  # the whole frame: a slow machine may get it in pieces
            "mean",
            "▸ resnet50-a      ● running   9.70  103 ms",
            "input-bound: 62% of the time training waited for data",
            "╱╱ waiting for data 62% (62%)  ██ computing 35% (34%)",
            "step p50 103 ms · p95 131 ms · 9.70 steps/s",
            "num_workers 0 → 8 (costs about 48 MiB of /dev/shm) → up to 2.60×",
            "q quit",
            "step time",
        )
        last_minute = next(line for line in text.splitlines() if "last minute █" in line)
        assert last_minute.count("╱") == pytest.approx(0.62 * 65, abs=1)
        mean = re.search(r"mean ([\d.]+) ms = ([\d.]+) ms data wait", text)
        assert mean
        assert float(mean[1]) == pytest.approx(99, abs=3)  # 96% of 103 ms: the rest is evaluation
        assert 50 < float(mean[2]) < 75


def test_keys_choose_runs_gpus_findings_help_and_quit(agent: NodeWithGpus) -> None:
    agent.runs.append(a_run("bert-1-2", "bert-large", **BERT))  # type: ignore[arg-type]
    agent.gpus = True
    with top(agent.url) as terminal:
        terminal.wait_for("▸ resnet50-a", "mean")
        terminal.press("j")
        terminal.wait_for(
            "▸ bert-large", "healthy: 93% of the time is compute, the input keeps up", "No bottleneck found"
        )
        terminal.press("\x1b[A")
        terminal.wait_for("▸ resnet50-a", "── resnet50-a")
        terminal.press("g")
        text = terminal.wait_for("state now", "▸ 0", "7   ▓ evaluation", "waiting for data 75%")
        assert text.count("141 GiB") == 8
        terminal.press("jj")
        terminal.wait_for("▸ 2   ─ held idle", "end pid 4713 (python) of alice")
        terminal.press("f")
        terminal.wait_for("GPUs without a run", "no work for 15m 00s")
        terminal.press("?")
        terminal.wait_for("How to read it", "busy, no hook")
        terminal.press("\x1b")
        terminal.wait_for("── resnet50-a")
        assert terminal.screen.modes >= {"1049"}
        terminal.press("q")
        assert terminal.ended() == 0
        assert terminal.screen.modes == {"25", "7"}, (
            terminal.screen.modes
        )  # cursor and wrap are back, the alternate screen is left
        assert terminal.settings == terminal.settings_before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_gives_the_terminal_back(agent: NodeWithGpus, number: signal.Signals) -> None:
    with top(agent.url) as terminal:
        terminal.wait_for("▸ resnet50-a")
        terminal.process.send_signal(number)
        assert terminal.ended() == 0
        assert terminal.screen.modes == {"25", "7"}
        assert terminal.settings == terminal.settings_before


def test_ctrl_z_gives_the_terminal_back_until_it_is_resumed_and_ctrl_c_ends_with_130(agent: NodeWithGpus) -> None:
    with top(agent.url) as terminal:
        terminal.wait_for("mean")
        state = Path(f"/proc/{terminal.process.pid}/stat")
        terminal.press("\x1a")
        wait_for("it is stopped", lambda: state.read_text().split()[2] == "T", 10)
        wait_for("all of its output", lambda: terminal.screen.modes == {"25", "7"}, 10)
        assert terminal.settings == terminal.settings_before
        terminal.process.send_signal(signal.SIGCONT)
        wait_for("it draws again", lambda: terminal.screen.modes >= {"1049"}, 10)
        terminal.wait_for("▸ resnet50-a", "mean")
        terminal.press("\x03")
        assert terminal.ended() == 130
        assert terminal.screen.modes == {"25", "7"}


def test_agent_away_and_back(agent: NodeWithGpus) -> None:
    with top(agent.url) as terminal:
        terminal.wait_for("▸ resnet50-a")
        agent.stop()
        terminal.wait_for(f"The agent at {agent.url} does not answer.", "Start it with gpuwatch up or gpuwatch agent.")
        agent.start()
        text = terminal.wait_for("▸ resnet50-a", "mean")
        assert "does not answer" not in text


def test_started_before_the_agent_and_before_any_run(agent: NodeWithGpus) -> None:
    agent.stop()
    with top(agent.url) as terminal:
        terminal.wait_for("does not answer")
        agent.runs = []
        agent.start()
        terminal.wait_for("No training run on node-17 yet.", "for batch in gpuwatch.watch(loader):")
        agent.runs = [a_run()]
        terminal.wait_for("▸ resnet50-a", "input-bound: 62%")


def test_resize_redraws(agent: NodeWithGpus) -> None:
    agent.gpus = True
    with top(agent.url) as terminal:
        terminal.wait_for("▸ resnet50-a", "mean")
        terminal.resize(60, 20)
        text = terminal.wait_for("▸ resnet50-a", "num_workers 0 → 8", "q quit")
        assert len(text.splitlines()) == 20
        terminal.resize(160, 50)
        terminal.wait_for("100%", "5 min", "NVIDIA H200", "── node node-17")


def test_no_color_has_no_colour(agent: NodeWithGpus) -> None:
    with top(agent.url, environment={**ENVIRONMENT, "NO_COLOR": "1"}) as terminal:
        terminal.wait_for("╱╱ waiting for data 62%")
        assert terminal.screen.colours == set()
    with top(agent.url) as terminal:
        terminal.wait_for("╱╱ waiting for data 62%")
        assert "38" in terminal.screen.colours


def test_only_what_changed_is_sent(agent: NodeWithGpus) -> None:
    with top(agent.url) as terminal:
        terminal.wait_for("mean")
        screen, read = terminal.received, agent.requests
        wait_for("the layout has settled", lambda: agent.requests >= read + 6, 20)
        before, read = terminal.received, agent.requests
        wait_for("three more refreshes", lambda: agent.requests >= read + 6, 20)
        assert 0 < terminal.received - before < screen


def test_at_40_columns_verdict_and_advice_are_there(agent: NodeWithGpus) -> None:
    with top(agent.url, 40, 24) as terminal:
        text = terminal.wait_for("▸ resnet50-a", "input-bound: 62%", "do   num_workers 0 → 8", "q quit")
        assert max(len(line) for line in text.splitlines()) <= 40


def test_what_is_drawn_does_not_go_to_a_log(agent: NodeWithGpus) -> None:
    with top(agent.url) as terminal:  # PseudoTerminal gives it a pipe as stderr
        terminal.wait_for("▸ resnet50-a")
        terminal.press("q")
        assert (terminal.ended(), terminal.errors()) == (0, "")


def test_a_pipe_prints_once_in_plain_text(agent: NodeWithGpus) -> None:
    agent.gpus = True
    done = piped("--agent", agent.url)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert "input-bound: 62% of the time training waited for data" in done.stdout
    assert done.stdout.count("141 GiB") == 8
    assert "num_workers 0 → 8" in done.stdout


def test_once_on_a_terminal(agent: NodeWithGpus) -> None:
    done = subprocess.run([*TOP, "--agent", agent.url, "--once"], capture_output=True, env=ENVIRONMENT, timeout=180)
    assert done.returncode == 0 and b"resnet50-a" in done.stdout


def test_once_without_an_agent_is_1_and_says_why(agent: NodeWithGpus) -> None:
    agent.stop()
    done = piped("--agent", agent.url)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"the agent at {agent.url} does not answer" in done.stderr and "gpuwatch up" in done.stderr


def test_from_prometheus(agent: NodeWithGpus, tmp_path: Path) -> None:
    agent.gpus = True
    with start_prometheus(tmp_path, prometheus_config({"gpuwatch": agent.url}), "groups: []") as prometheus:
        wait_for("eight GPUs", lambda: piped("--prometheus", prometheus.url).stdout.count("/80 GiB") == 8, 60, 3)
        # a range query ends at a whole multiple of its step, a scrape interval of 15 s unless configured otherwise
        wait_for("the verdict", lambda: "input-bound: 6" in piped("--prometheus", prometheus.url).stdout, 60, 3)
        done = piped("--prometheus", prometheus.url)
        assert done.returncode == 0, done.stderr
        assert "resnet50-a" in done.stdout and "alice, job 17" in done.stdout

        def idle() -> str:
            [line] = [
                each for each in piped("--prometheus", prometheus.url).stdout.splitlines() if each[:6] == "  7   "
            ]
            return line if "─" * 14 in line else ""

        assert "─ held idle" in wait_for("GPU 7 was idle for as long as it is known", idle, 90, 3)
    done = piped("--prometheus", prometheus.url)
    assert done.returncode == 1 and "Prometheus at" in done.stderr


def test_a_real_training_and_its_injected_share(tmp_path: Path) -> None:
    environment = programs.hook_environment(tmp_path, GPUWATCH_RUN="real-run", GPUWATCH_QUIET="1")
    with (
        programs.agent(tmp_path) as agent,
        programs.training(environment, "--seconds", "14", "--wait-ms", "30", "--compute-ms", "20") as training,
        top(agent.url) as terminal,
    ):
        terminal.wait_for("input-bound:", "data wait +", timeout_s=40)
        injected = programs.truth(training)
        text = terminal.wait_for("■ ended", "(whole run)", timeout_s=30)
        truth = injected["input_wait"] / (injected["input_wait"] + injected["compute"])
        verdict = re.search(r"input-bound: (\d+)%", text)
        assert verdict and float(verdict[1]) / 100 == pytest.approx(truth, abs=0.03)
        steps = re.search(r"([\d,]+) steps ─", text)
        assert steps and int(steps[1].replace(",", "")) == pytest.approx(injected["steps"], abs=1)
