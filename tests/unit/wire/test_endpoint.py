"""Where hook and agent meet."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuwatch.errors import ConfigError
from gpuwatch.wire import endpoint


@pytest.mark.parametrize(
    "good",
    [
        "ipc:///run/gpuwatch/hook.sock",
        "tcp://127.0.0.1:9479",
        "tcp://localhost:1",
        "tcp://[::1]:65535",
        "tcp://10.0.0.1:9479",
    ],
)
def test_endpoints_that_can_be_used(good: str) -> None:
    assert endpoint.checked(good, "--listen") == good


@pytest.mark.parametrize(
    ("bad", "remedy"),
    [
        ("http://x:1", "give ipc:///absolute/path.sock or tcp://127.0.0.1:PORT"),
        ("ipc://relative.sock", "give ipc:///absolute/path.sock"),
        ("tcp://127.0.0.1", "give ipc:///absolute/path.sock"),
        ("tcp://127.0.0.1:0", "give ipc:///absolute/path.sock"),
        ("tcp://127.0.0.1:70000", "give ipc:///absolute/path.sock"),
        ("", "give ipc:///absolute/path.sock"),
        ("tcp://node-17:9479", "or another IP address"),
        ("tcp://*:9479", "or another IP address"),
        ("tcp://::1:9479", "or another IP address"),
        ("tcp://[10.0.0.1]:9479", "or another IP address"),
        ("ipc:///" + "x" * 107, "at most 107 bytes"),
    ],
)
def test_what_cannot_be_used_is_named_with_the_remedy(bad: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        endpoint.checked(bad, "GPUWATCH_ENDPOINT")
    assert str(caught.value).startswith(f"GPUWATCH_ENDPOINT={bad}: ") and remedy in str(caught.value)


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for sockets, the only one that is looked at."""
    monkeypatch.setattr(endpoint, "SYSTEM_DIRECTORY", tmp_path / "system")
    monkeypatch.setattr(endpoint, "directories", lambda environ=os.environ: [tmp_path / "system", tmp_path / "user"])
    (tmp_path / "system").mkdir()
    (tmp_path / "user").mkdir()
    yield tmp_path


def make_socket(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(1)
    return listener


def test_socket_that_this_user_may_not_write_to_is_named_with_the_group(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = runtime / "system/hook.sock"
    assert endpoint.refused() is None
    with make_socket(path):
        assert endpoint.refused() is None
        monkeypatch.setattr(os, "access", lambda name, mode: not str(name).startswith(str(runtime / "system")))
        for refused in (endpoint.refused(), endpoint.refused(f"ipc://{path}")):
            assert refused is not None and refused.startswith(f"{path}: permission denied; ask for the group gpuwatch")
        assert endpoint.refused(f"ipc://{runtime}/user/hook.sock") is None


def test_the_declared_endpoint_wins_and_none_is_found_without_an_agent(runtime: Path) -> None:
    assert endpoint.find({"GPUWATCH_ENDPOINT": "tcp://127.0.0.1:9479"}) == "tcp://127.0.0.1:9479"
    assert endpoint.find({}) is None
    with pytest.raises(ConfigError, match="GPUWATCH_ENDPOINT=x"):
        endpoint.find({"GPUWATCH_ENDPOINT": "x"})


def test_the_first_agents_socket_is_found(runtime: Path) -> None:
    user = runtime / "user" / "hook.sock"
    with make_socket(user):
        assert endpoint.find({}) == f"ipc://{user}"
        system = runtime / "system" / "hook.sock"
        with make_socket(system):
            assert endpoint.find({}) == f"ipc://{system}"


def test_what_a_dead_agent_left_is_passed_over(runtime: Path) -> None:
    make_socket(runtime / "system" / "hook.sock").close()
    assert endpoint.find({}) is None
    with make_socket(runtime / "user" / "hook.sock"):
        assert endpoint.find({}) == f"ipc://{runtime / 'user' / 'hook.sock'}"


def test_a_busy_agent_is_no_dead_one(runtime: Path) -> None:
    path = runtime / "user" / "hook.sock"
    with make_socket(path):
        waiting = [socket.socket(socket.AF_UNIX) for _ in range(4)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(str(path))
        assert endpoint.find({}) == f"ipc://{path}"
        for each in waiting:
            each.close()


def test_a_file_that_is_no_socket_is_passed_over(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "is_listened_to", lambda path: True)
    (runtime / "user" / "hook.sock").write_text("")
    assert endpoint.find({}) is None


def test_another_users_socket_is_passed_over(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_socket(runtime / "user" / "hook.sock"):
        mine = (runtime / "user" / "hook.sock").stat().st_uid
        monkeypatch.setattr(os, "getuid", lambda: mine + 1)
        assert endpoint.find({}) is None or mine == 0, "root's sockets are everybody's"


def test_an_agent_listens_in_the_first_folder_it_may_write_in(runtime: Path) -> None:
    assert endpoint.default_listen({}) == f"ipc://{runtime / 'system' / 'hook.sock'}"
    (runtime / "system").rmdir()
    assert endpoint.default_listen({}) == f"ipc://{runtime / 'system' / 'hook.sock'}", "it can be made"


@pytest.mark.parametrize(
    ("uid", "folders"),
    [
        (7, ["/run/gpuwatch", "/run/user/7/gpuwatch", "/tmp/gpuwatch-7"]),
        (0, ["/run/user/7/gpuwatch", "/run/gpuwatch", "/tmp/gpuwatch-0"]),
    ],
)
def test_folders_in_their_order(monkeypatch: pytest.MonkeyPatch, uid: int, folders: list[str]) -> None:
    """Root can write to the node's folder always: what XDG_RUNTIME_DIR names keeps two of its agents apart."""
    monkeypatch.setattr(os, "getuid", lambda: uid)
    assert endpoint.directories({"XDG_RUNTIME_DIR": "/run/user/7"}) == [Path(folder) for folder in folders]
    assert endpoint.directories({})[0] == Path("/run/gpuwatch")


def test_a_token_comes_from_the_environment_or_a_file(tmp_path: Path) -> None:
    assert endpoint.token("X", {}) is None and endpoint.token("X", {"X": "", "X_FILE": " "}) is None
    (tmp_path / "token").write_text(f"{'f' * 16}\n")
    named = {"X_FILE": str(tmp_path / "token")}
    assert endpoint.token("X", named) == "f" * 16
    assert endpoint.token("X", {**named, "X": "e" * 16}) == "e" * 16
    for environ, output in (
        ({"X": "short"}, "X: a token has 16 or more ASCII characters"),
        ({"X": "e" * 15 + "\xe9"}, "ASCII"),
        ({"X_FILE": str(tmp_path)}, f"X_FILE {tmp_path}: Is a directory"),
        ({"X_FILE": "/no/token"}, "X_FILE /no/token: No such file or directory; name a file"),
    ):
        with pytest.raises(ConfigError, match=re.escape(output)):
            endpoint.token("X", environ)
