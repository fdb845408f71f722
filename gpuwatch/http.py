"""The one way to GET: replies of any server, and JSON decoded into structs, with errors that say what, where and what to do."""

from __future__ import annotations

import gzip
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import TypeVar
from urllib.parse import SplitResult, unquote, urlencode, urlsplit

import msgspec

from gpuwatch.errors import SourceError

TIMEOUT_S = 3.0
"""A page is redrawn every 2 s: an agent that takes longer is as good as away."""
LONG_TIMEOUT_S = 20.0
"""Of steps and series of a whole run: a million steps take an agent more than a second of a core."""
_MOST_BYTES = 256 << 20

Params = Mapping[str, str | int | float | Sequence[str]]
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Reply:
    """What a server answered, whatever its status."""

    status: int
    body: bytes
    location: str | None = None
    """Where a redirect leads: none is followed."""


Get = Callable[[str, float], Reply]
"""Returns the reply to a GET of a path within so many seconds. Raises: OSError when there is none."""


def _split(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError:  # "http://[": `_connect` refuses what has no host
        return urlsplit("")


class Http:
    """GETs from one server over connections that stay open, from any thread. No proxy is used: agents are inside the site."""

    def __init__(self, url: str) -> None:
        self._parts = _split(url.rstrip("/"))
        self._idle: list[HTTPConnection] = []
        self._headers = {"Accept-Encoding": "gzip"}
        if self._parts.username is not None:
            user = f"{unquote(self._parts.username)}:{unquote(self._parts.password or '')}"
            self._headers["Authorization"] = f"Basic {b64encode(user.encode()).decode()}"

    def get(self, path: str, timeout_s: float = TIMEOUT_S) -> Reply:
        """Return the reply. Raises: OSError when there is none."""
        while True:
            try:
                connection, is_new = self._idle.pop(), False
            except IndexError:
                connection, is_new = self._connect(timeout_s), True
            try:
                connection.sock.settimeout(timeout_s)
                connection.request("GET", f"{self._parts.path}{path}", headers=self._headers)
                response = connection.getresponse()
                body = response.read(_MOST_BYTES)
                if response.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
            except (OSError, HTTPException, ValueError, EOFError) as error:
                connection.close()
                if not is_new and not isinstance(error, TimeoutError):
                    continue  # the server has closed the idle connection
                if isinstance(error, OSError):
                    raise
                raise OSError(f"no HTTP there: {type(error).__name__}") from error
            if response.will_close:
                connection.close()
            else:
                self._idle.append(connection)
            return Reply(response.status, body, response.headers.get("Location"))

    def _connect(self, timeout_s: float) -> HTTPConnection:
        parts = self._parts
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise OSError("the URL has to begin with http:// or https:// and a host")
        connect = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        try:
            connection = connect(parts.hostname, parts.port, timeout=min(timeout_s, TIMEOUT_S))
            connection.connect()
        except ValueError as error:  # a port that is no number, a host that is no name
            raise OSError(str(error)) from error
        return connection

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    __del__ = close


def fetch(url: str, timeout_s: float = 1.0) -> Reply:
    """Return the reply of one URL, whatever its status. Raises: OSError when there is none."""
    parts = _split(url)
    with closing(Http(f"{parts.scheme}://{parts.netloc}")) as server:
        return server.get(f"{parts.path or '/'}{f'?{parts.query}' if parts.query else ''}", timeout_s)


def why(error: OSError) -> str:
    """Return an error in words: "Connection refused", "timed out"."""
    return error.strerror or str(error) or type(error).__name__


class JsonServer:
    """A server of JSON. `name` is its name in messages, `remedy` what to do when it is away; `get` is given in tests."""

    def __init__(self, url: str, name: str, remedy: str, get: Get | None = None) -> None:
        self.url = url.rstrip("/")
        self.where = f"{name} at {self.url}"
        self._remedy = remedy
        self._http = Http(self.url)
        self._get = get or self._http.get

    def ask(
        self, path: str, answer: type[Answer], params: Params | None = None, timeout_s: float = TIMEOUT_S
    ) -> Answer:
        """Return the answer, decoded and checked. Raises: SourceError."""
        try:
            reply = self._get(f"{path}?{urlencode(params, doseq=True)}" if params else path, timeout_s)
        except TimeoutError as error:
            raise SourceError(f"{self.where} did not answer within {timeout_s:g} s", self.url, self._remedy) from error
        except OSError as error:
            reason = "" if isinstance(error, ConnectionRefusedError) else f" ({why(error)})"
            raise SourceError(f"{self.where} does not answer{reason}", self.url, self._remedy) from error
        if reply.status != 200:
            what = f"{self.where} answered {path} with status {reply.status}"
            raise SourceError(what, self.url, _reason(reply), reply.status)
        try:
            return msgspec.json.decode(reply.body, type=answer)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise SourceError(
                f"{self.where} answered {path} with something else than expected ({error})",
                self.url,
                "check that the URL is right and that both sides have the same version of gpuwatch",
            ) from error

    def close(self) -> None:
        self._http.close()


def _reason(reply: Reply) -> str:
    if reply.location is not None:
        return f"it redirects to {reply.location}: give that address"
    try:  # agent and Prometheus refuse in the same form
        return str(msgspec.json.decode(reply.body, type=dict[str, object])["error"])
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError):
        return "its log says why"
