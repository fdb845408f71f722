"""GETs of JSON, and the client of the agent's API, with errors that say what, where and what to do."""

from __future__ import annotations

import os
import re
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeVar
from urllib.parse import quote, unquote, urlencode, urlsplit

import msgspec

from gpuwatch import api
from gpuwatch.errors import ConfigError, SourceError
from gpuwatch.wire import endpoint

TIMEOUT_S = 3.0  # A page is redrawn every 2 s: a slower agent is as good as down.
LONG_TIMEOUT_S = 20.0  # For steps and series of a whole run: a million steps take an agent more than a second of CPU.
MOST_OF_ANSWER = 1 << 20
"""Bytes of the answer to a POST that are read; a longer one is cut off, and is longer than this then."""
API_TOKEN = "GPUWATCH_API_TOKEN"  # The variable with the token of the agents' API, or with _FILE its file.

Params = Mapping[str, str | int | float | Sequence[str]]
Labels = Mapping[str, str]
Answer = TypeVar("Answer")
Vector = list[tuple[dict[str, str], float]]  # an instant query's answer: (labels, value) of each series


class Reply(msgspec.Struct, frozen=True):
    """A server's reply, whatever its status."""

    status: int
    body: bytes
    location: str | None = None  # Target of a redirect, which is not followed.
    retry_after: str | None = None  # What its header Retry-After says.


Get = Callable[[str, float], Reply]  # the reply to a GET of a path within so many seconds. Raises: OSError.


class Http:
    """GETs from one server over pooled connections, from any thread. No proxy is used: agents are inside the site.

    The URL may have a user and a password; otherwise the token in the environment variable `token` is sent.
    SSL_CERT_FILE names a private CA, GPUWATCH_CLIENT_CERT a client certificate.
    """

    def __init__(self, url: str, token: str | None = None) -> None:
        self._url = url.rstrip("/")
        self._token = token
        self._pool: Any = None

    def get(self, path: str, timeout_s: float = TIMEOUT_S) -> Reply:
        """Return the reply. Raises: OSError when there is none."""
        return self._request("GET", path, timeout_s)

    def get_or_post(self, path: str, timeout_s: float = TIMEOUT_S) -> Reply:
        """Return the reply to a GET, or to a form POST of a query too long for proxies. Raises: OSError without one."""
        if len(path) <= 4096:
            return self.get(path, timeout_s)
        path, _, form = path.partition("?")
        return self._request("POST", path, timeout_s, {"Content-Type": "application/x-www-form-urlencoded"}, body=form)

    def post(self, path: str, body: bytes, headers: Mapping[str, str], timeout_s: float = TIMEOUT_S) -> Reply:
        """Return the reply to a POST, as it was sent. Raises: OSError when there is none."""
        more = {"body": body, "preload_content": False, "decode_content": False}
        return self._request("POST", path, timeout_s, {**headers, "accept-encoding": "identity"}, **more)

    def _request(self, method: str, path: str, timeout_s: float, extra: Mapping[str, str] = {}, **more: Any) -> Reply:
        import urllib3
        from urllib3 import exceptions

        timeout = urllib3.Timeout(connect=min(timeout_s, TIMEOUT_S), read=timeout_s)
        try:
            if self._pool is None:
                if not is_url(self._url):
                    text = f"{without_password(self._url)}: the URL needs http:// or https://, a host, and no port above 65535"
                    raise ConfigError(text)
                auth = urllib3.util.parse_url(self._url).auth
                user = unquote(auth).encode().decode("latin-1") if auth else None  # RFC 7617: UTF-8
                headers = urllib3.make_headers(accept_encoding="gzip", basic_auth=user)
                own = os.environ.get("GPUWATCH_CLIENT_CERT") or None
                self._pool = urllib3.PoolManager(maxsize=32, headers=headers, cert_file=own)
            bearer = endpoint.token(self._token) if self._token and "authorization" not in self._pool.headers else None
            headers = self._pool.headers | ({"Authorization": f"Bearer {bearer}"} if bearer else {}) | dict(extra)
            given: Any = {"timeout": timeout, "headers": headers, "retries": False, "redirect": False, **more}
            reply = self._pool.request(method, self._url + path, **given)
            body = reply.data if more.get("preload_content", True) else reply.read(MOST_OF_ANSWER + 1)
            if more:
                reply.close()
        except ConfigError as error:
            raise OSError(str(error)) from error
        except exceptions.HTTPError as error:
            if isinstance(error, exceptions.TimeoutError) and not isinstance(error, exceptions.NewConnectionError):
                raise TimeoutError(str(error)) from error
            if isinstance(reason := error.__cause__ or error.__context__, OSError):
                raise reason from None
            raise OSError(f"not an HTTP server: {type(error).__name__}") from error
        return Reply(reply.status, body, reply.headers.get("Location"), reply.headers.get("Retry-After"))

    def __del__(self) -> None:
        with suppress(Exception):  # no request was made, or the interpreter ends
            self._pool.clear()


def without_password(url: str) -> str:
    """Return a URL as it may be shown."""
    return re.sub(r"(?<=://)[^/]*@", "", url)


def is_url(value: str) -> bool:
    """Return whether a value is an HTTP URL with a host and, if any, a usable port."""
    try:
        parts = urlsplit(value)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def fetch(url: str, timeout_s: float = TIMEOUT_S / 3, token: str | None = None) -> Reply:
    """Return the reply of one URL. Raises: OSError when there is none."""
    base, mark, query = url.partition("?")
    return Http(base, token).get(mark + query, timeout_s)


def why(error: OSError) -> str:
    """Return an error as text: "Connection refused", "timed out"."""
    return error.strerror or str(error) or type(error).__name__


def remedy_of(error: OSError, away: str) -> str:
    """Return what to do about an error; `away` where there may be no server."""
    if isinstance(error.__cause__, ConfigError):
        return "correct that; no request was sent"
    if isinstance(error, ssl.SSLCertVerificationError):
        return "SSL_CERT_FILE has to name its CA, and the URL a host of the certificate; renew one that has expired"
    if isinstance(error, ssl.SSLError | ConnectionResetError | FileNotFoundError):  # the last: of the certificate
        return "check http:// or https:// in the URL, and GPUWATCH_CLIENT_CERT"
    return away


class JsonServer:
    """A server of JSON. `name` is its name in messages, `remedy` what to do when it is down."""

    def __init__(self, url: str, name: str, remedy: str, get: Get) -> None:
        self.url = without_password(url.rstrip("/"))
        self.where = f"{name} at {self.url}"
        self._remedy, self._get = remedy, get

    def ask(self, path: str, kind: type[Answer], params: Params | None = None, timeout_s: float = TIMEOUT_S) -> Answer:
        """Return the answer, decoded and checked. Raises: SourceError."""
        try:
            reply = self._get(f"{path}?{urlencode(params, doseq=True)}" if params else path, timeout_s)
        except OSError as error:
            what = "does not answer" if isinstance(error, ConnectionRefusedError) else f"does not answer ({why(error)})"
            what = f"did not answer within {timeout_s:g} s" if isinstance(error, TimeoutError) else what
            raise SourceError(f"{self.where} {what}", remedy_of(error, self._remedy)) from error
        if reply.status != 200:
            what = f"{self.where} answered {path} with status {reply.status}"
            raise SourceError(what, reason_of(reply), reply.status)
        try:
            return msgspec.json.decode(reply.body, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            what = f"{self.where} answered {path} with an unexpected reply ({error})"
            remedy = "check that the URL is right and that both sides have the same version of gpuwatch"
            raise SourceError(what, remedy) from error


def reason_of(reply: Reply) -> str:
    """Return why a server refuses, in its own words."""
    if reply.location is not None:
        return f"it redirects to {reply.location}: use that address"
    try:  # the agent and Prometheus report errors in the same form
        return str(msgspec.json.decode(reply.body, type=dict[str, object])["error"])
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError):
        return "see its log"


class _Result(msgspec.Struct, frozen=True):
    """One series: `value` of an instant query, `values` of a range query."""

    metric: dict[str, str]
    value: tuple[float, str] = (0.0, "nan")
    values: tuple[tuple[float, str], ...] = ()


class _Data(msgspec.Struct, frozen=True):
    result: list[_Result]


class _Answer(msgspec.Struct, frozen=True):
    data: _Data


class Prometheus(JsonServer):
    """A Prometheus, or any store with its HTTP API. Methods raise SourceError for no answer, or an unexpected one."""

    def __init__(self, url: str, get: Get | None = None) -> None:
        remedy = "check the URL given with --prometheus and that Prometheus is running"
        super().__init__(url, "Prometheus", remedy, get or Http(url).get_or_post)

    def query(self, path: str, params: Params, timeout_s: float) -> list[_Result]:
        return self.ask(f"/api/v1/{path}", _Answer, params, timeout_s).data.result

    def instant(self, expr: str, time_s: float, timeout_s: float = TIMEOUT_S) -> Vector:
        """Return (labels, value) of each series of an expression at a time."""
        found = self.query("query", {"query": expr, "time": time_s}, timeout_s)
        return [(result.metric, float(result.value[1])) for result in found]


class Client(JsonServer):
    """A node's agent. Every method raises SourceError when it does not answer, or not as expected."""

    def __init__(
        self, url: str, remedy: str = "start it with `gpuwatch up` or `gpuwatch agent`", get: Get | None = None
    ) -> None:
        super().__init__(url, "the agent", remedy, get or Http(url, API_TOKEN).get)

    def status(self) -> api.Status:
        return self.ask("/api/v1/status", api.Status)

    def caught_up(self) -> Client:
        """Return itself once the agent has booked all it has received (a run may just have ended), or after 2 s."""
        now = self.status()
        deadline, asked_s = time.monotonic() + 2.0, now.time_s or 0.0
        while now.sampled_s is not None and now.sampled_s < asked_s and time.monotonic() < deadline:
            time.sleep(0.1)
            now = self.status()
        return self

    def runs(self, kept: bool = False) -> Sequence[api.Run]:
        """Return the runs, the most recently active first; with `kept` those too that only the history has."""
        return self.ask("/api/v1/runs", api.Runs, {"kept": "all"} if kept else None).runs

    def jobs(self) -> Sequence[api.Job]:
        """Return the jobs of the node over all their attempts."""
        return self.ask("/api/v1/jobs", api.Jobs).jobs

    def findings(self, run: str) -> Sequence[api.Finding]:
        """Return all findings of a run's ranks, past ones too, oldest first."""
        return self.ask(f"/api/v1/runs/{quote(run, safe='')}/findings", api.Findings).findings

    def series(self, metric: str, labels: Labels, start_s: float, end_s: float, points: int) -> Sequence[api.Series]:
        params: Params = {"metric": metric, "start": start_s, "end": end_s, "points": points, **labels}
        return self.ask("/api/v1/series", api.SeriesOf, params, LONG_TIMEOUT_S).series

    def many_series(self, queries: Sequence[Params]) -> list[Sequence[api.Series]]:
        """Return the series of each query, in one request: a request costs as much as decoding ten answers."""
        if not queries:
            return []
        params = {"q": [urlencode(query) for query in queries]}
        return [answer.series for answer in self.ask("/api/v1/series/many", api.Answers, params).answers]

    def last_steps(self, run: str, rank: int, last: int) -> api.LastSteps | None:
        """Return the last single steps; None where none are kept."""
        return self._steps(run, api.LastSteps, {"rank": rank, "last": last})

    def steps(
        self, run: str, rank: int, points: int, start_s: float | None = None, end_s: float | None = None
    ) -> api.Steps | None:
        """Return the steps begun in a time range (None: all) in at most `points` buckets; None where none are kept."""
        times = {name: at for name, at in (("start", start_s), ("end", end_s)) if at is not None}
        return self._steps(run, api.Steps, {"rank": rank, "points": points, **times})

    def _steps(self, run: str, answer: type[Answer], params: Params) -> Answer | None:
        try:
            return self.ask(f"/api/v1/runs/{quote(run, safe='')}/steps", answer, params, LONG_TIMEOUT_S)
        except SourceError as error:
            if error.status == 404:
                return None
            raise


class RunSource(Protocol):
    """What a report reads from: a Client, or a history file (in the agent's package)."""

    where: str  # For messages: what is read.

    def runs(self, kept: bool = False) -> Sequence[api.Run]: ...
    def findings(self, run: str) -> Sequence[api.Finding]: ...
    def series(
        self, metric: str, labels: Labels, start_s: float, end_s: float, points: int
    ) -> Sequence[api.Series]: ...
    def last_steps(self, run: str, rank: int, last: int) -> api.LastSteps | None: ...
    def steps(self, run: str, rank: int, points: int) -> api.Steps | None: ...
