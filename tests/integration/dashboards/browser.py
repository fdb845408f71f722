"""What tests of the pages do in the browser: find numbers, places in a chart, and what a chart shows at the pointer."""

from __future__ import annotations

import re
from typing import Any

WAIT_MS = 90_000
"""A deadline that bounds a failure only: a first visit takes half a minute where seven programs share a processor."""
LEFT_PX, RIGHT_PX = 64, 12
"""What lies outside a chart's axes: charts.GRID."""


def number(page: Any, selector: str) -> float:
    """Return the first number in an element's text."""
    text = page.locator(selector).first.inner_text(timeout=WAIT_MS)
    found = re.search(r"\d[\d.,]*", text)
    assert found, f"{selector}: no number in {text!r}"
    return float(found[0].replace(",", ""))


def legend(page: Any, panel: str) -> str:
    """Return a panel's words in one line."""
    page.wait_for_selector(f".st-key-panel-{panel} .gw-panel", timeout=WAIT_MS)
    return " ".join(page.locator(f".st-key-panel-{panel}").inner_text().split())


def place(page: Any, panel: str, part: float) -> tuple[float, float]:
    """Return a place in a chart; `part` of its width from the left."""
    chart = page.locator(f".st-key-panel-{panel} canvas").first
    chart.wait_for(timeout=WAIT_MS)
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    left, right = box["x"] + LEFT_PX, box["x"] + box["width"] - RIGHT_PX
    return left + part * (right - left), box["y"] + box["height"] / 2


def tooltip(page: Any, panel: str, part: float) -> str:
    """Return what a chart says with the pointer at this place; asked again where a refresh came between."""
    for attempt in range(30):
        x, y = place(page, panel, part)
        page.mouse.move(x + attempt % 2, y)
        page.wait_for_timeout(150)
        output = page.evaluate(
            f"[...document.querySelectorAll('.st-key-panel-{panel} [data-testid=stEChartsChart] > div')]"
            ".map(e => e.innerText).find(text => text.trim()) || ''"
        )
        if output:
            return str(output)
    raise AssertionError(f"{panel}: the chart says nothing under the pointer")
