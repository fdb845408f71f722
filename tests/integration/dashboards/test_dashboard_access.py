"""The pages for everybody: axe's rules in light and dark, desktop and phone; the keyboard; nothing off the screen."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.chromium import DESKTOP, PHONE
from tests.integration.dashboards.browser import WAIT_MS
from tests.integration.dashboards.fake import RUN_ID, FakeAgent, a_run
from tests.integration.dashboards.steps import MadeUpSteps

axe = pytest.importorskip("axe_playwright_python.sync_playwright")

PAGES = {
    "/?window=5+min": ".st-key-panel-disk canvas",
    f"/run?run={RUN_ID}": ".st-key-panel-heat canvas",
    "/compare?runs=before,after": ".st-key-panel-speeds canvas",
    "/fleet": ".gw-message",
}
"""By address: what is there once the page is drawn."""
SERIOUS = ("serious", "critical")
STREAMLITS_OWN: set[str] = set()
"""Rules that Streamlit's own parts break, and nothing of ours does."""


@pytest.fixture(scope="module")
def agent() -> Iterator[FakeAgent]:
    steps = MadeUpSteps(5000, 0.103, 0.064, 1000, device=True)
    before, after = (a_run(name, name, 900.0, status="ended", steps=5000) for name in ("before", "after"))
    fake = FakeAgent([a_run(age_s=600.0), before, after], gpus=True)
    fake.steps = {RUN_ID: steps, "before": steps, "after": steps}
    fake.past = [{**before["findings"][0], "rank": 0, "seen_s": time.time() - 100, "since_s": time.time() - 400}]
    fake.start()
    yield fake
    fake.stop()


def broken_rules(page: Any) -> dict[str, list[str]]:
    """Return axe's serious findings: the elements by rule."""
    found = axe.Axe().run(page).response["violations"]
    return {
        rule["id"]: [node["html"][:200] for node in rule["nodes"]]
        for rule in found
        if rule["impact"] in SERIOUS and rule["id"] not in STREAMLITS_OWN
    }


@pytest.mark.parametrize(("scheme", "viewport"), [("light", DESKTOP), ("dark", PHONE)], ids=["light", "dark"])
def test_axe_finds_nothing_serious_and_all_fits(page: Any, url: str, scheme: str, viewport: dict[str, int]) -> None:
    page.set_viewport_size(viewport)
    page.emulate_media(color_scheme=scheme)
    for address, drawn in PAGES.items():
        page.goto(url + address)
        page.wait_for_selector(drawn, timeout=WAIT_MS)
        assert broken_rules(page) == {}, address
        wide = page.evaluate(
            "[...document.querySelectorAll('[class*=gw-], canvas, [data-testid=stMain] button')]"
            f".filter(e => e.getBoundingClientRect().right > {viewport['width'] + 1}).map(e => e.outerHTML.slice(0, 120))"
        )
        assert wide == [], address


def test_messages_have_no_serious_finding(page: Any, agent: FakeAgent, url: str) -> None:
    page.set_viewport_size(PHONE)
    page.emulate_media(color_scheme="dark")
    runs, agent.runs, agent.gpus = agent.runs, [], False
    try:
        page.goto(url)
        page.get_by_text("No training run on node-17 yet.").wait_for(timeout=WAIT_MS)
        assert broken_rules(page) == {}
        agent.stop()
        page.get_by_text("does not answer").wait_for(timeout=WAIT_MS)
        assert broken_rules(page) == {}
    finally:
        agent.start()
        agent.runs, agent.gpus = runs, True
    page.wait_for_selector(".gw-verdict", timeout=WAIT_MS)


def test_the_pages_are_reached_by_keyboard_and_every_chart_has_a_name(page: Any, url: str) -> None:
    page.goto(f"{url}/?window=5+min")
    page.wait_for_selector(".st-key-panel-disk canvas", timeout=WAIT_MS)
    charts = "[...document.querySelectorAll('[data-testid=stEChartsChart]')]"
    page.wait_for_function(f"{charts}.every(e => (e.getAttribute('aria-label') || '').includes(': '))", timeout=WAIT_MS)
    names = [e.get_attribute("aria-label") or "" for e in page.locator("[data-testid=stEChartsChart]").all()]
    assert len(names) >= 12 and all(": " in name for name in names), names
    focused = "document.activeElement.innerText"
    for _ in range(12):
        page.keyboard.press("Tab")
        if page.evaluate(focused) == "Run":
            break
    assert page.evaluate(focused) == "Run"
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/run?run={RUN_ID}*", timeout=WAIT_MS)
    page.wait_for_selector(".st-key-panel-heat canvas", timeout=WAIT_MS)
