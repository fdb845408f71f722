"""The dashboards' names in URLs, and the order of the runbooks. Fixed: links and bookmarks are made of them."""

from __future__ import annotations

from gpuwatch.alerting.render import alerts

FLEET, NODE, RUN, RUNBOOKS = "gpuwatch-fleet", "gpuwatch-node", "gpuwatch-run", "gpuwatch-runbooks"
TAG = "gpuwatch"
"""Of every dashboard and annotation that is ours."""
DATASOURCE = "gpuwatch-prometheus"
"""The uid that the provisioned datasource has, and that the datasource variable starts with."""
PAGES: tuple[str, ...] = (*sorted(alerts()), "causes")
"""What the dashboard of runbooks shows: every alert's runbook, and the list of causes."""


def page_id(page: str) -> int:
    """Return the id of a runbook's panel."""
    return PAGES.index(page) + 1


def runbook_url(page_or_id: str) -> str:
    """Return the link to a runbook, by its alert's name or by what stands for its panel's id."""
    return f"/d/{RUNBOOKS}?viewPanel={page_id(page_or_id) if page_or_id in PAGES else page_or_id}"
