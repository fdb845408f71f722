"""A docker engine for tests: the one that answers, or our own in a temporary directory, stopped by its own pid."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.servers import stop


class Unavailable(Exception):
    """No docker engine can be had here; the message says why."""


@dataclass(frozen=True)
class Engine:
    """A docker engine that answers."""

    env: Mapping[str, str]
    """The environment that points docker and compose to it."""
    own: bool = False
    """Whether it was started here, and all it has goes with it."""

    def run(self, *command: str, timeout_s: float = 120, stdin: object = None) -> str:
        """Return a command's output. Raises AssertionError with its errors when it fails, or after `timeout_s`."""
        try:
            done = subprocess.run(
                command,
                env=self.env,
                stdin=stdin,  # type: ignore[call-overload]
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired as late:
            raise AssertionError(f"{' '.join(command)} took more than {timeout_s} s") from late
        assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-8000:]}"
        return str(done.stdout)

    def has_image(self, name: str) -> bool:
        return _succeeds(["docker", "image", "inspect", name], self.env, 30)

    def compose(self) -> tuple[str, ...]:
        """Return the compose command: the plugin, else the stand-alone program. Raises Unavailable without either."""
        if _succeeds(["docker", "compose", "version"], self.env, 30):
            return ("docker", "compose")
        if shutil.which("docker-compose"):
            return ("docker-compose",)
        raise Unavailable("neither the docker compose plugin nor docker-compose is installed")


@contextlib.contextmanager
def start_engine(directory: Path) -> Iterator[Engine]:
    """Give an engine. One that is started here keeps all it has below `directory` and is gone in the end.

    Raises:
        Unavailable: docker is not installed, or none answers and this user may not start one.
    """
    if not shutil.which("docker"):
        raise Unavailable("docker is not installed (scripts/install-test-tools.sh)")
    env = dict(os.environ)
    if _succeeds(["docker", "info"], env, 30):
        yield Engine(env)
        return
    if os.geteuid() != 0 or not shutil.which("dockerd"):
        raise Unavailable("no docker engine answers, and starting one takes root and dockerd")

    socket = directory / "docker.sock"
    log = directory / "dockerd.log"
    env["DOCKER_HOST"] = f"unix://{socket}"
    with log.open("w") as output:
        daemon = subprocess.Popen(
            [
                "dockerd",
                f"--data-root={directory / 'data'}",
                f"--exec-root={directory / 'exec'}",
                f"--pidfile={directory / 'pid'}",
                f"--host=unix://{socket}",
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + 60
        while not _succeeds(["docker", "info"], env, 10):
            if daemon.poll() is not None or time.monotonic() > deadline:
                raise Unavailable(f"dockerd does not start here:\n{log.read_text()[-2000:]}")
            time.sleep(0.3)
        yield Engine(env, own=True)
    finally:
        stop(daemon, 30)


def _succeeds(command: list[str], env: Mapping[str, str], timeout_s: float) -> bool:
    """Return whether a command ends with 0. `docker info` does so without a server, so its errors are looked at too."""
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0 and "Cannot connect" not in done.stdout + done.stderr
