"""`gpuwatch grafana`: what it pushes, that pushing again changes nothing, and what it says when Grafana refuses.

It runs against a server with the few routes of Grafana's documented API that it needs (tests/grafana_server.py): a real
Grafana was not available.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuwatch.commands.grafana import _link
from gpuwatch_dashboards.grafana import DATASOURCE, load
from gpuwatch_dashboards.grafana.push import (
    GrafanaError,
    Pushed,
    connect,
    explained,
    push_dashboard,
    push_folder,
)
from tests.grafana_server import EDITOR, VIEWER, FakeGrafana
from tests.servers import free_port, require

UIDS = {"gpuwatch-fleet", "gpuwatch-node", "gpuwatch-run"}


@pytest.fixture
def grafana() -> Iterator[FakeGrafana]:
    with FakeGrafana() as server:
        yield server


def pushed(server: FakeGrafana, token: str = EDITOR, **options: Any) -> list[Pushed]:
    """Push the folder and all dashboards; return what came of each."""
    api = connect(server.url, token)
    try:
        uid, folder = push_folder(api, server.url, options.pop("folder", "gpuwatch"))
        dashboards = load(datasource=options.pop("datasource", DATASOURCE)).values()
        return [folder, *(push_dashboard(api, server.url, each, uid, **options) for each in dashboards)]
    finally:
        api.client.s.close()


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gpuwatch", "grafana", *arguments],
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, "COLUMNS": "200", **environment},
    )


def test_push_again_changes_nothing(grafana: FakeGrafana) -> None:
    first = pushed(grafana)
    assert [each.outcome for each in first] == ["created"] * 4
    assert set(grafana.dashboards) == UIDS
    assert {versions[0]["folderUid"] for versions in grafana.versions.values()} == {"gpuwatch"}
    assert grafana.dashboards["gpuwatch-run"]["panels"] == load()["gpuwatch-run.json"]["panels"]
    grafana.writes.clear()
    assert [each.outcome for each in pushed(grafana)] == ["unchanged"] * 4
    assert grafana.writes == []


def test_what_is_of_another_version_is_brought_up_to_date(grafana: FakeGrafana) -> None:
    pushed(grafana)
    api = connect(grafana.url, EDITOR)
    older = load()
    older["gpuwatch-node.json"]["description"] = "as it was"
    for each in older.values():
        push_dashboard(api, grafana.url, each, "gpuwatch")
    api.client.s.close()
    outcomes = {each.what: each.outcome for each in pushed(grafana)}
    assert outcomes["dashboard GPU node"] == "updated" and outcomes["dashboard GPU fleet"] == "unchanged"
    assert grafana.dashboards["gpuwatch-node"]["version"] == 3
    assert grafana.dashboards["gpuwatch-node"]["id"] == 2


def test_another_data_source_is_chosen(grafana: FakeGrafana) -> None:
    pushed(grafana, datasource="mimir")
    variables = grafana.dashboards["gpuwatch-fleet"]["templating"]["list"]
    assert variables[0]["current"]["value"] == "mimir"


def test_a_folder_of_the_title_is_used_whatever_its_uid(grafana: FakeGrafana) -> None:
    grafana.folders["f1"] = {"id": 9, "uid": "f1", "title": "GPU team", "url": "/dashboards/f/f1"}
    assert pushed(grafana, folder="GPU team")[0] == Pushed("folder GPU team", "unchanged")
    assert grafana.versions["gpuwatch-run"][0]["folderUid"] == "f1"


def test_what_was_changed_by_hand_is_kept_unless_forced(grafana: FakeGrafana) -> None:
    pushed(grafana)
    grafana.edited_by_hand("gpuwatch-run", "Our run")
    with pytest.raises(GrafanaError, match=r"Training run: was changed by admin .*\(version 2\).*--force"):
        pushed(grafana)
    assert grafana.dashboards["gpuwatch-run"]["title"] == "Our run"
    assert pushed(grafana, force=True)[3].outcome == "updated"
    assert grafana.dashboards["gpuwatch-run"]["title"] == "Training run"


def test_who_saves_at_the_same_moment_is_not_overwritten(grafana: FakeGrafana) -> None:
    pushed(grafana)
    older = load()
    older["gpuwatch-run.json"]["description"] = "new"
    api = connect(grafana.url, EDITOR)
    grafana.before["POST", "/api/dashboards/db"] = lambda: grafana.edited_by_hand("gpuwatch-run", "Theirs")
    with pytest.raises(
        GrafanaError, match=r"someone else saved it in the meantime \(save the dashboard Training run: .*changed by"
    ):
        push_dashboard(api, grafana.url, older["gpuwatch-run.json"], "gpuwatch")
    api.client.s.close()
    assert grafana.dashboards["gpuwatch-run"]["title"] == "Theirs"


def test_what_grafana_reads_from_files_is_left(grafana: FakeGrafana) -> None:
    pushed(grafana)
    grafana.provisioned.add("gpuwatch-fleet")
    with pytest.raises(GrafanaError, match=r"GPU fleet: Grafana at .* reads it from files"):
        pushed(grafana)


@pytest.mark.parametrize(
    ("token", "message"),
    [
        ("glsa_wrong", r"rejects the token \(Invalid API key\)"),
        (
            VIEWER,
            r"the token may not create the folder 'gpuwatch' \(.*folders:create\): give its service account the role",
        ),
    ],
)
def test_a_token_that_will_not_do_is_explained(grafana: FakeGrafana, token: str, message: str) -> None:
    with pytest.raises(GrafanaError, match=message):
        pushed(grafana, token)
    assert grafana.dashboards == {} and grafana.folders == {}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            (500, {"message": "database is locked"}),
            r"failed \(list the folders.*500, database is locked\): read its log",
        ),
        ((429, {"message": "Too many requests"}), "limits the rate of requests"),
        ((404, {"message": "Not found"}), r"has no such page .*https://HOST/grafana\?"),
        ((418, {"message": "no"}), r"refused to list the folders.*\(418: no\)"),
    ],
)
def test_other_refusals_are_explained(grafana: FakeGrafana, answer: tuple[int, Any], message: str) -> None:
    grafana.before["GET", "/api/folders"] = lambda: answer
    with pytest.raises(GrafanaError, match=message):
        pushed(grafana)


def test_grafana_under_a_path(tmp_path: Path) -> None:
    with FakeGrafana(prefix="/grafana") as server:
        assert len(pushed(server)) == 4
        bare = server.url.removesuffix("/grafana")
        with pytest.raises(GrafanaError, match="answers, but not as Grafana does"):
            connect(bare, EDITOR)


@pytest.mark.parametrize(
    ("url", "path", "link"),
    [
        ("http://h:3000", "/d/x", "http://h:3000/d/x"),
        ("https://h/grafana/", "/d/x", "https://h/grafana/d/x"),
        ("https://h/grafana", "/grafana/d/x", "https://h/grafana/d/x"),
    ],
)
def test_links_that_are_reported_have_the_path_in_front_once(url: str, path: str, link: str) -> None:
    assert _link(url, path) == link


def test_tls_with_a_certificate_of_its_own(tmp_path: Path) -> None:
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    made = ["-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=127.0.0.1"]
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([require("openssl"), "req", *made, *names], check=True, capture_output=True)
    both = tmp_path / "both.pem"
    both.write_text(key.read_text() + certificate.read_text())
    with FakeGrafana(certificate=both) as server:
        with pytest.raises(GrafanaError, match=r"the certificate of https://.* is not trusted .*--ca FILE"):
            connect(server.url, EDITOR)
        for options in ({"ca": certificate}, {"insecure": True}):
            connect(server.url, EDITOR, **options).client.s.close()  # type: ignore[arg-type]
        done = command("push", "--url", server.url, "--token", EDITOR, "--insecure")
        assert (done.returncode, done.stderr) == (0, "")


def test_no_server_there() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    done = command("push", "--url", url, "--token", EDITOR)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith(f"gpuwatch: nothing answers at {url} (") and "Traceback" not in done.stderr
    assert "is the address right" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["push", "--url", "grafana.example.com", "--token", "x"], "--url grafana.example.com: give Grafana's address"),
        (["push", "--url", "http://[::1", "--token", "x"], "--url http://[::1: give Grafana's address"),
        (["push", "--url", "http://h:99999", "--token", "x"], "--url http://h:99999: give Grafana's address"),
        (["push", "--url", "http://127.0.0.1:1"], "no token: give --token, or set GRAFANA_TOKEN"),
        (["push", "--url", "https://h", "--token", "x", "--ca", "/none.pem"], "--ca /none.pem: no such file"),
        (["write", "/proc/none"], "/proc/none: "),
    ],
)
def test_wrong_use_ends_with_two(arguments: list[str], message: str) -> None:
    done = command(*arguments)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


def test_files_are_written(tmp_path: Path) -> None:
    config = tmp_path / "gpuwatch.toml"
    config.write_text('[prices]\ngpu_hour = 2\ncurrency = "EUR"\n')
    assert command("write", str(tmp_path / "out"), "--config", str(config)).returncode == 0
    assert {path.stem for path in (tmp_path / "out").iterdir()} == UIDS
    assert "currency:EUR" in (tmp_path / "out/gpuwatch-fleet.json").read_text()


def test_a_slow_grafana_is_explained(grafana: FakeGrafana) -> None:
    from grafana_client.client import GrafanaTimeoutError

    with pytest.raises(GrafanaError, match=r"did not answer within 10 s \(look\)"), explained(grafana.url, "look"):
        raise GrafanaTimeoutError(0, None, "timed out")
