"""docker-compose.yml as it is shipped, brought up for real: training on the host, everything else in containers.

Base images are pulled, or built from Debian under the same names where no registry answers (tests/docker). The tests
share one site and one long training, which starves from the first test to the last: what happens to the site in between
must not cost it a second.
"""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docker.engine import Unavailable, start_engine
from tests.docker.site import SERVICES, Site, Training, bring_up
from tests.servers import get_json, wait_for

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]

STARVED = "compose-starved"
SHM_BYTES = 32 << 20


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    directory = Path(tempfile.mkdtemp(prefix="gpuwatch-"))  # a short path: a socket's name has at most 107 characters
    try:
        with start_engine(directory) as engine:
            yield from bring_up(engine, directory)
    except Unavailable as reason:
        if os.environ.get("CI") == "true":
            pytest.fail(str(reason))
        pytest.skip(str(reason))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="module")
def starved(site: Site) -> Iterator[Training]:
    with Training(site, STARVED) as training:
        yield training


def test_prometheus_scrapes_the_agent_loads_the_rules_and_knows_alertmanager(site: Site, starved: Training) -> None:
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


def test_training_in_another_container_reaches_the_agent_by_the_documented_line(site: Site) -> None:
    """As another user, with a /dev/shm and an environment of its own: the agent sees both, by its capabilities."""
    name = f"{site.image.partition(':')[2]}-training"
    line = ("docker", "run", "-v", f"{site.run_directory}:/run/gpuwatch", "--group-add", "4711")
    mine = ("-i", "--rm", "--name", name, "--user", "12345:12345", "--shm-size", str(SHM_BYTES))
    environment = ("-e", "GPUWATCH_RUN=compose-contained", "-e", "GPUWATCH_QUIET=1", "-e", "POD_NAME=train-0")
    # What the agent does where the host has a group `gpuwatch`: this one may have none.
    os.chown(site.run_directory / "hook.sock", 0, 4711)
    (site.run_directory / "hook.sock").chmod(0o660)
    command = (*line, *mine, *environment, "--entrypoint", "python", site.image)
    with Training(site, "", command, environment={}) as training:
        try:
            run = wait_for("the run is known with its owner", lambda: _owned(site, "compose-contained"), 60)
            container = site.engine.run("docker", "inspect", "-f", "{{.Id}}", name).strip()
            assert (run["user"], run["owner"]["pod"]) == ("12345", "train-0")
            assert run["owner"]["container_id"] == container
            size = wait_for("its /dev/shm is seen", lambda: _shm_bytes(site, "compose-contained"), 20)
            assert size == SHM_BYTES
            injected = training.end()
        finally:
            if training.process.poll() is None:
                site.engine.run("docker", "rm", "-f", name)
    _assert_ledger(site, "compose-contained", injected)


def test_the_agent_in_its_container_sees_the_host(site: Site) -> None:
    """The node's processes and its /dev/shm, not the container's own 64 MB."""
    with Training(site, "compose-seen") as training:
        run = wait_for("the run is known", lambda: site.run("compose-seen"), 20)
        assert run["pid"] == training.process.pid
        assert run["user"] == pwd.getpwuid(os.getuid()).pw_name
        training.process.kill()
        training.process.wait()
        # it had no time to close the run: the end of its process is detected long before its silence would show it
        wait_for("the run is lost", lambda: (site.run("compose-seen") or {}).get("status") == "lost", 8)
    shm = os.statvfs("/dev/shm")
    assert _shm_bytes(site, "host") == shm.f_blocks * shm.f_frsize


def test_the_dashboard_s_page_answers(site: Site, starved: Training) -> None:
    with urllib.request.urlopen(site.url("dashboard", "/"), timeout=10) as page:
        assert page.status == 200
        assert "<title>" in page.read().decode()
    ask = "from gpuwatch.api.client import Client; print(*(run.run for run in Client('http://agent:9478').runs()))"
    assert STARVED in site.engine.run("docker", "exec", site.id_of("dashboard"), "python", "-c", ask).split()


def test_the_api_needs_the_token_that_the_agent_has_made(site: Site) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        get_json(site.url("agent", "/api/v1/runs"))
    assert refused.value.code == 401
    refused.value.close()
    places = site.engine.run("docker", "exec", site.id_of("agent"), "stat", "-c", "%u:%g %a", "/run/gpuwatch-api/token")
    assert places.strip() == "0:65532 640"
    with pytest.raises(AssertionError):
        site.engine.run("docker", "exec", site.id_of("dashboard"), "touch", "/run/gpuwatch-api/token")


def test_containers_have_no_more_rights_than_they_need(site: Site) -> None:
    for service in SERVICES:
        details = json.loads(site.engine.run("docker", "inspect", site.id_of(service)))[0]
        host = details["HostConfig"]
        assert host["ReadonlyRootfs"], service
        assert host["RestartPolicy"]["Name"] == "unless-stopped", service
        assert host["CapDrop"] == ["ALL"], service
        assert "no-new-privileges:true" in host["SecurityOpt"], service
        assert (details["Config"]["User"] in ("0", "0:0", "")) == (service == "agent"), service
        bound = [binding["HostIp"] for bindings in host["PortBindings"].values() for binding in bindings]
        assert bound == ["127.0.0.1"], service
        added = {"CHOWN", "DAC_READ_SEARCH", "SYS_PTRACE"} if service == "agent" else set()
        assert {cap.removeprefix("CAP_") for cap in host["CapAdd"] or ()} == added, service


def test_the_agent_is_killed_in_mid_run_comes_back_by_itself_and_loses_no_second(site: Site) -> None:
    def is_running() -> bool:
        return (site.run("compose-killed") or {}).get("status") == "running"

    with Training(site, "compose-killed") as training:
        wait_for("the run is known", is_running, 20)
        agent = json.loads(site.engine.run("docker", "inspect", site.id_of("agent")))[0]
        os.kill(agent["State"]["Pid"], signal.SIGKILL)
        wait_for("the run is known again", is_running, 20)
        time.sleep(2)
        injected = training.end()
    _assert_ledger(site, "compose-killed", injected)


def test_the_alert_is_seen_in_prometheus_and_alertmanager(site: Site, starved: Training) -> None:
    for service in ("prometheus", "alertmanager"):
        alert = wait_for(f"{service} has it", lambda service=service: site.alert(service, STARVED), 240)
        assert alert["labels"]["severity"] == "warning"
        assert STARVED in alert["annotations"]["summary"]


def test_each_container_restarts_in_its_turn_and_nothing_is_lost(site: Site, starved: Training) -> None:
    """The run's account, Prometheus' samples, the alert, Alertmanager's silences: all are there afterwards."""
    before = time.time()
    silence = _silence(site)
    for service in SERVICES:
        site.engine.run(*site.compose, "restart", "-t", "10", service, timeout_s=60)
        wait_for(f"all is healthy after the restart of {service}", site.is_healthy, 90, 0.5)
    known = {"compose-contained", "compose-seen", "compose-killed", STARVED}
    assert known <= {run["run"] for run in site.ask("/api/v1/runs")["runs"]}
    for service in ("prometheus", "alertmanager"):
        wait_for(f"{service} has the alert again", lambda service=service: site.alert(service, STARVED), 180)
    assert _steps_at(site, before) > 100
    assert [one["id"] for one in get_json(site.url("alertmanager", "/api/v2/silences"))] == [silence]
    _assert_ledger(site, STARVED, starved.end())


def _owned(site: Site, run: str) -> dict[str, Any] | None:
    found = site.run(run)
    return found if found is not None and found["owner"]["container_id"] else None


def _shm_bytes(site: Site, mount: str) -> float | None:
    series = site.ask("/api/v1/series", metric="gpuwatch_shm_size_bytes", mount=mount)["series"]
    return float(series[0]["points"][-1][1]) if series else None


def _steps_at(site: Site, time_s: float) -> float:
    """Return the run's steps as Prometheus had them at a time before it was restarted."""
    query = f'gpuwatch_steps_total{{run="{STARVED}"}}'
    answer = get_json(site.url("prometheus", "/api/v1/query"), query=query, time=str(time_s))
    return float(answer["data"]["result"][0]["value"][1])


def _silence(site: Site) -> str:
    """Make a silence that silences nothing here; return its id."""
    day = {"startsAt": "2026-01-01T00:00:00Z", "endsAt": "2099-01-01T00:00:00Z", "createdBy": "test", "comment": "test"}
    matcher = {"name": "run", "value": "another", "isRegex": False, "isEqual": True}
    request = urllib.request.Request(
        site.url("alertmanager", "/api/v2/silences"),
        json.dumps({**day, "matchers": [matcher]}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=10) as response:
        return str(json.load(response)["silenceID"])


def _assert_ledger(site: Site, run: str, injected: tuple[float, float, float]) -> None:
    """Assert that Prometheus has the run's seconds: all of them, in their states, each once.

    On a busy machine time passes between the training's own clocks, which are around its waits, its work and its loop.
    """
    waited_s, trained_s, loop_s = injected
    between_s = loop_s - waited_s - trained_s

    def ledger() -> dict[str, float] | None:
        answer = get_json(
            site.url("prometheus", "/api/v1/query"), query=f'gpuwatch_run_seconds_total{{run="{run}",rank="0"}}'
        )
        states = {one["metric"]["state"]: float(one["value"][1]) for one in answer["data"]["result"]}
        return states if training(states) >= waited_s + trained_s else None

    def training(states: dict[str, float]) -> float:
        return sum(states.get(state, 0.0) for state in ("input_wait", "transfer", "compute", "host_wait"))

    states = wait_for("the whole run is in Prometheus", ledger, 30)
    assert training(states) <= loop_s
    assert waited_s <= states["input_wait"] <= waited_s + between_s
    assert states.get("unknown", 0) == 0
