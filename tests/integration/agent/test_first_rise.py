"""A real Prometheus sees every first rise from 0, shares as the agent has them, and an ended run's last values.

Those are scraped before the run's series go.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.agent_process import Agent
from tests.servers import prometheus_config, start_prometheus, wait_for

_TRAINING = """
import sys, time
import gpuwatch

with gpuwatch.Watch(quiet=True) as w:
    for number, _ in enumerate(w.steps(range(100))):
        time.sleep(0.1)
        if number == 60:
            with w.phase("eval"):
                time.sleep(6)
        if number == 80:
            with w.phase("checkpoint"):
                time.sleep(0.7)
sys.stdin.readline()
"""


@pytest.mark.timeout(240)
def test_prometheus_has_the_agent_s_shares_and_the_end_of_a_run(tmp_path: Path) -> None:
    with (
        Agent(tmp_path, "--series", "standard") as agent,
        start_prometheus(
            tmp_path / "prometheus", prometheus_config({"gpuwatch": agent.url}, scrape_interval="2s"), "groups: []"
        ) as prometheus,
    ):
        environment = {**os.environ, "GPUWATCH_RUN": "r", "GPUWATCH_ENDPOINT": agent.endpoint}
        training = subprocess.Popen([sys.executable, "-c", _TRAINING], env=environment, stdin=subprocess.PIPE)
        try:
            wait_for(
                "its checkpoint",
                lambda: prometheus.query('gpuwatch_run_seconds_total{run="r",state="checkpoint"} > 0.6'),
                120,
                1,
            )
        finally:
            training.communicate(b"\n", timeout=60)
        ended = agent.wait_run("r", status="ended")
        wait_for("its series go, but for its end", lambda: not prometheus.query('gpuwatch_run_info{run="r"}'), 60, 1)
        assert prometheus.query('gpuwatch_run_up{run="r"} == 0')
        assert not any(key[:2] == ("gpuwatch_run_seconds_total", "r") for key in agent.metrics())
        assert agent.run("r") is not None, "the agent still knows it"

        def samples(metric: str) -> dict[str, dict[float, float]]:
            found = prometheus.get("/api/v1/query", query=f'{metric}{{run="r"}}[5m]')["data"]["result"]
            return {
                each["metric"].get("state", ""): {time_s: float(value) for time_s, value in each["values"]}
                for each in found
            }

        states = samples("gpuwatch_run_seconds_total")
        watermark = samples("gpuwatch_ledger_watermark_timestamp_seconds")[""]
    first_s = min(watermark)
    assert {"eval", "checkpoint", "compute"} <= states.keys()
    for state, values in states.items():
        assert values[min(values)] == 0 or min(values) == first_s, f"{state} begins with {values}"
    for time_s, until_s in watermark.items():  # at every scrape the ledger adds up
        known = sum(values.get(time_s, 0.0) for values in states.values())
        assert known == pytest.approx(until_s - ended["started_s"], abs=0.05)
    last = {state: values[max(values)] for state, values in states.items()}
    assert last == pytest.approx({state: ended["states"].get(state, 0.0) for state in last}, abs=1e-3)
