"""The shipped Alertmanager configuration in the real Alertmanager: what silences what, what its receivers are sent."""

from __future__ import annotations

import json
import shutil
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import yaml

from tests.programs import ROOT
from tests.receivers import webhook
from tests.servers import Server, start_alertmanager, wait_for

FOLDER = ROOT / "deploy/alertmanager"
CONFIG = FOLDER / "alertmanager.yml"

ALERTS = [
    {"alertname": "GpuwatchAgentDown", "instance": "n1"},
    {"alertname": "GpuStarved", "instance": "n1", "run": "r1"},
    {"alertname": "GpuHeldIdle", "instance": "n1", "gpu": "0"},
    {"alertname": "GpuLost", "instance": "n1"},
    {"alertname": "GpuwatchTelemetryLost", "instance": "n1", "run": "r1"},
    {"alertname": "RunStalled", "run": "r2"},
    {"alertname": "GpuStarved", "run": "r2"},
    {"alertname": "RunInefficient", "run": "r2"},
    {"alertname": "GpuStarved", "run": "r3"},
    {"alertname": "RunInefficient", "run": "r3"},
    {"alertname": "GpuwatchTelemetryLost", "instance": "n3", "run": "r4"},
    {"alertname": "RunStalled", "instance": "n3", "run": "r4"},
    {"alertname": "GpuwatchTelemetryLost", "instance": "n3", "run": "r12"},
    {"alertname": "RunKilled", "run": "r12"},
    {"alertname": "RunHung", "run": "r5"},
    {"alertname": "RunStalled", "run": "r5"},
    {"alertname": "PhaseStuck", "run": "r5", "state": "eval"},
    {"alertname": "GpuBusyNoProgress", "instance": "n4", "run": "r5", "rank": "0", "gpu": "0"},
    {"alertname": "StepTimeRegressed", "run": "r3"},
    {"alertname": "StepTimeRegressed", "run": "r6"},
    {"alertname": "RunInefficient", "run": "r6"},
    {"alertname": "GpuLost", "instance": "n5"},
    {"alertname": "RunStalled", "instance": "n5", "run": "r7"},
    {"alertname": "ShmNearlyFull", "instance": "n6", "mount": "host"},
    {"alertname": "ShmForecast", "instance": "n6", "run": "r8"},
    {"alertname": "ShmForecast", "instance": "n7", "run": "r9"},
    {"alertname": "StragglerAcrossNodes", "run": "r10"},
    {"alertname": "Straggler", "instance": "n8", "run": "r10", "rank": "3"},
    {"alertname": "StepTimeRegressed", "run": "r10"},
    {"alertname": "Straggler", "instance": "n8", "run": "r11", "rank": "0"},
    {"alertname": "StragglerAcrossNodes", "run": "r5"},
    {"alertname": "JobRestartLoop", "job_id": "j1"},
    {"alertname": "GpuwatchTelemetryLost", "instance": "n9", "job_id": "j1", "run": "r13"},
    {"alertname": "GpuwatchTelemetryLost", "instance": "n9", "job_id": "j2", "run": "r14"},
    {"alertname": "GpuwatchTelemetryLost", "instance": "n9", "run": "r15"},
    {"UUID": "GPU-a", "alertname": "GpuXid", "instance": "n10"},
    {"alertname": "GpuLost", "instance": "n10"},
    {"UUID": "GPU-a", "alertname": "GpuHeldIdle", "instance": "n10"},
    {"UUID": "GPU-b", "alertname": "GpuHeldIdle", "instance": "n10"},
    {"alertname": "RunStalled", "instance": "n10", "run": "r16"},
    {"UUID": "GPU-c", "alertname": "GpuHeldIdle", "instance": "n11", "run": "r17"},
    {"alertname": "PhaseStuck", "instance": "n11", "run": "r17", "state": "other"},
    {"alertname": "PhaseStuck", "instance": "n11", "run": "r17", "state": "checkpoint"},
    {"alertname": "RunInefficient", "instance": "n11", "run": "r17"},
    {"UUID": "GPU-d", "alertname": "GpuThrottled", "instance": "n12", "user": "alice"},
    {"alertname": "StepTimeRegressed", "instance": "n12", "run": "r18", "user": "alice"},
    {"alertname": "StepTimeRegressed", "instance": "n12", "run": "r19", "user": "bob"},
    {"alertname": "StepTimeRegressed", "run": "r20", "user": "alice"},
    {"alertname": "ManyRunsStalled", "job": "gpuwatch"},
    {"alertname": "RunStalled", "job": "gpuwatch", "run": "r21"},
    {"alertname": "RunHung", "job": "gpuwatch", "run": "r22"},
    {"alertname": "PhaseStuck", "job": "gpuwatch", "run": "r23", "state": "checkpoint"},
    {"alertname": "GpuwatchTelemetryLost", "job": "gpuwatch", "run": "r24"},
    {"alertname": "RunStalled", "job": "gpuwatch-b", "run": "r25"},
    {"alertname": "RunStalled", "cluster": "b", "job": "gpuwatch", "run": "r26"},
    {"about": "agents", "alertname": "GpuwatchAgentDown", "cluster": "c"},
]

STARVED = {
    "labels": {"alertname": "GpuStarved", "severity": "warning", "about": "run r1", "run": "r1"},
    "annotations": {
        "summary": "Run resnet50-a (r1) waits for input 40% of its training time, on 1 of 1 ranks",
        "description": "Share of the training time of the last 5m that was spent waiting for a batch.",
        "gpus": "GPU 0 on n1",
        "owner": "user alice, job 4711",
        "cause": "input_cpu",
        "advice": "num_workers 4 → 10",
        "cost": "9.6 GPU-hours a day (24.00 EUR)",
        "dashboard_url": "http://127.0.0.1:3000/d/gpuwatch-run?var-run=r1",
        "runbook_url": "http://127.0.0.1:9478/docs/runbooks/GpuStarved.md",
    },
}


def post(alertmanager: Server, alerts: list[dict[str, Any]]) -> None:
    request = urllib.request.Request(
        alertmanager.url + "/api/v2/alerts",
        data=json.dumps(alerts).encode(),
        headers={"Content-Type": "application/json"},
    )
    urllib.request.urlopen(request, timeout=60).close()


def quick_config(directory: Path, receiver: str, **fields: Any) -> str:
    """Return the shipped configuration with this receiver named in the route, and some of its fields replaced."""
    directory.mkdir(parents=True)
    shutil.copytree(FOLDER / "templates", directory / "templates")
    config = yaml.safe_load(CONFIG.read_text())
    config["route"] |= {"receiver": receiver, "group_wait": "1s", "group_interval": "1s", "routes": []}
    chosen = next(each for each in config["receivers"] if each["name"] == receiver)
    (settings,) = chosen[f"{receiver}_configs"]
    for name in ("api_url_file", "routing_key_file"):
        settings.pop(name, None)
    settings |= fields
    return json.dumps(config)


def test_a_cause_silences_its_consequences_and_nothing_else(tmp_path: Path) -> None:
    # group_wait is how long Alertmanager gathers alerts before it decides
    config = CONFIG.read_text().replace("group_wait: 1m", "group_wait: 1s")
    with start_alertmanager(tmp_path, config) as alertmanager:
        post(alertmanager, [{"labels": labels} for labels in ALERTS])

        def states() -> dict[tuple[str, ...], str] | None:
            alerts = alertmanager.get("/api/v2/alerts")
            found = {tuple(alert["labels"].values()): alert["status"]["state"] for alert in alerts}
            return found if len(found) == len(ALERTS) and "unprocessed" not in found.values() else None

        found = wait_for("all alerts are processed", states, 20)
    reported = {key for key, state in found.items() if state == "active"}
    assert reported == {
        ("GpuwatchAgentDown", "n1"),
        ("RunStalled", "r2"),
        ("GpuStarved", "r3"),
        ("GpuwatchTelemetryLost", "n3", "r4"),
        ("RunKilled", "r12"),
        ("RunHung", "r5"),
        ("StepTimeRegressed", "r6"),
        ("RunInefficient", "r6"),
        ("GpuLost", "n5"),
        ("ShmNearlyFull", "n6", "host"),
        ("ShmForecast", "n7", "r9"),
        ("StragglerAcrossNodes", "r10"),
        ("Straggler", "n8", "0", "r11"),
        ("JobRestartLoop", "j1"),
        ("GpuwatchTelemetryLost", "n9", "j2", "r14"),
        ("GpuwatchTelemetryLost", "n9", "r15"),
        ("GPU-a", "GpuXid", "n10"),
        ("GPU-b", "GpuHeldIdle", "n10"),
        ("GPU-c", "GpuHeldIdle", "n11", "r17"),
        ("PhaseStuck", "n11", "r17", "checkpoint"),
        ("GPU-d", "GpuThrottled", "n12", "alice"),
        ("StepTimeRegressed", "n12", "r19", "bob"),
        ("StepTimeRegressed", "r20", "alice"),
        ("ManyRunsStalled", "gpuwatch"),
        ("GpuwatchTelemetryLost", "gpuwatch", "r24"),
        ("RunStalled", "gpuwatch-b", "r25"),
        ("RunStalled", "b", "gpuwatch", "r26"),
        ("agents", "GpuwatchAgentDown", "c"),
    }


def test_a_webhook_is_sent_the_alert_with_all_of_its_annotations_and_its_end(tmp_path: Path) -> None:
    with (
        webhook() as inbox,
        start_alertmanager(tmp_path / "am", quick_config(tmp_path / "am", "webhook", url=inbox.url)) as alertmanager,
    ):
        post(alertmanager, [STARVED, {**STARVED, "labels": {**STARVED["labels"], "instance": "n2"}}])
        message = wait_for("the webhook has the message", lambda: inbox.accepted and inbox.accepted[0], 20)
        post(alertmanager, [{**STARVED, "endsAt": "2020-01-01T00:00:00Z"}])
        wait_for("the end is delivered", lambda: any("resolved" in str(each) for each in inbox.accepted), 20)
    assert message["groupLabels"] == {"alertname": "GpuStarved", "about": "run r1"}
    assert len(message["alerts"]) == 2  # in one message
    assert message["alerts"][0]["annotations"] == STARVED["annotations"]


def test_a_silence_is_of_the_run_whatever_its_name_and_an_alert_that_fires_is_reported_in_full(tmp_path: Path) -> None:
    about = 'run h"x"}{#&+% \\ <!channel> ü'
    texts = {**dict.fromkeys(STARVED["annotations"], "job <!channel>"), "dashboard_url": "", "runbook_url": ""}
    alerts = [
        {
            "labels": {**STARVED["labels"], "about": about, "rank": rank},
            "annotations": {**texts, "summary": f"Rank {rank}"},
        }
        for rank in ("0", "1")
    ]
    with webhook() as inbox:
        config = quick_config(tmp_path / "am", "slack", api_url=inbox.url)
        with start_alertmanager(tmp_path / "am", config) as alertmanager:
            post(alertmanager, alerts)
            wait_for("Slack has the message", lambda: inbox.accepted, 20)
            post(alertmanager, [{**alerts[0], "endsAt": "2020-01-01T00:00:00Z"}])
            wait_for("the end is delivered", lambda: "Resolved" in str(inbox.accepted[-1]), 20)
            message = inbox.accepted[-1]["attachments"][0]
            _, _, link = message["text"].partition("Silence: ")
            assert link.isprintable() and not set(' "<&+') & set(link)
            matchers = urllib.parse.unquote(link.partition("?filter=")[2])
            assert matchers[0] + matchers[-1] == "{}"
            matcher = matchers[1:-1].removeprefix('alertname="GpuStarved",')
            found = alertmanager.get("/api/v2/alerts", filter=matcher)
            assert [each["labels"]["about"] for each in found] == [about]
    assert "- Resolved: Rank 0\n- Rank 1\n" in message["text"].replace(
        "- Rank 1\n- Resolved: Rank 0\n", "- Resolved: Rank 0\n- Rank 1\n"
    )
    assert "For example:\nRank 1\n" in message["text"]
    assert "<" not in message["title"] + message["text"]


def test_the_runs_of_an_owner_are_one_short_message_and_a_silence_of_one_run_is_of_that_run(tmp_path: Path) -> None:
    runs = [f"slurm-48211_{number}.0" for number in range(14)]
    alerts = [
        {
            "labels": {**STARVED["labels"], "about": "user alice", "run": run},
            "annotations": {**STARVED["annotations"], "summary": f"Run sweep-resnet50 ({run}) waits for input 40% of its time"},
        }
        for run in runs
    ]  # fmt: skip
    with webhook() as inbox:
        config = quick_config(tmp_path / "am", "slack", api_url=inbox.url)
        with start_alertmanager(tmp_path / "am", config) as alertmanager:
            post(alertmanager, alerts[:1])
            wait_for("the first run's message", lambda: inbox.accepted, 20)
            post(alertmanager, alerts)
            wait_for("the one of all", lambda: "14 in all" in str(inbox.accepted[-1]), 20)
    first, message = (each["attachments"][0] for each in (inbox.accepted[0], inbox.accepted[-1]))
    assert unquoted_silence(first["text"]) == f'{{alertname="GpuStarved",run="{runs[0]}"}}'
    assert unquoted_silence(message["text"]) == '{alertname="GpuStarved",about="user alice"}'
    assert message["title"] == "[14 warning] GpuStarved: user alice"
    assert message["text"].count("\n- Run sweep") + message["text"].startswith("- Run sweep") == 6
    assert len(message["title"] + message["text"]) < 1500


def unquoted_silence(text: str) -> str:
    """Return the matchers of a message's link to a silence."""
    return urllib.parse.unquote(text.partition("Silence: ")[2].partition("?filter=")[2])


def test_a_webhook_that_refuses_is_tried_again_and_no_alert_is_lost(tmp_path: Path) -> None:
    answers = iter([503, 503])
    with (
        webhook() as inbox,
        start_alertmanager(tmp_path / "am", quick_config(tmp_path / "am", "webhook", url=inbox.url)) as alertmanager,
    ):
        inbox.answer = lambda: next(answers, 200)
        post(alertmanager, [STARVED])
        message = wait_for("the webhook has the message", lambda: inbox.accepted and inbox.accepted[0], 30)
    assert len(inbox.posts) >= 3
    assert message["alerts"][0]["labels"]["run"] == "r1"


def test_pagerduty_is_sent_severity_title_and_details(tmp_path: Path) -> None:
    critical = {**STARVED, "labels": {**STARVED["labels"], "alertname": "RunStalled", "severity": "critical"}}
    with webhook() as inbox:
        config = quick_config(tmp_path / "am", "pagerduty", routing_key="k" * 32, url=inbox.url + "/v2/enqueue")
        with start_alertmanager(tmp_path / "am", config) as alertmanager:
            post(alertmanager, [critical])
            message = wait_for("PagerDuty has the message", lambda: inbox.posts and inbox.posts[0][1], 20)
    assert (message["routing_key"], message["event_action"]) == ("k" * 32, "trigger")
    assert message["payload"]["severity"] == "critical"
    assert message["payload"]["summary"].startswith("[critical] RunStalled: Run resnet50-a")
    assert "Cost: 9.6 GPU-hours a day" in message["payload"]["custom_details"]["alerts"]
