"""The whole path with real parts: training process → agent → Prometheus → Alertmanager, and the page in Chromium."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpuwatch.alert_rules import AlertThresholds, render
from tests.chromium import DESKTOP, chromium
from tests.programs import agent, dashboard, hook_environment, training, truth
from tests.servers import prometheus_config, start_alertmanager, start_prometheus, wait_for

QUICK = AlertThresholds(
    starved_window_s=15, starved_min_training_s=5, starved_for_s=3, agent_frozen_window_s=10, agent_down_for_s=3
)
"""The shipped rules with windows that a test can wait for."""

SHARE = """
sum by (run) (increase(gpuwatch_run_seconds_total{state="input_wait"}[20s]))
/ sum by (run) (increase(gpuwatch_run_seconds_total[20s]))
"""


def test_injected_starvation_reaches_prometheus_within_3_points_and_fires_in_alertmanager(tmp_path: Path) -> None:
    with (
        agent(tmp_path / "agent") as node,
        start_alertmanager(tmp_path / "am") as alertmanager,
        start_prometheus(
            tmp_path / "prometheus",
            prometheus_config({"gpuwatch": node.url}, alertmanager=alertmanager.url),
            render(QUICK),
        ) as prometheus,
        training(hook_environment(tmp_path / "agent", GPUWATCH_RUN="starving"), "--seconds", "34") as trainer,
    ):
        fired = wait_for(
            "GpuStarved is active in Alertmanager",
            lambda: [a for a in alertmanager.get("/api/v2/alerts") if a["labels"]["alertname"] == "GpuStarved"],
            timeout_s=45,
        )
        share = prometheus.value(SHARE)
        injected = truth(trainer)

    assert share is not None
    expected = injected["input_wait"] / injected["wall"]
    assert share == pytest.approx(expected, abs=0.03)
    assert 0.5 < expected < 0.7  # it was starved as meant
    labels, annotations = fired[0]["labels"], fired[0]["annotations"]
    assert labels["run"] == "starving" and labels["rank"] == "0"
    said = re.search(r"([\d.]+)% of its training time", annotations["summary"])
    assert said is not None, annotations["summary"]
    assert float(said[1]) / 100 == pytest.approx(expected, abs=0.05)
    assert "input_single_process" in annotations["description"]


def test_the_live_page_shows_the_run_and_its_injected_share_within_3_points(tmp_path: Path) -> None:
    with (
        agent(tmp_path / "agent") as node,
        dashboard(tmp_path / "page", node.url) as page_server,
        training(hook_environment(tmp_path / "agent", GPUWATCH_RUN="starving-run"), "--seconds", "40") as trainer,
        chromium() as browser,
    ):
        page = browser.new_page(viewport=DESKTOP)
        page.goto(page_server.url)
        page.get_by_text("starving-run").first.wait_for(timeout=30_000)
        sentence = re.compile(r"input-bound: (\d+)% of the time", re.IGNORECASE)
        verdict = page.get_by_text(sentence).first
        verdict.wait_for(timeout=30_000)
        page.wait_for_timeout(10_000)  # it refreshes by itself; by then a finding is active too
        said = sentence.search(verdict.inner_text())
        page.get_by_text("num_workers").first.wait_for(timeout=10_000)
        page.screenshot(path=str(tmp_path / "live.png"), full_page=True)
        injected = truth(trainer)

    assert said is not None
    assert int(said[1]) / 100 == pytest.approx(injected["input_wait"] / injected["wall"], abs=0.03)
    assert (tmp_path / "live.png").stat().st_size > 20_000
