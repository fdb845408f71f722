"""The shipped Alertmanager configuration in the real Alertmanager: what silences what, and what does not."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

from tests.servers import start_alertmanager, wait_for

CONFIG = Path(__file__).parents[2] / "deploy/alertmanager/alertmanager.yml"

ALERTS = [
    {"alertname": "GpuwatchAgentDown", "instance": "n1"},
    {"alertname": "GpuStarved", "instance": "n1", "run": "r1", "rank": "0"},
    {"alertname": "GpuHeldIdle", "instance": "n1", "gpu": "0"},
    {"alertname": "GpuwatchTelemetryLost", "instance": "n1", "run": "r1", "rank": "0"},
    {"alertname": "RunStalled", "instance": "n2", "run": "r2", "rank": "0"},
    {"alertname": "GpuStarved", "instance": "n2", "run": "r2", "rank": "0"},
    {"alertname": "GpuStarved", "instance": "n2", "run": "r3", "rank": "0"},
    {"alertname": "GpuwatchTelemetryLost", "instance": "n3", "run": "r4", "rank": "1"},
    {"alertname": "RunStalled", "instance": "n3", "run": "r4", "rank": "1"},
    {"alertname": "RunStalled", "instance": "n3", "run": "r4", "rank": "0"},
]


def test_a_cause_silences_its_consequences_and_nothing_else(tmp_path: Path) -> None:
    # group_wait is how long Alertmanager gathers alerts before it decides
    config = CONFIG.read_text().replace("group_wait: 15s", "group_wait: 1s")
    with start_alertmanager(tmp_path, config) as alertmanager:
        request = urllib.request.Request(
            alertmanager.url + "/api/v2/alerts",
            data=json.dumps([{"labels": labels} for labels in ALERTS]).encode(),
            headers={"Content-Type": "application/json"},
        )
        urllib.request.urlopen(request, timeout=5).close()

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
    }
