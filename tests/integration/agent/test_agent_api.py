"""Every path of docs/reference/api.md and /metrics, asked of a live agent with a run whose id is an odd one."""

from __future__ import annotations

import gzip
import os
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from gpuwatch import __version__
from gpuwatch.alerting.thresholds import AlertThresholds
from gpuwatch.ledger.states import RUN_STATES
from gpuwatch.metrics import BY_NAME
from tests.integration.agent_process import Agent, Trainer, run_states
from tests.servers import require, wait_for

RUN = 'team/ü b"1"?x=1#%2F'


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    """An agent with a run of a few seconds that has ended: 30 ms of waiting and 10 ms of compute a step."""
    directory = tmp_path_factory.mktemp("agent")
    with Agent(directory) as agent, Trainer(agent, data_s=0.03, compute_s=0.01, run=RUN) as trainer:
        live = agent.wait_run(RUN, activity="data_wait")
        assert live["status"] == "running"
        first = agent.metrics()
        assert {key[3] for key in first if key[:2] == ("gpuwatch_run_seconds_total", RUN)} == set(RUN_STATES)
        time.sleep(4)

        def steady() -> dict[str, Any] | None:
            """Return the run once a pause in which it had no core is a small part of its last minute."""
            run = agent.wait_run(RUN)
            recent, shares = run["recent"], run["recent"]["states"]
            usual = (
                recent["steps_per_s"] * recent["step_s_p50"] > 0.8
                and shares.get("input_wait", 0) / (shares.get("input_wait", 0) + shares.get("compute", 1)) > 0.5
            )
            return run if usual else None

        agent.live = wait_for("it goes on steadily", steady, 60, 1)  # type: ignore[attr-defined]
        trainer.finish()
        agent.report = trainer.report()  # type: ignore[attr-defined]
        agent.wait_run(RUN, status="ended")
        yield agent


def steps_path(run: str = RUN) -> str:
    return f"/api/v1/runs/{urllib.parse.quote(run, safe='')}/steps"


def test_health(agent: Agent) -> None:
    assert agent.get_text("/healthz") == "ok\n"
    assert agent.get_text("/readyz") == "ok\n"


def test_the_runbooks_that_alerts_link_to_are_served_and_nothing_else(agent: Agent) -> None:
    page = urllib.parse.urlsplit(f"{AlertThresholds.runbooks}/RunHung.md").path
    assert agent.get_text(page).startswith("# RunHung\n")
    assert agent.get_text("/docs/concepts/causes.md").startswith("# ")  # a runbook links to it
    for path in (
        "/docs/runbooks/" + "Nothing.md",
        "/docs/reference/api.md",
        "/docs/runbooks/..%2fconcepts%2fcauses.md",
    ):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            agent.get_text(path)


def test_status(agent: Agent) -> None:
    asked_s = time.time()
    status = agent.get("/api/v1/status")
    assert set(status) == {
        "version",
        "host",
        "time_s",
        "sampled_s",
        "started_s",
        "collectors",
        "history",
        "gpus",
        "listen",
    }
    assert status["listen"] == [agent.endpoint]
    assert status["history"]["path"] == str(agent.history)
    assert status["history"]["failures"] == 0
    assert asked_s - 1 < status["time_s"] < time.time() + 1
    assert status["started_s"] < status["sampled_s"] <= status["time_s"]
    collectors = {each["name"]: each for each in status["collectors"]}
    assert collectors["cpu"]["success"] is True and 0 < collectors["cpu"]["duration_s"] < 30

    def its_size() -> bool:
        return bool(agent.get("/api/v1/status")["history"]["bytes"] == agent.history.stat().st_size)

    wait_for("its history's size", its_size, 10)  # it grows every second


def test_runs(agent: Agent) -> None:
    live = agent.live  # type: ignore[attr-defined]
    report = agent.report  # type: ignore[attr-defined]
    documented = """run rank name job host pid host_pid user gpus cost status world_size timeline device started_s watermark_s last_message_s
        steps samples tokens records_lost activity states phases recent verdict findings loader tags owner versions
        energy_joules goodput_ratio goodput_is_exact conclusion attempts gpu_share breakdown"""
    assert set(live) == set(documented.split())
    recent = live["recent"]
    assert recent["states"].keys() <= set(RUN_STATES)
    assert sum(recent["states"].values()) == pytest.approx(recent["duration_s"])
    assert 0.029 < recent["data_wait_s_p50"] < 0.05
    assert 0.039 < recent["step_s_p50"] < 0.06 and recent["step_s_p50"] <= recent["step_s_p95"]
    assert recent["steps_per_s"] == pytest.approx(1 / recent["step_s_p50"], rel=0.25)
    assert recent["samples_per_s"] == pytest.approx(8 * recent["steps_per_s"])
    assert live["verdict"]["state"] == "input" and 0.5 < live["verdict"]["ratio"] < 0.85
    ended = agent.wait_run(RUN, status="ended")
    assert ended["states"] == pytest.approx(report["states"], abs=1e-6)
    assert (ended["steps"], ended["samples"]) == (report["steps"], report["samples"])
    assert ended["verdict"]["state"] == "input"  # it stays
    assert ended["findings"] == []


def test_findings(agent: Agent) -> None:
    assert isinstance(agent.get("/api/v1/findings")["findings"], list)


def test_series(agent: Agent) -> None:
    found = agent.get("/api/v1/series", metric="gpuwatch_run_seconds_total", run=RUN, state="input_wait")
    assert (found["kind"], found["unit"]) == ("counter", "seconds")
    assert [each["labels"] for each in found["series"]] == [{"run": RUN, "rank": "0", "state": "input_wait"}]
    points = found["series"][0]["points"]
    assert points[-1][1] == pytest.approx(agent.report["states"]["input_wait"])  # type: ignore[attr-defined]
    coarse = agent.get("/api/v1/series", metric="gpuwatch_steps_total", run=RUN, points=3)["series"][0]["points"]
    fine = agent.get("/api/v1/series", metric="gpuwatch_steps_total", run=RUN, points=2000)["series"][0]["points"]
    assert len(coarse) <= 3 and coarse[-1] == fine[-1]
    assert all(point in fine for point in coarse)
    assert agent.get("/api/v1/series", metric="gpuwatch_cpu_cores", end=1000)["series"] == []
    assert agent.get("/api/v1/series", metric="gpuwatch_run_threads", run="absent")["series"] == []


def test_ledger(agent: Agent) -> None:
    found = agent.get("/api/v1/ledger")
    (run,) = (each for each in found["runs"] if each["run"] == RUN)
    states = agent.wait_run(RUN)["states"]
    assert run["rank"] == "0" and run["seconds"] == pytest.approx(sum(run["states"].values()))
    # the agent's record of the run begins with what it had done before: up to a second is from before the first sample
    assert run["states"]["input_wait"] == pytest.approx(states["input_wait"], abs=1.5)
    assert found["gpus"] == [] and found["end_s"] - found["start_s"] == 3600
    assert agent.get("/api/v1/ledger", start=1, end=2)["runs"] == []


def test_runs_that_are_kept(agent: Agent) -> None:
    live, kept = agent.get("/api/v1/runs")["runs"], agent.get("/api/v1/runs", kept="all")["runs"]
    assert [each["run"] for each in live] == [each["run"] for each in kept] == [RUN]


def test_steps(agent: Agent) -> None:
    run = agent.wait_run(RUN)
    steps = agent.get(steps_path(), last=100_000)
    assert (steps["run"], steps["rank"]) == (RUN, 0)
    columns = ["time_s", "data_wait_s", "transfer_s", "compute_s", "input_wait_s", "host_wait_s"]
    columns += ["device_transfer_s", "device_compute_s", "samples", "epoch_start"]
    assert {len(steps[name]) for name in columns} == {run["steps"] - run["records_lost"]}
    assert sum(steps["data_wait_s"]) == pytest.approx(run["states"]["input_wait"], abs=0.2)
    assert sum(steps["epoch_start"]) == 1 and set(steps["samples"]) == {8}
    assert run["started_s"] <= steps["time_s"][0] <= steps["time_s"][-1] <= run["watermark_s"]
    last = agent.get(steps_path(), last=7)
    assert len(last["time_s"]) == 7 and last["time_s"] == steps["time_s"][-7:]
    assert last["first_step"] == run["steps"] - 7


@pytest.mark.parametrize(
    ("path", "query", "status", "says"),
    [
        ("/api/v1/series", {}, 400, "metric='' is not a metric"),
        ("/api/v1/series", {"metric": "up"}, 400, "'up' is not a metric"),
        ("/api/v1/series", {"metric": "gpuwatch_load1", "colour": "red"}, 400, "no label 'colour'"),
        ("/api/v1/series", {"metric": "gpuwatch_load1", "points": "many"}, 400, "points='many' is not a number"),
        ("/api/v1/series", {"metric": "gpuwatch_load1", "points": 0}, 400, "points=0: give 1 to 2000"),
        ("/api/v1/series", {"metric": "gpuwatch_load1", "points": "nan"}, 400, "points='nan'"),
        ("/api/v1/series", {"metric": "gpuwatch_load1", "start": "-inf"}, 400, "start='-inf'"),
        ("/api/v1/series", {"metric": "gpuwatch_load1", "start": 2e9, "end": 1e9}, 400, "after end"),
        (steps_path(), {"last": 0}, 400, "last=0: give 1 to 100000"),
        (steps_path(), {"rank": "x"}, 400, "rank='x' is not a number"),
        (steps_path(), {"rank": 9}, 404, "rank 9 are kept; /api/v1/runs lists the runs"),
        (steps_path("no-such-run"), {}, 404, "no steps of run 'no-such-run'"),
        ("/api/v1/nothing", {}, 404, "/api/v1/nothing does not exist; the paths are in docs/reference/api.md"),
    ],
)
def test_wrong_questions_are_answered_with_what_to_do(
    agent: Agent, path: str, query: dict[str, object], status: int, says: str
) -> None:
    answer = agent.get(path, **query)
    assert answer["status"] == status
    assert says in answer["error"]


def test_other_methods_are_refused_as_json(agent: Agent) -> None:
    request = urllib.request.Request(agent.url + "/api/v1/runs", data=b"x", method="POST")
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=60)
    with caught.value as error:
        assert error.code == 405 and b"use GET" in error.read()


def test_page_passes_promtool(agent: Agent) -> None:
    promtool = require("promtool")
    page = agent.get_text("/metrics")
    done = subprocess.run([promtool, "check", "metrics"], input=page, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_page_is_open_metrics_when_asked_for(agent: Agent) -> None:
    page = agent.get_text("/metrics", {"Accept": "application/openmetrics-text; version=1.0.0"})
    families = {family.name for family in text_string_to_metric_families(page)}
    assert page.endswith("# EOF\n") and "gpuwatch_run_seconds" in families
    names = {metric.name.removesuffix("_total").removesuffix("_info") for metric in BY_NAME.values()}
    assert families <= names


def test_page_is_compressed_when_asked_for(agent: Agent) -> None:
    request = urllib.request.Request(agent.url + "/metrics", headers={"Accept-Encoding": "gzip"})
    with urllib.request.urlopen(request, timeout=60) as response:
        assert response.headers["Content-Encoding"] == "gzip"
        body = response.read()
    page = gzip.decompress(body).decode()
    assert 'run_seconds_total{rank="0"' in page and len(body) < len(page) / 3.5


def test_the_core_metrics_of_a_node_without_gpus_are_on_the_page(agent: Agent) -> None:
    """Every name on the page is in the catalogue (see `metrics`). What needs no GPU, worker or finding is there."""
    there = {key[0] for key in agent.metrics()}
    core = """run_seconds_total ledger_watermark_timestamp_seconds step_phase_seconds_total steps_total samples_total
        run_info run_up step_records_lost_total hook_overhead_seconds_total cpu_seconds_total cpu_cores
        load1 memory_total_bytes memory_available_bytes shm_size_bytes shm_used_bytes build_info
        messages_received_total messages_rejected_total history_bytes
        sample_timestamp_seconds agent_cpu_seconds_total agent_resident_memory_bytes"""
    assert {f"gpuwatch_{name}" for name in core.split()} - there == set()


def test_ledger_on_the_page_is_the_wall_clock(agent: Agent) -> None:
    run, page = agent.wait_run(RUN), agent.metrics()
    states = run_states(page, RUN)
    assert sum(states.values()) == pytest.approx(run["watermark_s"] - run["started_s"], abs=0.05)
    assert page["gpuwatch_steps_total", RUN, "0"] == run["steps"]


def test_an_agent_in_a_pod_has_its_node_s_name_and_says_where_it_is_reached(tmp_path: Path) -> None:
    pod = {"GPUWATCH_NODE": "node-17", "GPUWATCH_ADDRESS": "10.1.2.3:9478"}
    with Agent(tmp_path, environment={**os.environ, **pod}) as agent:
        assert agent.get("/api/v1/status")["host"] == "node-17"
        assert agent.metrics()["gpuwatch_build_info", __version__, "10.1.2.3:9478"] == 1
