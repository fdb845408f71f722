"""The whole path with real parts: training process → agent → Prometheus → Alertmanager, and the page in Chromium."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from gpuwatch.alerting.render import render
from gpuwatch.alerting.thresholds import AlertThresholds
from tests.chromium import DESKTOP, chromium
from tests.integration.dashboards.browser import WAIT_MS
from tests.programs import agent, dashboard, end, hook_environment, training, truth
from tests.servers import free_port, prometheus_config, start_alertmanager, start_prometheus, wait_for

QUICK = AlertThresholds(
    starved_window_s=15,
    starved_min_training_s=5,
    starved_for_s=3,
    agent_frozen_window_s=10,
    agent_down_for_s=3,
    ledger_window_s=5,
)
"""The shipped rules with windows that a test can wait for."""

SHARE = """
sum by (run) (gpuwatch_run_seconds_total{state="input_wait"})
/ sum by (run) (gpuwatch_run_seconds_total{state!="startup"})
"""


@pytest.mark.alone
def test_injected_starvation_reaches_prometheus_within_3_points_and_fires_in_alertmanager(tmp_path: Path) -> None:
    with (
        agent(tmp_path / "agent") as node,
        start_alertmanager(tmp_path / "am") as alertmanager,
        start_prometheus(
            tmp_path / "prometheus",
            prometheus_config({"gpuwatch": node.url}, alertmanager=alertmanager.url),
            render(QUICK),
        ) as prometheus,
        training(hook_environment(tmp_path / "agent", GPUWATCH_RUN="starving"), "--seconds", "90") as trainer,
    ):
        fired = wait_for(
            "GpuStarved is active in Alertmanager",
            lambda: [a for a in alertmanager.get("/api/v2/alerts") if a["labels"]["alertname"] == "GpuStarved"],
            timeout_s=45,
        )
        share, at = prometheus.value(SHARE), time.time()
        end(trainer)
        injected = truth(trainer, end=at)

    assert share is not None
    expected = injected["input_wait"] / injected["wall"]
    assert share == pytest.approx(expected, abs=0.03)
    assert 0.5 < expected < 0.7  # it was starved as meant
    labels, annotations = fired[0]["labels"], fired[0]["annotations"]
    assert labels["run"] == "starving" and labels["user"]
    output = re.search(r"([\d.]+)% of its training time", annotations["summary"])
    assert output is not None, annotations["summary"]
    assert float(output[1]) / 100 == pytest.approx(expected, abs=0.05)
    assert "input_single_process" in annotations["cause"]


@pytest.mark.alone
def test_the_live_page_shows_the_run_and_its_injected_share_within_3_points(tmp_path: Path) -> None:
    with (
        agent(tmp_path / "agent") as node,
        dashboard(tmp_path / "page", node.url) as page_server,
        training(hook_environment(tmp_path / "agent", GPUWATCH_RUN="starving-run"), "--seconds", "90") as trainer,
        chromium() as browser,
    ):
        page = browser.new_page(viewport=DESKTOP)
        page.goto(page_server.url)
        page.get_by_text("starving-run").first.wait_for(timeout=WAIT_MS)
        sentence = re.compile(r"input-bound: (\d+)% of the time", re.IGNORECASE)
        verdict = page.get_by_text(sentence).first
        verdict.wait_for(timeout=WAIT_MS)
        page.wait_for_timeout(10_000)  # it refreshes by itself; by then a finding is active too
        shown, at = sentence.search(verdict.inner_text()), time.time()
        page.get_by_text("num_workers").first.wait_for(timeout=10_000)
        page.screenshot(path=str(tmp_path / "live.png"), full_page=True)
        end(trainer)
        injected = truth(trainer, end=at)

    assert shown is not None
    assert int(shown[1]) / 100 == pytest.approx(injected["input_wait"] / injected["wall"], abs=0.03)
    assert (tmp_path / "live.png").stat().st_size > 20_000


def test_an_agent_that_is_killed_in_mid_run_leaves_increase_right_in_prometheus(tmp_path: Path) -> None:
    directory = tmp_path / "agent"
    port = free_port()
    with (
        start_prometheus(
            tmp_path / "prometheus", prometheus_config({"gpuwatch": f"127.0.0.1:{port}"}), render(QUICK)
        ) as prometheus,
        training(hook_environment(directory, GPUWATCH_RUN="survivor"), "--seconds", "90") as trainer,
    ):
        run = 'gpuwatch_run_seconds_total{run="survivor"}'
        with agent(directory, port=port) as first:
            wait_for("the run is in Prometheus", lambda: (prometheus.value(f"sum({run})") or 0) > 8, 40)
            first.process.kill()
            first.process.wait()
        before = prometheus.value(f"sum({run})")
        assert before is not None
        with agent(directory, port=port) as second:
            wait_for("the run is back", lambda: second.get("/api/v1/runs")["runs"], 10)
            wait_for("Prometheus has more of it", lambda: (prometheus.value(f"sum({run})") or 0) > before + 6, 30)
            end(trainer)
            truth(trainer)
            wait_for("it has ended", lambda: second.get("/api/v1/runs")["runs"][0]["status"] == "ended", 10)
            seen: list[tuple[float, dict[str, float]]] = []

            def has_the_end() -> bool:
                states = second.get("/api/v1/runs")["runs"][0]["states"]
                seen.append((prometheus.value(f"sum({run})") or 0, states))
                return abs(seen[-1][0] - sum(states.values())) < 1e-6

            try:
                wait_for("Prometheus has the end", has_the_end, 10)
            finally:
                print(seen[0], seen[-1])
            states = seen[-1][1]
            resets = prometheus.value(f"sum(resets({run}[2m]))")
            grown = prometheus.value(f"sum(max_over_time({run}[2m]) - min_over_time({run}[2m]))")
            increased = prometheus.value(f"sum(increase({run}[2m]))")
    assert resets == 0
    assert "unknown" not in states  # its totals explain the time without an agent
    assert grown is not None and increased is not None
    # increase() also reaches a little past its first and last samples: by half a scrape interval at each end, as always
    assert increased == pytest.approx(grown, abs=2.5)
