"""The real Chromium for browser tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import pytest

from tests.servers import require

ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
DESKTOP, PHONE = {"width": 1400, "height": 1000}, {"width": 390, "height": 844}


@contextmanager
def chromium() -> Iterator[Any]:
    """Give a headless browser (playwright's Browser). Skips where there is none; fails instead when CI=true."""
    path = require("chromium", "chromium-browser")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing("playwright is not installed")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()


def missing(why: str) -> NoReturn:
    if os.environ.get("CI") == "true":
        pytest.fail(f"browser tests must run here: {why}")
    pytest.skip(why)
