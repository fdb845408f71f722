"""Processes that a command starts and stops with itself."""

from __future__ import annotations

import ctypes
import errno
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from types import TracebackType

from gpuwatch.errors import ConfigError, GpuwatchError
from gpuwatch.http import fetch

_STOP_WAIT_S = 8.0
_PR_SET_PDEATHSIG = 1


class Child:
    """A process that ends with this one: asked at exit, forced after 8 s, and by the kernel should we be killed."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], quiet: bool = False) -> None:
        self.name = name
        self.process = subprocess.Popen(
            command,
            env=dict(environment),
            start_new_session=True,  # a Ctrl-C in the terminal is ours to pass on
            stdout=subprocess.DEVNULL if quiet else None,
            preexec_fn=_end_with_parent,
        )

    def stop(self) -> None:
        """Ask it to end, and make it after a while."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(_STOP_WAIT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


def wait_until_answers(child: Child, url: str, timeout_s: float = 30.0) -> None:
    """Wait until a child answers with 200 at `url`. Raises: GpuwatchError when it ends or takes too long."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        code = child.process.poll()
        if code is not None:
            raise ChildEnded(f"the {child.name} ended at its start, see above", code)
        try:
            if fetch(url).status == 200:
                return
        except OSError:
            pass
        time.sleep(0.1)
    raise GpuwatchError(f"the {child.name} does not answer at {url} after {timeout_s:.0f} s")


class ChildEnded(GpuwatchError):
    """A child that should run has ended."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def wait_for_end(children: Sequence[Child]) -> int:
    """Wait for Ctrl-C, SIGTERM or the end of any child; return the exit code that this makes."""
    stopped = [False]

    def stop(number: int, frame: object) -> None:
        stopped[0] = True

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    while not stopped[0]:
        for child in children:
            code = child.process.poll()
            if code is not None:
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
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1])
    return wanted


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
