"""What a reader gets of every alert: Slack, mail and webhook, rendered by the real Alertmanager.

It is compared with tests/golden/alerts; UPDATE_GOLDEN=1 writes those files again. The alerts are those that promtool's
scenarios expect of the rules (deploy/prometheus/tests). One test has them fire: the scenarios' series are written to a
real Prometheus with the shipped rules.
"""

from __future__ import annotations

import email
import email.policy
import html
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import yaml

from gpuwatch.alerting.render import alerts, groups, render
from tests.integration.alerting.test_alertmanager import CONFIG, FOLDER, post
from tests.programs import ROOT
from tests.receivers import mail_server, webhook
from tests.replay import CONFIG as REPLAY_CONFIG
from tests.replay import OPTIONS as REPLAY_OPTIONS
from tests.replay import Site, ends, parsed, scenario
from tests.servers import Server, start_alertmanager, start_prometheus, wait_for

GOLDEN = ROOT / "tests/golden/alerts"
SCENARIOS = ROOT / "deploy/prometheus/tests"
LONGEST = 1500
"""Characters of a message: what Slack shows without folding, and a reader reads."""

Messages = Mapping[str, Mapping[str, str]]


def complete(name: str) -> tuple[Any, Any, Any]:
    """Return the first scenario of this name that expects an alert with all annotations.

    With it come the expectation, and the alert in it.
    """
    for test in parsed((SCENARIOS / f"{name}.yml").read_text())["tests"]:
        for each in test.get("alert_rule_test", ()):
            for found in each["exp_alerts"]:
                if each["alertname"] == name and "runbook_url" in found["exp_annotations"]:
                    return test, each, found
    raise AssertionError(f"no scenario of {name} has all annotations")


def expected(name: str) -> dict[str, Any]:
    """Return the alert that this scenario expects, as Prometheus sends it."""
    found = complete(name)[2]
    return {
        "labels": {"alertname": name, **found["exp_labels"]},
        "annotations": found["exp_annotations"],
        "startsAt": "2026-01-02T03:04:05Z",
        "endsAt": "2099-01-01T00:00:00Z",
    }


def config_text(folder: Path, slack: str, hook: str, mail_port: int, as_shipped: bool = False) -> str:
    """Return the shipped configuration with its receivers on loopback, each of which gets every alert.

    `as_shipped`: by the routes and inhibitions that are shipped, with waits of seconds.
    """
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
    shipped = {"routes": config["route"]["routes"]} if as_shipped else {}
    config["route"] |= {"group_wait": "1s", "routes": [{"receiver": name, "continue": True} | shipped for name in own]}
    if as_shipped:  # The alerts of single runs, which wait for that about many, as long in proportion.
        text = re.sub(r'("group_wait": )"1m"', r'\1"18 s"', json.dumps(config))
        return re.sub(r'("group_(?:wait|interval)": )"\w+"', r'\1"4500ms"', text).replace('"18 s"', '"18s"')
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
    [link] = re.findall(r'href="([^"]*silences[^"]*)"', messages[name]["mail.txt"])
    assert unquote(html.unescape(link)) == unquote(lines["Silence"]), "of a mail, which escapes it once more"


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


LATER = {"ShortRunsStarved": (("14 ", "13 "), ("12.0 ", "9.6 "))}
"""What changes in a golden file within a minute of its moment: here, a trial leaves the window of ten minutes."""
ALSO = {("StragglerAcrossNodes", "GpuStarved")}
"""Pairs of a scenario and another alert that it fires, with a message of its own.

The straggler is late because it waits for input 30% of its time.
"""


DATE = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \+0000"


def test_each_alert_from_its_series_to_its_message(tmp_path: Path) -> None:
    """Each alert brings one message, that of the golden files, and one at its end.

    A real Prometheus, in which now is the moment of each alert's scenario, and a real Alertmanager as shipped. What
    differs from a site: samples of the past are written and not scraped, and recorded from with `query_range`; rules
    are evaluated every 3 s, `for` is 3 s (promtool's scenarios are about when they fire) and alerts are held for 9 s;
    Alertmanager waits 4.5 s for a group. Windows, thresholds and texts are as shipped.
    """
    marks = {name: f"-x{number:02d}" for number, name in enumerate(alerts())}
    what_ends = {name: ends((SCENARIOS / f"{name}.yml").read_text()) for name in alerts()}
    scenarios = []
    for name, mark in marks.items():
        test, asked, _ = complete(name)
        scenarios.append(scenario(test, asked["eval_time"], mark, what_ends[name]))
    recording = [rule for group in groups() for rule in group["rules"] if "record" in rule]
    rules = re.sub(r"(?m)^( +(?:interval|for): )\w+$", r"\g<1>3s", render())
    rules = re.sub(r"(keep_firing_for: |alert:\w+:value\[)15m", r"\g<1>9s", rules)
    with (
        webhook() as slack,
        webhook() as hook,
        mail_server() as mail,
        start_alertmanager(
            tmp_path / "am",
            config_text(tmp_path / "am", slack.url, hook.url, mail.port, as_shipped=True),
            url="http://alertmanager:9093",
        ) as alertmanager,
        start_prometheus(
            tmp_path / "prometheus", replay_config(alertmanager.url), "groups: []", REPLAY_OPTIONS
        ) as prometheus,
    ):
        site = Site(prometheus, scenarios)
        site.record(recording)
        with site.going_on():
            site.evaluate(rules)
            all_alerts = {(name, name) for name in alerts()} | ALSO
            wait_for("all messages", lambda: arrived(by_scenario(hook.accepted, marks, "firing"), all_alerts), 45)
            time.sleep(12)  # more of them would come with the next evaluations
            assert bad_rules(prometheus) == []
            fired = by_scenario(hook.accepted, marks, "firing")
            shown = by_scenario(slack.accepted, marks, "firing")
            site.is_over = True
            all_ends = {(name, name) for name, series in what_ends.items() if series}
            wait_for(
                "all ends, by the lines `# ends:`",
                lambda: arrived(by_scenario(hook.accepted, marks, "resolved"), all_ends),
                90,
            )
            time.sleep(6)
        again = by_scenario(hook.accepted, marks, "firing")
        ended = by_scenario(hook.accepted, marks, "resolved")
    assert {key: len(bodies) for key, bodies in fired.items()} == dict.fromkeys(all_alerts, 1)
    assert {key: len(bodies) for key, bodies in again.items()} == dict.fromkeys(all_alerts, 1), (
        "and no other one after it"
    )
    assert {key: len(bodies) for key, bodies in ended.items() if key not in ALSO} == dict.fromkeys(all_ends, 1)
    for name in alerts():
        [body], [message] = fired[name, name], shown[name, name]
        texts = [(GOLDEN / f"{name}.{kind}.json").read_text() for kind in ("webhook", "slack")]
        for before, after in LATER.get(name, ()):
            texts = [text.replace(before, after) for text in texts]
        golden, golden_message = map(json.loads, texts)
        for key in ("status", "groupLabels", "commonLabels", "commonAnnotations"):
            assert undated(body[key]) == undated(golden[key]), (name, key)
        assert [len(body["alerts"]), body["truncatedAlerts"]] == [1, 0]
        assert undated(message) == undated(golden_message), name
    held = fired["GpuHeldIdle", "GpuHeldIdle"][0]["commonAnnotations"]["description"]
    [date] = re.findall(DATE, held)
    since = datetime.strptime(date, "%Y-%m-%d %H:%M:%S %z").timestamp()
    [its] = [each for each in scenarios if each.mark == marks["GpuHeldIdle"]]
    assert 0 <= since - its.begin_s <= 300, "from its scenario's beginning, as far as chunks of the past can tell"


def arrived(found: Mapping[tuple[str, str], Any], wanted: set[tuple[str, str]]) -> bool:
    if missing := wanted - found.keys():
        raise OSError(f"missing: {sorted(missing)}")
    return True


def by_scenario(bodies: Sequence[Any], marks: Mapping[str, str], status: str) -> dict[tuple[str, str], list[Any]]:
    """Return messages of a webhook or of Slack by (scenario, alert), without the scenario's mark."""
    found: dict[tuple[str, str], list[Any]] = {}
    for body in bodies:
        text = json.dumps(body, ensure_ascii=False)
        is_slack = "attachments" in body
        title = body["attachments"][0]["title"] if is_slack else ""
        if (title.startswith("[resolved]") if is_slack else body["status"] == "resolved") != (status == "resolved"):
            continue
        alert = _name(title) if is_slack else body["groupLabels"]["alertname"]
        [(name, mark)] = [(name, mark) for name, mark in marks.items() if mark in text]
        found.setdefault((name, alert), []).append(json.loads(text.replace(mark, "")))
    return found


def undated(body: Any) -> Any:
    """Return a message without what time itself changes in it: dates, and what a job has lost so far."""
    text = re.sub(rf"{DATE}|\d{{4}}-\d\d-\d\d \d\d:\d\d", "DATE", json.dumps(body, sort_keys=True))
    return re.sub(r"\b(?:\d+h )?\d+m \d+s", "TIME", text)


def bad_rules(prometheus: Server) -> list[str]:
    found = prometheus.get("/api/v1/rules")["data"]["groups"]
    return [
        f"{rule['name']}: {rule['lastError']}" for group in found for rule in group["rules"] if rule["health"] == "err"
    ]


def replay_config(alertmanager: str) -> str:
    targets = [{"static_configs": [{"targets": [alertmanager.removeprefix("http://")]}]}]
    return json.dumps({**REPLAY_CONFIG, "alerting": {"alertmanagers": targets}})
