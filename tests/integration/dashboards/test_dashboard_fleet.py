"""The page "Fleet" in the real Chromium over the real Prometheus, which holds a day of a fleet whose truth is known."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chromium import DESKTOP, PHONE
from tests.integration.dashboards.browser import WAIT_MS
from tests.integration.dashboards.fake import streamlit_page
from tests.integration.recorded_fleet import Share, recorded, write_blocks
from tests.servers import Server, prometheus_config, start_prometheus

HOURS = 24.0
PRICE = 2.5
FLEET = [
    Share("node-1:9478", "alice", "17", "resnet", 8.0, starved=0.5, cause="input_single_process"),
    Share("node-2:9478", "bob", "18", "bert", 4.0, idle=0.25),
    Share("node-2:9478", "carol <b>", "19", "gpt", 4.0),
    Share("node-3:9478", "carol <b>", "20", "vit", 4.0, stalled=0.1),
]
GPUS = sum(share.gpus for share in FLEET)
LOST = 8 * 0.5 + 4 * 0.25 + 4 * 0.1


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for a Prometheus whose store is filled."""
    folder = tmp_path_factory.mktemp("prometheus") / "server"
    folder.mkdir()
    write_blocks(recorded(FLEET, PRICE, silent=["node-9:9478"]), HOURS, folder / "data")
    return folder


@pytest.fixture(scope="module")
def prometheus(store: Path) -> Iterator[Server]:
    with start_prometheus(store, prometheus_config({})) as server:
        yield server


@pytest.fixture(scope="module")
def url(prometheus: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with streamlit_page("http://127.0.0.1:1", tmp_path_factory.mktemp("page") / "log", prometheus.url) as address:
        yield address


def figure(page: Any, kind: str) -> float:
    text = page.locator(f".gw-figure-{kind} b").inner_text(timeout=WAIT_MS)
    return float(re.sub(r"[^\d.]", "", text))


def rows(page: Any, panel: str) -> list[dict[str, str]]:
    """Return a table's rows: their cells by column. After a click the old table may remain, which has other columns."""
    column = {"by_user": "User", "by_run": "Run"}.get(panel, "Node")
    table = page.locator(f".st-key-panel-{panel}").filter(has=page.locator(f"td[data-label={column}]"))
    table.first.wait_for(timeout=WAIT_MS)
    found: list[dict[str, str]] = table.locator("tbody tr").evaluate_all(
        "rows => rows.map(row => Object.fromEntries([...row.cells].map(cell => [cell.dataset.label, cell.innerText])))"
    )
    return found


def hours(text: str) -> float:
    return float(text.removesuffix(" h").replace(",", ""))


def test_fleet_has_the_numbers_that_were_put_in(page: Any, url: str) -> None:
    page.goto(f"{url}/fleet?window=24+h")
    assert figure(page, "gpus") == GPUS and figure(page, "nodes") == 3
    assert figure(page, "starved") == pytest.approx(100 * 8 * 0.5 / GPUS, abs=0.6)
    assert figure(page, "idle") == pytest.approx(100 * 4 * 0.25 / GPUS, abs=0.6)
    assert figure(page, "lost") == pytest.approx(LOST * HOURS, rel=0.02)
    assert figure(page, "cost") == pytest.approx(LOST * HOURS * PRICE, rel=0.02)
    assert f"{100 * LOST / GPUS:.0f}% of the GPUs' time is lost now" in page.locator(".gw-sentence").inner_text()
    assert page.locator(".gw-figure-cost b").inner_text().endswith(" EUR")
    alice, *others = rows(page, "by_user")
    assert [each["User"] for each in (alice, *others)] == ["alice", "bob", "carol <b>"]  # who lost most first
    assert hours(alice["Starved"]) == pytest.approx(4 * HOURS, rel=0.02)
    assert hours(alice["Lost"]) == hours(alice["Starved"]) and hours(alice["Held idle"]) == 0
    assert alice["GPUs now"] == "8"
    assert float(alice["Lost money"].removesuffix(" EUR").replace(",", "")) == pytest.approx(
        4 * HOURS * PRICE, rel=0.02
    )
    legend = " ".join(page.locator(".st-key-panel-fleet_states").inner_text().split())
    assert "waiting for data 4.00" in legend and "held idle 1.00" in legend and "stalled 0.40" in legend
    page.wait_for_selector(".st-key-panel-fleet_states canvas", timeout=WAIT_MS)


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_what_is_lost_now_is_in_the_first_screen(page: Any, url: str, viewport: Any) -> None:
    page.set_viewport_size(viewport)
    page.goto(f"{url}/fleet")
    first, second, third = rows(page, "lost_now")
    assert first == {
        "Kind": "starved", "Node": "node-1:9478", "Run": "resnet", "User": "alice", "Job": "17", "GPUs lost": "4",
        "Cause": "input_single_process", "For": first["For"], "Cost per hour": "10.00 EUR/h",
    }  # fmt: skip
    assert first["For"][:2] in ("1h", "2h")
    assert (second["Run"], second["Kind"], second["Cause"]) == ("bert", "idle", "–")
    assert (third["Run"], third["Kind"], third["GPUs lost"]) == ("vit", "stalled", "0.40")
    assert page.locator(".st-key-panel-lost_now tbody tr").first.bounding_box()["y"] < viewport["height"]
    assert page.locator(".st-key-panel-lost_now a", has_text="resnet").get_attribute("href") == "run?run=resnet"
    assert rows(page, "silent_nodes") == [{"Node": "node-9:9478"}]
    assert page.evaluate("document.querySelector('[data-testid=stMain]').scrollWidth") <= viewport["width"]


def test_lost_time_is_reported_by_node_and_leads_there_and_the_link_keeps_it(page: Any, url: str) -> None:
    page.goto(f"{url}/fleet?window=24+h")
    page.get_by_role("radio", name="By node").or_(page.get_by_role("button", name="By node")).first.click()
    second = rows(page, "by_node")[1]
    assert second["Node"] == "node-2:9478" and hours(second["Held idle"]) == pytest.approx(1 * HOURS, rel=0.02)
    assert "by=node" in page.url
    page.goto(page.url)
    assert hours(rows(page, "by_node")[0]["Lost"]) == pytest.approx(4 * HOURS, rel=0.02)
    page.locator(".st-key-panel-by_node a", has_text="node-2").click()
    page.get_by_text("No training run on node-2:9478").wait_for(timeout=WAIT_MS)
    assert "/?node=node-2" in page.url and page.get_by_text("Page not found").count() == 0
    page.goto(f"{url}/fleet?by=run&window=24+h")
    [vit] = [each for each in rows(page, "by_run") if each["Run"] == "vit"]
    assert hours(vit["Stalled"]) == pytest.approx(0.4 * HOURS, rel=0.02)
    assert page.locator(".st-key-panel-by_run a", has_text="vit").get_attribute("href") == "run?run=vit"


def test_prometheus_away_and_back(page: Any, store: Path, prometheus: Server, url: str) -> None:
    page.set_viewport_size(PHONE)
    page.goto(f"{url}/?window=1+h")
    page.get_by_text("No training run on").first.wait_for(timeout=WAIT_MS)
    wide = page.evaluate("document.querySelector('[data-testid=stMain]').scrollWidth")
    assert wide <= PHONE["width"]
    prometheus.process.send_signal(19)  # SIGSTOP: it takes connections and answers none
    try:
        page.get_by_text("did not answer within").wait_for(timeout=WAIT_MS)
        assert prometheus.url in page.locator(".gw-message").inner_text()
    finally:
        prometheus.process.send_signal(18)
    page.get_by_text("No training run on").first.wait_for(timeout=WAIT_MS)


def test_a_prometheus_that_is_away_is_asked_again_soon(page: Any, prometheus: Server, tmp_path: Path) -> None:
    with streamlit_page("http://127.0.0.1:1", tmp_path / "log", prometheus.url) as url:
        prometheus.process.send_signal(19)
        try:
            page.goto(f"{url}/fleet")
            page.get_by_text("did not answer within").wait_for(timeout=WAIT_MS)
        finally:
            prometheus.process.send_signal(18)
        number = page.locator(".gw-figure-gpus b")
        assert float(number.inner_text(timeout=25_000)) == GPUS, "sooner than this page is drawn, every 30 s"
        page.wait_for_function("document.querySelectorAll('.gw-message').length === 0", timeout=WAIT_MS)


def test_without_prometheus_the_page_says_how_to_get_one(page: Any, tmp_path: Path) -> None:
    with streamlit_page("http://127.0.0.1:1", tmp_path / "log") as url:
        page.goto(f"{url}/fleet")
        page.get_by_text("The fleet needs a Prometheus.").wait_for(timeout=WAIT_MS)
        assert "--prometheus" in page.locator(".gw-message").inner_text()


def test_prometheus_without_the_rules_says_so(page: Any, tmp_path: Path) -> None:
    with (
        start_prometheus(tmp_path / "empty", prometheus_config({})) as empty,
        streamlit_page("http://127.0.0.1:1", tmp_path / "log", empty.url) as url,
    ):
        page.goto(f"{url}/fleet")
        page.get_by_text("no GPU time is recorded").wait_for(timeout=WAIT_MS)
        assert "gpuwatch rules" in page.locator(".gw-message").inner_text()
