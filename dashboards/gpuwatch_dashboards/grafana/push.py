"""Dashboards into a Grafana: made, brought up to date, or left as they are; what people changed by hand is not overwritten.

What was pushed is known again by the message of its version: ours ends with a digest of the dashboard.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from grafana_client import GrafanaApi
from grafana_client.client import GrafanaClientError

from gpuwatch import __version__
from gpuwatch_dashboards.grafana.connection import GrafanaError, explained
from gpuwatch_dashboards.grafana.uids import DATASOURCE

Outcome = Literal["created", "updated", "unchanged"]
_OURS = "gpuwatch "


@dataclass(frozen=True)
class Pushed:
    what: str
    outcome: Outcome
    url: str = ""


def push_folder(api: GrafanaApi, url: str, title: str) -> tuple[str, Pushed]:
    """Return the uid of the folder of this title, which is made if there is none. Raises GrafanaError."""
    wanted = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:40] or "gpuwatch"
    with explained(url, f"list the folders, to find {title!r}"):
        folders = api.folder.get_all_folders()
    for folder in folders:
        if folder["uid"] == wanted or folder["title"] == title:
            return folder["uid"], Pushed(f"folder {folder['title']}", "unchanged")
    with explained(url, f"create the folder {title!r}"):
        made = api.folder.create_folder(title, uid=wanted)
    return made["uid"], Pushed(f"folder {title}", "created", made.get("url", ""))


def push_dashboards(
    api: GrafanaApi,
    url: str,
    dashboards: Mapping[str, dict[str, Any]],
    folder: str,
    *,
    datasource: str = DATASOURCE,
    force: bool = False,
) -> Iterator[Pushed]:
    """Push each dashboard into the folder of this uid, and yield what came of it.

    Args:
        dashboards: By file name, as `files.load` gives them.
        datasource: The uid of the Prometheus that they read at first.
        force: Replace what was changed by hand.

    Raises:
        GrafanaError: What was pushed until then stays.
    """
    for dashboard in dashboards.values():
        yield _push(api, url, _reading(dashboard, datasource), folder, force)


def _push(api: GrafanaApi, url: str, dashboard: dict[str, Any], folder: str, force: bool) -> Pushed:
    title, uid = dashboard["title"], dashboard["uid"]
    what = f"dashboard {title}"
    there = _there(api, url, uid, title)
    message = f"{_OURS}{__version__} {_digest(dashboard)}"
    if there is not None:
        last = _last_version(api, url, uid, title)
        meta = there["meta"]
        if meta.get("provisioned"):
            raise GrafanaError(
                f"{what}: Grafana at {url} reads it from files (provisioning): change these, or end the provisioning"
            )
        if last.get("message") == message and meta.get("folderUid", "") == folder:
            return Pushed(what, "unchanged", meta.get("url", ""))
        if not str(last.get("message", "")).startswith(_OURS) and not force:
            raise GrafanaError(
                f"{what}: was changed by {last.get('createdBy') or 'somebody'} at {url} (version {last.get('version')}): "
                "save it there under another name to keep the changes, then push with --force"
            )
        dashboard = {**dashboard, "id": there["dashboard"].get("id"), "version": there["dashboard"]["version"]}
    body = {"dashboard": dashboard, "folderUid": folder, "message": message, "overwrite": False}
    with explained(url, f"save the {what}"):
        saved = api.dashboard.update_dashboard(body)
    return Pushed(what, "updated" if there is not None else "created", saved.get("url", ""))


def _there(api: GrafanaApi, url: str, uid: str, title: str) -> dict[str, Any] | None:
    """Return the dashboard as Grafana has it, None if it has none."""
    with explained(url, f"read the dashboard {title}"):
        try:
            found: dict[str, Any] = api.dashboard.get_dashboard(uid)
        except GrafanaClientError as error:
            if error.status_code == 404:
                return None
            raise
    return found


def _last_version(api: GrafanaApi, url: str, uid: str, title: str) -> dict[str, Any]:
    with explained(url, f"read the versions of the dashboard {title}"):
        # not the client's own method, which puts the limit into the body of a GET
        answer = api.client.GET(f"/dashboards/uid/{uid}/versions", params={"limit": 1})
    versions = answer["versions"] if isinstance(answer, dict) else answer  # a list before Grafana 11
    return max(versions, key=lambda version: int(version["version"]), default={})


def _digest(dashboard: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(dashboard, sort_keys=True).encode()).hexdigest()[:12]


def _reading(dashboard: dict[str, Any], datasource: str) -> dict[str, Any]:
    """Return the dashboard with another data source chosen at first."""
    if datasource == DATASOURCE:
        return dashboard
    copy: dict[str, Any] = json.loads(json.dumps(dashboard))
    for variable in copy.get("templating", {}).get("list", []):
        if variable["type"] == "datasource":
            variable["current"] = {"selected": True, "text": datasource, "value": datasource}
    return copy
