"""A server with the part of Grafana's HTTP API that `gpuwatch grafana push` uses, for tests. It is not Grafana.

Written from Grafana's published API documentation (folders, dashboards, dashboard versions, health; the
access-control errors): paths, status codes and bodies are as documented there for Grafana 9 to 13's `/api`.
"""

from __future__ import annotations

import json
import re
import ssl
import threading
import urllib.parse
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any

EDITOR, VIEWER = "glsa_editor", "glsa_viewer"
_ROLES = {EDITOR: "Editor", VIEWER: "Viewer"}
Answer = tuple[int, Any]


class FakeGrafana:
    """One organisation. `before[method, path pattern]` runs right before a request is answered, and may answer it."""

    def __init__(self, certificate: Path | None = None, prefix: str = "") -> None:
        self.folders: dict[str, dict[str, Any]] = {}
        self.dashboards: dict[str, dict[str, Any]] = {}
        self.versions: dict[str, list[dict[str, Any]]] = {}
        self.provisioned: set[str] = set()
        self.before: dict[tuple[str, str], Callable[[], Answer | None]] = {}
        self.writes: list[str] = []
        """Requests that changed something."""
        self.prefix = prefix
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        scheme = "http"
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
            scheme = "https"
        self.url = f"{scheme}://127.0.0.1:{self._server.server_port}{prefix}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> FakeGrafana:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)

    def edited_by_hand(self, uid: str, title: str, message: str = "") -> None:
        """Do what somebody does who saves a dashboard in the browser."""
        dashboard = {**self.dashboards[uid], "title": title}
        self._store(dashboard, self.versions[uid][0]["folderUid"], message, "admin")

    def answer(self, method: str, path: str, query: dict[str, list[str]], body: Any, token: str) -> Answer:
        if path == "/api/health":
            return 200, {"commit": "0", "database": "ok", "version": "11.6.1"}
        if token not in _ROLES:
            return 401, {"message": "Invalid API key", "traceID": ""}
        if method != "GET" and _ROLES[token] == "Viewer":
            return 403, _denied(method, path)
        for (wanted, pattern), act in list(self.before.items()):
            if wanted == method and re.fullmatch(pattern, path):
                answered = act()
                if answered is not None:
                    return answered
        for wanted, pattern, respond in self._routes():
            match = re.fullmatch(pattern, path)
            if wanted == method and match:
                answered = respond(query, body, *match.groups())
                if method != "GET" and answered[0] == 200:
                    self.writes.append(f"{method} {path}")
                return answered
        return 404, {"message": "Not found", "traceID": ""}

    def _routes(self) -> list[tuple[str, str, Callable[..., Answer]]]:
        return [
            ("GET", r"/api/folders", lambda q, b: (200, list(self.folders.values()))),
            ("POST", r"/api/folders", self._new_folder),
            ("GET", r"/api/dashboards/uid/([^/]+)", self._get_dashboard),
            ("GET", r"/api/dashboards/uid/([^/]+)/versions", self._get_versions),
            ("POST", r"/api/dashboards/db", self._save_dashboard),
        ]

    def _new_folder(self, query: Any, body: dict[str, Any]) -> Answer:
        if any(folder["title"] == body["title"] for folder in self.folders.values()):
            return 409, {"message": "a folder with the same name already exists in the current location"}
        if body["uid"] in self.folders:
            return 412, {"message": "a folder with the same UID already exists"}
        uid = body["uid"]
        folder = {"id": len(self.folders) + 1, "uid": uid, "title": body["title"], "url": f"/dashboards/f/{uid}/x"}
        self.folders[uid] = folder
        return 200, {**folder, "version": 1}

    def _get_dashboard(self, query: Any, body: Any, uid: str) -> Answer:
        if uid not in self.dashboards:
            return 404, {"message": "Dashboard not found"}
        last = self.versions[uid][0]
        meta = {"url": f"/d/{uid}/x", "folderUid": last["folderUid"], "provisioned": uid in self.provisioned}
        return 200, {"dashboard": self.dashboards[uid], "meta": {**meta, "version": last["version"]}}

    def _get_versions(self, query: dict[str, list[str]], body: Any, uid: str) -> Answer:
        limit = int(query.get("limit", ["0"])[0]) or None
        return 200, {"continueToken": "", "versions": self.versions[uid][:limit]}

    def _save_dashboard(self, query: Any, body: dict[str, Any]) -> Answer:
        new, uid = body["dashboard"], body["dashboard"]["uid"]
        if body.get("folderUid") not in self.folders:
            return 400, {"message": "folder not found"}
        if uid in self.provisioned:
            return 400, {"message": "Cannot save provisioned dashboard"}
        there = self.dashboards.get(uid)
        if there is not None and not body.get("overwrite") and new.get("version") != there["version"]:
            message = "The dashboard has been changed by someone else"
            return 412, {"message": message, "status": "version-mismatch"}
        saved = self._store(new, body["folderUid"], body.get("message", ""), "sa-gpuwatch")
        slug = {"id": saved["id"], "uid": uid, "url": f"/d/{uid}/x", "slug": "x"}
        return 200, {**slug, "status": "success", "version": saved["version"]}

    def _store(self, new: dict[str, Any], folder: str, message: str, who: str) -> dict[str, Any]:
        uid = new["uid"]
        there = self.dashboards.get(uid)
        version = there["version"] + 1 if there else 1
        number = there["id"] if there else len(self.dashboards) + 1
        self.dashboards[uid] = {**new, "id": number, "version": version}
        entry = {"version": version, "message": message, "createdBy": who, "folderUid": folder}
        self.versions.setdefault(uid, []).insert(0, entry)
        return self.dashboards[uid]


def _denied(method: str, path: str) -> dict[str, str]:
    action = {"folders": "folders:create", "dashboards": "dashboards:create"}
    needed = action[path.split("/")[2]]
    return {
        "accessErrorId": "ACE0123456789",
        "message": f"You'll need additional permissions to perform this action. Permissions needed: {needed}",
        "title": "Access denied",
    }


def _handler(grafana: FakeGrafana) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            parts = urllib.parse.urlsplit(self.path)
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length) or b"null")
            token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
            if not parts.path.startswith(f"{grafana.prefix}/api/"):
                self._send(200, b"<html>log in</html>", "text/html")
                return
            path = parts.path.removeprefix(grafana.prefix)
            status, answer = grafana.answer(self.command, path, urllib.parse.parse_qs(parts.query), body, token)
            self._send(status, json.dumps(answer).encode(), "application/json; charset=UTF-8")

        def _send(self, status: int, data: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PUT = _answer

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler
