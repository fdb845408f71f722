"""Dashboards and annotations into a Grafana: created, updated, or left as they are.

What was changed by hand is not overwritten. A pushed dashboard is recognised by the message of its version: ours ends with
its digest. An annotation (a run from its begin to its end, and each of its findings, so that they outlive Prometheus'
retention) is recognised by its tags and its begin: pushing again extends those that went on and leaves the others.
"""

from __future__ import annotations

import hashlib
import html
import json
import re
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from grafana_client import GrafanaApi
from grafana_client.client import GrafanaClientError

from gpuwatch import __version__
from gpuwatch.api import Finding, Run, RunSource
from gpuwatch_dashboards.grafana.connection import GrafanaError, explained
from gpuwatch_dashboards.grafana.files import DATASOURCE, TAG

Outcome = Literal["created", "updated", "unchanged"]
_OURS = "gpuwatch "
LIMIT = 5000
"""Annotations of one run that are read."""


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


@dataclass(frozen=True)
class Mark:
    """One annotation. Times in Unix milliseconds."""

    tags: tuple[str, ...]
    begin_ms: int
    end_ms: int
    text: str


def marks_of(source: RunSource, since_s: float) -> Iterator[Mark]:
    """Yield the marks of all runs that sent a message since a moment, and of their findings. Raises as the source does."""
    recent = sorted((r for r in source.runs(kept=True) if r.last_message_s >= since_s), key=lambda r: r.run)
    for run, ranks in groupby(recent, key=lambda r: r.run):
        yield _of_run(run, list(ranks))
        yield from (_of_finding(run, found) for found in source.findings(run))


def _of_run(run: str, ranks: Sequence[Run]) -> Mark:
    states = {rank.status for rank in ranks}
    status = "running" if "running" in states else "lost" if "lost" in states else "ended"
    verdict = next((rank.verdict.sentence for rank in ranks if rank.verdict is not None), "")
    return Mark(
        tags=(TAG, f"run:{run}", "run"),
        begin_ms=_ms(min(rank.started_s for rank in ranks)),
        end_ms=_ms(max(max(rank.last_message_s, rank.watermark_s) for rank in ranks)),
        text=_text(ranks[0].name, f"{status}, {len(ranks)} rank{'s' if len(ranks) > 1 else ''} here", verdict),
    )


def _of_finding(run: str, found: Finding) -> Mark:
    return Mark(
        tags=(TAG, f"run:{run}", f"cause:{found.cause}", f"rank:{found.rank}"),
        begin_ms=_ms(found.since_s or 0.0),
        end_ms=_ms(max(found.seen_s or 0.0, found.since_s or 0.0)),
        text=_text(found.title, found.advice),
    )


def push_marks(api: GrafanaApi, url: str, marks: Iterable[Mark]) -> dict[Outcome, int]:
    """Push the marks; return how many were created, updated and unchanged. Raises GrafanaError."""
    counts: dict[Outcome, int] = {"created": 0, "updated": 0, "unchanged": 0}
    for run_tag, of_run in groupby(marks, key=lambda mark: mark.tags[1]):
        there = _marks_there(api, url, run_tag)
        for mark in of_run:
            counts[_push_mark(api, url, mark, there)] += 1
    return counts


def _push_mark(api: GrafanaApi, url: str, mark: Mark, there: Mapping[tuple[frozenset[str], int], Any]) -> Outcome:
    known = there.get((frozenset(mark.tags), mark.begin_ms))
    if known is None:
        with explained(url, "create an annotation"):
            api.annotations.add_annotation(
                time_from=mark.begin_ms, time_to=mark.end_ms, tags=list(mark.tags), text=mark.text
            )
        return "created"
    if (known.get("timeEnd"), known.get("text")) == (mark.end_ms, mark.text):
        return "unchanged"
    with explained(url, "change an annotation"):  # all of it: the client's partial update clears the tags
        api.annotations.update_annotation(
            known["id"], time_from=mark.begin_ms, time_to=mark.end_ms, tags=list(mark.tags), text=mark.text
        )
    return "updated"


def _marks_there(api: GrafanaApi, url: str, run_tag: str) -> dict[tuple[frozenset[str], int], Any]:
    """Return a run's annotations by tags and begin."""
    tags = [urllib.parse.quote(tag, safe="") for tag in (TAG, run_tag)]  # the client does not quote them
    with explained(url, "list annotations"):
        found = api.annotations.find_annotations(tags=tags, limit=LIMIT)
    return {(frozenset(each["tags"]), each["time"]): each for each in found}


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


def _text(*lines: str) -> str:
    """Return lines as Grafana shows them: it reads HTML."""
    return "<br>".join(html.escape(line, quote=False) for line in lines if line)
