"""A real agent behind TLS, passwords and a token: what scrapes it, gpuwatch's own clients, and who has none of them."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import bcrypt
import pytest

from gpuwatch.api.client import Client, Http, Reply
from gpuwatch.commands.up import own_agent_url, running, wait_until_answers
from gpuwatch.errors import SourceError
from gpuwatch_agent.http import BoundedProtocol
from gpuwatch_dashboards.sources.prometheus import PrometheusSource, ScrapedRun
from tests.certificates import Authority
from tests.integration.agent_process import Agent
from tests.servers import free_port, start_prometheus, wait_for

commands_up: Any = sys.modules["gpuwatch.commands.up"]  # `gpuwatch.commands.up` is the function
USER = f"basic_auth_users: {{alice: '{bcrypt.hashpw(b'p@ss:word', bcrypt.gensalt(5)).decode()}'}}"
TLS = "tls_server_config: {cert_file: node.crt, key_file: node.key%s}\n"
CLIENT_CA = ", client_ca_file: authority.crt, client_auth_type: RequireAndVerifyClientCert"


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that gets no core for three seconds is there all the same."""
    request = Http._request

    def patiently(self: Http, method: str, path: str, timeout_s: float, *args: Any, **more: Any) -> Reply:
        return request(self, method, path, 60.0, *args, **more)

    monkeypatch.setattr(Http, "_request", patiently)
    monkeypatch.setattr("gpuwatch.api.client.TIMEOUT_S", 60.0)


@pytest.fixture(scope="module")
def issuer(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def authority(issuer: Authority, monkeypatch: pytest.MonkeyPatch) -> Authority:
    """Give an authority that this process and those that it starts trust."""
    monkeypatch.setenv("SSL_CERT_FILE", str(issuer.path))
    for name in ("GPUWATCH_API_TOKEN", "GPUWATCH_API_TOKEN_FILE", "GPUWATCH_CLIENT_CERT"):
        monkeypatch.delenv(name, raising=False)
    return issuer


def agent_behind(folder: Path, authority: Authority, web: str) -> Agent:
    path = authority.path.with_name("web.yml")
    path.write_text(web)
    agent = Agent(folder, "--web.config.file", str(path))
    agent.url = agent.url.replace("http://127.0.0.1", "https://localhost")
    return agent


def gpuwatch(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gpuwatch", *arguments]
    given = {**os.environ, **environment}
    for _ in range(5):
        done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=180, check=False)
        if "did not answer within" not in done.stderr:  # on a busy machine
            break
    return done


def test_prometheus_and_gpuwatch_s_own_clients_with_tls_and_a_password(tmp_path: Path, authority: Authority) -> None:
    authority.issue("node")
    with agent_behind(tmp_path, authority, TLS % "" + USER) as agent:
        target = [{"targets": [f"localhost:{agent.port}"]}]
        scheme = {"scheme": "https", "tls_config": {"ca_file": str(authority.path)}, "static_configs": target}
        jobs = [
            {**scheme, "job_name": name, "basic_auth": {"username": "alice", "password": password}}
            for name, password in (("right", "p@ss:word"), ("wrong", "password"))
        ]
        jobs.append({"job_name": "plain", "static_configs": target})
        config = {"global": {"scrape_interval": "1s"}, "scrape_configs": jobs}
        with start_prometheus(tmp_path / "prometheus", json.dumps(config)) as prometheus:
            wait_for("it is scraped", lambda: prometheus.value('up{job="right"}') == 1, 20)
            assert prometheus.value('gpuwatch_build_info{job="right"} > 0')
            wait_for("the others were tried", lambda: len(prometheus.query("up")) == 3, 20)
            targets = prometheus.get("/api/v1/targets")["data"]["activeTargets"]
            errors = {each["labels"]["job"]: each["lastError"] for each in targets}
            assert errors["right"] == "" and "401" in errors["wrong"] and errors["plain"]
            source = PrometheusSource(prometheus.url, agent_url="https://alice:p%40ss%3Aword@elsewhere:1/")
            scraped = ScrapedRun("r", 0, "r", "running", 0.0, 0.0, 0.0, instance=f"localhost:{agent.port}")
            assert source.agent_of(scraped).runs() == []

        url = agent.url.replace("https://", "https://alice:p%40ss%3Aword@")
        assert Client(url).status().host == socket.gethostname()
        with pytest.raises(SourceError, match="status 401: a user and a password are needed") as refused:
            Client(agent.url).status()
        assert agent.url in str(refused.value)
        with pytest.raises(SourceError, match="status 401: the user or password is wrong") as refused:
            Client(url.replace("word", "other")).status()
        assert "p%40" not in str(refused.value), "a password is not shown"
        for done in (
            gpuwatch("top", "--once", "--agent", url),
            gpuwatch("doctor", "--agent", url, "--json"),
            gpuwatch("report", "absent", "--agent", url),
        ):
            assert "p%40" not in done.stdout + done.stderr, done.args
            assert "401" not in done.stdout + done.stderr and "does not answer" not in done.stdout + done.stderr
        checks = {
            check["name"]: check for check in json.loads(gpuwatch("doctor", "--agent", url, "--json").stdout)["checks"]
        }
        assert checks["agent"]["status"] == "ok", checks["agent"]
        checks = json.loads(gpuwatch("doctor", "--agent", agent.url, "--json").stdout)["checks"]
        assert "it answers with status 401" in next(each["found"] for each in checks if each["name"] == "agent")
        plain = gpuwatch("top", "--once", "--agent", url.replace("https", "http"))
        assert plain.returncode == 1 and "check http:// or https:// in the URL" in plain.stderr
        untrusted = gpuwatch("top", "--once", "--agent", url, SSL_CERT_FILE="/dev/null")
        assert (
            "certificate verify failed" in untrusted.stderr and "SSL_CERT_FILE has to name its CA" in untrusted.stderr
        )


def test_mutual_tls(tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    authority.issue("node")
    cert, key = authority.issue("operator")
    (tmp_path / "operator.pem").write_text(cert.read_text() + key.read_text())
    (tmp_path / "stranger").mkdir()
    cert, key = Authority(tmp_path / "stranger").issue("stranger")
    (tmp_path / "stranger.pem").write_text(cert.read_text() + key.read_text())
    agent = agent_behind(tmp_path, authority, TLS % CLIENT_CA)
    monkeypatch.setattr(agent, "_ready", lambda: "https://" in agent.log.read_text())
    with agent:
        for own, accepted in (("operator.pem", True), ("stranger.pem", False), ("", False), ("absent.pem", False)):
            monkeypatch.setenv("GPUWATCH_CLIENT_CERT", str(tmp_path / own) if own else "")
            if accepted:
                wait_for("it answers", lambda: _answers(agent), 20)
            else:
                with pytest.raises(SourceError, match=r"does not answer.*check http.*GPUWATCH_CLIENT_CERT"):
                    Client(agent.url).status()


def test_a_certificate_that_has_expired_is_named_and_the_next_one_is_taken(
    tmp_path: Path, authority: Authority
) -> None:
    authority.issue("node", days=-1)
    agent = agent_behind(tmp_path, authority, TLS % "")
    with agent.log.open("wb") as log:
        process = subprocess.Popen(agent.command(*agent._options), stderr=log)
    try:
        wait_for("it has started", lambda: "/metrics" in agent.log.read_text(), 60)
        wait_for("the certificate is refused", lambda: "certificate has expired" in _refusal(agent), 10)
        assert "renew one that has expired" in _refusal(agent)
        authority.issue("node")
        wait_for("the new certificate is used", lambda: _answers(agent), 30)
        authority.path.with_name("node.key").write_text("broken")
        wait_for("it is logged", lambda: "the previous configuration stays in use" in agent.log.read_text(), 30)
        assert _answers(agent)
    finally:
        process.kill()
        process.wait(10)


def _answers(agent: Agent) -> bool:
    return _refusal(agent) == ""


def _refusal(agent: Agent) -> str:
    """Return why the agent cannot be read; empty: it can."""
    try:
        return "" if Client(agent.url).status().version else "no version"
    except SourceError as error:
        return str(error)


def test_handshakes_that_do_not_end_take_no_descriptors(tmp_path: Path, authority: Authority) -> None:
    authority.issue("node")
    with agent_behind(tmp_path, authority, TLS % "") as agent:
        assert agent.process is not None
        before = len(os.listdir(f"/proc/{agent.process.pid}/fd"))  # noqa: PTH208
        idle = [socket.create_connection(("127.0.0.1", agent.port)) for _ in range(200)]
        time.sleep(1)
        pid = agent.process.pid

        def bounded() -> bool:
            return len(os.listdir(f"/proc/{pid}/fd")) - before <= BoundedProtocol.most + 8  # noqa: PTH208

        wait_for("those beyond the bound are closed", bounded, 10)
        assert Client(agent.url).status().version
        for connection in idle:
            connection.close()


def test_off_loopback_the_api_has_a_token_that_clients_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GPUWATCH_API_TOKEN", "GPUWATCH_API_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    agent = Agent(tmp_path, "--api-token-file", str(tmp_path / "token"), "--http", "0.0.0.0:0")
    agent._options = (*agent._options[:-1], f"0.0.0.0:{agent.port}")
    with agent:
        assert "gpuwatch_build_info" in agent.get_text("/metrics")
        assert agent.get("/api/v1/status")["status"] == 401
        with pytest.raises(SourceError, match="the API needs its token: GPUWATCH_API_TOKEN"):
            Client(agent.url).status()
        monkeypatch.setenv("GPUWATCH_API_TOKEN_FILE", str(tmp_path / "token"))
        client = Client(agent.url)
        assert client.status().version
        (tmp_path / "token").write_text("another-token-of-the-agent")
        wait_for("the agent and a client that runs use the new token", lambda: _status(client), 20)
        done = gpuwatch("top", "--once", "--agent", agent.url)
        assert done.returncode == 0, done.stderr
        monkeypatch.setenv("GPUWATCH_API_TOKEN", "w" * 20)
        with pytest.raises(SourceError, match="status 401"):
            client.status()


def _status(client: Client) -> bool:
    try:
        return bool(client.status().version)
    except SourceError as error:
        raise OSError(str(error)) from error


@pytest.mark.parametrize(
    ("web", "output"),
    [
        (USER.replace("$", "x"), "basic_auth_users: alice: give NAME: HASH"),
        (TLS % "", "node.crt"),
        ("tls: {}", "[tls] is not a section"),
    ],
    ids=["hash", "certificate", "section"],  # the hash differs in each process
)
def test_an_agent_does_not_start_with_a_web_configuration_that_it_cannot_use(
    tmp_path: Path, web: str, output: str
) -> None:
    (tmp_path / "web.yml").write_text(web)
    assert output in Agent(tmp_path).refused("--web.config.file", str(tmp_path / "web.yml"))


def test_a_page_of_another_name_cannot_read_an_agent_on_loopback(tmp_path: Path) -> None:
    with Agent(tmp_path) as agent, pytest.raises(urllib.error.HTTPError) as refused:
        agent.get_text("/api/v1/runs", {"Host": f"rebound.example.com:{agent.port}"})
    assert refused.value.code == 421
    refused.value.close()


def test_up_with_tls_and_users(tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    authority.issue("node")
    web, config, http = authority.path.with_name("web.yml"), tmp_path / "gpuwatch.toml", f"127.0.0.1:{free_port()}"
    config.write_text(f'[agent]\nweb_config = "{web}"\n')
    monkeypatch.setenv("GPUWATCH_CONFIG", str(config))
    monkeypatch.delenv("GPUWATCH_AGENT", raising=False)
    web.write_text(TLS % "")
    assert own_agent_url(http) == f"https://{http}"
    web.write_text(TLS % "" + USER)
    up = ["up", "--http", http, "--port", str(free_port()), "--listen", f"ipc://{tmp_path}/hook.sock"]
    up += ["--history", str(tmp_path / "history.db")]
    done = gpuwatch(*up)
    assert done.returncode == 2 and "set GPUWATCH_AGENT=https://USER:PASSWORD@HOST:PORT" in done.stderr
    url = f"https://alice:p%40ss%3Aword@{http}"
    done = gpuwatch(*up, GPUWATCH_AGENT=url, SSL_CERT_FILE="/dev/null")
    assert done.returncode == 2 and "set SSL_CERT_FILE to its CA" in done.stderr and "p%40" not in done.stderr
    url = url.replace("127.0.0.1", "localhost")
    with running([sys.executable, "-m", "gpuwatch", *up], {**os.environ, "GPUWATCH_AGENT": url}) as started:
        wait_until_answers("agent", started, f"{url}/readyz")
        page = f"http://127.0.0.1:{up[4]}/_stcore/health"
        wait_until_answers("page", started, page)
        assert Client(url).status().host == socket.gethostname()


@pytest.mark.parametrize(("http", "by"), [("127.0.0.1", "file"), ("0.0.0.0", "file"), ("0.0.0.0", "variable")])
def test_the_page_of_up_has_the_token_file_of_its_agent(
    http: str, by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token, config, started = tmp_path / "token", tmp_path / "gpuwatch.toml", list[dict[str, str]]()
    config.write_text(f'[agent]\napi_token_file = "{token}"\n' if by == "file" else "")
    for name in ("GPUWATCH_API_TOKEN", "GPUWATCH_API_TOKEN_FILE"):
        monkeypatch.setenv(name, "")  # so that it is as before afterwards
        monkeypatch.delenv(name)
    monkeypatch.setenv("GPUWATCH_CONFIG", str(config))
    if by == "variable":
        monkeypatch.setenv("GPUWATCH_API_TOKEN_FILE", str(token))

    @contextlib.contextmanager
    def run(command: Sequence[str], more: Mapping[str, str] = {}, quiet: bool = False) -> Iterator[None]:
        started.append({**os.environ, **more})
        yield None

    monkeypatch.setattr(commands_up, "running", run)
    monkeypatch.setattr(commands_up, "wait_until_answers", lambda *_: None)
    with commands_up.agent_and_page(f"{http}:{free_port()}", free_port(), [], None):
        _, page = started
    assert page["GPUWATCH_API_TOKEN_FILE"] == str(token)
    assert "GPUWATCH_API_TOKEN" not in page, "it would override the file, and refuse who has the file's token"
