"""Sends dashboards to a Grafana by grafana-client: each is created, updated, or left as it is.

Dashboards that were edited by hand are not overwritten: the message of a version that was pushed ends with its
digest, and that of an edited one does not.
"""

import hashlib
import json
import re
import ssl
import urllib.parse
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from grafana_client import GrafanaApi
from grafana_client.client import GrafanaClientError, GrafanaException, GrafanaTimeoutError

from gpuwatch import __version__
from gpuwatch.api.client import is_url
from gpuwatch.errors import ConfigError, GpuwatchError

TIMEOUT_S = 10.0
PERMISSIONS = "the role Editor, or the permissions folders:create, dashboards:create and dashboards:write"
_OURS = "gpuwatch "
_NOT_GRAFANA = (
    "{} answers, but not as Grafana does: is it a proxy's login page, or is a path missing (https://HOST/grafana)?"
)


class GrafanaError(GpuwatchError):
    """Grafana is unreachable or refuses. Says what, where and what to do."""


@dataclass(frozen=True)
class Pushed:
    what: str
    outcome: Literal["created", "updated", "unchanged"]
    url: str = ""


def connect(url: str, token: str, ca: Path | None = None, insecure: bool = False) -> GrafanaApi:
    """Return a connection to a Grafana that answers. Raises ConfigError for wrong arguments, and GrafanaError."""
    if not is_url(url):
        raise ConfigError(f"--url {url}: give Grafana's address, e.g. https://grafana.example.com or http://HOST:3000")
    if not token:
        remedy = f"give --token, or set GRAFANA_TOKEN to the token of a service account with {PERMISSIONS}"
        raise ConfigError(f"no token: {remedy}")
    if ca is not None and not ca.is_file():
        raise ConfigError(f"--ca {ca}: no such file; give the certificate, in PEM, of Grafana's certificate authority")
    # the client appends "api" to the path without a slash
    parts = urllib.parse.urlsplit(url)
    base = urllib.parse.urlunsplit((*parts[:2], parts.path.rstrip("/") + "/", "", ""))
    api = GrafanaApi.from_url(base, credential=token, timeout=TIMEOUT_S)
    api.client.verify = False if insecure else (str(ca) if ca else True)
    with explained(url, "read its health"):
        health = api.client.GET("/health")  # documented, unlike the page that the client's own check reads
    if not isinstance(health, dict) or "database" not in health:
        raise GrafanaError(_NOT_GRAFANA.format(url))
    return api


@contextmanager
def explained(url: str, action: str) -> Iterator[None]:
    """Turn every failure inside into a GrafanaError; `action` is e.g. "create the folder"."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*Unverified HTTPS.*")  # requested by --insecure
            yield
    except (GrafanaException, OSError) as error:  # the second are the errors of the client's HTTP library
        raise GrafanaError(_explanation(url, action, error)) from error


_REFUSALS = {
    401: "Grafana at {url} rejects the token ({reason}): it is mistyped, expired, or belongs to another Grafana",
    403: f"the token may not {{action}} ({{reason}}): give its service account {PERMISSIONS}",
    404: "{url} has no such page ({action}: {reason}): is Grafana under a path, as in https://HOST/grafana?",
    412: "someone else saved it in the meantime ({action}: {reason}): review their change, then push again",
    429: "Grafana at {url} limits the rate of requests ({action}: {reason}): try again in a minute",
    500: "Grafana at {url} failed ({action}: {status}, {reason}): read its log",
}
"""What an answer of this status means, and what to do."""


def _explanation(url: str, action: str, error: GrafanaException | OSError) -> str:
    """Return what failed, and what to do."""
    if isinstance(error, GrafanaTimeoutError):
        return f"Grafana at {url} did not answer within {TIMEOUT_S:g} s ({action}): try again, or read its log"
    if isinstance(error, GrafanaException):
        answer = error.response.get("message") if isinstance(error.response, dict) else error.response
        reason, status = " ".join(str(answer or "no reason given").split())[:200], error.status_code
        text = _REFUSALS.get(min(status, 500), "Grafana at {url} refused to {action} ({status}: {reason})")
        return text.format(url=url, action=action, status=status, reason=reason)
    if isinstance(error, json.JSONDecodeError):
        return _NOT_GRAFANA.format(url)
    cause: BaseException = error
    while cause.__cause__ or cause.__context__:
        cause = cause.__cause__ or cause.__context__  # type: ignore[assignment]
    why = " ".join(str(cause).split())[:150] or type(cause).__name__
    if isinstance(cause, ssl.SSLError):
        remedy = "give --ca FILE with the certificate of its authority, or --insecure"
        return f"the certificate of {url} is not trusted ({why}): {remedy}"
    return f"nothing answers at {url} ({why}): is the address right, and is Grafana running?"


def push_folder(api: GrafanaApi, url: str, title: str) -> tuple[str, Pushed]:
    """Return the uid of the folder with this title, created if there is none. Raises GrafanaError."""
    wanted = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:40] or "gpuwatch"
    with explained(url, f"list the folders, to find {title!r}"):
        folders = api.folder.get_all_folders()
    for folder in folders:
        if folder["uid"] == wanted or folder["title"] == title:
            return folder["uid"], Pushed(f"folder {folder['title']}", "unchanged")
    with explained(url, f"create the folder {title!r}"):
        made = api.folder.create_folder(title, uid=wanted)
    return made["uid"], Pushed(f"folder {title}", "created", made.get("url", ""))


def push_dashboard(api: GrafanaApi, url: str, dashboard: dict[str, Any], folder: str, force: bool = False) -> Pushed:
    """Push a dashboard into the folder with this uid; `force` replaces one edited by hand. Raises: GrafanaError."""
    uid, what = dashboard["uid"], f"dashboard {dashboard['title']}"
    digest = hashlib.sha256(json.dumps(dashboard, sort_keys=True).encode()).hexdigest()[:12]
    message = f"{_OURS}{__version__} {digest}"
    with explained(url, f"read the {what}"):
        try:
            existing: dict[str, Any] | None = api.dashboard.get_dashboard(uid)
        except GrafanaClientError as error:
            if error.status_code != 404:
                raise
            existing = None
    if existing is not None:
        meta = existing["meta"]
        if meta.get("provisioned"):
            remedy = "change those, or end the provisioning"
            raise GrafanaError(f"{what}: Grafana at {url} reads it from files (provisioning): {remedy}")
        with explained(url, f"read the versions of the {what}"):
            answer = api.dashboard_versions.get_dashboard_versions_by_uid(uid)
        versions = answer["versions"] if isinstance(answer, dict) else answer  # a list before Grafana 11
        last: dict[str, Any] = max(versions, key=lambda version: int(version["version"]), default={})
        if last.get("message") == message and meta.get("folderUid", "") == folder:
            return Pushed(what, "unchanged", meta.get("url", ""))
        if not str(last.get("message", "")).startswith(_OURS) and not force:
            raise GrafanaError(
                f"{what}: was changed by {last.get('createdBy') or 'someone'} at {url} (version {last.get('version')}): "
                "save it there under another name to keep the changes, then push with --force"
            )
        dashboard = {**dashboard, "id": existing["dashboard"].get("id"), "version": existing["dashboard"]["version"]}
    with explained(url, f"save the {what}"):
        body = {"dashboard": dashboard, "folderUid": folder, "message": message, "overwrite": False}
        saved = api.dashboard.update_dashboard(body)
    return Pushed(what, "created" if existing is None else "updated", saved.get("url", ""))
