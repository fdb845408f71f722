"""`gpuwatch digest` over a real Prometheus that holds two days of a fleet whose truth is known."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.integration.recorded_fleet import Share, recorded, write_blocks
from tests.receivers import webhook
from tests.servers import Server, prometheus_config, start_prometheus

PRICE, HOURS = 2.5, 48.0
FLEET = [
    Share("node-1:9478", "alice", "17", "resnet.a", 8.0, starved=0.5, cause="input_single_process"),
    Share("node-2:9478", "alice", "17", "resnet.a", 4.0, stalled=0.25),
    Share("node-2:9478", "bob", "18", "bert", 4.0, idle=0.25),
    Share("node-3:9478", "carol <b>", "19", "gpt", 4.0),
]


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("prometheus") / "server"
    folder.mkdir()
    write_blocks(recorded(FLEET, PRICE), HOURS, folder / "data")
    with start_prometheus(folder, prometheus_config({})) as server:
        yield server


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "gpuwatch", "digest", *options], capture_output=True, text=True)


def test_its_hours_and_money_are_those_that_were_put_in(prometheus: Server) -> None:
    done = run("--prometheus", prometheus.url, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert list(found["users"]) == ["alice", "bob", "carol <b>"], "who lost most comes first"
    alice, bob, carol = found["users"].values()
    assert found["gpu_hours"]["all"] == pytest.approx(20 * HOURS, rel=0.02)
    assert alice["gpu_hours"] == pytest.approx(
        {"all": 12 * HOURS, "useful": 0.95 * 7 * HOURS, "starved": 4 * HOURS, "stalled": 1 * HOURS}, rel=0.02
    )
    assert alice["cost"]["starved"] == pytest.approx(4 * HOURS * PRICE, rel=0.02)
    assert alice["runs"] == {
        "resnet.a": {
            "lost_hours": pytest.approx(5 * HOURS, rel=0.02),
            "cause": "input_single_process",
            "advice": "mend input_single_process",
        }
    }
    assert bob["runs"] == {"bert": {"lost_hours": pytest.approx(1 * HOURS, rel=0.02)}}, "without a finding"
    assert carol["runs"] == {} and found["currency"] == "EUR"
    assert json.loads(run("--prometheus", prometheus.url, "--json", "--days", "1").stdout)["gpu_hours"][
        "all"
    ] == pytest.approx(20 * 24, rel=0.02)


def test_a_team_s_letter_goes_to_its_receiver(prometheus: Server) -> None:
    with webhook() as box:
        url = box.url.replace("http://", "json://")
        done = run("--prometheus", prometheus.url, "--user", "alice|carol.*", "--notify", url)
    assert done.returncode == 0, done.stderr
    (letter,) = box.accepted
    text = letter["title"] + "\n" + letter["message"]
    assert text.rstrip() == done.stdout.rstrip()
    head, gpus, cost, lost, _, alice = text.splitlines()[:6]
    assert head.startswith("gpuwatch · 7 days to 2") and head.endswith(" · 2 users") and alice == "alice"
    assert gpus.startswith("  GPUs    769 GPU-hours: useful 65%  starved 25%  stalled 6.2%") and cost.endswith(" EUR")
    assert lost.startswith("  lost    240 GPU-hours, 31%, 60")
    assert "  resnet.a lost 240 GPU-hours: input_single_process\n  do      mend input_single_process" in text


def test_what_cannot_be_done_is_an_error_that_names_it(prometheus: Server) -> None:
    unknown = run("--prometheus", prometheus.url, "--user", "dave")
    assert unknown.returncode == 2 and "dave" in unknown.stderr and "gpuwatch rules" in unknown.stderr
    wrong = run("--prometheus", prometheus.url, "--user", "(")
    assert wrong.returncode == 2 and "missing closing )" in wrong.stderr
    undelivered = run("--prometheus", prometheus.url, "--notify", "json://127.0.0.1:1")
    assert undelivered.returncode == 1 and "alice" in undelivered.stdout
