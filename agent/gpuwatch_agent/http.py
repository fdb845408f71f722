"""The agent's HTTP side: /metrics, health and the JSON API of docs/reference/api.md. It reads snapshots and the history only."""

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

from gpuwatch import __version__, api
from gpuwatch.alerting.thresholds import Prices
from gpuwatch_agent.exporter import Snapshot, content_type
from gpuwatch_agent.history import History, queries

STALE_S = 5.0
_encode = msgspec.json.Encoder().encode


def make_app(
    snapshot: Callable[[], Snapshot | None], history: History, host: str, listen: tuple[str, ...], prices: Prices
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
            api.Status(
                version=__version__,
                host=host,
                time_s=time.time(),
                started_s=started_s,
                collectors=tuple(now.collectors) if now else (),
                history=api.HistoryFile(str(history.path), history.size_bytes, history.failures),
                gpus=tuple(now.gpus) if now else (),
                listen=listen,
            )
        )

    async def runs(request: Request) -> Response:
        now = snapshot()
        live = now.runs if now else []
        query = dict(request.query_params)
        if not query:
            return _json(api.Runs(live))
        return await asked(lambda: queries.runs(history.reader, live, query, prices))

    async def findings(request: Request) -> Response:
        now = snapshot()
        return _json(api.Findings(now.findings if now else []))

    async def series(request: Request) -> Response:
        return await asked(lambda: queries.series(history.reader, dict(request.query_params)))

    async def many_series(request: Request) -> Response:
        texts = request.query_params.getlist("q")
        return await asked(lambda: queries.many_series(history.reader, texts))

    async def ledger(request: Request) -> Response:
        return await asked(lambda: queries.ledger(history.reader, dict(request.query_params)))

    async def steps(request: Request) -> Response:
        run = request.path_params["run"]
        return await asked(lambda: queries.steps(history.reader, run, dict(request.query_params)))

    async def run_findings(request: Request) -> Response:
        run = request.path_params["run"]
        return await asked(lambda: api.Findings(history.reader.findings(run), run))

    async def asked(query: Callable[[], Any]) -> Response:
        """Answer from the history, in a thread: a long query holds up no scrape."""
        return _json(await run_in_threadpool(query))

    async def nothing(request: Request, error: Exception) -> Response:
        return _json({"error": str(error)}, 404)

    async def bad_request(request: Request, error: Exception) -> Response:
        return _json({"error": str(error)}, 400)

    async def no_history(request: Request, error: Exception) -> Response:
        return _json({"error": f"the history {history.path} cannot be read now: {error}"}, 503)

    async def not_found(request: Request, error: Exception) -> Response:
        return _json({"error": f"{request.url.path} is not here; the paths are in docs/reference/api.md"}, 404)

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
            Route("/api/v1/ledger", ledger),
            Route("/api/v1/series", series),
            Route("/api/v1/series/many", many_series),
            Route("/api/v1/runs/{run:path}/steps", steps),
            Route("/api/v1/runs/{run:path}/findings", run_findings),
        ],
        exception_handlers={
            queries.BadRequest: bad_request,
            queries.NothingKept: nothing,
            sqlite3.Error: no_history,
            404: not_found,
            405: not_allowed,
        },
    )


def _json(content: Any, status: int = 200) -> Response:
    return Response(_encode(content), status, media_type="application/json")
