"""A hidden tab in the real Chromium: it asks for nothing until it is shown again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.integration.dashboards.browser import WAIT_MS, number
from tests.integration.dashboards.fake import FakeAgent, a_run, streamlit_page
from tests.servers import wait_for

WATCH_MS = 6000
"""A page that is seen is redrawn every 2 s."""


def show(page: Any, seen: bool) -> None:
    """Say to the page what a browser says of a tab; a headless one takes every tab for seen."""
    page.evaluate(
        "hidden => { Object.defineProperty(document, 'hidden', {configurable: true, get: () => hidden});"
        " document.dispatchEvent(new Event('visibilitychange')) }",
        not seen,
    )


def test_a_hidden_tab_asks_for_nothing_and_is_up_to_date_when_it_is_seen_again(page: Any, tmp_path: Path) -> None:
    agent = FakeAgent([a_run()])
    agent.start()
    with streamlit_page(agent.url, tmp_path / "streamlit.log") as url:
        page.goto(url)
        page.wait_for_selector(".st-key-panel-ledger canvas", timeout=WAIT_MS)
        first = agent.requests
        wait_for("a refresh", lambda: agent.requests > first + 2, 20, 0.2)
        show(page, False)

        def settled() -> bool:
            """Whether what was under way as it was hidden has been drawn."""
            before = agent.requests
            page.wait_for_timeout(WATCH_MS)
            return agent.requests == before

        wait_for("it asks no more", settled, 20, 0)
        hidden = agent.requests
        agent.runs[0]["recent"]["step_s_p50"] = 0.5
        page.wait_for_timeout(WATCH_MS)
        assert agent.requests == hidden
        assert number(page, ".gw-figure-p50 b") == 103
        show(page, True)
        wait_for("the new number", lambda: number(page, ".gw-figure-p50 b") == 500, 20, 0.2)
        again = agent.requests
        wait_for("refreshes", lambda: agent.requests > again + 2, 20, 0.2)
    agent.stop()
