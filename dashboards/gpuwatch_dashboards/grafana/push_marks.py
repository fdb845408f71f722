"""Annotations into a Grafana: a run from its begin to its end, and its findings, so that they outlive Prometheus' memory.

Each is known again by its tags and its begin. Pushing again extends those that went on and leaves the others.
"""

from __future__ import annotations

import html
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from grafana_client import GrafanaApi

from gpuwatch.api import Finding, Run, RunSource
from gpuwatch_dashboards.grafana.connection import explained
from gpuwatch_dashboards.grafana.push import Outcome
from gpuwatch_dashboards.grafana.uids import TAG

LIMIT = 5000
"""Annotations of one run that are looked through."""


@dataclass(frozen=True)
class Mark:
    """One annotation. Times in Unix milliseconds."""

    tags: tuple[str, ...]
    begin_ms: int
    end_ms: int
    text: str


def marks_of(source: RunSource, since_s: float) -> Iterator[Mark]:
    """Yield the marks of all runs that were heard of since a moment, and of their findings. Raises as the source does."""
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
        there = _there(api, url, run_tag)
        for mark in of_run:
            counts[_push(api, url, mark, there)] += 1
    return counts


def _push(api: GrafanaApi, url: str, mark: Mark, there: Mapping[tuple[frozenset[str], int], Any]) -> Outcome:
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


def _there(api: GrafanaApi, url: str, run_tag: str) -> dict[tuple[frozenset[str], int], Any]:
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
