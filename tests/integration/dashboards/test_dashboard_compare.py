"""The page "Compare" in the real Chromium: what was achieved and predicted, against the steps that were made up."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.dashboards.browser import WAIT_MS, legend
from tests.integration.dashboards.fake import FakeAgent, a_run
from tests.integration.dashboards.steps import MadeUpSteps

BEFORE, AFTER, WORSE = (
    MadeUpSteps(10_000, 0.1, 0.06, 1000),
    MadeUpSteps(10_000, 0.05, 0.01, 1000),
    MadeUpSteps(10_000, 0.2, 0.16, 1000),
)
LONG = MadeUpSteps(1_200_000, 0.1, 0.06, 1000)


def ended(run: str, age_s: float, steps: MadeUpSteps, **more: Any) -> dict[str, Any]:
    return a_run(run, run, age_s, status="ended", steps=steps.count, samples=64 * steps.count, **more)


@pytest.fixture(scope="module")
def agent() -> Iterator[FakeAgent]:
    fake = FakeAgent()
    fake.steps = {"before": BEFORE, "after": AFTER, "worse": WORSE, "long": LONG}
    before = ended("before", 3000.0, BEFORE)
    loader = {"num_workers": 8, "prefetch_factor": 2, "batch_size": 64, "pin_memory": False}
    shares = {"startup": 6.0, "input_wait": 54.0, "compute": 240.0}
    fake.runs = [before, ended("after", 2000.0, AFTER, states=shares, loader=loader), ended("worse", 1000.0, WORSE)]
    fake.runs.append(ended("long", 130_000.0, LONG))
    fake.past = [{**before["findings"][0], "rank": 0, "seen_s": before["started_s"] + 2900.0, "run": "before",
                  "since_s": before["started_s"] + 10.0}]  # fmt: skip
    fake.start()
    yield fake
    fake.stop()


def cells(page: Any, run: str, row: str) -> list[str]:
    """Return what a row of a run's table says: before, after, change."""
    name = re.compile(f"^{re.escape(row)}$")
    found = page.locator(f".gw-outcome[data-run={run}] tr").filter(has=page.locator("th", has_text=name))
    return [cell.inner_text() for cell in found.first.locator("td").all()]


def choose(page: Any, run: str) -> None:
    page.locator("[data-testid=stMultiSelect] input").click(timeout=WAIT_MS)
    page.get_by_role("option", name=re.compile(f"^{run}")).click()
    page.locator(f".gw-outcome[data-run={run}]").wait_for(timeout=WAIT_MS)


def test_two_runs_with_their_prediction(page: Any, url: str) -> None:
    page.goto(f"{url}/compare?runs=before,after")
    outcome = page.locator(".gw-outcome[data-run=after]")
    outcome.wait_for(timeout=WAIT_MS)
    output = outcome.inner_text()
    assert "after is faster: a step is 2.00× as fast as one of before" in output
    assert "up to 2.60× the throughput; achieved 2.00×, 62% of that gain, and the cause is gone" in output
    assert cells(page, "after", "step, mean") == ["100 ms", "50 ms", "-50%"]
    assert cells(page, "after", "waiting for data") == ["62%", "18%", "-44.0 points"]
    assert cells(page, "after", "loader: num_workers") == ["0", "8"]
    name = page.locator(".st-key-panel-speeds [role=img]").get_attribute("aria-label", timeout=WAIT_MS)
    assert name == "Predicted and achieved, times before: after: predicted 2.6, achieved 2.0"
    assert page.locator(".st-key-panel-steps [role=img]").get_attribute("aria-label", timeout=WAIT_MS) == (
        "Step time over the run: medians before 100 ms, after 50 ms"
    )


def test_a_run_of_more_steps_than_a_report_takes_is_drawn_from_its_start(page: Any, url: str) -> None:
    page.goto(f"{url}/compare?runs=before,long")
    page.locator(".gw-outcome[data-run=long]").wait_for(timeout=WAIT_MS)
    assert cells(page, "long", "steps") == ["10,000", "1,200,000", ""]
    assert cells(page, "long", "step times of") == ["all", "the last 20,000", ""]
    drawn = page.locator(".st-key-panel-steps [role=img]")
    drawn.wait_for(timeout=WAIT_MS)
    axis = drawn.evaluate("e => e.closest('.st-key-panel-steps').innerText")
    assert "shown are" not in axis and "no longer stored" not in axis


def test_a_third_run_joins_and_is_kept_in_the_link(page: Any, url: str) -> None:
    page.goto(f"{url}/compare?runs=before,after")
    choose(page, "worse")
    worse = page.locator(".gw-outcome[data-run=worse]")
    assert "worse is slower: a step is 0.50× as fast as one of before" in worse.inner_text()
    page.wait_for_url(re.compile("runs=before(,|%2C)after(,|%2C)worse"), timeout=WAIT_MS)
    page.goto(page.url)
    page.locator(".gw-outcome[data-run=worse]").wait_for(timeout=WAIT_MS)
    assert "after" in legend(page, "speeds") or page.locator(".gw-outcome").count() == 2


def test_without_a_link_the_newest_two_are_compared(page: Any, url: str) -> None:
    page.goto(f"{url}/compare")
    outcome = page.locator(".gw-outcome[data-run=worse]")
    outcome.wait_for(timeout=WAIT_MS)
    assert "worse is slower: a step is 0.25× as fast as one of after" in outcome.inner_text()


def test_a_run_stays_compared_when_it_ends(page: Any, url: str, agent: FakeAgent) -> None:
    """The text of a choice had the run's status and steps: the browser gave the old text, which was taken for a run."""
    after = agent.runs[1]
    after["status"] = "running"
    try:
        page.goto(f"{url}/compare")
        choose(page, "before")
        page.wait_for_url(re.compile("runs=after(,|%2C)worse(,|%2C)before$"), timeout=WAIT_MS)
        after |= {"status": "ended", "steps": after["steps"] + 1}
        page.wait_for_timeout(17_000)  # a refresh
        page.keyboard.press("Escape")
        choose(page, "long")
        page.wait_for_url(re.compile("runs=after(,|%2C)worse(,|%2C)before(,|%2C)long$"), timeout=WAIT_MS)
        heads = [head.split() for head in page.locator(".gw-outcome .gw-run").all_inner_texts()]
        assert heads == [["after", "→", run] for run in ("worse", "before", "long")]
    finally:
        after |= {"status": "ended", "steps": AFTER.count}


def test_one_run_is_too_few_and_the_page_says_what_to_do(page: Any, url: str, agent: FakeAgent) -> None:
    runs = agent.runs
    agent.runs = runs[:1]
    try:
        page.goto(f"{url}/compare")
        page.get_by_text("One run is known so far. A comparison takes two.").wait_for(timeout=WAIT_MS)
    finally:
        agent.runs = runs
