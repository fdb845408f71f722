"""Who may ask the agent over HTTP: TLS and passwords as in Prometheus's exporters, the API's token, the Host header.

Source: the web configuration of github.com/prometheus/exporter-toolkit. A changed file is read without a restart.
"""

import asyncio
import base64
import hmac
import logging
import os
import re
import secrets
import socket
import ssl
import stat
from pathlib import Path
from typing import Any, Literal

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from gpuwatch.config import AgentSettings, sections
from gpuwatch.errors import ConfigError, GpuwatchError, require, usable
from gpuwatch.wire.endpoint import is_loopback, token

logger = logging.getLogger(__name__)

# Kubernetes' probes have no password; these paths show no more than that a thread hangs
_PROBES = ("/healthz", "/readyz")
_HASH = r"\$2[aby]\$(0[4-9]|[12]\d|3[01])\$[./A-Za-z0-9]{53}"
_VERIFY = {"VerifyClientCertIfGiven": ssl.CERT_OPTIONAL, "RequireAndVerifyClientCert": ssl.CERT_REQUIRED}


class Tls(msgspec.Struct, frozen=True):
    """tls_server_config. The toolkit's other client_auth_type values accept certificates that no authority signed."""

    cert_file: str = ""
    key_file: str = ""
    client_auth_type: Literal["NoClientCert", "VerifyClientCertIfGiven", "RequireAndVerifyClientCert"] = "NoClientCert"
    client_ca_file: str = ""
    min_version: Literal["TLS12", "TLS13"] = "TLS12"
    max_version: Literal["TLS12", "TLS13"] = "TLS13"
    prefer_server_cipher_suites: bool = True  # Python's default; Go has long ignored it as well


class HttpServer(msgspec.Struct, frozen=True):
    """http_server_config: `http2` may be either, HTTP/1.1 is served."""

    http2: bool = True


_SECTIONS = {"tls_server_config": Tls, "http_server_config": HttpServer}


def read_web_config(path: Path) -> tuple[Tls | None, dict[str, str]]:
    """Return TLS settings and each user's bcrypt hash. Raises: ConfigError for what cannot be used; MissingExtra."""
    require("yaml", "agent")
    import yaml

    where = f"--web.config.file {path}"
    remedy = "name a YAML file that can be read"
    try:
        with usable(where, remedy):
            loaded: Any = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: {' '.join(str(error).split())}; {remedy}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"{where}: give sections, such as tls_server_config: and basic_auth_users:")
    users = loaded.pop("basic_auth_users", None) or {}
    for user, hashed in users.items() if isinstance(users, dict) else [(users, None)]:
        if not (isinstance(user, str) and isinstance(hashed, str) and re.fullmatch(_HASH, hashed)):
            raise ConfigError(f"{where}: basic_auth_users: {user}: give NAME: HASH, made by `htpasswd -nBC 10 NAME`")
    if users:
        require("bcrypt", "agent")
    tables = {str(name): {} if table is None else table for name, table in loaded.items()}
    return sections(tables, _SECTIONS, where).get("tls_server_config"), users


def make_context(tls: Tls, path: Path) -> ssl.SSLContext:
    """Return the server's TLS context; files are in the folder of the web configuration `path`. Raises: ConfigError."""
    cert, key, authority = (path.parent / name for name in (tls.cert_file, tls.key_file, tls.client_ca_file))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        if not tls.cert_file or not tls.key_file or (tls.client_auth_type in _VERIFY) != bool(tls.client_ca_file):
            raise OSError(
                "cert_file and key_file require each other, client_ca_file requires a client_auth_type that verifies"
            )
        context.minimum_version = ssl.TLSVersion[f"TLSv1_{tls.min_version[-1]}"]
        context.maximum_version = ssl.TLSVersion[f"TLSv1_{tls.max_version[-1]}"]
        cert.read_bytes(), key.read_bytes()  # OpenSSL's errors have no file's name
        context.load_cert_chain(cert, key, password=lambda: b"")
        if tls.client_ca_file:
            context.load_verify_locations(authority)
            context.verify_mode = _VERIFY[tls.client_auth_type]
    except OSError as error:
        raise ConfigError(f"--web.config.file {path}: [tls_server_config]: {error}; docs/deploy/security.md") from error
    _warn_of_others(key)
    return context


def kept_token(name: str, file: str | None) -> str | None:
    """Return the token in the environment variable `name`, else in a file; None without both. Raises: ConfigError.

    A missing file is made with a random token. Only its owner can read it, and in a setgid folder that folder's group.
    """
    given, path = os.environ.get(name, ""), Path(file or "")
    with usable(f"{name}_FILE {path}", "name a file that you may write to"):
        if file and not given and not path.exists():
            new = path.with_name(f"{path.name}.new")  # an empty one, of a full disk, would be no token
            new.unlink(missing_ok=True)
            new.touch(0o640 if path.parent.stat().st_mode & stat.S_ISGID else 0o600, exist_ok=False)
            new.write_text(f"{secrets.token_hex(32)}\n")
            new.replace(path)
        if file and path.exists():
            _warn_of_others(path)
    return token(name, {name: given, f"{name}_FILE": file or ""})


def _warn_of_others(secret: Path) -> None:
    if secret.stat().st_mode & stat.S_IROTH:
        logger.warning("%s: all users of the machine can read this secret; run chmod o-r", secret)


class Access:
    """Checks each request: TLS and passwords for all paths, a token for the API, on loopback only this host's names."""

    def __init__(self, settings: AgentSettings, listening: socket.socket) -> None:
        """Raises: ConfigError; MissingExtra."""
        self._path = Path(settings.web_config) if settings.web_config else None
        self._token_file = settings.api_token_file
        self._on_loopback = is_loopback(listening.getsockname()[0])
        own = socket.gethostname().lower()
        self._own_names = {own, own.partition(".")[0]}
        self._salt = secrets.token_bytes(32)
        # right passwords, hashed with the salt: bcrypt takes 50 ms and more, and a scrape comes every few seconds
        self._verified: set[bytes] = set()
        self._one_by_one = asyncio.Lock()
        self._load()
        self._stamps = self._stamp()

    def _load(self) -> None:
        tls, users = read_web_config(self._path) if self._path else (None, {})
        context = make_context(tls, self._path) if self._path and tls else None
        token = kept_token("GPUWATCH_API_TOKEN", self._token_file)
        self._tls, self._users, self.context, self._token = tls, users, context, token
        self._verified.clear()
        if context is not None:
            context.sni_callback = self._use_newest

    def _use_newest(self, connection: ssl.SSLObject, name: str | None, served: ssl.SSLContext) -> None:
        connection.context = self.context or served

    def _stamp(self) -> list[tuple[int, ...]]:
        tls, files = self._tls or Tls(), [Path(self._token_file)] if self._token_file else []
        if self._path:
            names = (self._path.name, tls.cert_file, tls.key_file, tls.client_ca_file)
            files += [self._path.parent / name for name in names if name]
        found = [file.stat() for file in files if file.exists()]
        return [(status.st_mtime_ns, status.st_size, status.st_ino) for status in found]

    def refresh(self) -> None:
        """Read changed files again; if they cannot be used, what was read before stays. Call every few seconds."""
        try:
            stamps = self._stamp()
            if stamps != self._stamps:
                self._stamps = stamps
                self._load()
        except (GpuwatchError, OSError) as error:
            logger.error("%s; the previous configuration stays in use", error)

    def guard(self, app: ASGIApp) -> ASGIApp:
        """Return the application behind these checks."""

        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            refusal = await self._refusal(scope["path"], Headers(scope=scope)) if scope["type"] == "http" else None
            await (refusal or app)(scope, receive, send)

        return guarded

    async def _refusal(self, path: str, headers: Headers) -> ASGIApp | None:
        """Return the answer to a request that is refused; None for one that is not."""
        host = re.sub(r":\d*$", "", headers.get("host", "localhost")).strip("[]").rstrip(".").lower()
        if self._on_loopback and host not in self._own_names and not is_loopback(host):
            return _error(421, f"{host} is not a name of this host: ask for localhost or 127.0.0.1")
        scheme, _, given = headers.get("authorization", "").partition(" ")
        is_api = path != "/metrics" and not path.startswith("/docs/")
        if path in _PROBES or (scheme.lower() == "basic" and self._users and await self._knows(given)):
            return None
        asked, bearer = f"{scheme.lower()} {given}".encode(), f"bearer {self._token}".encode()
        if is_api and self._token and hmac.compare_digest(asked, bearer):
            return None
        if self._users:
            text = "a user and a password are needed" if scheme.lower() != "basic" else "the user or password is wrong"
            return _error(401, f"{text}, https://USER:PASSWORD@HOST", "Basic realm=gpuwatch")
        if is_api and self._token:
            text = "the token is wrong" if scheme.lower() == "bearer" else "the API needs its token"
            return _error(401, f"{text}: GPUWATCH_API_TOKEN, or GPUWATCH_API_TOKEN_FILE", "Bearer")
        if is_api and not self._on_loopback:
            remedy = "start the agent with --api-token-file FILE, or with basic_auth_users in --web.config.file"
            return _error(403, f"the API is off, because the agent listens on more than loopback; {remedy}")
        return None

    async def _knows(self, given: str) -> bool:
        """Return whether credentials are a user's. An unknown user takes as long as a wrong password."""
        import bcrypt

        try:
            user, _, text = base64.b64decode(given, validate=True).decode().partition(":")
        except ValueError:
            return False
        password = text.encode()[:72]  # all that bcrypt reads
        hashed = self._users.get(user) or next(iter(self._users.values()))
        seen = hmac.digest(self._salt, f"{user}\0{hashed}\0".encode() + password, "sha256")
        if seen in self._verified:
            return True
        async with self._one_by_one:  # wrong passwords take one core at most
            right = seen in self._verified or await run_in_threadpool(bcrypt.checkpw, password, hashed.encode())
        if right and user in self._users:
            self._verified.add(seen)
        return seen in self._verified


def _error(status: int, text: str, challenge: str = "") -> JSONResponse:
    return JSONResponse({"error": text}, status, {"WWW-Authenticate": challenge} if challenge else None)
