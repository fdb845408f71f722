"""The agent's HTTP side: /metrics, health and the JSON API of docs/api.md. It reads snapshots and the history only."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from typing import Any

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
        query = dict(request.query_params)
        metric = query.pop("metric", "")
        if metric not in BY_NAME:
            raise BadRequest(f"metric={metric!r} is not a metric of gpuwatch; /metrics lists them")
        end_s = _number(query, "end", time.time())
        start_s = _number(query, "start", end_s - 900)
        points = int(_number(query, "points", 300))
        if start_s > end_s:
            raise BadRequest(f"start={start_s} is after end={end_s}")
        if not 0 < points <= _MAX_POINTS:
            raise BadRequest(f"points={points}: give 1 to {_MAX_POINTS}")
        unknown = query.keys() - set(BY_NAME[metric].labels)
        if unknown:
            raise BadRequest(
                f"{metric} has no label {sorted(unknown)[0]!r}; it has {', '.join(BY_NAME[metric].labels) or 'none'}"
            )
        found = await run_in_threadpool(history.reader.series, metric, query, start_s, end_s, points)
        return _json(
            {
                "metric": metric,
                "kind": BY_NAME[metric].kind,
                "unit": BY_NAME[metric].unit,
                "series": [{"labels": labels, "points": values} for labels, values in found],
            }
        )

    async def steps(request: Request) -> Response:
        query = dict(request.query_params)
        run, rank, last = request.path_params["run"], int(_number(query, "rank", 0)), int(_number(query, "last", 600))
        if not 0 < last <= _MAX_STEPS:
            raise BadRequest(f"last={last}: give 1 to {_MAX_STEPS}")
        first, columns = await run_in_threadpool(history.reader.steps, run, rank, last)
        if not columns["time_s"]:
            return _json({"error": f"no steps of run {run!r} rank {rank} are kept; /api/v1/runs lists the runs"}, 404)
        return _json({"run": run, "rank": rank, "first_step": first, **columns})

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
            Route("/api/v1/runs/{run:path}/steps", steps),
        ],
        exception_handlers={BadRequest: bad_request, sqlite3.Error: no_history, 404: not_found, 405: not_allowed},
    )


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
