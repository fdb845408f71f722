"""The shipped Alertmanager configuration in the real Alertmanager: what silences what, and what its receivers are sent."""

from __future__ import annotations

import email
import email.policy
import json
import shutil
import urllib.request
from pathlib import Path
from typing import Any

import yaml

from tests.receivers import mail_server, webhook
from tests.servers import Server, start_alertmanager, wait_for

FOLDER = Path(__file__).parents[2] / "deploy/alertmanager"
CONFIG = FOLDER / "alertmanager.yml"

ALERTS = [
    {"alertname": "GpuwatchAgentDown", "instance": "n1"},
    {"alertname": "GpuStarved", "instance": "n1", "run": "r1", "rank": "0"},
    {"alertname": "GpuHeldIdle", "instance": "n1", "gpu": "0"},
    {"alertname": "GpuLost", "instance": "n1"},
    {"alertname": "GpuwatchTelemetryLost", "instance": "n1", "run": "r1", "rank": "0"},
    {"alertname": "RunStalled", "instance": "n2", "run": "r2", "rank": "0"},
    {"alertname": "GpuStarved", "instance": "n2", "run": "r2", "rank": "0"},
    {"alertname": "GpuStarved", "instance": "n2", "run": "r3", "rank": "0"},
    {"alertname": "GpuwatchTelemetryLost", "instance": "n3", "run": "r4", "rank": "1"},
    {"alertname": "RunStalled", "instance": "n3", "run": "r4", "rank": "1"},
    {"alertname": "RunStalled", "instance": "n3", "run": "r4", "rank": "0"},
    {"alertname": "RunHung", "run": "r5"},
    {"alertname": "RunStalled", "instance": "n4", "run": "r5", "rank": "0"},
    {"alertname": "GpuBusyNoProgress", "instance": "n4", "run": "r5", "rank": "0", "gpu": "0"},
    {"alertname": "StepTimeRegressed", "run": "r3"},
    {"alertname": "StepTimeRegressed", "run": "r6"},
    {"alertname": "GpuLost", "instance": "n5"},
    {"alertname": "RunStalled", "instance": "n5", "run": "r7", "rank": "0"},
    {"alertname": "ShmNearlyFull", "instance": "n6", "mount": "host"},
    {"alertname": "ShmForecast", "instance": "n6", "run": "r8"},
    {"alertname": "ShmForecast", "instance": "n7", "run": "r9"},
    {"alertname": "StragglerAcrossNodes", "run": "r10"},
    {"alertname": "Straggler", "instance": "n8", "run": "r10", "rank": "3"},
    {"alertname": "StepTimeRegressed", "run": "r10"},
    {"alertname": "Straggler", "instance": "n8", "run": "r11", "rank": "0"},
    {"alertname": "StragglerAcrossNodes", "run": "r5"},
]

STARVED = {
    "labels": {"alertname": "GpuStarved", "severity": "warning", "instance": "n1", "run": "r1", "rank": "0"},
    "annotations": {
        "summary": "Run resnet50-a (r1, rank 0) on n1 waits for input 40% of its training time",
        "description": "Of the training time in the last 5m, 40% was spent waiting for a batch.",
        "owner": "user alice, job 4711",
        "cause": "input_cpu",
        "advice": "num_workers 4 → 10",
        "cost": "9.6 GPU-hours a day (24.00 EUR)",
        "runbook_url": "docs/runbooks/GpuStarved.md",
    },
}


def post(alertmanager: Server, alerts: list[dict[str, Any]]) -> None:
    request = urllib.request.Request(
        alertmanager.url + "/api/v2/alerts",
        data=json.dumps(alerts).encode(),
        headers={"Content-Type": "application/json"},
    )
    urllib.request.urlopen(request, timeout=5).close()


def quick_config(directory: Path, receiver: str, **fields: Any) -> str:
    """Return the shipped configuration with this receiver named in the route, and some of its fields replaced."""
    directory.mkdir(parents=True)
    shutil.copytree(FOLDER / "templates", directory / "templates")
    config = yaml.safe_load(CONFIG.read_text())
    config["route"] |= {"receiver": receiver, "group_wait": "1s", "group_interval": "1s"}
    chosen = next(each for each in config["receivers"] if each["name"] == receiver)
    (settings,) = chosen[f"{receiver}_configs"]
    for name in ("api_url_file", "routing_key_file"):
        settings.pop(name, None)
    settings |= fields
    return json.dumps(config)


def test_a_cause_silences_its_consequences_and_nothing_else(tmp_path: Path) -> None:
    # group_wait is how long Alertmanager gathers alerts before it decides
    config = CONFIG.read_text().replace("group_wait: 15s", "group_wait: 1s")
    with start_alertmanager(tmp_path, config) as alertmanager:
        post(alertmanager, [{"labels": labels} for labels in ALERTS])

        def states() -> dict[tuple[str, ...], str] | None:
            alerts = alertmanager.get("/api/v2/alerts")
            found = {tuple(alert["labels"].values()): alert["status"]["state"] for alert in alerts}
            return found if len(found) == len(ALERTS) and "unprocessed" not in found.values() else None

        found = wait_for("all alerts are processed", states, 20)
    told = {key for key, state in found.items() if state == "active"}
    assert told == {
        ("GpuwatchAgentDown", "n1"),
        ("RunStalled", "n2", "0", "r2"),
        ("GpuStarved", "n2", "0", "r3"),
        ("GpuwatchTelemetryLost", "n3", "1", "r4"),
        ("RunStalled", "n3", "0", "r4"),
        ("RunHung", "r5"),
        ("StepTimeRegressed", "r6"),
        ("GpuLost", "n5"),
        ("ShmNearlyFull", "n6", "host"),
        ("ShmForecast", "n7", "r9"),
        ("StragglerAcrossNodes", "r10"),
        ("Straggler", "n8", "0", "r11"),
    }


def test_a_webhook_is_sent_the_alert_with_all_of_its_annotations_and_its_end(tmp_path: Path) -> None:
    with (
        webhook() as inbox,
        start_alertmanager(tmp_path / "am", quick_config(tmp_path / "am", "webhook", url=inbox.url)) as alertmanager,
    ):
        post(alertmanager, [STARVED, {**STARVED, "labels": {**STARVED["labels"], "rank": "1"}}])
        message = wait_for("the webhook is told", lambda: inbox.accepted and inbox.accepted[0], 20)
        post(alertmanager, [{**STARVED, "endsAt": "2020-01-01T00:00:00Z"}])
        wait_for("the end is told", lambda: any("resolved" in str(each) for each in inbox.accepted), 20)
    assert message["groupLabels"] == {"alertname": "GpuStarved", "run": "r1"}
    assert {alert["labels"]["rank"] for alert in message["alerts"]} == {"0", "1"}  # one message for both ranks
    assert message["alerts"][0]["annotations"] == STARVED["annotations"]


def test_a_webhook_that_refuses_is_tried_again_and_no_alert_is_lost(tmp_path: Path) -> None:
    answers = iter([503, 503])
    with (
        webhook() as inbox,
        start_alertmanager(tmp_path / "am", quick_config(tmp_path / "am", "webhook", url=inbox.url)) as alertmanager,
    ):
        inbox.answer = lambda: next(answers, 200)
        post(alertmanager, [STARVED])
        message = wait_for("the webhook is told", lambda: inbox.accepted and inbox.accepted[0], 30)
    assert len(inbox.posts) >= 3
    assert message["alerts"][0]["labels"]["run"] == "r1"


def test_slack_is_sent_number_owner_cause_advice_cost_and_runbook(tmp_path: Path) -> None:
    with webhook() as inbox:
        config = quick_config(tmp_path / "am", "slack", api_url=inbox.url + "/slack")
        with start_alertmanager(tmp_path / "am", config) as alertmanager:
            post(alertmanager, [STARVED])
            message = wait_for("Slack is told", lambda: inbox.accepted and inbox.accepted[0], 20)
    (attachment,) = message["attachments"]
    summary = STARVED["annotations"]["summary"]
    assert attachment["title"] == f"[1 firing] GpuStarved: {summary}"
    assert attachment["color"] == "warning"
    assert attachment["text"].splitlines()[:7] == [
        summary,
        "Of the training time in the last 5m, 40% was spent waiting for a batch.",
        "Owner: user alice, job 4711",
        "Cause: input_cpu",
        "Do: num_workers 4 → 10",
        "Cost: 9.6 GPU-hours a day (24.00 EUR)",
        "Runbook: docs/runbooks/GpuStarved.md",
    ]


def test_pagerduty_is_sent_severity_title_and_details(tmp_path: Path) -> None:
    critical = {**STARVED, "labels": {**STARVED["labels"], "alertname": "RunStalled", "severity": "critical"}}
    with webhook() as inbox:
        config = quick_config(tmp_path / "am", "pagerduty", routing_key="k" * 32, url=inbox.url + "/v2/enqueue")
        with start_alertmanager(tmp_path / "am", config) as alertmanager:
            post(alertmanager, [critical])
            message = wait_for("PagerDuty is told", lambda: inbox.posts and inbox.posts[0][1], 20)
    assert (message["routing_key"], message["event_action"]) == ("k" * 32, "trigger")
    assert message["payload"]["severity"] == "critical"
    assert message["payload"]["summary"].startswith("[1 firing] RunStalled: Run resnet50-a")
    assert "Cost: 9.6 GPU-hours a day" in message["payload"]["custom_details"]["alerts"]


def test_mail_says_the_same_in_text_and_html(tmp_path: Path) -> None:
    with mail_server() as inbox:
        config = quick_config(tmp_path / "am", "email", smarthost=f"127.0.0.1:{inbox.port}", require_tls=False)
        with start_alertmanager(tmp_path / "am", config) as alertmanager:
            post(alertmanager, [STARVED])
            raw = wait_for("mail arrives", lambda: inbox.mails and inbox.mails[0], 20)
    mail = email.message_from_string(raw, policy=email.policy.default)
    assert mail["To"] == "gpu-team@example.com"
    assert mail["Subject"].startswith("[1 firing] GpuStarved: Run resnet50-a")
    parts = {part.get_content_type(): part.get_content() for part in mail.walk() if not part.is_multipart()}
    assert "Do: num_workers 4 → 10" in parts["text/plain"]
    assert "<td>9.6 GPU-hours a day (24.00 EUR)</td>" in parts["text/html"]
