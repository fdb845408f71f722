"""Start the real Prometheus and Alertmanager binaries on free loopback ports, for tests.

with start_alertmanager(tmp_path / "am") as alertmanager:
    config = prometheus_config({"gpuwatch": agent_url}, alertmanager=alertmanager.url)
    with start_prometheus(tmp_path / "prom", config, render(AlertThresholds(...))) as prometheus:
        prometheus.get("/api/v1/query", query="up")
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

ALERTMANAGER_CONFIG = """\
route: {receiver: none, group_by: [alertname], group_wait: 1s, group_interval: 1s}
receivers: [{name: none}]
"""


def require(*programs: str) -> str:
    """Return the path of the first of these programs that is installed.

    Skips the test where there is none, and fails it when `CI=true`: there, everything has to be installed.
    """
    for program in programs:
        if path := shutil.which(program):
            return path
    reason = f"{programs[0]} is not installed (scripts/install-test-tools.sh)"
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


def _ports() -> Iterator[int]:
    """Yield ports below those that the system gives to connections itself.

    Each process of a part of the tests has its own thousand.
    """
    before = {"unit": 0, "alone": 2}.get(os.environ.get("TEST_PART", ""), 4)  # processes of the parts before it
    first = 20_000 + 1_000 * ((before + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))) % 12)
    start = random.randrange(1_000)
    return itertools.cycle(first + (start + each) % 1_000 for each in range(1_000))


_PORTS = _ports()


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 on which nothing listens, and that no other test gets before it is used."""
    for port in itertools.islice(_PORTS, 1_000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


def get_json(url: str, timeout_s: float = 20, **parameters: str) -> Any:
    """Return the JSON that a URL answers with. Raises OSError when it does not answer with status 200."""
    query = f"?{urllib.parse.urlencode(parameters)}" if parameters else ""
    with urllib.request.urlopen(url + query, timeout=timeout_s) as response:
        return json.load(response)


GO = {"GOGC": os.environ.get("GOGC", "400"), "GOMAXPROCS": "1"}
"""Environment of programs in Go: one processor, and garbage collected less often.

They then take up to a third less time, but more memory.
"""

PATIENCE = 3.0
"""A machine that runs several files of tests at once is slower by as much.

A deadline that only bounds a failure waits so much longer.
"""


def wait_for(what: str, look: Callable[[], T | None], timeout_s: float, every_s: float = 0.2) -> T:
    """Return what `look` gives once it is true. An OSError counts as not yet. Raises AssertionError in the end.

    `timeout_s`: what it takes at most on a quiet machine.
    """
    deadline = time.monotonic() + PATIENCE * timeout_s
    while True:
        last: object
        try:
            found = last = look()
        except OSError as error:
            found, last = None, error
        if found:
            return found
        assert time.monotonic() < deadline, f"{what}: not within {PATIENCE * timeout_s:g} s; last seen: {last!r}"
        time.sleep(every_s)


def stop(process: subprocess.Popen[Any], timeout_s: float = 30) -> None:
    """Ask a process to end, and kill it after the time; harmless when it has ended."""
    process.terminate()
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(60)


@dataclass
class Server:
    """A server of our own, ready. Stops its process at the end of `with`, or by `stop()`."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def get(self, path: str, **parameters: str) -> Any:
        """Return the JSON at a path of this server."""
        return get_json(self.url + path, 20, **parameters)

    def query(self, expr: str) -> list[dict[str, Any]]:
        """Return the samples of a PromQL expression, now: `[{"metric": labels, "value": [time, "0.4"]}]`."""
        result: list[dict[str, Any]] = self.get("/api/v1/query", query=expr)["data"]["result"]
        return result

    def value(self, expr: str) -> float | None:
        """Return the one value of a PromQL expression, None when it has none."""
        result = self.query(expr)
        assert len(result) <= 1, f"{expr} has {len(result)} values"
        return float(result[0]["value"][1]) if result else None

    def stop(self) -> None:
        """End the process; harmless when it has ended."""
        stop(self.process)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()


def prometheus_config(
    targets: Mapping[str, str], *, alertmanager: str | None = None, scrape_interval: str = "1s"
) -> str:
    """Return the text of a prometheus.yml, to be used with `rules_text`.

    Args:
        targets: A URL or `host:port` by job name.
        alertmanager: URL or `host:port` of an Alertmanager.
        scrape_interval: Of scrapes and of rule evaluations.
    """
    config: dict[str, Any] = {
        "global": {"scrape_interval": scrape_interval, "evaluation_interval": scrape_interval},
        "rule_files": ["rules.yml"],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": [_address(url)]}]} for job, url in targets.items()
        ],
    }
    if alertmanager:
        config["alerting"] = {"alertmanagers": [{"static_configs": [{"targets": [_address(alertmanager)]}]}]}
    return json.dumps(config)  # JSON is YAML


def hastened(rules: str) -> str:
    """Return alerting rules evaluated every 2 s, whose windows of 1 and 2 minutes, for missed scrapes, are 10 s."""
    return re.sub(r"\[[12]m\]", "[10s]", re.sub(r"(?m)^  interval: \w+$", "  interval: 2s", rules))


def start_prometheus(
    directory: Path, config_text: str, rules_text: str | None = None, options: Sequence[str] = ()
) -> Server:
    """Start Prometheus with this configuration and wait until it is ready.

    `rules_text` becomes `rules.yml` next to the configuration, which has to name it in `rule_files`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = directory / "prometheus.yml"
    config.write_text(config_text)
    if rules_text is not None:
        (directory / "rules.yml").write_text(rules_text)
    port = free_port()
    return _start(
        [
            require("prometheus"),
            f"--config.file={config}",
            f"--storage.tsdb.path={directory / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            *options,
        ],
        port,
        directory / "prometheus.log",
    )


def start_alertmanager(
    directory: Path,
    config_text: str = ALERTMANAGER_CONFIG,
    port: int | None = None,
    url: str | None = None,
    options: Sequence[str] = (),
) -> Server:
    """Start Alertmanager and wait until it is ready. Its alerts: `.get("/api/v2/alerts")`.

    Args:
        port: None for a free one.
        url: What links in its messages begin with; None for its own address.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = directory / "alertmanager.yml"
    config.write_text(config_text)
    port = port or free_port()
    return _start(
        [
            require("alertmanager", "prometheus-alertmanager"),
            f"--config.file={config}",
            f"--storage.path={directory / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--cluster.listen-address=",
            *([f"--web.external-url={url}"] if url else []),
            *options,
        ],
        port,
        directory / "alertmanager.log",
    )


def _start(command: list[str], port: int, log: Path) -> Server:
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **GO})
    server = Server(f"http://127.0.0.1:{port}", process, log)

    def ready() -> bool:
        assert process.poll() is None, f"{command[0]} ended:\n{log.read_text()[-4000:]}"
        with urllib.request.urlopen(server.url + "/-/ready", timeout=2) as response:
            return bool(response.status == 200)

    try:
        wait_for(f"{command[0]} is ready", ready, 30, 0.1)
    except BaseException:
        server.stop()
        raise
    return server


def _address(url: str) -> str:
    return urllib.parse.urlsplit(url).netloc or url
