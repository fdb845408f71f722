"""What a reader gets of every alert: Slack, mail and webhook, rendered by the real Alertmanager, compared with tests/golden/alerts.

The alerts are those that promtool's scenarios expect of the rules (deploy/prometheus/tests). UPDATE_GOLDEN=1 writes the files again.
"""

from __future__ import annotations

import email
import email.policy
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpuwatch.alerting.render import alerts
from tests.integration.test_alertmanager import CONFIG, FOLDER, post
from tests.receivers import mail_server, webhook
from tests.servers import start_alertmanager, wait_for

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests/golden/alerts"
SCENARIOS = ROOT / "deploy/prometheus/tests"
LONGEST = 1500
"""Characters of a message: what Slack shows without folding, and a reader reads."""

Messages = Mapping[str, Mapping[str, str]]


def expected(name: str) -> dict[str, Any]:
    """Return the alert that the first complete scenario of this name expects, as Prometheus sends it."""
    for test in yaml.safe_load((SCENARIOS / f"{name}.yml").read_text())["tests"]:
        for each in test.get("alert_rule_test", ()):
            for found in each["exp_alerts"]:
                if each["alertname"] == name and "runbook_url" in found["exp_annotations"]:
                    labels = {"alertname": name, **found["exp_labels"]}
                    return {
                        "labels": labels,
                        "annotations": found["exp_annotations"],
                        "startsAt": "2026-01-02T03:04:05Z",
                        "endsAt": "2099-01-01T00:00:00Z",
                    }
    raise AssertionError(f"no scenario of {name} has all annotations")


def config_text(folder: Path, slack: str, hook: str, mail_port: int) -> str:
    """Return the shipped configuration with its receivers on loopback, each of which gets every alert."""
    folder.mkdir(parents=True)
    shutil.copytree(FOLDER / "templates", folder / "templates")
    config = yaml.safe_load(CONFIG.read_text())
    receivers = {each["name"]: each for each in config["receivers"]}
    own: dict[str, dict[str, Any]] = {
        "slack": {"api_url": slack},
        "email": {"smarthost": f"127.0.0.1:{mail_port}", "require_tls": False},
        "webhook": {"url": hook},
    }
    for name, fields in own.items():
        receivers[name][f"{name}_configs"][0].pop("api_url_file", None)
        receivers[name][f"{name}_configs"][0] |= fields
    config["receivers"] = [receivers[name] for name in ("null", *own)]
    config["route"] |= {"group_wait": "1s", "routes": [{"receiver": name, "continue": True} for name in own]}
    return json.dumps(config | {"inhibit_rules": []})


@pytest.fixture(scope="module")
def messages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Messages]:
    """Give the messages by alert and receiver."""
    folder = tmp_path_factory.mktemp("alertmanager") / "am"
    with webhook() as slack, webhook() as hook, mail_server() as mail:
        config = config_text(folder, slack.url, hook.url, mail.port)
        with start_alertmanager(folder, config, url="http://alertmanager:9093") as alertmanager:
            post(alertmanager, [expected(name) for name in alerts()])
            wait_for(
                "all messages arrive",
                lambda: min(len(slack.accepted), len(hook.accepted), len(mail.mails)) >= len(alerts()),
                60,
            )
            found: dict[str, dict[str, str]] = {name: {} for name in alerts()}
            for body in slack.accepted:
                found[_name(body["attachments"][0]["title"])]["slack.json"] = _json(body)
            for body in hook.accepted:
                found[body["commonLabels"]["alertname"]]["webhook.json"] = _json(body)
            for raw in mail.mails:
                parsed = email.message_from_string(raw, policy=email.policy.default)
                parts = [part.get_content().replace("\r\n", "\n") for part in parsed.walk() if not part.is_multipart()]
                found[_name(parsed["Subject"])]["mail.txt"] = "\n".join([f"Subject: {parsed['Subject']}\n", *parts])
    yield found


def _name(title: str) -> str:
    return title.partition("] ")[2].partition(":")[0]


def _json(body: Any) -> str:
    return json.dumps(body, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


@pytest.mark.parametrize("name", alerts())
def test_golden_messages(name: str, messages: Messages) -> None:
    assert set(messages[name]) == {"slack.json", "mail.txt", "webhook.json"}
    for kind, text in messages[name].items():
        path = GOLDEN / f"{name}.{kind}"
        if os.environ.get("UPDATE_GOLDEN"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert text == path.read_text(), "is it meant? `make golden` writes it again"


@pytest.mark.parametrize("name", alerts())
def test_a_message_is_short_and_says_all(name: str, messages: Messages) -> None:
    (attachment,) = json.loads(messages[name]["slack.json"])["attachments"]
    assert len(attachment["title"] + attachment["text"]) < LONGEST
    lines = dict(line.partition(": ")[::2] for line in attachment["text"].splitlines())
    assert lines["Since"] == "2026-01-02 03:04 UTC"
    for what in ("GPUs", "Owner", "Cause", "Do", "Cost"):
        assert lines[what], what
    assert lines["Dashboard"].startswith("http://") and lines["Runbook"].endswith(f"/{name}.md")
    assert lines["Silence"].startswith("http://alertmanager:9093/#/silences/new?filter=%7B")


def test_links_to_silences_begin_with_the_address_that_a_site_sets_for_compose(tmp_path: Path) -> None:
    """The service's own command, with its variable, past the real Alertmanager: also behind a proxy, below a path."""
    service = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["alertmanager"]
    for number, (url, begin) in enumerate(
        ((None, "http://127.0.0.1:9093"), ("https://ops.example.com/am", "https://ops.example.com/am"))
    ):
        command = [re.sub(r"\$\{GPUWATCH_ALERTMANAGER_URL:-(.*?)\}", url or r"\1", part) for part in service["command"]]
        web = [part for part in command if part.startswith("--web.")]
        assert len(web) == 2
        with webhook() as slack, webhook() as hook, mail_server() as mail:
            folder = tmp_path / str(number)
            config = config_text(folder, slack.url, hook.url, mail.port)
            with start_alertmanager(folder, config, options=web) as alertmanager:
                post(alertmanager, [expected("GpuStarved")])
                wait_for("the message arrives", lambda: len(slack.accepted) > 0, 60)
        text = slack.accepted[0]["attachments"][0]["text"]
        assert f"\nSilence: {begin}/#/silences/new?filter=" in text


def test_there_is_no_message_of_an_alert_that_is_gone() -> None:
    assert {path.name.partition(".")[0] for path in GOLDEN.iterdir()} == set(alerts())
