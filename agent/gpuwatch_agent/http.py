"""The agent's HTTP server: /metrics, health and the JSON API of docs/reference/api.md, from snapshots and the history; and the runbooks."""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from gpuwatch import __version__, api
from gpuwatch.alerting.thresholds import Prices
from gpuwatch_agent.exporter import Snapshot, content_type
from gpuwatch_agent.history import History, queries
from gpuwatch_agent.history.reader import HistoryReader

STALE_S = 5.0
_DOCS = Path(__file__).parent / "docs"
"""The runbooks and the concepts that they link to. The wheel has a copy; a checkout has them at its top."""
_NO_SAMPLE = "no sample was taken yet\n"
_encode = msgspec.json.Encoder().encode


def make_app(
    snapshot: Callable[[], Snapshot | None], history: History, host: str, listen: tuple[str, ...], prices: Prices
) -> Starlette:
    """Return the ASGI application. `snapshot` returns the latest one, None before the first."""
    started_s = time.time()

    async def healthz(request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(request: Request) -> Response:
        now = snapshot()
        if now is None:
            return PlainTextResponse(_NO_SAMPLE, 503)
        age_s = time.monotonic() - now.monotonic_s
        if age_s > STALE_S:
            return PlainTextResponse(f"the last sample is {age_s:.0f} s old: a collector or the disk hangs\n", 503)
        return PlainTextResponse("ok\n")

    async def metrics(request: Request) -> Response:
        now = snapshot()
        if now is None:
            return PlainTextResponse(_NO_SAMPLE, 503)
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
        return _json(await run_in_threadpool(queries.runs, history.reader, live, query, prices))

    async def jobs(request: Request) -> Response:
        now = snapshot()
        return _json(api.Jobs(now.jobs if now else []))

    async def findings(request: Request) -> Response:
        now = snapshot()
        return _json(api.Findings(now.findings if now else []))

    async def document(request: Request) -> Response:
        name = f"{request.path_params['folder']}/{request.path_params['page']}.md"
        roots = (_DOCS, Path(__file__).parents[2] / "docs")
        found = [root / name for root in roots if re.fullmatch(r"(runbooks|concepts)/\w+\.md", name)]
        path = next((path for path in found if path.is_file()), None)
        return (
            _json({"error": f"there is no page {name}"}, 404)
            if path is None
            else PlainTextResponse(path.read_text("utf-8"))
        )

    def from_history(path: str, answer: Callable[[HistoryReader, dict[str, Any], QueryParams], Any]) -> Route:
        async def handle(request: Request) -> Response:  # in a thread: a long query delays no scrape
            return _json(await run_in_threadpool(answer, history.reader, request.path_params, request.query_params))

        return Route(path, handle)

    def failure(status: int, text: Callable[[Request, Exception], str]) -> Callable[[Request, Exception], Response]:
        return lambda request, error: _json({"error": text(request, error)}, status)

    return Starlette(
        routes=[
            Route("/healthz", healthz),
            Route("/readyz", readyz),
            Route("/metrics", metrics),
            Route("/docs/{folder}/{page}.md", document),
            Route("/api/v1/status", status),
            Route("/api/v1/runs", runs),
            Route("/api/v1/findings", findings),
            Route("/api/v1/jobs", jobs),
            from_history("/api/v1/ledger", lambda reader, path, query: queries.ledger(reader, dict(query))),
            from_history("/api/v1/series", lambda reader, path, query: queries.series(reader, dict(query))),
            from_history(
                "/api/v1/series/many", lambda reader, path, query: queries.many_series(reader, query.getlist("q"))
            ),
            from_history(
                "/api/v1/runs/{run:path}/steps",
                lambda reader, path, query: queries.steps(reader, path["run"], dict(query)),
            ),
            from_history(
                "/api/v1/runs/{run:path}/findings",
                lambda reader, path, query: api.Findings(reader.findings(path["run"]), path["run"]),
            ),
        ],
        exception_handlers={
            queries.BadRequest: failure(400, lambda request, error: str(error)),
            queries.NothingKept: failure(404, lambda request, error: str(error)),
            sqlite3.Error: failure(
                503, lambda request, error: f"the history {history.path} cannot be read now: {error}"
            ),
            404: failure(
                404, lambda request, error: f"{request.url.path} does not exist; the paths are in docs/reference/api.md"
            ),
            405: failure(405, lambda request, error: f"{request.method} {request.url.path} is not allowed; use GET"),
        },
    )


def _json(content: Any, status: int = 200) -> Response:
    return Response(_encode(content), status, media_type="application/json")
