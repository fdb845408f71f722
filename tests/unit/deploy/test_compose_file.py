"""docker-compose.yml: what a site sets by variables."""

from __future__ import annotations

import http.server
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml

COMPOSE = Path(__file__).parents[3] / "docker-compose.yml"


class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


def test_every_service_has_a_memory_limit_that_a_site_can_set() -> None:
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    for name, service in services.items():
        assert re.fullmatch(rf"\$\{{GPUWATCH_{name.upper()}_MEMORY:-\d+[mg]\}}", service["mem_limit"]), name


def test_no_service_can_be_stopped_over_http_and_grafanas_password_is_the_sites() -> None:
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    assert not [part for service in services.values() for part in service.get("command", ()) if "lifecycle" in part]
    password = services["grafana"]["environment"]["GF_SECURITY_ADMIN_PASSWORD"]
    assert password == "${GPUWATCH_GRAFANA_PASSWORD:-admin}"


def test_the_dashboard_reads_an_agent_that_a_site_can_set() -> None:
    command = yaml.safe_load(COMPOSE.read_text())["services"]["dashboard"]["command"]
    assert command[command.index("--agent") + 1] == "${GPUWATCH_AGENT:-http://agent:9478}"


def test_the_agent_is_reached_at_the_address_that_a_site_can_set() -> None:
    [port] = yaml.safe_load(COMPOSE.read_text())["services"]["agent"]["ports"]
    assert port == "${GPUWATCH_AGENT_ADDRESS:-127.0.0.1}:${GPUWATCH_AGENT_PORT:-9478}:9478"


def test_the_node_has_the_name_that_a_site_gives_it_and_none_that_docker_makes_up() -> None:
    agent = yaml.safe_load(COMPOSE.read_text())["services"]["agent"]
    assert agent["hostname"] == "${GPUWATCH_NODE:-agent}"


def test_containers_have_names_that_do_not_depend_on_the_folder() -> None:
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    names = {name: service["container_name"] for name, service in services.items()}
    assert names == {name: f"${{COMPOSE_PROJECT_NAME:-gpuwatch}}-{name}" for name in services}


def test_agent_and_page_share_a_token_that_no_other_service_has() -> None:
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    command, page = services["agent"]["command"], services["dashboard"]
    assert (
        command[command.index("--api-token-file") + 1]
        == page["environment"]["GPUWATCH_API_TOKEN_FILE"]
        == "/run/gpuwatch-api/token"
    )
    mounts = {
        name: [one for one in service.get("volumes", ()) if "/run/gpuwatch-api" in one]
        for name, service in services.items()
    }
    assert {name: found for name, found in mounts.items() if found} == {
        "agent": ["agent-api:/run/gpuwatch-api"],
        "dashboard": ["agent-api:/run/gpuwatch-api:ro"],
    }
    for service in (services["agent"], page):
        assert service["environment"]["GPUWATCH_API_TOKEN"] == "${GPUWATCH_API_TOKEN:-}"


@pytest.mark.parametrize(("service", "port"), [("agent", "9478"), ("dashboard", "8501")])
def test_a_health_check_asks_no_proxy(service: str, port: str) -> None:
    """Docker's client gives containers the site's, by ~/.docker/config.json: all services were unhealthy."""
    check = yaml.safe_load(COMPOSE.read_text())["services"][service]["healthcheck"]["test"][-1]
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Ready) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        code = check.replace("${GPUWATCH_AGENT_SCHEME:-http}", "http").replace(f":{port}/", f":{server.server_port}/")
        environ = {**os.environ, "http_proxy": "http://127.0.0.1:1", "no_proxy": "", "NO_PROXY": ""}
        done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=20)
        server.shutdown()
    assert done.returncode == 0, done.stderr


def test_grafana_and_the_other_health_checks_ask_no_proxy() -> None:
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    assert services["grafana"]["environment"]["NO_PROXY"] == "prometheus"
    for name in ("prometheus", "alertmanager", "grafana"):
        assert services[name]["healthcheck"]["test"][:4] == ["CMD", "wget", "-Y", "off"]
