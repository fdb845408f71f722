"""The compose file's services brought up from a copy of the checkout, with rules that a test can wait for."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.docker.engine import Engine
from tests.docker.images import ensure_images
from tests.integration.agent_process import PATIENT
from tests.programs import ROOT
from tests.servers import free_port, get_json, wait_for

SERVICES = ("agent", "prometheus", "alertmanager", "dashboard")
"""Without Grafana: where no registry answers, Debian has nothing to build its image from."""
CHECKOUT = (
    *("docker-compose.yml", "docker-compose.gpu.yml", ".dockerignore", "pyproject.toml", "README.md", "LICENSE"),
    *("gpuwatch", "agent", "dashboards", "deploy", "docs"),
)
SOON = """
[alerts]
starved_window_s = 30
starved_min_training_s = 10
starved_for_s = 5
ledger_window_s = 10
"""
TRAINING = (
    PATIENT
    + """
import json, sys, threading, time
import gpuwatch

waited = trained = 0.0
ended = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()

def batches():
    global waited
    while not ended.is_set():
        begin = time.perf_counter()
        time.sleep(0.06)
        waited += time.perf_counter() - begin
        yield [0.0]

watched, loop_begin = gpuwatch.watch(batches()), time.perf_counter()
for batch in watched:
    begin = time.perf_counter()
    time.sleep(0.04)
    trained += time.perf_counter() - begin
print(json.dumps({"waited_s": waited, "trained_s": trained, "loop_s": time.perf_counter() - loop_begin}))
"""
)
"""Trains until its standard input is closed: each batch takes 60 ms to come and 40 ms to train on."""


@dataclass(frozen=True)
class Site:
    """The compose file's services, healthy."""

    engine: Engine
    compose: tuple[str, ...]
    ports: Mapping[str, int]
    run_directory: Path
    """What GPUWATCH_RUN_DIR names: the directory that the host and the training's containers share."""
    image: str
    """The agent's, which has Python and the hook."""

    def url(self, service: str, path: str = "") -> str:
        return f"http://127.0.0.1:{self.ports[service]}{path}"

    def _containers(self, column: str) -> dict[str, str]:
        """Return a column of `docker ps` by service. Compose may be a Python program that takes a second to answer."""
        project = self.compose[self.compose.index("-p") + 1]
        listed = self.engine.run(
            *("docker", "ps", "--all", "--no-trunc", "--filter", f"label=com.docker.compose.project={project}"),
            *("--format", f'{{{{.Label "com.docker.compose.service"}}}}\t{{{{{column}}}}}'),
        )
        return dict(line.split("\t", 1) for line in listed.splitlines())

    def containers(self) -> dict[str, str]:
        """Return each container's status by its service, as `docker ps` words it: "Up 5 seconds (healthy)"."""
        return self._containers(".Status")

    def id_of(self, service: str) -> str:
        return self._containers(".ID")[service]

    @cached_property
    def token(self) -> str:
        """The API's, where docs/deploy/compose.md says that it is; an agent that comes back has kept it."""
        return self.engine.run("docker", "exec", self.id_of("agent"), "cat", "/run/gpuwatch-api/token").strip()

    def is_healthy(self) -> bool:
        containers = self.containers()
        return set(containers) == set(SERVICES) and all("(healthy)" in status for status in containers.values())

    def ask(self, path: str, **parameters: str) -> Any:
        """Return what the agent's API answers."""
        url = f"{self.url('agent', path)}?{urllib.parse.urlencode(parameters)}"
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {self.token}"})
        with urllib.request.urlopen(request, timeout=20) as answer:
            return json.load(answer)

    def run(self, run: str) -> dict[str, Any] | None:
        """Return what the agent's API says of a run."""
        runs = self.ask("/api/v1/runs")["runs"]
        return next((one for one in runs if one["run"] == run), None)

    def alert(self, service: str, run: str) -> dict[str, Any] | None:
        """Return GpuStarved of this run as Prometheus or Alertmanager has it, once it fires."""
        if service == "prometheus":
            alerts = get_json(self.url(service, "/api/v1/alerts"))["data"]["alerts"]
            alerts = [alert for alert in alerts if alert["state"] == "firing"]
        else:
            alerts = get_json(self.url(service, "/api/v2/alerts"))
        wanted = {"alertname": "GpuStarved", "run": run}.items()
        return next((alert for alert in alerts if wanted <= alert["labels"].items()), None)


class Training:
    """A training process on the host, or in a container by a command of its own. Ends on request."""

    def __init__(
        self, site: Site, run: str, command: tuple[str, ...] = (), environment: Mapping[str, str] | None = None
    ):
        own = {"GPUWATCH_ENDPOINT": f"ipc://{site.run_directory}/hook.sock", "GPUWATCH_RUN": run, "GPUWATCH_QUIET": "1"}
        self.process = subprocess.Popen(
            [*(command or (sys.executable,)), "-c", TRAINING],
            cwd=ROOT,
            env={**(site.engine.env if command else os.environ), **(environment or own)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self) -> tuple[float, float, float]:
        """End it; return (seconds waited, seconds trained, those of the whole loop) as it measured them itself."""
        out, errors = self.process.communicate("", timeout=180)
        assert self.process.returncode == 0, errors
        injected = json.loads(out.splitlines()[-1])
        return injected["waited_s"], injected["trained_s"], injected["loop_s"]

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


def bring_up(engine: Engine, directory: Path) -> Iterator[Site]:
    """Build and start everything below `directory`; take all of it down in the end, volumes and images too."""
    ensure_images(engine, directory)
    checkout = directory / "a checkout"
    _copy(checkout)
    (directory / "run").mkdir()
    ports = {service: free_port() for service in SERVICES}
    settings = {f"GPUWATCH_{service.upper()}_PORT": str(port) for service, port in ports.items()}
    project = f"gpuwatch-test-{os.getpid()}"
    settings |= {"GPUWATCH_RUN_DIR": str(directory / "run"), "GPUWATCH_TAG": project}
    engine = Engine({**engine.env, **settings}, engine.own)
    compose = (*engine.compose(), "-p", project, "-f", str(checkout / "docker-compose.yml"))
    site = Site(engine, compose, ports, directory / "run", f"gpuwatch-agent:{project}")
    try:
        engine.run(*compose, "build", "agent", "dashboard", timeout_s=700)
        engine.run(*compose, "up", "-d", *SERVICES, timeout_s=120)
        try:
            wait_for("all services are healthy", site.is_healthy, 150, 1)
        except AssertionError as late:
            logs = engine.run(*compose, "logs", "--no-color", "--tail", "40")
            raise AssertionError(f"{late}\n{site.containers()}\n{logs}") from late
        yield site
    finally:
        engine.run(*compose, "down", "--volumes", "--timeout", "5", timeout_s=120)
        for image in () if engine.own else ("gpuwatch-agent", "gpuwatch-dashboard"):
            with contextlib.suppress(AssertionError):
                engine.run("docker", "image", "rm", f"{image}:{project}")


def _copy(checkout: Path) -> None:
    """Copy the files of the services, and generate the rules as docs/deploy/compose.md says, with other thresholds."""
    checkout.mkdir()
    for name in CHECKOUT:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, checkout / name)
    config = checkout / "deploy/gpuwatch.toml"
    config.write_text(SOON)
    rules = ("rules", "--config", str(config), "--write", str(checkout / "deploy/prometheus/rules"))
    subprocess.run([sys.executable, "-m", "gpuwatch", *rules], check=True, capture_output=True, timeout=180)
