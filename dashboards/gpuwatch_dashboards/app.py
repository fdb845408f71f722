"""The Streamlit app: `streamlit run` starts this file (see launch.py). Settings come by environment variables."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import streamlit as st

from gpuwatch.tools.reports.display import BLUE, SKY, VERMILLION
from gpuwatch.tools.reports.page import TEMPLATES
from gpuwatch_dashboards.launch import AGENT_URL, DEFAULT_AGENT_URL, PROMETHEUS_URL
from gpuwatch_dashboards.sources import AgentSource, SharedSource
from gpuwatch_dashboards.sources.prometheus import PrometheusSource
from gpuwatch_dashboards.views import compare, fleet, live, run
from gpuwatch_dashboards.views.site import Site, draw_page

PAGES = {"live": live, "run": run, "compare": compare, "fleet": fleet}


@st.cache_resource
def shared() -> SharedSource:
    """Return what all viewers share: the source with its open connections, and the cache."""
    agent_url, prometheus_url = os.environ.get(AGENT_URL) or DEFAULT_AGENT_URL, os.environ.get(PROMETHEUS_URL)
    prometheus = PrometheusSource(prometheus_url, agent_url=agent_url) if prometheus_url else None
    return SharedSource(prometheus or AgentSource(agent_url))


def main() -> None:
    st.set_page_config(page_title="gpuwatch", page_icon="📈", layout="wide", initial_sidebar_state="collapsed")
    for style in (TEMPLATES / "parts.css", Path(__file__).with_name("style.css")):
        st.html(style)
    st.html(f"<style>:root {{ --gw-lost: {VERMILLION}; --gw-work: {BLUE}; --gw-mark: {SKY}; }}</style>")
    pages: dict[str, Any] = {}
    site = Site(shared(), pages)
    for key, of in PAGES.items():
        page = partial(draw_page, site, of.page, of.EVERY_S)
        pages[key] = st.Page(page, title=f"gpuwatch {key.title()}", url_path=key, default=key == "live")
    st.navigation(list(pages.values()), position="hidden").run()


if __name__ == "__main__":
    main()
