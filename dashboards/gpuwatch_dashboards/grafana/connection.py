"""A connection to a Grafana, and what its refusals mean in words: what happened, where, and what to do."""

from __future__ import annotations

import urllib.parse
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import niquests
from grafana_client import GrafanaApi
from grafana_client.client import GrafanaException, GrafanaTimeoutError

from gpuwatch.errors import ConfigError, GpuwatchError

TIMEOUT_S = 10.0
NEEDED = (
    "the role Editor, or the permissions folders:create, dashboards:create, dashboards:write and annotations:create"
)


class GrafanaError(GpuwatchError):
    """A Grafana that cannot be reached, or refuses. Says what, where and what to do."""


def connect(url: str, token: str, ca: Path | None = None, insecure: bool = False) -> GrafanaApi:
    """Return a connection; a Grafana that does not answer, or is none, is told here.

    Args:
        url: With the path in front of Grafana, if there is one.
        token: Of a service account.
        ca: The certificate of who signed Grafana's, in PEM. None: those that the system trusts.
        insecure: Take any certificate.

    Raises:
        ConfigError: For an address that is none, or a file that is not there.
        GrafanaError: As `explained`.
    """
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--url {url}: give Grafana's address, e.g. https://grafana.example.com or http://HOST:3000")
    if not token:
        raise ConfigError("no token: give --token, or set GRAFANA_TOKEN to that of a service account with " + NEEDED)
    if ca is not None and not ca.is_file():
        raise ConfigError(f"--ca {ca}: no such file; it is the certificate, in PEM, of who signed Grafana's")
    # the client puts "api" right behind the path
    bare = urllib.parse.urlunsplit((parts.scheme, parts.netloc, parts.path.rstrip("/") + "/", "", ""))
    api = GrafanaApi.from_url(bare, credential=token, timeout=TIMEOUT_S)
    api.client.verify = False if insecure else (str(ca) if ca else True)
    with explained(url, "look at its health"):
        health = api.client.GET("/health")  # documented, unlike the page that the client's own check reads
        if not isinstance(health, dict) or "database" not in health:
            raise GrafanaError(_not_grafana(url))
    return api


@contextmanager
def explained(url: str, what: str) -> Iterator[None]:
    """Turn whatever goes wrong inside into a GrafanaError; `what` was tried, as in "create the folder"."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*Unverified HTTPS.*")  # it was asked for by --insecure
            yield
    except niquests.exceptions.SSLError as error:
        raise GrafanaError(
            f"the certificate of {url} is not trusted ({_innermost(error)}): give --ca FILE with the certificate of "
            "who signed it, or --insecure"
        ) from error
    except (GrafanaTimeoutError, niquests.exceptions.Timeout) as error:
        raise GrafanaError(
            f"Grafana at {url} did not answer within {TIMEOUT_S:g} s ({what}): try again, or look at its log"
        ) from error
    except niquests.exceptions.JSONDecodeError as error:
        raise GrafanaError(_not_grafana(url)) from error
    except niquests.exceptions.RequestException as error:
        raise GrafanaError(
            f"nothing answers at {url} ({_innermost(error)}): is the address right, and does Grafana run?"
        ) from error
    except GrafanaException as error:
        raise GrafanaError(refusal(url, what, error)) from error


def refusal(url: str, what: str, error: GrafanaException) -> str:
    """Return what an answer of status 400 or more means, and what to do."""
    said = _said(error.response)
    match error.status_code:
        case 401:
            return f"Grafana at {url} does not know the token ({said}): it is mistyped, expired or of another Grafana"
        case 403:
            return f"the token may not {what} ({said}): give its service account {NEEDED}"
        case 404:
            return f"{url} has no such page ({what}: {said}): is Grafana under a path, as in https://HOST/grafana?"
        case 412:
            return f"somebody saved it meanwhile ({what}: {said}): push again, after a look at what they changed"
        case 400 if "provisioned" in said.lower():
            return f"could not {what} ({said}): Grafana reads it from files; change them there, or end the provisioning"
        case 429:
            return f"Grafana at {url} has had enough for now ({what}: {said}): try again in a minute"
        case status if status >= 500:
            return f"Grafana at {url} failed ({what}: {status}, {said}): look at its log"
    return f"Grafana at {url} refused to {what} ({error.status_code}: {said})"


def _not_grafana(url: str) -> str:
    return (
        f"{url} answers, but not as Grafana does: a proxy's log-in page, or a path is missing (https://HOST/grafana)?"
    )


def _said(response: Any) -> str:
    text = response.get("message") if isinstance(response, dict) else response
    return " ".join(str(text or "it does not say why").split())[:200]


def _innermost(error: BaseException) -> str:
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    return " ".join(str(error).split())[:150] or type(error).__name__
