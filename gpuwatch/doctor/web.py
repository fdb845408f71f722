"""URLs, asked briefly; and what the agent says of itself."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

_TIMEOUT_S = 1.0
_MOST_BYTES = 8 << 20


@dataclass(frozen=True)
class Answer:
    """What a URL answered, whatever its status."""

    status: int
    body: bytes

    def json(self) -> Any:
        """Return the decoded body. Raises: ValueError."""
        return json.loads(self.body)


Fetch = Callable[[str], Answer]


def fetch(url: str) -> Answer:
    """Return what a URL answers. This machine is asked without a proxy. Raises: OSError when there is no answer."""
    handlers = [urllib.request.ProxyHandler({})] if is_local(url) else []
    try:
        with urllib.request.build_opener(*handlers).open(url, timeout=_TIMEOUT_S) as answer:
            return Answer(answer.status, answer.read(_MOST_BYTES))
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, error.read(_MOST_BYTES))
    except urllib.error.URLError as error:
        if isinstance(error.reason, OSError):
            raise error.reason from error
        raise
    except (http.client.HTTPException, ValueError) as error:
        raise OSError(f"no HTTP there: {type(error).__name__}") from error


def why(error: OSError) -> str:
    """Return an error in words: "Connection refused", "timed out"."""
    return error.strerror or str(error) or type(error).__name__


def is_local(url: str) -> bool:
    """Return whether a URL is on this machine's loopback."""
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


def port_of(url: str) -> int:
    """Return the port of a URL."""
    parts = urlsplit(url)
    return parts.port or (443 if parts.scheme == "https" else 80)


@dataclass(frozen=True)
class AgentView:
    """The agent at `url`."""

    url: str
    state: Literal["answers", "refused", "foreign", "silent"]
    """An agent; nobody listens; another program answers; nothing can be had."""
    status: dict[str, Any] | None = None
    """Its /api/v1/status. None unless `state` is "answers"."""
    error: str = ""
    ready: bool = False
    not_ready: str = ""
    """Its own words at /readyz."""
    ahead_s: float = 0.0
    """Its clock less this one's; uncertain by half of the round trip, which is taken off."""


def ask_agent(url: str, fetch: Fetch, time_s: Callable[[], float]) -> AgentView:
    """Return what the agent says of itself."""
    asked_s = time_s()
    try:
        answer = fetch(f"{url}/api/v1/status")
        answered_s = time_s()
        status = answer.json() if answer.status == 200 else None
        if not isinstance(status, dict) or "collectors" not in status:
            return AgentView(url, "foreign", error=f"another program answers there (status {answer.status})")
        ready = fetch(f"{url}/readyz")
    except ConnectionRefusedError as error:
        return AgentView(url, "refused", error=why(error))
    except OSError as error:
        return AgentView(url, "silent", error=why(error))
    except ValueError:
        return AgentView(url, "foreign", error="another program answers there (no JSON)")
    difference_s = float(status.get("time_s") or answered_s) - (asked_s + answered_s) / 2
    uncertain_s = (answered_s - asked_s) / 2
    ahead_s = 0.0 if abs(difference_s) <= uncertain_s else difference_s
    words = ready.body.decode(errors="replace").strip()
    return AgentView(url, "answers", status, ready=ready.status == 200, not_ready=words, ahead_s=ahead_s)
