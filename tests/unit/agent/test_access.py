"""Who may ask the agent: the web configuration file, passwords, the API's token, the Host header."""

from __future__ import annotations

import base64
import errno
import os
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bcrypt
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from gpuwatch.config import AgentSettings
from gpuwatch.errors import ConfigError
from gpuwatch_agent.access import Access, kept_token, make_context, read_web_config
from tests.certificates import Authority

SALT = b"$2b$04$abcdefghijklmnopqrstuu"  # always the same, as it is in the names of tests
HASH = bcrypt.hashpw(b"right", SALT).decode().replace("$2b$", "$2y$")  # as htpasswd writes it
USERS = f"basic_auth_users: {{alice: '{HASH}'}}"
TOKEN = "t" * 32


def bound(address: str) -> socket.socket:
    bound = socket.socket()
    bound.bind((address, 0))
    return bound


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Give a function that makes a client of an agent on `address`.

    `web` and `token` are the contents of --web.config.file and --api-token-file.
    """
    monkeypatch.delenv("GPUWATCH_API_TOKEN", raising=False)
    opened = []

    def client(address: str = "127.0.0.1", web: str = "", token: str = "", host: str = "127.0.0.1") -> TestClient:
        (tmp_path / "web.yml").write_text(web)
        (tmp_path / "token").write_text(token)
        settings = AgentSettings(
            web_config=str(tmp_path / "web.yml") if web else None,
            api_token_file=str(tmp_path / "token") if token else None,
        )
        opened.append(bound(address))
        access = Access(settings, opened[-1])

        async def answer(request: Request) -> PlainTextResponse:
            return PlainTextResponse("answered")

        paths = ("/metrics", "/healthz", "/readyz", "/docs/runbooks/GpuXid.md", "/api/v1/runs", "/new")
        made = TestClient(access.guard(Starlette(routes=[Route(path, answer) for path in paths])), f"http://{host}")
        made.access = access  # type: ignore[attr-defined]
        return made

    yield client
    for one in opened:
        one.close()


def status(client: TestClient, path: str, authorization: str = "") -> int:
    return client.get(path, headers={"Authorization": authorization} if authorization else {}).status_code


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def test_on_loopback_everything_is_open(ask: Callable[..., TestClient]) -> None:
    client = ask()
    assert {
        status(client, path) for path in ("/metrics", "/healthz", "/readyz", "/docs/runbooks/GpuXid.md", "/api/v1/runs")
    } == {200}


def test_elsewhere_the_api_is_off_and_what_is_scraped_is_not(ask: Callable[..., TestClient]) -> None:
    client = ask("0.0.0.0", host="node-17.example.com")
    assert {status(client, path) for path in ("/metrics", "/healthz", "/readyz", "/docs/runbooks/GpuXid.md")} == {200}
    assert (status(client, "/api/v1/runs"), status(client, "/new")) == (403, 403)
    assert "--api-token-file" in client.get("/api/v1/runs").json()["error"]
    assert status(client, "/api/v1/runs", f"Bearer {TOKEN}") == 403


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_a_token_opens_the_api_and_only_that(ask: Callable[..., TestClient], address: str) -> None:
    client = ask(address, token=f"{TOKEN}\n")
    assert status(client, "/api/v1/runs", f"Bearer {TOKEN}") == status(client, "/api/v1/runs", f"bearer {TOKEN}") == 200
    wrong = ("", f"Bearer {TOKEN}x", "Bearer", f"Basic {TOKEN}")
    assert {status(client, "/api/v1/runs", each) for each in wrong} == {401}
    refused = client.get("/api/v1/runs")
    assert refused.headers["WWW-Authenticate"] == "Bearer" and "GPUWATCH_API_TOKEN" in refused.json()["error"]
    assert (status(client, "/metrics"), status(client, "/healthz")) == (200, 200)


def test_a_user_s_password_is_needed_for_all_but_the_probes(ask: Callable[..., TestClient]) -> None:
    client = ask("0.0.0.0", web=USERS, token=TOKEN)
    for path in ("/metrics", "/api/v1/runs", "/docs/runbooks/GpuXid.md"):
        assert status(client, path, basic("alice", "right")) == 200
        wrong = (
            "",
            basic("alice", "wrong"),
            basic("bob", "right"),
            basic("alice", "right\0x"),
            "Basic ?",
            "Basic /w==",
        )
        assert {status(client, path, each) for each in wrong} == {401}
    assert status(client, "/metrics", f"Bearer {TOKEN}") == 401
    assert status(client, "/api/v1/runs", f"Bearer {TOKEN}") == 200
    assert (status(client, "/healthz"), status(client, "/readyz")) == (200, 200)
    assert client.get("/metrics").headers["WWW-Authenticate"] == "Basic realm=gpuwatch"


def test_a_right_password_is_hashed_once_and_a_wrong_one_every_time(
    ask: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked, check = [], bcrypt.checkpw
    monkeypatch.setattr(bcrypt, "checkpw", lambda given, hashed: checked.append(given) or check(given, hashed))
    client = ask(web=USERS)
    assert [status(client, "/metrics", basic("alice", "right")) for _ in range(5)] == [200] * 5
    (tmp_path / "another file of the folder").touch()
    client.access.refresh()
    assert status(client, "/metrics", basic("alice", "right")) == 200
    assert checked == [b"right"]
    assert [status(client, "/metrics", basic("alice", "wrong")) for _ in range(2)] == [401] * 2
    assert status(client, "/metrics", basic("bob", "right")) == 401, "a cached password is its user's only"
    assert checked[1:] == [b"wrong", b"wrong", b"right"]


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        *(
            (host, 200)
            for host in ("127.0.0.1:9478", "localhost:9478", "LOCALHOST", "[::1]:9478", "127.9.9.9", "localhost.")
        ),
        *(
            (host, 421)
            for host in ("rebound.example.com", "127.0.0.1.example.com", "10.0.0.1:9478", "localhost.evil", "")
        ),
    ],
)
def test_a_name_that_was_made_to_mean_loopback_is_refused(
    ask: Callable[..., TestClient], host: str, expected: int
) -> None:
    client = ask()
    answers = {
        client.get(path, headers={"Host": host}).status_code for path in ("/metrics", "/api/v1/runs", "/healthz")
    }
    assert answers == {expected}
    if expected == 421:
        assert "ask for localhost" in client.get("/metrics", headers={"Host": host}).text


def test_this_host_s_own_name_is_accepted(ask: Callable[..., TestClient]) -> None:
    assert ask().get("/metrics", headers={"Host": f"{socket.gethostname()}:9478"}).status_code == 200


def test_a_new_token_password_or_certificate_is_taken_and_a_broken_file_is_not(
    ask: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    client = ask(web=USERS, token=TOKEN)
    (tmp_path / "token").write_text("u" * 40)
    (tmp_path / "web.yml").write_text(f"basic_auth_users: {{carol: '{HASH}'}}")
    client.access.refresh()
    assert (
        status(client, "/api/v1/runs", f"Bearer {'u' * 40}")
        == status(client, "/metrics", basic("carol", "right"))
        == 200
    )
    assert (
        status(client, "/api/v1/runs", f"Bearer {TOKEN}") == status(client, "/metrics", basic("alice", "right")) == 401
    )
    (tmp_path / "web.yml").write_text("basic_auth_users: {carol: secret}")
    for _ in range(3):
        client.access.refresh()
    assert status(client, "/metrics", basic("carol", "right")) == 200
    assert caplog.text.count("the previous configuration stays in use") == 1


def test_a_token_is_made_where_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPUWATCH_API_TOKEN", raising=False)
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o2750)
    with bound("127.0.0.1") as listening:
        for folder, mode in ((tmp_path, 0o600), (shared, 0o640)):
            Access(AgentSettings(api_token_file=str(folder / "token")), listening)
            text = (folder / "token").read_text()
            assert re.fullmatch(r"[0-9a-f]{64}\n", text) and (folder / "token").stat().st_mode & 0o777 == mode
            Access(AgentSettings(api_token_file=str(folder / "token")), listening)
            assert (folder / "token").read_text() == text
        with pytest.raises(ConfigError, match="GPUWATCH_API_TOKEN_FILE /no/folder/token: No such file"):
            Access(AgentSettings(api_token_file="/no/folder/token"), listening)
        (tmp_path / "token").write_text("short")
        with pytest.raises(ConfigError, match="a token has 16 or more ASCII characters"):
            Access(AgentSettings(api_token_file=str(tmp_path / "token")), listening)


def test_a_token_that_a_full_disk_did_not_take_is_made_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty file was left: "a token has 16 or more characters", until somebody deleted it."""

    def full(*_: Any, **__: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.delenv("GPUWATCH_API_TOKEN", raising=False)
    file = tmp_path / "token"
    with monkeypatch.context() as patch, pytest.raises(ConfigError, match="No space left"):
        patch.setattr(Path, "write_text", full)
        kept_token("GPUWATCH_API_TOKEN", str(file))
    made = kept_token("GPUWATCH_API_TOKEN", str(file))
    assert made == file.read_text().strip() and len(made) == 64
    assert file.stat().st_mode & 0o777 == 0o600 and list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("is_link", [False, True])
def test_what_another_user_has_put_there_gets_no_token(
    is_link: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder like /tmp: the token went into a file that its owner, or all users, can read."""
    monkeypatch.delenv("GPUWATCH_API_TOKEN", raising=False)
    file, new, other = (tmp_path / name for name in ("token", "token.new", "other"))
    other.touch()
    if is_link:
        new.symlink_to(other)
    else:
        new.hardlink_to(other)
    made = kept_token("GPUWATCH_API_TOKEN", str(file))
    assert made == file.read_text().strip() and file.stat().st_mode & 0o777 == 0o600
    assert other.read_text() == "" and not file.is_symlink()


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ("tls_server_config: {cert_fil: a}", "[tls_server_config] cert_fil is not a key; did you mean cert_file?"),
        ("tls_server_config: {cipher_suites: [RC4]}", "cipher_suites is not a key"),
        ("tls_server_config: {client_auth_type: RequestClientCert}", "give NoClientCert or VerifyClientCertIfGiven or"),
        ("tls_server_config: {min_version: TLS11}", "give TLS12 or TLS13"),
        ("tls_server_config: [a]", "tls_server_config = … is outside of a section"),
        ("basic_auth_user: {}", "[basic_auth_user] is not a section"),
        (
            "basic_auth_users: {alice: secret}",
            "basic_auth_users: alice: give NAME: HASH, made by `htpasswd -nBC 10 NAME`",
        ),
        (USERS.replace("$04$", "$03$"), "basic_auth_users: alice: give NAME: HASH"),  # bcrypt refuses these costs
        (USERS.replace("$04$", "$32$"), "basic_auth_users: alice: give NAME: HASH"),
        ("basic_auth_users: [alice]", "basic_auth_users: ['alice']: give NAME: HASH"),
        ("http_server_config: {headers: {}}", "headers is not a key; there are: http2"),
        ("http_server_config: {http2: 3}", "http2 = 3: expected `bool`"),
        ("a: [", "while parsing"),
        ("text", "give sections"),
    ],
)
def test_what_a_web_configuration_cannot_say_is_named(tmp_path: Path, text: str, output: str) -> None:
    (tmp_path / "web.yml").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(output)) as error:
        read_web_config(tmp_path / "web.yml")
    assert str(error.value).startswith(f"--web.config.file {tmp_path}/web.yml: ")
    with pytest.raises(ConfigError, match="No such file"):
        read_web_config(tmp_path / "absent.yml")


@pytest.mark.parametrize(
    ("settings", "output"),
    [
        ("cert_file: node.crt", "cert_file and key_file require each other"),
        ("cert_file: node.crt, key_file: absent.key", "absent.key"),
        ("cert_file: node.crt, key_file: other.key", "KEY_VALUES_MISMATCH"),
        ("cert_file: node.key, key_file: node.key", "PEM"),
        (
            "cert_file: node.crt, key_file: node.key, client_auth_type: RequireAndVerifyClientCert",
            "client_ca_file requires a client_auth_type",
        ),
        (
            "cert_file: node.crt, key_file: node.key, client_ca_file: authority.crt",
            "client_ca_file requires a client_auth_type",
        ),
    ],
)
def test_certificates_that_cannot_be_used_are_named(tmp_path: Path, settings: str, output: str) -> None:
    authority = Authority(tmp_path)
    authority.issue("node")
    authority.issue("other")
    (tmp_path / "web.yml").write_text(f"tls_server_config: {{{settings}}}")
    with pytest.raises(ConfigError, match=re.escape(output)):
        tls, _ = read_web_config(tmp_path / "web.yml")
        assert tls is not None
        make_context(tls, tmp_path / "web.yml")


def test_a_secret_that_everyone_can_read_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, key = Authority(tmp_path).issue("node")
    (tmp_path / "web.yml").write_text("tls_server_config: {cert_file: node.crt, key_file: node.key}")
    tls, _ = read_web_config(tmp_path / "web.yml")
    assert tls is not None
    for mode, warned in ((0o600, 0), (0o640, 0), (0o644, 1)):
        os.chmod(key, mode)  # noqa: PTH101 - a Path
        caplog.clear()
        make_context(tls, tmp_path / "web.yml")
        assert caplog.text.count("all users of the machine can read this secret") == warned
