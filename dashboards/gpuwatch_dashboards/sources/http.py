"""One GET that either gives a decoded answer or one clear error."""

from __future__ import annotations

from typing import TypeVar

import httpx
import msgspec

from gpuwatch_dashboards.errors import SourceError

TIMEOUT_S = 3.0
"""A page is redrawn every 2 s: who takes longer than this is as good as away."""

Params = dict[str, str | int | float | list[str]]
Answer = TypeVar("Answer")


class JsonApi:
    """A JSON API at a URL. `name` is its name in messages ("the agent"), `remedy` what to do when it is away."""

    def __init__(self, name: str, url: str, remedy: str, transport: httpx.BaseTransport | None = None) -> None:
        self.url = url.rstrip("/")
        self.where = f"{name} at {self.url}"
        self._remedy = remedy
        # trust_env=False: a proxy set for the internet must not be asked for a node's own agent
        self._client = httpx.Client(base_url=self.url, timeout=TIMEOUT_S, transport=transport, trust_env=False)

    def get(
        self, path: str, answer: type[Answer], params: Params | None = None, timeout_s: float = TIMEOUT_S
    ) -> Answer:
        """Return the answer, decoded and checked. Raises SourceError."""
        try:
            patience = httpx.Timeout(timeout_s, connect=min(timeout_s, TIMEOUT_S))
            response = self._client.get(path, params=params, timeout=patience)
        except httpx.TimeoutException as error:
            raise SourceError(f"{self.where} did not answer within {timeout_s:g} s", self.url, self._remedy) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise SourceError(f"{self.where} does not answer", self.url, self._remedy) from error
        if response.status_code != httpx.codes.OK:
            raise SourceError(
                f"{self.where} answered {path} with status {response.status_code}",
                self.url,
                _reason(response),
                response.status_code,
            )
        try:
            return msgspec.json.decode(response.content, type=answer)
        except msgspec.MsgspecError as error:
            raise SourceError(
                f"{self.where} answered {path} with something else than expected ({error})",
                self.url,
                "check that the URL is right and that both sides have the same version of gpuwatch",
            ) from error

    def close(self) -> None:
        self._client.close()


def _reason(response: httpx.Response) -> str:
    """Return what the server says about its refusal: agent and Prometheus both have an `error` field."""
    try:
        reason = msgspec.json.decode(response.content, type=dict[str, object]).get("error")
    except msgspec.MsgspecError:
        reason = None
    return str(reason) if reason else "look at its log"
