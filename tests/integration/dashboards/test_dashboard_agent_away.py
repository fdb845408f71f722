"""The page "Run" while the node's agent is away: what is missing is named, what Prometheus knows is drawn.

It goes on by itself when the agent is back.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.dashboards.browser import WAIT_MS, legend, number
from tests.integration.dashboards.fake import INPUT_SHARE, RUN_ID, STEP_S, FakeAgent, a_run, streamlit_page
from tests.integration.dashboards.steps import MadeUpSteps
from tests.servers import prometheus_config, require, start_prometheus, wait_for


def test_run_without_its_agent_has_what_prometheus_knows_and_more_when_it_is_back(page: Any, tmp_path: Path) -> None:
    require("prometheus")
    agent = FakeAgent([a_run(age_s=30.0)])
    agent.steps = {RUN_ID: MadeUpSteps(250, STEP_S, 0.064, 100)}
    agent.start()
    config = prometheus_config({"gpuwatch": agent.url}, scrape_interval="1s")
    with (
        start_prometheus(tmp_path / "prometheus", config) as server,
        streamlit_page("http://127.0.0.1:1", tmp_path / "log", server.url) as url,
    ):
        scrapes = "count_over_time(gpuwatch_run_up[1m])"
        wait_for("scrapes", lambda: (server.value(scrapes) or 0) >= 20, 60)
        agent.stop()
        page.goto(f"{url}/run?run={RUN_ID}")
        missing = legend(page, "steps")
        assert f"The agent at {agent.url} does not answer: start it with" in missing
        waiting = number(page, ".st-key-panel-ledger li:has-text('waiting for data') b")
        assert abs(waiting - 100 * INPUT_SHARE) <= 12
        assert "p50 103 ms" in legend(page, "step_time")
        assert "input_single_process 62%" in legend(page, "findings")
        assert page.locator(".gw-figure-steps").count() == 0, "none shown is not none taken"
        assert page.locator(".st-key-panel-heat, .st-key-box-past").count() == 0
        agent.start()
        page.wait_for_selector(".gw-figure-steps", timeout=WAIT_MS)
        assert number(page, ".gw-figure-steps b") == 250
        page.wait_for_selector(".st-key-panel-step_time", state="detached", timeout=WAIT_MS)
    agent.stop()


class BreaksOff(MadeUpSteps):
    """Steps of an agent that dies while it is asked for them."""

    def downsampled(self, start_s: float, query: dict[str, str]) -> dict[str, Any] | None:
        raise ConnectionResetError


@pytest.mark.alone  # it depends on deadlines of the product
def test_an_agent_that_dies_between_two_questions_is_away_like_any_other(page: Any, tmp_path: Path) -> None:
    agent = FakeAgent([a_run()])
    agent.steps = {RUN_ID: BreaksOff(250, STEP_S, 0.064, 100)}
    agent.start()
    with streamlit_page(agent.url, tmp_path / "log") as url:
        page.goto(f"{url}/run")
        page.wait_for_selector(".gw-message, [data-testid=stException]", timeout=WAIT_MS)
        assert page.locator("[data-testid=stException]").count() == 0
        assert f"The agent at {agent.url} does not answer" in page.locator(".gw-message").inner_text()
        agent.steps = {RUN_ID: MadeUpSteps(250, STEP_S, 0.064, 100)}
        page.wait_for_selector(".gw-figure-steps", timeout=WAIT_MS)
        assert number(page, ".gw-figure-steps b") == 250
        assert page.locator(".gw-message").count() == 0
    agent.stop()
