"""A browser for each file of tests, one tab in it, and the pages of the file's own `agent`."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import suppress
from typing import Any

import pytest

from tests.chromium import DESKTOP, chromium
from tests.integration.dashboards.browser import WAIT_MS
from tests.integration.dashboards.fake import FakeAgent, streamlit_page


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add to a failure what the page showed."""
    report = yield
    page = getattr(item, "funcargs", {}).get("page")
    if report.failed and page is not None:
        with suppress(Exception):  # a tab that hangs, too
            shown = f"{page.url}\n{page.inner_text('body', timeout=5000)}"
            report.sections.append(("the page as it was", shown))
    return report


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def tab(browser: Any) -> Iterator[Any]:
    context = browser.new_context()
    context.set_default_timeout(WAIT_MS)
    yield context.new_page()
    context.close()


@pytest.fixture(scope="module")
def url(agent: FakeAgent, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("page") / "streamlit.log"
    with streamlit_page(agent.url, log) as address:
        yield address
    assert "Traceback" not in log.read_text()


@pytest.fixture
def page(tab: Any) -> Iterator[Any]:
    """Give the tab, empty, at the size of a desktop screen.

    Chromium has compiled Streamlit's code in it, which takes most of a first visit.
    """
    tab.set_viewport_size(DESKTOP)
    tab.emulate_media(color_scheme="light")
    yield tab
    tab.goto("about:blank")
