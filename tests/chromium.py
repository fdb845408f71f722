"""The real Chromium for browser tests."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.c_library import built
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
        environment = {**os.environ, **without_netlink()}
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS, env=environment)
        try:
            yield browser
        finally:
            browser.close()


def without_netlink() -> dict[str, str]:
    """Return the environment in which Chromium on Linux does not notice changes of network interfaces.

    It is empty where there is no compiler. When an interface comes or goes, as docker's do in tests that run at the
    same time, Chromium drops the requests under way (ERR_NETWORK_CHANGED), on loopback too, and a page whose script
    was among them stays empty.
    """
    if sys.platform != "linux" or shutil.which(os.environ.get("CC", "cc")) is None:
        return {}
    return {"LD_PRELOAD": str(built(Path(__file__).with_name("no_netlink.c"), "no_netlink.so"))}


def missing(why: str) -> NoReturn:
    if os.environ.get("CI") == "true":
        pytest.fail(f"browser tests must run here: {why}")
    pytest.skip(why)
