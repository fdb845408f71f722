"""The agent is killed with -9 in the middle of a run, and started again."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest

from gpuwatch.ledger.states import RUN_STATES
from gpuwatch.metrics import BY_NAME
from tests.integration.agent_process import Agent, Series, Trainer, run_states, watch_counters
from tests.servers import wait_for

RUN = "restarted"


def increase(pages: list[Series], key: tuple[str, ...]) -> float:
    """Return what Prometheus's increase() adds up to between the scrapes: a fall counts as a reset to 0."""
    values = [page[key] for page in pages if key in page]
    return sum(b - a if b >= a else b for a, b in itertools.pairwise(values))


def test_no_second_and_no_step_is_lost_or_counted_twice(tmp_path: Path) -> None:
    pages: list[Series] = []
    with Agent(tmp_path) as agent, Trainer(agent, data_s=0.012, compute_s=0.004, run=RUN) as trainer:
        agent.wait_run(RUN)
        wait_for("its series", lambda: run_states(agent.metrics(), RUN), 30, 0.05)
        watch_counters(agent, 3, pages)
        for away_s in (0.0, 1.5):
            agent.kill()
            time.sleep(away_s)
            agent.start()
            wait_for("the run is back", lambda: agent.run(RUN), 30, 0.05)
            wait_for("it is heard", lambda: agent.metrics()["gpuwatch_messages_received_total",] > 0, 30, 0.05)
            watch_counters(agent, 1.5, pages)
        trainer.finish()
        report = trainer.report(60)
        run = agent.wait_run(RUN, status="ended")
        watch_counters(agent, 0.5, pages)
        last = agent.metrics()
        kept = agent.get(f"/api/v1/runs/{RUN}/steps", last=100_000)
        assert agent.stop() == 0

    # to the nanosecond what the hook itself says
    assert run_states(last, RUN) == pytest.approx(report["states"], abs=1e-6)
    assert run["states"].get("unknown", 0) == 0
    assert sum(run["states"].values()) == pytest.approx(run["watermark_s"] - run["started_s"], abs=0.05)
    assert (run["steps"], run["samples"]) == (report["steps"], 8 * report["steps"])
    assert last["gpuwatch_steps_total", RUN, "0"] == report["steps"]

    # each step's record is in the history once, or was counted as lost
    assert len(kept["time_s"]) + run["records_lost"] == report["steps"]
    assert run["records_lost"] <= 0.5 * report["steps"]
    assert all(a < b for a, b in zip(kept["time_s"], kept["time_s"][1:], strict=False))
    assert last["gpuwatch_step_records_lost_total", RUN, "0"] == run["records_lost"]

    # no counter of the run ever goes back, so that increase() is right over both restarts
    for key in pages[0]:
        if key[1:2] == (RUN,) and key[0] in BY_NAME and BY_NAME[key[0]].kind == "counter":
            values = [page[key] for page in pages if key in page]
            assert values == sorted(values), key
            assert increase(pages, key) == pytest.approx(values[-1] - values[0]), key
    watched_s = sum(increase(pages, ("gpuwatch_run_seconds_total", RUN, "0", state)) for state in RUN_STATES)
    first_s = sum(run_states(pages[0], RUN).values())
    assert watched_s == pytest.approx(sum(report["states"].values()) - first_s, abs=1e-3)
