"""URLs, asked briefly; and what the agent says of itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from gpuwatch.api import Status
from gpuwatch.http import Reply, why

Fetch = Callable[[str], Reply]


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
    status: Status | None = None
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
        if answer.status != 200:
            return AgentView(url, "foreign", error=f"another program answers there (status {answer.status})")
        status = msgspec.json.decode(answer.body, type=Status)
        ready = fetch(f"{url}/readyz")
    except ConnectionRefusedError as error:
        return AgentView(url, "refused", error=why(error))
    except OSError as error:
        return AgentView(url, "silent", error=why(error))
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return AgentView(url, "foreign", error="another program answers there (no agent's JSON)")
    difference_s = (status.time_s or answered_s) - (asked_s + answered_s) / 2
    uncertain_s = (answered_s - asked_s) / 2
    ahead_s = 0.0 if abs(difference_s) <= uncertain_s else difference_s
    words = ready.body.decode(errors="replace").strip()
    return AgentView(url, "answers", status, ready=ready.status == 200, not_ready=words, ahead_s=ahead_s)
