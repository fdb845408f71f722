"""HTTP server: /metrics, health and the JSON API of docs/reference/api.md, from snapshots and the history; runbooks."""

import asyncio
import contextlib
import re
import socket
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from gpuwatch import __version__, api
from gpuwatch.alerting.thresholds import Prices
from gpuwatch_agent.exporter import FORMATS, Page, Snapshot
from gpuwatch_agent.history import History, queries
from gpuwatch_agent.history.reader import HistoryReader

STALE_S = 5.0
_DOCS = Path(__file__).parent / "docs"
"""The runbooks and the concepts that they link to. The wheel has a copy; a checkout has them at its top."""
WEDGED_S = 30.0
"""A thread of the agent that has done nothing for so long hangs: a service manager should restart the agent."""
_QUERIES_AT_ONCE = 1
_NO_SAMPLE = "no sample was taken yet\n"
_encode = msgspec.json.Encoder().encode


def make_app(
    snapshot: Callable[[], Snapshot | None],
    history: History,
    host: str,
    listen: tuple[str, ...],
    prices: Prices,
    idle_s: Callable[[], dict[str, float]] = dict,
) -> Starlette:
    """Return the ASGI application. `snapshot`: the latest, None before the first; `idle_s`: each thread's idle time."""
    started_s = time.time()
    slots = asyncio.Semaphore(_QUERIES_AT_ONCE)

    async def healthz(request: Request) -> Response:
        hanging = [(name, age_s) for name, age_s in idle_s().items() if age_s > WEDGED_S]
        text = "".join(f"the {name} has done nothing for {age_s:.0f} s\n" for name, age_s in hanging)
        return PlainTextResponse(text or "ok\n", 503 if hanging else 200)

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
        headers = {"Content-Type": FORMATS[open_metrics].CONTENT_TYPE_LATEST, "Vary": "Accept, Accept-Encoding"}
        if compressed:
            headers["Content-Encoding"] = "gzip"
        now.page.taken += request.method == "GET"
        return Response(now.page.body(open_metrics, compressed), headers=headers)

    async def document(request: Request) -> Response:
        name = f"{request.path_params['folder']}/{request.path_params['page']}.md"
        is_page = re.fullmatch(r"(runbooks|concepts)/\w{1,64}\.md", name)
        for root in (_DOCS, Path(__file__).parents[2] / "docs") if is_page else ():
            if (root / name).is_file():
                return PlainTextResponse((root / name).read_text("utf-8"))
        return _json({"error": f"there is no page {name}"}, 404)

    def live(path: str, answer: Callable[[Snapshot], object]) -> Route:
        async def handle(request: Request) -> Response:
            return _json(answer(snapshot() or Snapshot(0.0, 0.0, Page(()))))

        return Route(path, handle)

    def from_history(path: str, answer: Callable[[HistoryReader, Request], object]) -> Route:
        async def handle(request: Request) -> Response:
            async with slots:  # in a thread, few at once: many long queries delay no scrape, and fit into memory
                return await run_in_threadpool(lambda: _json(answer(history.reader, request)))

        return Route(path, handle)

    async def runs(request: Request) -> Response:
        now, query = snapshot(), dict(request.query_params)
        found = now.runs if now else []
        if not query:
            return _json(api.Runs(found))
        async with slots:
            return _json(await run_in_threadpool(queries.runs, history.reader, found, query, prices))

    def status(now: Snapshot) -> api.Status:
        return api.Status(
            version=__version__,
            host=host,
            time_s=time.time(),
            sampled_s=now.time_s,
            started_s=started_s,
            collectors=tuple(now.collectors),
            history=api.HistoryFile(str(history.path), history.size_bytes, history.failures),
            gpus=tuple(now.gpus),
            listen=listen,
        )

    def failure(status: int, text: Callable[[Request, Exception], str]) -> Callable[[Request, Exception], Response]:
        return lambda request, error: _json({"error": text(request, error)}, status)

    def unreadable(request: Request, error: Exception) -> str:
        history.note_damage(error)
        return f"the history {history.path} cannot be read now: {error}"

    return Starlette(
        routes=[
            Route("/healthz", healthz),
            Route("/readyz", readyz),
            Route("/metrics", metrics),
            Route("/docs/{folder}/{page}.md", document),
            Route("/api/v1/runs", runs),
            live("/api/v1/status", status),
            live("/api/v1/findings", lambda now: api.Findings(now.findings)),
            live("/api/v1/jobs", lambda now: api.Jobs(now.jobs)),
            from_history("/api/v1/ledger", lambda reader, asked: queries.ledger(reader, dict(asked.query_params))),
            from_history("/api/v1/series", lambda reader, asked: queries.series(reader, dict(asked.query_params))),
            from_history(
                "/api/v1/series/many",
                lambda reader, asked: queries.many_series(reader, asked.query_params.getlist("q")),
            ),
            from_history(
                "/api/v1/runs/{run:path}/steps",
                lambda reader, asked: queries.steps(reader, asked.path_params["run"], dict(asked.query_params)),
            ),
            from_history(
                "/api/v1/runs/{run:path}/findings",
                lambda reader, asked: api.Findings(reader.findings(asked.path_params["run"]), asked.path_params["run"]),
            ),
        ],
        exception_handlers={
            queries.BadRequest: failure(400, lambda request, error: str(error)),
            queries.NothingKept: failure(404, lambda request, error: str(error)),
            sqlite3.Error: failure(503, unreadable),
            404: failure(
                404, lambda request, error: f"{request.url.path} does not exist; the paths are in docs/reference/api.md"
            ),
            405: failure(405, lambda request, error: f"{request.method} {request.url.path} is not allowed; use GET"),
        },
    )


def _json(content: Any, status: int = 200) -> Response:
    return Response(_encode(content), status, media_type="application/json")


_MOST_CONNECTIONS = 64
_MOST_UNREAD = 16 << 20  # bytes of answers that clients have not read yet, in memory
_IDLE_S = 10.0
_LONGEST_S = 60.0


class Listener(socket.socket):
    """A listening socket that closes the oldest of too many unfinished TLS handshakes, which asyncio does not know."""

    waiting: ClassVar[dict[int, socket.socket]] = {}

    def accept(self) -> tuple[socket.socket, Any]:
        connection, address = super().accept()
        self.waiting.pop(connection.fileno(), None)
        self.waiting[connection.fileno()] = connection
        if len(self.waiting) > BoundedProtocol.most:
            oldest = self.waiting.pop(next(iter(self.waiting)))
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)
        return connection, address


class BoundedProtocol(H11Protocol):
    """Bounds connections: 10 s for a request's head, a minute to read an answer; closes the oldest idle of too many."""

    most = _MOST_CONNECTIONS

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        Listener.waiting.pop(transport.get_extra_info("socket").fileno(), None)
        self.since_s = time.monotonic()
        self.loop.call_later(_IDLE_S, self.check)
        if len(self.connections) > self.most:
            others = [one for one in self.connections if isinstance(one, BoundedProtocol) and one is not self]
            min(others, key=lambda one: (one.is_busy, one.since_s), default=self).transport.abort()

    @property
    def is_busy(self) -> bool:
        """Whether a request is being answered, or its answer read."""
        return self.unread > 0 or (self.cycle is not None and not self.cycle.response_complete)

    @property
    def unread(self) -> int:
        """Bytes of answers that the client has not read."""
        return self.transport.get_write_buffer_size()

    def on_response_complete(self) -> None:
        """Close the oldest of the connections whose clients do not read, where too much waits for them."""
        self.since_s = time.monotonic()
        super().on_response_complete()
        waiting = [one for one in self.connections if isinstance(one, BoundedProtocol) and one.unread]
        waiting.sort(key=lambda one: -one.since_s)
        while len(waiting) > 1 and sum(one.unread for one in waiting) > _MOST_UNREAD:
            waiting.pop().transport.abort()

    def check(self) -> None:
        """Close the connection if it has taken too long; called every 10 s while it is open."""
        if self not in self.connections:
            return
        if time.monotonic() - self.since_s >= (_LONGEST_S if self.is_busy else _IDLE_S):
            self.transport.abort()
        else:
            self.loop.call_later(_IDLE_S, self.check)
