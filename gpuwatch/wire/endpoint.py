"""The socket's address: where the hook looks for an agent, and where the agent listens; and the tokens that open it."""

import errno
import ipaddress
import os
import socket
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from gpuwatch.errors import ConfigError, usable

SOCKET_NAME = "hook.sock"
SYSTEM_DIRECTORY = Path("/run/gpuwatch")


def directories(environ: Mapping[str, str] = os.environ) -> list[Path]:
    """Return where agents' sockets may be, in order of search; root's XDG_RUNTIME_DIR keeps two of its agents apart."""
    found = [SYSTEM_DIRECTORY]
    if runtime := environ.get("XDG_RUNTIME_DIR"):
        found.insert(0 if os.getuid() == 0 else 1, Path(runtime) / "gpuwatch")
    return [*found, Path(f"/tmp/gpuwatch-{os.getuid()}")]


def is_listened_to(path: Path) -> bool:
    """Return whether a process listens on a Unix socket: an agent that was killed leaves its file behind."""
    with socket.socket(socket.AF_UNIX) as probe, suppress(OSError):
        probe.setblocking(False)
        return probe.connect_ex(str(path)) in (0, errno.EAGAIN)  # the second: its queue is full, it is not gone
    return False


def _sockets(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield those that are sockets of root or this user."""
    for path in paths:
        with suppress(OSError):
            status = path.stat()
            if stat.S_ISSOCK(status.st_mode) and status.st_uid in (0, os.getuid()):
                yield path


def find(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the endpoint to connect to: GPUWATCH_ENDPOINT, else the first agent's socket found; None without any.

    Other users' sockets (but root's) and dead agents' are skipped. Raises: ConfigError for a bad GPUWATCH_ENDPOINT.
    """
    if declared := environ.get("GPUWATCH_ENDPOINT", "").strip():
        return checked(declared, "GPUWATCH_ENDPOINT")
    found = _sockets(directory / SOCKET_NAME for directory in directories(environ))
    return next((f"ipc://{path}" for path in found if os.access(path, os.W_OK) and is_listened_to(path)), None)


def refused(where: str | None = None, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the message for a user who may not write to an endpoint's socket, or one in `directories`; else None."""
    paths = [directory / SOCKET_NAME for directory in directories(environ)]
    closed = (
        f"{path}: permission denied; ask for the group gpuwatch (usermod -aG gpuwatch USER), and log in again"
        for path in _sockets(paths if where is None else [Path(where.removeprefix("ipc://"))])
        if not os.access(path, os.W_OK)
    )
    return next(closed, None)


def default_listen(environ: Mapping[str, str] = os.environ) -> str:
    """Return where an agent listens by default: in the first of `directories` that this user can write or create."""
    for directory in directories(environ):
        if os.access(directory if directory.exists() else directory.parent, os.W_OK) and not directory.is_file():
            return f"ipc://{directory / SOCKET_NAME}"
    tried = ", ".join(map(str, directories(environ)))
    raise ConfigError(
        f"no folder for the agent's socket can be written (tried {tried}): choose one with --listen ipc:///path/hook.sock"
    )


def is_tcp(endpoint: str) -> bool:
    return endpoint.startswith("tcp://")


def is_loopback(host: str) -> bool:
    """Return whether a host's name or address is this machine's alone."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def checked(endpoint: str, where: str) -> str:
    """Return the endpoint, `ipc:///path` or `tcp://ADDRESS:PORT`. Raises: ConfigError, naming `where` it was set."""
    scheme, _, rest = endpoint.partition("://")
    if scheme == "ipc" and rest.startswith("/"):
        if len(rest.encode()) > 107:
            raise ConfigError(f"{where}={endpoint}: a socket's path may have at most 107 bytes; choose a shorter one")
        return endpoint
    host, _, port = rest.rpartition(":")
    try:  # no names: their resolution, by ZeroMQ's thread, could hold a program at its end
        is_address = host == "localhost" or ipaddress.ip_address(host.strip("[]")).version == (6 if "[" in host else 4)
    except ValueError:
        is_address = False
    if scheme != "tcp" or not is_address or not port.isdigit() or not 0 < int(port) < 65536:
        hint = ", or another IP address" if scheme == "tcp" and host else ""
        raise ConfigError(f"{where}={endpoint}: give ipc:///absolute/path.sock or tcp://127.0.0.1:PORT{hint}")
    return endpoint


def token(name: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the token in variable `name`, else in the file that `name`_FILE names, or None. Raises: ConfigError."""
    found, file = environ.get(name, "").strip(), environ.get(f"{name}_FILE", "").strip()
    where = name if found else f"{name}_FILE {file}"
    if not found and not file:
        return None
    with usable(where, "name a file with a token that you may read"):
        found = found or Path(file).read_text(encoding="utf-8").strip()
    if len(found) < 16 or not found.isascii() or not found.isprintable():
        raise ConfigError(f"{where}: a token has 16 or more ASCII characters; make one by `openssl rand -hex 32`")
    return found
