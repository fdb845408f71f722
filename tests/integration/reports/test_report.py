"""`gpuwatch report` and `gpuwatch compare` as a user runs them: on a live agent, and on the file that it left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest

from tests.chromium import DESKTOP, PHONE, chromium
from tests.integration.agent_process import Agent, Trainer
from tests.programs import ROOT
from tests.servers import free_port

SCHEMAS = ROOT / "docs" / "reference" / "schemas"


def gpuwatch(*arguments: object, directory: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gpuwatch", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=180,
        cwd=directory,
        env={**os.environ, "COLUMNS": "200"},
    )


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file in which a run that starved and one that did not have ended, and what an agent reported of the first."""
    directory = tmp_path_factory.mktemp("report")
    with Agent(directory) as agent:
        with (
            Trainer(agent, data_s=0.03, compute_s=0.01, seconds=8, run="starved") as starved,
            Trainer(agent, data_s=0.0005, compute_s=0.01, seconds=8, run="fed") as fed,
        ):
            starved.report(60)
            fed.report(60)
        agent.wait_run("starved", status="ended")
        agent.wait_run("fed", status="ended")
        live = gpuwatch("report", "starved", "--agent", agent.url, "--json")
        assert live.returncode == 0, live.stderr
        (directory / "live.json").write_text(live.stdout)
        assert agent.stop() == 0
    yield directory / "history.db"


def report(history: Path, run: str) -> dict[str, object]:
    done = gpuwatch("report", run, "--history", history, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


_SLOWER_THEN_FASTER = """
import time, torch
from torch.utils.data import DataLoader, Dataset
class Images(Dataset):
    def __len__(self): return 8 * 420
    def __getitem__(self, i):
        time.sleep(0.001 if i < 8 * 210 else 0.0002)
        return torch.randn(16)
model = torch.nn.Linear(16, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for batch in DataLoader(Images(), batch_size=8):
    model(batch).square().mean().backward(); optimizer.step(); optimizer.zero_grad(); time.sleep(0.006)
"""


def test_a_report_has_the_words_that_the_program_has_printed(tmp_path: Path) -> None:
    """The agent judges the last minute, the program itself the whole run."""
    (tmp_path / "train.py").write_text(_SLOWER_THEN_FASTER)
    with Agent(tmp_path) as agent:
        environment = {
            **os.environ,
            "GPUWATCH_ENDPOINT": agent.endpoint,
            "OMP_NUM_THREADS": "1",
            "GPUWATCH_RUN": "mine",
        }
        command = [sys.executable, "-m", "gpuwatch", "run", "--", sys.executable, "train.py"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, done.stderr
        printed = " ".join(done.stderr.rpartition("gpuwatch · mine")[2].split())
        agent.wait_run("mine", status="ended")
        live = gpuwatch("report", "mine", "--agent", agent.url, "--json")
        of_api = agent.run("mine") or {}
        assert agent.stop() == 0
    found, kept = json.loads(live.stdout), report(agent.history, "mine")
    assert found["verdict"] == kept["verdict"] == of_api["verdict"] == of_api["conclusion"]["verdict"]
    assert found["findings"] == kept["findings"]
    assert found["verdict"]["sentence"] in printed, (found["verdict"], printed)
    roots = [each for each in found["findings"] if each["root"] is None]
    assert printed.count(" why ") == min(3, len(roots)) and "is in Images.__getitem__ (train.py:" in printed, printed
    for each in roots[:3]:
        why = f"{each['title']}: {'; '.join(evidence['text'] for evidence in each['evidence'])}"
        assert why in printed and each["advice"] in printed, (why, printed)


def test_a_file_gives_the_report_of_the_agent_that_wrote_it(history: Path) -> None:
    live = json.loads((history.parent / "live.json").read_text())
    dead = report(history, "starved")
    for name in (
        "run",
        "status",
        "states",
        "shares",
        "steps",
        "samples",
        "findings",
        "step_time",
        "loader",
        "versions",
    ):
        assert dead[name] == live[name], name
    assert live["schema"] == "gpuwatch-report/1"
    jsonschema.validate(live, json.loads((SCHEMAS / "gpuwatch-report-1.json").read_text()))
    assert live["verdict"]["state"] == "input"
    assert sum(live["states"].values()) == pytest.approx(live["duration_s"])
    assert live["shares"]["input_wait"] > 0.5
    assert live["findings"][0]["cause"].startswith("input_")
    booked = sum(sum(column) for column in live["over_time"]["states"].values())
    assert booked == pytest.approx(live["duration_s"], rel=0.02)


def test_a_limit_ends_with_1_and_says_by_how_much(history: Path) -> None:
    done = gpuwatch("report", "starved", "--history", history, "--markdown", "--fail-on", "input_wait=0.1")
    assert done.returncode == 1
    assert "points over the limit of 10%" in done.stderr and "limit exceeded: input" in done.stdout
    assert gpuwatch("report", "fed", "--history", history, "--markdown", "--fail-on", "stalled=0.5").returncode == 0


def test_a_page_is_written_where_it_says(history: Path, tmp_path: Path) -> None:
    done = gpuwatch("report", "starved", "--history", history, directory=tmp_path)
    assert (done.returncode, done.stdout) == (0, "gpuwatch-starved.html\n")
    assert (tmp_path / "gpuwatch-starved.html").read_text().startswith("<!doctype html>")
    done = gpuwatch("report", "last", "--history", history, "-o", tmp_path / "no" / "where.html")
    assert done.returncode == 2 and "choose a file that you may write to" in done.stderr


def test_two_runs_and_a_kept_baseline_are_compared(history: Path) -> None:
    kept = history.parent / "live.json"
    done = gpuwatch("compare", kept, "fed", "--history", history, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["schema"], found["a"]["name"], found["b"]["name"]) == ("gpuwatch-compare/1", "starved", "fed")
    jsonschema.validate(found, json.loads((SCHEMAS / "gpuwatch-compare-1.json").read_text()))
    assert found["speedup"] > 1
    assert found["speedup_interval"][0] <= found["speedup"] <= found["speedup_interval"][1]
    assert found["share_change"]["input_wait"] < -0.2
    assert found["prediction"]["cause"] == found["a"]["findings"][0]["cause"]
    slower = gpuwatch("compare", "fed", kept, "--history", history, "--json", "--fail-on", "slower=0.05")
    assert slower.returncode == 1 and "slower, which is over the limit of 5.0%" in slower.stderr
    faster = gpuwatch("compare", kept, "fed", "--history", history, "--json", "--fail-on", "slower=0.05")
    assert faster.returncode == 0, faster.stderr


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("report", "stravd", "--history", "{history}"), "did you mean starved?"),
        (("report", "last", "--history", "{history}.no"), "there is no such file"),
        (("report", "last", "--history", __file__), "cannot be read"),
        (("report", "last", "--history", "{history}", "--json", "--markdown"), "give one of them"),
        (("report", "last", "--history", "{history}", "--fail-on", "inputwait=1"), "did you mean input_wait?"),
        (("compare", "a.json", "--history", "{history}"), "a.json: a report's file is compared with a second run"),
        (("compare", "none.json", "last", "--history", "{history}"), "No such file"),
        (("compare", "starved", "--history", "{history}"), "has no run before starved that is called 'starved'"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(history: Path, arguments: tuple[str, ...], why: str) -> None:
    done = gpuwatch(*(argument.format(history=history) for argument in arguments))
    assert done.returncode == 2
    assert why in done.stderr and "Traceback" not in done.stderr and done.stderr.count("\n") == 1


def test_two_kept_reports_are_compared_without_an_agent(history: Path) -> None:
    kept, no_agent = history.parent / "live.json", f"http://127.0.0.1:{free_port()}"
    done = gpuwatch("compare", kept, f"{history.parent}/./live.json", "--agent", no_agent, "--markdown")
    assert done.returncode == 0 and "no significant difference" in done.stdout, done.stderr
    done = gpuwatch("report", kept, "--agent", no_agent, "--markdown")
    assert done.returncode == 0 and "starved" in done.stdout, done.stderr


def test_a_file_is_utf_8_whatever_the_locale(history: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}.items():
        monkeypatch.setenv(name, value)
    for file, option in (("page.html", ()), ("page.md", ("--markdown",)), ("page.json", ("--json",))):
        done = gpuwatch("report", "starved", "--history", history, "-o", tmp_path / file, *option)
        assert done.returncode == 0, done.stderr
        assert "·" in (tmp_path / file).read_text("utf-8") or file != "page.html"


def test_without_an_agent_the_way_to_a_file_is_named() -> None:
    done = gpuwatch("report", "last", "--agent", f"http://127.0.0.1:{free_port()}")
    assert done.returncode == 2
    assert "--history FILE" in done.stderr and "Traceback" not in done.stderr


def test_pages_fit_a_screen_and_a_phone(history: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one.html", tmp_path / "two.html"
    assert gpuwatch("report", "starved", "--history", history, "-o", one).returncode == 0
    assert gpuwatch("compare", "starved", "fed", "--history", history, "-o", two).returncode == 0
    with chromium() as browser:
        for path in (one, two):
            for viewport in (DESKTOP, PHONE):
                page = browser.new_page(viewport=viewport)
                output: list[str] = []
                page.on("console", lambda message, output=output: output.append(message.text))
                page.on(
                    "request",
                    lambda request, output=output: request.url.startswith("file:") or output.append(request.url),
                )
                page.goto(path.as_uri())
                assert page.evaluate("document.documentElement.scrollWidth") == viewport["width"]
                assert page.locator("[role=img]").count() >= 4
                drawn = page.locator("svg svg").evaluate_all("all => all.map(one => getComputedStyle(one).overflow)")
                assert set(drawn) == {"hidden"}, "what is above the scale would cover what is above the plot"
                assert page.locator("tbody th", has_text="waiting for data").first.is_visible()
                assert output == []
                page.close()
