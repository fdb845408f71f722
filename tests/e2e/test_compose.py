"""docker-compose.yml as it is shipped, brought up for real: training on the host, everything else in containers.

Base images are pulled, or built from Debian under the same names where no registry answers (tests/docker). Grafana is
left out there, by naming the other services.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.docker.engine import Engine, Unavailable, start_engine
from tests.docker.images import ensure_images
from tests.servers import free_port, get_json, wait_for

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
SERVICES = ("agent", "prometheus", "alertmanager", "dashboard")
RUN = "compose-e2e"

TRAINING = """
import json, sys, time
import gpuwatch

waited = trained = 0.0

def batches():
    global waited
    for _ in range(int(sys.argv[1])):
        begin = time.perf_counter()
        time.sleep(0.06)
        waited += time.perf_counter() - begin
        yield [0.0]

for batch in gpuwatch.watch(batches()):
    begin = time.perf_counter()
    time.sleep(0.04)
    trained += time.perf_counter() - begin
print(json.dumps({"waited_s": waited, "trained_s": trained}))
"""


@dataclass(frozen=True)
class Site:
    """The compose file's services, healthy."""

    engine: Engine
    compose: tuple[str, ...]
    ports: Mapping[str, int]
    endpoint: str
    """The hook's socket as the host sees it."""

    def url(self, service: str, path: str = "") -> str:
        return f"http://127.0.0.1:{self.ports[service]}{path}"

    def containers(self) -> dict[str, str]:
        """Return each container's status by its service, as `docker ps` words it: "Up 5 seconds (healthy)"."""
        project = self.compose[self.compose.index("-p") + 1]
        listed = self.engine.run(
            *("docker", "ps", "--all", "--filter", f"label=com.docker.compose.project={project}"),
            *("--format", '{{.Label "com.docker.compose.service"}}\t{{.Status}}'),
        )
        return dict(line.split("\t", 1) for line in listed.splitlines())

    def id_of(self, service: str) -> str:
        return self.engine.run(*self.compose, "ps", "-q", service).strip().splitlines()[-1]


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    """Bring the services up; take everything down in the end, volumes and all."""
    directory = Path(tempfile.mkdtemp(prefix="gpuwatch-"))  # a short path: a socket's name has at most 107 characters
    (directory / "run").mkdir()
    try:
        with start_engine(directory) as engine:
            yield from _up(engine, directory)
    except Unavailable as reason:
        if os.environ.get("CI") == "true":
            pytest.fail(str(reason))
        pytest.skip(str(reason))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _up(engine: Engine, directory: Path) -> Iterator[Site]:
    ensure_images(engine, directory)
    ports = {service: free_port() for service in SERVICES}
    settings = {f"GPUWATCH_{service.upper()}_PORT": str(port) for service, port in ports.items()}
    project = f"gpuwatch-test-{os.getpid()}"
    settings |= {"GPUWATCH_RUN_DIR": str(directory / "run"), "GPUWATCH_TAG": project}
    engine = Engine({**engine.env, **settings})
    compose = (*engine.compose(), "-p", project, "-f", str(ROOT / "docker-compose.yml"))
    site = Site(engine, compose, ports, f"ipc://{directory}/run/hook.sock")
    try:
        engine.run(*compose, "build", "agent", "dashboard", timeout_s=420)
        engine.run(*compose, "up", "-d", *SERVICES, timeout_s=120)
        try:
            wait_for("all services are healthy", lambda: _healthy(site), 150, 1)
        except AssertionError as late:
            logs = engine.run(*compose, "logs", "--no-color", "--tail", "40")
            raise AssertionError(f"{late}\n{site.containers()}\n{logs}") from late
        yield site
    finally:
        engine.run(*compose, "down", "--volumes", "--timeout", "5", timeout_s=120)
        for image in ("gpuwatch-agent", "gpuwatch-dashboard"):
            if engine.has_image(f"{image}:{project}"):
                engine.run("docker", "image", "rm", f"{image}:{project}")


def _healthy(site: Site) -> bool:
    containers = site.containers()
    return set(containers) == set(SERVICES) and all("(healthy)" in status for status in containers.values())


def test_prometheus_scrapes_the_agent_loads_the_rules_and_knows_alertmanager(site: Site) -> None:
    prometheus = site.url("prometheus")

    def up() -> bool:
        answer = get_json(prometheus + "/api/v1/query", query='up{job="gpuwatch"}')
        return [sample["value"][1] for sample in answer["data"]["result"]] == ["1"]

    wait_for("the agent is scraped", up, 30)
    groups = get_json(prometheus + "/api/v1/rules")["data"]["groups"]
    alerts = {rule["name"] for group in groups for rule in group["rules"] if rule["type"] == "alerting"}
    assert {"GpuStarved", "GpuHeldIdle", "RunStalled", "ShmNearlyFull", "GpuwatchAgentDown"} <= alerts
    known = get_json(prometheus + "/api/v1/alertmanagers")["data"]["activeAlertmanagers"]
    assert [one["url"] for one in known] == ["http://alertmanager:9093/api/v2/alerts"]


def test_training_on_the_host_reaches_prometheus_with_its_share_of_waiting(site: Site) -> None:
    with _training(site, RUN, batches=150) as process:
        injected = _injected(process)
    _assert_ledger(site, RUN, injected)


def test_the_agent_is_killed_in_mid_run_comes_back_by_itself_and_loses_no_second(site: Site) -> None:
    run = f"{RUN}-killed"

    def is_running() -> bool:
        runs = get_json(site.url("agent", "/api/v1/runs"))["runs"]
        return (run, "running") in {(one["run"], one["status"]) for one in runs}

    with _training(site, run, batches=120) as process:
        wait_for("the run is known", is_running, 20)
        agent = json.loads(site.engine.run("docker", "inspect", site.id_of("agent")))[0]
        os.kill(agent["State"]["Pid"], signal.SIGKILL)
        wait_for("the run is known again", is_running, 10)
        injected = _injected(process)
    _assert_ledger(site, run, injected)


def test_the_agent_in_its_container_sees_the_host(site: Site) -> None:
    """The node's processes and its /dev/shm, not the container's own 64 MB."""
    with _training(site, f"{RUN}-seen", batches=1200) as process:

        def run() -> dict[str, Any] | None:
            runs = get_json(site.url("agent", "/api/v1/runs"))["runs"]
            return next((one for one in runs if one["pid"] == process.pid), None)

        assert wait_for("the run is known", run, 20)["user"] == pwd.getpwuid(os.getuid()).pw_name
        process.kill()
        process.wait()
        # it had no time for a good-bye: that its process is gone is seen, long before its silence would tell
        wait_for("the run is lost", lambda: (run() or {}).get("status") == "lost", 8)
    shm = os.statvfs("/dev/shm")
    series = get_json(site.url("agent", "/api/v1/series"), metric="gpuwatch_shm_size_bytes", mount="host")["series"]
    assert series[0]["points"][-1][1] == shm.f_blocks * shm.f_frsize


@contextlib.contextmanager
def _training(site: Site, run: str, batches: int) -> Iterator[subprocess.Popen[str]]:
    """Give a training process on the host: each batch takes 60 ms to come and 40 ms to train on."""
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINING, str(batches)],
        cwd=ROOT,
        env={**os.environ, "GPUWATCH_ENDPOINT": site.endpoint, "GPUWATCH_RUN": run, "GPUWATCH_QUIET": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def _injected(process: subprocess.Popen[str]) -> tuple[float, float]:
    """Return (seconds waited, seconds trained) as the training itself measured them, once it has ended."""
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    injected = json.loads(out.splitlines()[-1])
    return injected["waited_s"], injected["trained_s"]


def _assert_ledger(site: Site, run: str, injected: tuple[float, float]) -> None:
    """Assert that Prometheus has the run's seconds: all of them, in their states, each once."""
    waited_s, trained_s = injected

    def ledger() -> dict[str, float] | None:
        answer = get_json(
            site.url("prometheus", "/api/v1/query"), query=f'gpuwatch_run_seconds_total{{run="{run}",rank="0"}}'
        )
        states = {one["metric"]["state"]: float(one["value"][1]) for one in answer["data"]["result"]}
        return states if sum(states.values()) >= waited_s + trained_s else None

    states = wait_for("the whole run is in Prometheus", ledger, 30)
    training_s = states["input_wait"] + states["transfer"] + states["compute"] + states["host_wait"]
    assert training_s == pytest.approx(waited_s + trained_s, rel=0.03)
    assert states["input_wait"] / training_s == pytest.approx(waited_s / (waited_s + trained_s), abs=0.03)
    assert states["unknown"] == 0


def test_the_dashboard_s_page_answers(site: Site) -> None:
    with urllib.request.urlopen(site.url("dashboard", "/"), timeout=10) as page:
        assert page.status == 200
        assert "<title>" in page.read().decode()
    ask = "import urllib.request as u; print(u.urlopen('http://agent:9478/api/v1/runs', timeout=5).read().decode())"
    answer = site.engine.run("docker", "exec", site.id_of("dashboard"), "python", "-c", ask)
    assert RUN in {run["run"] for run in json.loads(answer)["runs"]}


def test_containers_have_no_more_rights_than_they_need(site: Site) -> None:
    for service in SERVICES:
        details = json.loads(site.engine.run("docker", "inspect", site.id_of(service)))[0]
        host = details["HostConfig"]
        assert host["ReadonlyRootfs"], service
        assert host["RestartPolicy"]["Name"] == "unless-stopped", service
        assert (details["Config"]["User"] in ("0", "0:0", "")) == (service == "agent"), service
        bound = [binding["HostIp"] for bindings in host["PortBindings"].values() for binding in bindings]
        assert bound == ["127.0.0.1"], service
        if service == "agent":
            assert host["CapDrop"] == ["ALL"]
            assert {cap.removeprefix("CAP_") for cap in host["CapAdd"]} == {"CHOWN", "SYS_PTRACE"}
