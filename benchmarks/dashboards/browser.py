"""What the pages cost a headless Chromium without a GPU: first content, a refresh, a hidden tab, a million steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from benchmarks.dashboards.viewers import WINDOWS, cpu_s, server_of
from tests.chromium import DESKTOP, chromium

PATIENCE_MS, LOOK_MS = 180_000, 2000
HIDE = "Object.defineProperty(document, 'hidden', {get: () => true}); document.dispatchEvent(new Event('visibilitychange'))"
"""What a browser says to a tab that it hides; a headless one takes every tab for seen."""


def opened(new_page: Callable[[], Any], url: str, *selectors: str) -> tuple[Any, list[float]]:
    """Return the page and the seconds until each of the selectors was there.

    Once more where the machine's network changed meanwhile (a container came or went): Chromium then drops what it was
    loading.
    """
    from playwright.sync_api import TimeoutError as NotYet

    failures: list[str] = []
    while True:
        failures.clear()
        page = new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on("requestfailed", lambda request: failures.append(request.failure or ""))
        begin, times = time.monotonic(), []
        page.goto(url)
        while len(times) < len(selectors) and not any("NETWORK_CHANGED" in failure for failure in failures):
            if time.monotonic() > begin + PATIENCE_MS / 1e3:
                raise NotYet(f"{url}: no {selectors[len(times)]}; what failed to load: {failures or 'nothing'}")
            try:
                page.wait_for_selector(selectors[len(times)], timeout=LOOK_MS)
                times.append(time.monotonic() - begin)
            except NotYet:
                continue
        if len(times) == len(selectors):
            return page, times
        page.close()


def in_the_browser(url: str, seconds: float) -> None:
    """Print times to first content, a refresh's cost for the browser's main thread, a hidden tab's for the server."""
    with chromium() as browser:
        charts = (".gw-sentence", ".st-key-panel-ledger canvas", ".st-key-panel-disk canvas")
        for name in ("cold", "cold again", "warm", "warm again"):
            if name.startswith("cold"):
                page, times = opened(
                    lambda: browser.new_context(viewport=DESKTOP).new_page(), f"{url}/?{WINDOWS['1 h']}", *charts
                )
            else:
                context = page.context
                page, times = opened(context.new_page, f"{url}/?{WINDOWS['1 h']}", *charts)
            verdict_s, ledger_s, charts_s = times
            print(
                f"first content, {name}: verdict {verdict_s:.2f} s, ledger {ledger_s:.2f} s, all charts {charts_s:.2f} s",
                flush=True,
            )
        for window, query in WINDOWS.items():
            for other in page.context.pages[:-1]:
                other.close()
            page, _ = opened(page.context.new_page, f"{url}/?{query}", *charts)
            page.wait_for_timeout(5000)
            session = page.context.new_cdp_session(page)
            session.send("Performance.enable")
            texts: set[str] = set()
            before, begin = _task_s(session), time.monotonic()
            while time.monotonic() - begin < seconds:
                texts.add(page.locator(".gw-foot").inner_text())
                page.wait_for_timeout(400)
            each_ms = 1e3 * (_task_s(session) - before) / max(1, len(texts) - 1)
            print(f"refresh in the browser, {window}: {each_ms:.0f} ms of its main thread", flush=True)
        page.context.close()


def a_hidden_tab(url: str, seconds: float) -> None:
    """Print what one tab costs the server and itself, seen and hidden."""
    process = server_of(url)
    sent = [0, 0]
    with chromium() as browser:

        def new_page() -> Any:
            page = browser.new_context(viewport=DESKTOP).new_page()
            page.on("websocket", lambda socket: socket.on("framesent", lambda _: sent.__setitem__(0, sent[0] + 1)))
            return page

        page, _ = opened(new_page, f"{url}/?{WINDOWS['5 min']}", ".st-key-panel-disk canvas")
        session = page.context.new_cdp_session(page)
        session.send("Performance.enable")
        for name in ("seen", "hidden"):
            if name == "hidden":
                page.evaluate(HIDE)
            page.wait_for_timeout(5000)
            cpu, task, asked, begin = cpu_s(process), _task_s(session), sent[0], time.monotonic()
            page.wait_for_timeout(1000 * seconds)
            took_s = time.monotonic() - begin
            print(
                f"a tab that is {name}: {100 * (cpu_s(process) - cpu) / took_s:.2f}% of a core of the server, "
                f"{60 * (sent[0] - asked) / took_s:.0f} requests a minute, "
                f"{100 * (_task_s(session) - task) / took_s:.2f}% of the browser's main thread",
                flush=True,
            )


def a_million_steps(url: str) -> None:
    """Print how long the page "Run" takes to show a million steps, the agent's reading and downsampling included.

    The page's process keeps what it has received of a run that is over: the first time is that of the first visitor.
    """
    with chromium() as browser:
        for name in ("first", "again"):
            wanted = (".gw-sentence", ".st-key-panel-steps canvas", ".st-key-panel-heat canvas")
            page, times = opened(
                lambda: browser.new_context(viewport=DESKTOP).new_page(), f"{url}/run?run=million", *wanted
            )
            print(
                f"a run of 1,000,000 steps, {name}: head {times[0]:.2f} s, steps {times[1]:.2f} s, heat map {times[2]:.2f} s",
                flush=True,
            )
            page.context.close()


def a_fleet(url: str, nodes: int) -> None:
    """Print how long the page "Fleet" takes to show a week, by user and by node, in a browser that was never there."""
    with chromium() as browser:
        for level in ("user", "node", "node"):
            wanted = (".gw-sentence", ".st-key-panel-fleet_states canvas", f".st-key-panel-by_{level} tbody td")
            page, times = opened(
                lambda: browser.new_context(viewport=DESKTOP).new_page(), f"{url}/fleet?by={level}", *wanted
            )
            print(
                f"the page of a week of {nodes} nodes by {level}: head {times[0]:.2f} s, states {times[1]:.2f} s, "
                f"who loses most {times[2]:.2f} s",
                flush=True,
            )
            page.context.close()


def _task_s(session: Any) -> float:
    metrics = {metric["name"]: metric["value"] for metric in session.send("Performance.getMetrics")["metrics"]}
    return float(metrics["TaskDuration"])
