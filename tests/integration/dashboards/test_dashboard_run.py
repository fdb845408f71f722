"""The page "Run" in the real Chromium: a million steps and a few of them, against the steps that were made up."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.dashboards.browser import WAIT_MS, legend, number, tooltip
from tests.integration.dashboards.fake import FakeAgent, a_run
from tests.integration.dashboards.steps import SLOW_S, MadeUpSteps

STEPS = MadeUpSteps(1_000_000, 0.1, 0.03, 5000, device=True)
EPOCHS = STEPS.count // STEPS.epoch_steps
LENGTH_S = STEPS.begin_s(STEPS.count)


@pytest.fixture(scope="module")
def agent() -> Iterator[FakeAgent]:
    now = time.time()
    over = {"status": "ended", "watermark_s": now, "last_message_s": now, "started_s": now - LENGTH_S}
    long = a_run("long", "gpt-long", LENGTH_S, **{**over, "steps": STEPS.count})
    short = a_run("short", "gpt-short", 100.0)
    ranks = [
        a_run("ranks", "ddp", 900.0, rank=rank, world_size=2, recent={"duration_s": 60.0, "states": {}, "step_s_p50": p50})
        for rank, p50 in ((0, 0.1), (1, 0.25))
    ]  # fmt: skip
    fake = FakeAgent([long, short, *ranks])
    fake.steps = {"long": STEPS, "ranks": MadeUpSteps(8000, 0.1, 0.05, 1000)}
    finding = long["findings"][0]
    fake.past = [{**finding, "rank": 0, "since_s": now - 0.5 * LENGTH_S, "seen_s": now - 0.4 * LENGTH_S, "run": "long"}]
    fake.start()
    yield fake
    fake.stop()


def test_a_million_steps(page: Any, url: str) -> None:
    page.goto(f"{url}/run?run=long")
    assert number(page, ".gw-figure-steps b") == STEPS.count
    assert number(page, ".gw-figure-epochs b") == EPOCHS
    assert number(page, ".gw-figure-p50 b") == 100  # ms
    assert "data wait 30.0 ms transfer 3.00 ms computing 67.0 ms" in legend(page, "steps")
    assert "waiting for the host 4.00 ms waiting for data 12.0 ms" in legend(page, "device_steps")
    waits = legend(page, "waits")
    assert "hidden behind the device's work 18.0 ms" in waits and "the device starved 12.0 ms" in waits
    output = tooltip(page, "steps", 0.42)
    assert re.search(r"data wait\n30 ms", output) and re.search(r"computing\n67 ms", output), output
    longest = [tooltip(page, "longest", part) for part in (0.31, 0.315, 0.32, 0.325)]
    assert any(f"longest\n{1e3 * SLOW_S:.0f} ms" in output for output in longest), (
        longest
    )  # an epoch's first batch is not lost
    past = page.locator(".gw-past li").inner_text()
    assert "the loader is the bottleneck" in past and "62%" in past


def test_heat_map_has_its_slow_steps_where_epochs_begin(page: Any, url: str) -> None:
    page.goto(f"{url}/run?run=long")
    assert f"Full colour: {1e3 * SLOW_S:.0f} ms or more" in legend(page, "heat")
    name = page.locator(".st-key-panel-heat [role=img]").get_attribute("aria-label", timeout=WAIT_MS)
    assert name == "Data wait over the run: 100 rows; longest wait 500 ms"
    first, middle = tooltip(page, "heat", 0.03), tooltip(page, "heat", 0.5)
    assert "longest data wait 500" in first.replace("\n", " "), first
    assert "longest data wait 30" in middle.replace("\n", " "), middle


def test_a_few_steps_are_shown_one_by_one_and_buttons_move_the_time(page: Any, url: str, agent: FakeAgent) -> None:
    start_s = agent.runs[0]["started_s"] + STEPS.begin_s(1000) - 0.01
    page.goto(f"{url}/run?run=long&from={start_s:.3f}&to={start_s + 2.0:.3f}")
    assert number(page, ".gw-figure-steps b") == 20
    assert "What did each of these 20 steps do" in legend(page, "bars")
    name = page.locator(".st-key-panel-bars [role=img]").get_attribute("aria-label", timeout=WAIT_MS)
    assert name == "20 steps one by one, a row each of host and device"
    output = tooltip(page, "bars", 0.5)
    assert "hidden behind the device's work\n18 ms" in output and "waiting for the host\n4 ms" in output, output
    page.get_by_role("button", name="Zoom out").click()
    page.wait_for_function("document.querySelector('.gw-figure-steps b').innerText === '40'", timeout=WAIT_MS)
    page.get_by_role("button", name="Later").focus()
    page.keyboard.press("Enter")  # by key as well
    page.wait_for_url(re.compile(rf"from={start_s + 1:.3f}&to={start_s + 5:.3f}"), timeout=WAIT_MS)
    page.get_by_role("button", name="Whole run").click()
    page.wait_for_function("document.querySelector('.gw-figure-steps b').innerText === '1,000,000'", timeout=WAIT_MS)
    assert "from=" not in page.url


def test_ranks_stand_side_by_side_and_the_slow_one_is_marked(page: Any, url: str) -> None:
    page.goto(f"{url}/run?run=ranks&rank=1")
    slow = page.locator("tr[data-rank='1']")
    slow.wait_for(timeout=WAIT_MS)
    assert slow.get_attribute("data-slow") == "true" and "250 ms 2.50× the quickest" in slow.inner_text()
    assert page.locator("tr[data-rank='0']").get_attribute("data-slow") is None
    assert legend(page, "rank_steps").endswith("rank 0 100 ms rank 1 100 ms")


def test_run_without_kept_steps_says_so(page: Any, url: str) -> None:
    page.goto(f"{url}/run?run=short")
    page.get_by_text("No steps of this run are stored for this time range.").first.wait_for(timeout=WAIT_MS)
    assert number(page, ".gw-sentence") == 62
