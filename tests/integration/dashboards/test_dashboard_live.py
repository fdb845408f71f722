"""The page "Live" in the real Chromium, served by the real Streamlit, fed by an agent with known numbers."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.chromium import DESKTOP, PHONE
from tests.integration.dashboards.browser import WAIT_MS, legend, number, place, tooltip
from tests.integration.dashboards.fake import INPUT_SHARE, RUN_ID, FakeAgent, a_run, streamlit_page


@pytest.fixture(scope="module")
def agent() -> Iterator[FakeAgent]:
    fake = FakeAgent()
    fake.start()
    yield fake
    fake.stop()


@pytest.fixture(autouse=True)
def nothing_yet(agent: FakeAgent) -> None:
    agent.runs, agent.gpus = [], False


def test_verdict_and_numbers(page: Any, agent: FakeAgent, url: str) -> None:
    agent.runs = [a_run()]
    page.goto(url)
    page.wait_for_selector(".gw-verdict", timeout=WAIT_MS)
    head = page.locator(".st-key-verdict")
    assert "resnet50-a" in head.inner_text()
    assert "running" in head.inner_text()
    assert page.locator(".gw-verdict").get_attribute("data-state") == "input"
    assert abs(number(page, ".gw-sentence") - 100 * INPUT_SHARE) <= 3
    assert abs(number(page, ".gw-figure-ratio b") - 100 * INPUT_SHARE) <= 3
    assert number(page, ".gw-figure-steps b") == 9.7
    # the ledger's own mean, computed from the raw samples and not taken from the verdict
    assert abs(number(page, ".st-key-panel-ledger li:has-text('waiting for data') b") - 100 * INPUT_SHARE) <= 3
    finding = page.locator("[data-cause=input_single_process]").inner_text()
    assert "11 of 16 cores idle" in finding and "num_workers 0 → 8" in finding and "up to 2.60×" in finding
    assert page.locator(".st-key-panel-gpu_power").count() == 0
    assert "no GPU on this node" in page.locator(".gw-foot").inner_text()
    page.wait_for_selector(".st-key-panel-ledger canvas", timeout=WAIT_MS)
    assert "p95 131 ms p50 103 ms data wait" in legend(page, "step_time")
    assert page.locator("[data-testid=stException]").count() == 0


def test_consequences_are_inside_their_root_with_its_range_and_mfu_is_a_figure(
    page: Any, agent: FakeAgent, url: str
) -> None:
    run = a_run()
    (root,) = run["findings"]
    root["predicted_range"] = [1.2, 2.6]
    burst = {**root, "cause": "burst_every_n", "title": "one slow step in 4", "ratio": 0.3, "root": root["cause"]}
    late = {**root, "cause": "straggler", "title": "rank 3 is late at every step", "rank": 3, "predicted_range": None}
    run |= {"findings": [root, burst], "world_size": 4, "recent": {**run["recent"], "mfu_ratio": 0.41}}
    agent.runs = [run, {**run, "rank": 3, "findings": [late]}]
    page.goto(f"{url}?run={RUN_ID}&rank=0")
    page.wait_for_selector(".gw-figure-mfu", timeout=WAIT_MS)
    assert number(page, ".gw-figure-mfu b") == 41.0
    cards = page.locator(".gw-finding")
    cards.nth(1).wait_for(timeout=WAIT_MS)
    assert [card.get_attribute("data-cause") for card in cards.all()] == ["input_single_process", "straggler"]
    text = cards.first.inner_text()
    assert "Consequence: one slow step in 4 · 30%" in text and text.count("Do this:") == 1
    assert "1.20× to 2.60× the throughput" in text and "upper bound" not in text
    assert "rank 3" in cards.nth(1).locator(".gw-facts").inner_text()


def test_gpus_with_what_each_does_now(page: Any, agent: FakeAgent, url: str) -> None:
    agent.runs, agent.gpus = [a_run(age_s=1000.0)], True
    page.goto(url)
    page.locator("tr[data-gpu='7']").wait_for(timeout=WAIT_MS)
    assert page.locator("tr[data-gpu]").count() == 8
    third = " ".join(page.locator("tr[data-gpu='3']").inner_text().split())
    assert "waiting for data" in third and "30%" in third and "13.0 GiB of 80.0 GiB" in third and "400 W" in third
    shares = page.locator("tr[data-gpu='3'] .gw-bar").get_attribute("aria-label")
    waiting = re.search(r"waiting for data (\d+)%", shares or "")
    assert waiting is not None and abs(int(waiting[1]) - 100 * INPUT_SHARE) <= 3, shares
    assert page.locator("tr[data-gpu='7']").get_attribute("data-state") == "held_idle"
    idle = page.locator("[data-cause=held_idle]").inner_text()
    assert "GPU 7 is held and idle" in idle and "End pid 4718 (python) of alice." in idle
    ledger = " ".join(page.locator(".st-key-panel-gpu_ledger").inner_text().split())
    assert "held idle 12%" in ledger or "held idle 13%" in ledger, ledger
    page.get_by_role("radio", name="GPU 3").or_(page.get_by_role("button", name="GPU 3")).first.click()
    page.wait_for_url("**gpu=3*", timeout=WAIT_MS)
    page.wait_for_function(
        "document.querySelector('.st-key-panel-gpu_ledger').innerText.indexOf('held idle') < 0", timeout=WAIT_MS
    )


def test_page_updates_by_itself_from_empty_to_a_run(page: Any, agent: FakeAgent, url: str) -> None:
    page.goto(url)
    page.wait_for_selector(".gw-message", timeout=WAIT_MS)
    assert "for batch in gpuwatch.watch(loader):" in page.locator(".gw-message").inner_text()
    agent.runs = [a_run()]
    page.wait_for_selector(".gw-verdict", timeout=WAIT_MS)
    changed = a_run(verdict={"state": "compute", "ratio": 0.97, "sentence": "healthy: 97% of the time is compute"})
    agent.runs = [changed]
    page.wait_for_selector(".gw-verdict[data-state=compute]", timeout=WAIT_MS)
    assert number(page, ".gw-sentence") == 97


def test_agent_away_and_back(page: Any, agent: FakeAgent, url: str) -> None:
    agent.runs = [a_run()]
    page.goto(url)
    page.wait_for_selector(".gw-verdict", timeout=WAIT_MS)
    agent.stop()
    try:
        page.wait_for_selector(".gw-message", timeout=WAIT_MS)
        message = page.locator(".gw-message").inner_text()
        assert agent.url in message and "gpuwatch up" in message
        page.wait_for_selector(".gw-verdict", state="detached", timeout=WAIT_MS)
    finally:
        agent.start()
    page.wait_for_selector(".gw-verdict", timeout=WAIT_MS)


def test_choice_of_a_run_is_kept_and_is_in_the_link(page: Any, agent: FakeAgent, url: str) -> None:
    agent.runs = [a_run(), a_run("old-run", "bert-large", 900.0, status="ended")]
    page.goto(url)
    page.wait_for_selector(".gw-name:has-text('resnet50-a')", timeout=WAIT_MS)
    page.locator(".st-key-choices [role=combobox], .st-key-choices input").first.click()
    page.get_by_role("option", name=re.compile("bert-large")).click()
    page.wait_for_selector(".gw-name:has-text('bert-large')", timeout=WAIT_MS)
    page.wait_for_timeout(5000)  # two refreshes
    assert page.locator(".gw-name").inner_text() == "bert-large"
    assert "run=old-run" in page.url
    page.goto(page.url)
    page.wait_for_selector(".gw-name:has-text('bert-large')", timeout=WAIT_MS)
    assert "ended" in page.locator(".gw-status").inner_text()


def test_page_follows_the_newest_run_while_none_is_chosen(page: Any, agent: FakeAgent, url: str) -> None:
    """The browser knows a choice by its text.

    A text with the run's status in it came back as a choice that the user had not made.
    """
    old, first = a_run("old", "train.py", 2000.0, status="ended"), a_run("first", "train.py", 900.0)
    agent.runs = [first, old]
    page.goto(url)
    page.wait_for_selector(".gw-status:has-text('running')", timeout=WAIT_MS)
    page.locator(".st-key-choices [role=combobox], .st-key-choices input").first.wait_for(timeout=WAIT_MS)
    first["status"] = "ended"
    page.wait_for_selector(".gw-status:has-text('ended')", timeout=WAIT_MS)
    page.wait_for_timeout(5000)  # two refreshes
    agent.runs = [a_run("new", "train.py", 5.0), first, old]
    page.wait_for_selector(".gw-status:has-text('running')", timeout=WAIT_MS)
    page.wait_for_timeout(5000)
    agent.runs = [a_run("heal", "heal.py", 2.0), {**agent.runs[0], "status": "ended"}, first, old]
    page.wait_for_selector(".gw-name:has-text('heal.py')", timeout=WAIT_MS)
    assert "run=" not in page.url and "rank=" not in page.url


def test_what_to_do_stays_after_the_end(page: Any, agent: FakeAgent, url: str) -> None:
    run = a_run(status="ended")
    own = {name: value for name, value in run["findings"][0].items() if name != "since_s"}
    agent.runs = [{**run, "findings": [], "conclusion": {"verdict": run["verdict"], "findings": [own]}}]
    for name in ("", "run"):
        page.goto(f"{url}/{name}")
        found = page.locator(".st-key-box-findings", has_text="The findings over the whole run")
        found.wait_for(timeout=WAIT_MS)
        box = found.inner_text()
        assert "num_workers 0 → 8" in box and "up to 2.60×" in box
        page.locator(".gw-foot").last.wait_for(timeout=WAIT_MS)
        assert "Nothing was found" not in page.inner_text("body")


def test_each_of_several_runs_with_one_name_can_be_chosen(page: Any, agent: FakeAgent, url: str) -> None:
    agent.runs = [a_run(f"r{n}", "train.py", 100.0 * n, status="ended", user=f"u{n}") for n in (1, 2, 2, 3)]
    agent.runs[2] |= {"run": "r2b", "user": "u2b", "started_s": agent.runs[1]["started_s"]}  # at the same moment
    page.goto(url)
    page.wait_for_selector(".gw-run:has-text('u1@')", timeout=WAIT_MS)
    for run, user in (("r3", "u3"), ("r2b", "u2b"), ("r2", "u2")):
        page.locator(".st-key-choices [role=combobox], .st-key-choices input").first.click(timeout=WAIT_MS)
        options = page.get_by_role("option")
        options.first.wait_for(timeout=WAIT_MS)
        assert len({option.inner_text() for option in options.all()}) == 4
        options.nth([each["run"] for each in agent.runs].index(run)).click()
        page.wait_for_selector(f".gw-run:has-text('{user}@')", timeout=WAIT_MS)
        assert f"run={run}&" in f"{page.url}&"


def test_all_runs_of_the_node_stand_side_by_side(page: Any, agent: FakeAgent, url: str) -> None:
    quick = {"state": "compute", "ratio": 0.97, "sentence": "healthy: 97% of the time is compute"}
    agent.runs = [a_run(), a_run("second", "bert-base", 300.0, verdict=quick), a_run("third", "gone", status="ended")]
    page.goto(f"{url}/?run={RUN_ID}")
    second = page.locator("tr[data-run='second']")
    second.wait_for(timeout=WAIT_MS)
    assert page.locator("tr[data-run]").count() == 2  # those that go on
    assert page.locator("tr[data-run][aria-current]").get_attribute("data-run") == RUN_ID
    output = " ".join(second.inner_text().split())
    assert "healthy: 97% of the time is compute" in output and "103 ms" in output and "9.70" in output
    assert "waiting for data 62%" in (second.locator(".gw-bar").get_attribute("aria-label") or "")
    second.locator("a").click()
    page.wait_for_selector(".gw-name:has-text('bert-base')", timeout=WAIT_MS)
    assert "run=second" in page.url


def eight_ranks(late: int) -> list[dict[str, Any]]:
    """Return a run of eight ranks: one is late at every step, the others wait 24% of the time for it."""
    waits = {"state": "comm", "ratio": 0.24, "sentence": "waiting for other ranks: 24% of the time"}
    base = a_run(world_size=8, findings=[], verdict=waits)
    states = {"compute": 37.2, "comm_wait": 14.4, "input_wait": 1.8, "transfer": 6.6}
    ranks = [{**base, "rank": n, "recent": {**base["recent"], "states": states}} for n in range(8)]
    (finding,) = a_run()["findings"]
    straggler = {**finding, "cause": "straggler", "title": f"rank {late} is late at every step", "rank": late}
    sentence = {
        "state": "straggler",
        "ratio": 0.3,
        "sentence": "straggler: the other ranks wait for this one for 30% of every step",
    }
    ranks[late] |= {"findings": [straggler], "verdict": sentence}
    ranks[late]["recent"] = {**ranks[late]["recent"], "states": {"compute": 37.2, "input_wait": 22.8}}
    return ranks


def test_eight_ranks_are_one_run_and_the_worst_one_is_first_and_marked(page: Any, agent: FakeAgent, url: str) -> None:
    quick = {"state": "compute", "ratio": 0.97, "sentence": "healthy: 97% of the time is compute"}
    agent.runs = [*eight_ranks(late=5), a_run("second", "bert-base", 900.0, verdict=quick)]
    page.goto(url)
    page.locator("tr[data-rank]").first.wait_for(timeout=WAIT_MS)
    assert "rank 5 of 8" in page.locator(".gw-run").inner_text()
    assert page.locator(".gw-verdict").get_attribute("data-state") == "straggler"
    assert page.locator("tr[data-run]").count() == 2
    assert "8 ranks, worst: 5" in page.locator(f"tr[data-run='{RUN_ID}']").inner_text()

    def order() -> list[str]:
        return [row.get_attribute("data-rank") for row in page.locator("tr[data-rank]").all()]

    assert order() == ["5", "0", "1", "2", "3", "4", "6", "7"]
    assert page.locator("tr[data-worst]").get_attribute("data-rank") == "5"
    agent.runs = [*reversed(eight_ranks(late=5)), a_run("second", "bert-base", 900.0, verdict=quick)]
    page.wait_for_timeout(3000)
    assert order() == ["5", "0", "1", "2", "3", "4", "6", "7"] and "rank 5 of 8" in page.locator(".gw-run").inner_text()
    page.locator("tr[data-rank='2'] a").click()
    page.wait_for_selector(".gw-run:has-text('rank 2 of 8')", timeout=WAIT_MS)
    assert "24% of the time" in page.locator(".gw-sentence").inner_text()
    page.locator("[data-cause=straggler]").first.wait_for(timeout=WAIT_MS)  # what it waits for is shown here too
    assert page.locator("[data-cause=straggler]").count() == 1


def test_what_to_do_is_in_the_first_screen_of_a_phone(page: Any, agent: FakeAgent, url: str) -> None:
    agent.runs, agent.gpus = eight_ranks(late=5), True
    page.set_viewport_size(PHONE)
    page.goto(url)
    page.locator(".gw-finding").first.wait_for(timeout=WAIT_MS)
    page.locator("tr[data-rank]").first.wait_for(timeout=WAIT_MS)
    bottom = page.evaluate("document.querySelector('.gw-finding .gw-advice').getBoundingClientRect().bottom")
    assert bottom <= PHONE["height"]


def test_phone_has_nothing_outside_the_screen(page: Any, agent: FakeAgent, url: str) -> None:
    name = "a-run-with-a-name-that-is-much-longer-than-any-phone-is-wide"
    agent.runs, agent.gpus = [a_run(name=name)], True
    page.set_viewport_size(PHONE)
    page.goto(url)
    page.locator(".gw-name", has_text=name).wait_for(timeout=WAIT_MS)
    page.wait_for_selector(".st-key-panel-gpu_power canvas", timeout=WAIT_MS)
    wide = page.evaluate(
        "[...document.querySelectorAll('.gw-verdict *, [class*=st-key-panel-], canvas')]"
        f".filter(e => e.getBoundingClientRect().right > {PHONE['width']}).map(e => e.className)"
    )
    assert wide == []


def test_log_of_the_page_is_quiet(page: Any, agent: FakeAgent, tmp_path: Path) -> None:
    agent.runs = [a_run()]
    log = tmp_path / "streamlit.log"
    with streamlit_page(agent.url, log) as own:
        page.goto(own)
        page.wait_for_selector(".gw-verdict", timeout=WAIT_MS)
    text = log.read_text()
    assert "Traceback" not in text and "deprecated" not in text.lower()


DAY_MIN = 24 * 60


@pytest.mark.parametrize("zone", ["Europe/Berlin", "America/St_Johns"])
def test_charts_and_text_show_the_reader_s_own_time(browser: Any, agent: FakeAgent, url: str, zone: str) -> None:
    agent.runs, agent.gpus = [a_run()], False
    context = browser.new_context(viewport=DESKTOP, timezone_id=zone)
    page = context.new_page()
    page.goto(url)
    tip = tooltip(page, "ledger", 0.98)
    now = page.evaluate("new Date().getHours() * 60 + new Date().getMinutes()")
    foot = re.search(r"updated (\d+):(\d+)", page.locator(".gw-foot").inner_text())
    context.close()
    assert foot is not None
    assert (int(foot[1]) * 60 + int(foot[2]) - now + 1) % DAY_MIN <= 2
    output = re.search(r" (\d+):(\d+):\d+\n", tip)
    assert output is not None, tip
    assert (now - (int(output[1]) * 60 + int(output[2]))) % DAY_MIN <= 2, tip  # over midnight too


def test_chart_says_the_values_under_the_pointer_and_a_click_looks_closer(
    page: Any, agent: FakeAgent, url: str
) -> None:
    agent.runs = [a_run("long", age_s=3000.0)]
    page.goto(f"{url}/?run=long&window=1+h")
    tip = tooltip(page, "ledger", 0.5)
    shares = dict(zip(re.findall(r"\n([a-z][a-z -]+)\n", tip), re.findall(r"\n([\d.]+)%", tip), strict=True))
    assert sum(float(share) for share in shares.values()) == pytest.approx(100, abs=1.5), tip
    assert float(shares["waiting for data"]) == pytest.approx(100 * INPUT_SHARE, abs=11), tip  # it swings by ten
    begin = time.time()
    x, y = place(page, "ledger", 0.5)
    page.mouse.click(x, y)
    page.wait_for_url("**from=*to=*", timeout=WAIT_MS)
    chosen = parse_qs(urlsplit(page.url).query)
    start_s, end_s = float(chosen["from"][0]), float(chosen["to"][0])
    assert end_s - start_s == pytest.approx(3000 / 8, rel=0.02)
    assert (start_s + end_s) / 2 == pytest.approx(begin - 1500, abs=60)
    page.get_by_role("button", name="Back to now").click()
    page.wait_for_url(lambda address: "from=" not in address, timeout=WAIT_MS)
