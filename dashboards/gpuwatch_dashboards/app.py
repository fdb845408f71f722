"""The Streamlit app: `streamlit run` starts this file (see launch.py). Settings come by environment variables."""

from __future__ import annotations

import os
from pathlib import Path

import streamlit as st

from gpuwatch_dashboards.launch import AGENT_URL, DEFAULT_AGENT_URL, PROMETHEUS_URL
from gpuwatch_dashboards.sources import AgentSource, PrometheusSource, Source
from gpuwatch_dashboards.views import live


@st.cache_resource
def source_at(agent_url: str, prometheus_url: str | None) -> Source:
    """Return the source that all viewers share, with its open connections."""
    return PrometheusSource(prometheus_url) if prometheus_url else AgentSource(agent_url)


def main() -> None:
    st.set_page_config(page_title="gpuwatch", page_icon="📈", layout="wide", initial_sidebar_state="collapsed")
    st.html(Path(__file__).with_name("style.css"))
    source = source_at(os.environ.get(AGENT_URL) or DEFAULT_AGENT_URL, os.environ.get(PROMETHEUS_URL) or None)
    pages = [st.Page(lambda: live.page(source), title="gpuwatch live", url_path="live", default=True)]
    st.navigation(pages, position="hidden").run()


if __name__ == "__main__":
    main()
