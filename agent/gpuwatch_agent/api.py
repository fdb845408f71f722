"""The agent's HTTP side: /metrics, health and the JSON API of docs/api.md. It reads snapshots and the history only."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qsl

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from gpuwatch import __version__
from gpuwatch.metrics import BY_NAME
from gpuwatch_agent.exporter import content_type
from gpuwatch_agent.history import History
from gpuwatch_agent.snapshot import Snapshot

STALE_S = 5.0
_MAX_POINTS = 2000
_MAX_STEPS = 200_000
_MAX_BUCKETS = 20_000
_MAX_QUERIES = 100
_PICKS = ("last", "extremes")
_MOST = 1e15
_encode = msgspec.json.Encoder().encode


class BadRequest(Exception):
    """A query that cannot be answered; its text says what, where and what to do."""


def make_app(
    snapshot: Callable[[], Snapshot | None], history: History, host: str, listen: tuple[str, ...]
) -> Starlette:
    """Return the ASGI application. `snapshot` gives the latest one, None before the first."""
    started_s = time.time()

    async def healthz(request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(request: Request) -> Response:
        now = snapshot()
        if now is None:
            return PlainTextResponse("no sample was taken yet\n", 503)
        age_s = time.monotonic() - now.monotonic_s
        if age_s > STALE_S:
            return PlainTextResponse(f"the last sample is {age_s:.0f} s old: a collector or the disk hangs\n", 503)
        return PlainTextResponse("ok\n")

    async def metrics(request: Request) -> Response:
        now = snapshot()
        if now is None:
            return PlainTextResponse("no sample was taken yet\n", 503)
        open_metrics = "application/openmetrics-text" in request.headers.get("accept", "")
        compressed = "gzip" in request.headers.get("accept-encoding", "")
        headers = {"Content-Type": content_type(open_metrics), "Vary": "Accept, Accept-Encoding"}
        if compressed:
            headers["Content-Encoding"] = "gzip"
        return Response(now.page.body(open_metrics, compressed), headers=headers)

    async def status(request: Request) -> Response:
        now = snapshot()
        return _json(
            {
                "version": __version__,
                "host": host,
                "time_s": time.time(),
                "started_s": started_s,
                "collectors": now.collectors if now else [],
                "history": {"path": str(history.path), "bytes": history.size_bytes, "failures": history.failures},
                "gpus": now.gpus if now else [],
                "listen": list(listen),
            }
        )

    async def runs(request: Request) -> Response:
        now = snapshot()
        return _json({"runs": now.runs if now else []})

    async def findings(request: Request) -> Response:
        now = snapshot()
        return _json({"findings": now.findings if now else []})

    async def series(request: Request) -> Response:
        return _json(await run_in_threadpool(_series, history, dict(request.query_params)))

    async def many_series(request: Request) -> Response:
        asked = [dict(parse_qsl(text, keep_blank_values=True)) for text in request.query_params.getlist("q")]
        if not 0 < len(asked) <= _MAX_QUERIES:
            raise BadRequest(f"{len(asked)} queries: give 1 to {_MAX_QUERIES}, each as q=metric%3DNAME%26…")
        return _json({"answers": await run_in_threadpool(lambda: [_series(history, query) for query in asked])})

    async def steps(request: Request) -> Response:
        query = dict(request.query_params)
        run, rank, last = request.path_params["run"], int(_number(query, "rank", 0)), int(_number(query, "last", 600))
        if "points" in query:
            return await condensed(run, rank, query)
        if not 0 < last <= _MAX_STEPS:
            raise BadRequest(f"last={last}: give 1 to {_MAX_STEPS}")
        first, columns = await run_in_threadpool(history.reader.steps, run, rank, last)
        if not columns["time_s"]:
            return _json({"error": f"no steps of run {run!r} rank {rank} are kept; /api/v1/runs lists the runs"}, 404)
        return _json({"run": run, "rank": rank, "first_step": first, **columns})

    async def run_findings(request: Request) -> Response:
        run = request.path_params["run"]
        found = await run_in_threadpool(history.reader.findings, run)
        return _json({"run": run, "findings": found})

    async def condensed(run: str, rank: int, query: dict[str, str]) -> Response:
        points = int(_number(query, "points", 600))
        if not 0 < points <= _MAX_BUCKETS:
            raise BadRequest(f"points={points}: give 1 to {_MAX_BUCKETS}")
        start_s = _number(query, "start", 0.0) if "start" in query else None
        end_s = _number(query, "end", 0.0) if "end" in query else None
        found = await run_in_threadpool(history.reader.condensed_steps, run, rank, points, start_s, end_s)
        if not found["steps"]:
            return _json({"error": f"no steps of run {run!r} rank {rank} are kept in this time"}, 404)
        return _json({"run": run, "rank": rank, **found})

    async def bad_request(request: Request, error: Exception) -> Response:
        return _json({"error": str(error)}, 400)

    async def no_history(request: Request, error: Exception) -> Response:
        return _json({"error": f"the history {history.path} cannot be read now: {error}"}, 503)

    async def not_found(request: Request, error: Exception) -> Response:
        return _json({"error": f"{request.url.path} is not here; the paths are in docs/api.md"}, 404)

    async def not_allowed(request: Request, error: Exception) -> Response:
        return _json({"error": f"{request.method} is not for {request.url.path}; use GET"}, 405)

    return Starlette(
        routes=[
            Route("/healthz", healthz),
            Route("/readyz", readyz),
            Route("/metrics", metrics),
            Route("/api/v1/status", status),
            Route("/api/v1/runs", runs),
            Route("/api/v1/findings", findings),
            Route("/api/v1/series", series),
            Route("/api/v1/series/many", many_series),
            Route("/api/v1/runs/{run:path}/steps", steps),
            Route("/api/v1/runs/{run:path}/findings", run_findings),
        ],
        exception_handlers={BadRequest: bad_request, sqlite3.Error: no_history, 404: not_found, 405: not_allowed},
    )


def _series(history: History, query: dict[str, str]) -> dict[str, Any]:
    """Return the answer to one query of /api/v1/series. Raises: BadRequest."""
    metric = query.pop("metric", "")
    if metric not in BY_NAME:
        raise BadRequest(f"metric={metric!r} is not a metric of gpuwatch; /metrics lists them")
    end_s = _number(query, "end", time.time())
    start_s = _number(query, "start", end_s - 900)
    points = int(_number(query, "points", 300))
    by, pick = query.pop("by", None), query.pop("pick", "last")
    if pick not in _PICKS:
        raise BadRequest(f"pick={pick!r} is not known; give one of {', '.join(_PICKS)}")
    if start_s > end_s:
        raise BadRequest(f"start={start_s} is after end={end_s}")
    if not 0 < points <= _MAX_POINTS:
        raise BadRequest(f"points={points}: give 1 to {_MAX_POINTS}")
    unknown = query.keys() - set(BY_NAME[metric].labels)
    if unknown:
        raise BadRequest(
            f"{metric} has no label {sorted(unknown)[0]!r}; it has {', '.join(BY_NAME[metric].labels) or 'none'}"
        )
    groups = None if by is None else [label for label in by.split(",") if label]
    if groups and (wrong := set(groups) - set(BY_NAME[metric].labels)):
        raise BadRequest(f"by={by}: {metric} has no label {sorted(wrong)[0]!r}")
    found = history.reader.series(metric, query, start_s, end_s, points, groups, pick == "extremes")
    return {
        "metric": metric,
        "kind": BY_NAME[metric].kind,
        "unit": BY_NAME[metric].unit,
        "series": [{"labels": labels, "points": values} for labels, values in found],
    }


def _number(query: dict[str, str], name: str, default: float) -> float:
    text = query.pop(name, None)
    if text is None:
        return default
    try:
        number = float(text)
    except ValueError:
        raise BadRequest(f"{name}={text!r} is not a number") from None
    if not abs(number) < _MOST:  # nor is nan
        raise BadRequest(f"{name}={text!r} is beyond all measure")
    return number


def _json(content: Any, status: int = 200) -> Response:
    return Response(_encode(content), status, media_type="application/json")
