"""Every panel's query in the real Prometheus, which scrapes an agent with known numbers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuwatch_dashboards.panels import Panel, live_panels
from gpuwatch_dashboards.query import Scope, Span
from gpuwatch_dashboards.sources.prometheus import PrometheusSource
from tests.integration.dashboards.browser import WAIT_MS
from tests.integration.dashboards.fake import GPU_NOW, INPUT_SHARE, RUN_ID, STEP_S, FakeAgent, a_run, streamlit_page
from tests.servers import prometheus_config, require, start_prometheus, wait_for


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Give the URL of a Prometheus that has scraped the agent for some seconds."""
    require("prometheus")
    agent = FakeAgent([a_run()], gpus=True)
    agent.start()
    config = prometheus_config({"gpuwatch": agent.url}, scrape_interval="1s")
    try:
        with start_prometheus(tmp_path_factory.mktemp("prometheus"), config) as server:
            scrapes = "count_over_time(gpuwatch_run_up[1m])"
            wait_for("eight scrapes", lambda: (server.value(scrapes) or 0) >= 8, 40)
            yield server.url
    finally:
        agent.stop()


@pytest.fixture
def source(prometheus: str) -> PrometheusSource:
    return PrometheusSource(prometheus, least_interval_s=1.0)


def steps_per_s(source: PrometheusSource) -> float | None:
    """Return the run's rate over four seconds. A scrape that is 0.2 s late makes it wrong by 5%."""
    [run] = source.runs()
    assert run.recent is not None
    return run.recent.steps_per_s


def test_run_and_verdict(source: PrometheusSource) -> None:
    [run] = source.runs()
    assert (run.run, run.name, run.status) == (RUN_ID, "resnet50-a", "running")
    assert run.verdict is not None and run.verdict.state == "input"
    assert run.verdict.ratio == pytest.approx(
        INPUT_SHARE, abs=0.12
    )  # of the last seconds: the fake's share swings by 0.1
    assert run.states["input_wait"] / sum(run.states.values()) == pytest.approx(INPUT_SHARE, abs=0.03)
    wait_for(
        "a rate of scrapes that were on time", lambda: steps_per_s(source) == pytest.approx(1 / STEP_S, rel=0.05), 30
    )
    assert [finding.cause for finding in run.findings] == ["input_single_process"]
    assert tuple(gpu.state for gpu in source.node(run).gpus or ()) == GPU_NOW, "of each GPU its longest state"


def test_every_panel_has_data_and_shares_sum_to_one(source: PrometheusSource) -> None:
    [run] = source.runs()
    scope = Scope(run.run, "0", run.instance)

    def values(panel: Panel) -> list[list[float | None]]:
        now = time.time()
        traces = source.evaluate([curve.query for curve in panel.curves], scope, Span(now - 5, now))
        return [[trace.last for trace in of_curve] for of_curve in traces]

    asked = [panel for panel in live_panels() if not panel.more or panel.key in ("findings", "node_shm")]
    assert len(asked) >= 15
    for panel in asked:
        of_curves = values(panel)
        assert all(of_curves), panel.key
        last = [value for of_curve in of_curves for value in of_curve]
        assert all(value is not None and value >= 0.0 for value in last), panel.key
        if panel.key == "ledger":
            assert sum(value or 0.0 for value in last) == pytest.approx(1.0)
        if panel.key == "step_time":
            phases, percentiles = ([value or 0.0 for value in of_curve] for of_curve in of_curves)
            assert sum(phases) == pytest.approx(0.96 * STEP_S, rel=0.1)
            assert sorted(percentiles) == [STEP_S, 0.131]
        if panel.key == "loader_workers":
            wait_for("scrapes that were on time", lambda: values(panel) == [[pytest.approx(0.8, rel=0.05)]], 30)  # noqa: B023


def test_page_reads_prometheus(page: Any, prometheus: str, tmp_path: Path) -> None:
    with (
        streamlit_page("http://127.0.0.1:1", tmp_path / "streamlit.log", prometheus) as url,
    ):
        page.goto(url)
        page.wait_for_selector(".gw-verdict[data-state=input]", timeout=WAIT_MS)
        assert "resnet50-a" in page.locator(".gw-name").inner_text()
        assert "input single process" in page.locator("[data-cause=input_single_process]").inner_text()
        assert page.locator("[data-testid=stException]").count() == 0
