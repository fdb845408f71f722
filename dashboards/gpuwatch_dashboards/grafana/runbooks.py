"""The dashboard of runbooks: what to do about each alert, where Grafana's readers are, without another server."""

from __future__ import annotations

import re
from pathlib import Path

from gpuwatch_dashboards.grafana.uids import PAGES, RUNBOOKS, runbook_url

DOCS = Path(__file__).parents[3] / "docs"


def runbook_text(page: str) -> str:
    """Return a runbook's Markdown without its title; links to other runbooks lead to their panels, those to files are text."""
    path = DOCS / ("causes.md" if page == "causes" else f"runbooks/{page}.md")
    text = re.sub(r"\A# .*\n+", "", path.read_text(encoding="utf-8"))
    return re.sub(r"\[([^\]]+)\]\(([^)]+)\)", _link, text).strip()


def _link(match: re.Match[str]) -> str:
    text, target = match[1], match[2]
    if "://" in target:
        return match[0]
    page = Path(target.partition("#")[0]).stem
    return f"[{text}]({runbook_url(page)})" if page in PAGES else text


def title(page: str) -> str:
    return "Causes that gpuwatch names" if page == "causes" else page


__all__ = ["DOCS", "PAGES", "RUNBOOKS", "runbook_text", "title"]
