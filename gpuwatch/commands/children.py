"""Child processes and ports of `up`, `dashboard`, `demo` and `simulate`."""

from __future__ import annotations

import ctypes
import errno
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from gpuwatch.errors import ConfigError, GpuwatchError
from gpuwatch.http import fetch

_STOP_WAIT_S = 8.0
_PR_SET_PDEATHSIG = 1
Child = subprocess.Popen[bytes]


@contextmanager
def running(command: Sequence[str], environment: Mapping[str, str], quiet: bool = False) -> Iterator[Child]:
    """Run a process that ends with this one: SIGTERM at exit, SIGKILL 8 s later; the kernel ends it if we are killed."""
    child = subprocess.Popen(
        command,
        env=dict(environment),
        start_new_session=True,  # Ctrl-C in the terminal reaches only us
        stdout=subprocess.DEVNULL if quiet else None,
        preexec_fn=_end_with_parent,
    )
    try:
        yield child
    finally:
        if child.poll() is None:
            child.terminate()
            try:
                child.wait(_STOP_WAIT_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class ChildEnded(GpuwatchError):
    """A child that should run has ended."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def wait_until_answers(name: str, child: Child, url: str, timeout_s: float = 30.0) -> None:
    """Wait until a child answers with 200 at `url`. Raises: ChildEnded; GpuwatchError when it takes too long."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if (code := child.poll()) is not None:
            raise ChildEnded(f"the {name} ended at its start, see above", code)
        try:
            if fetch(url).status == 200:
                return
        except OSError:
            pass
        time.sleep(0.1)
    raise GpuwatchError(f"the {name} does not answer at {url} after {timeout_s:.0f} s")


def wait_for_end(children: Sequence[Child]) -> int:
    """Wait for Ctrl-C, SIGTERM or the end of any child; return the resulting exit code."""
    stopped = False

    def stop(number: int, frame: object) -> None:
        nonlocal stopped
        stopped = True

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    while not stopped:
        for child in children:
            if (code := child.poll()) is not None:
                return code if code > 0 else 1
        time.sleep(0.1)
    return 0


def free_port_or_error(option: str, host: str, port: int) -> None:
    """Raise ConfigError where the port is taken or the address is not this machine's."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            what = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
            raise ConfigError(f"{option} {port}: {host}:{port} {what}; choose another with {option}") from error


def free_port(wanted: int) -> int:
    """Return `wanted` if it is free on loopback, else any free port."""
    try:
        free_port_or_error("--port", "127.0.0.1", wanted)
    except ConfigError:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            return int(probe.getsockname()[1])
    return wanted
