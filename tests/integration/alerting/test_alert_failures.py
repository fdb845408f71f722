"""What is between an alert and a reader fails: counted and tried again, no alert is lost; what is misspelt is named."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from gpuwatch.alerting.render import render
from gpuwatch.alerting.thresholds import AlertThresholds
from tests.integration.alerting.test_alertmanager import STARVED, post, quick_config
from tests.receivers import webhook
from tests.replay import CONFIG as REPLAY_CONFIG
from tests.replay import OPTIONS as REPLAY_OPTIONS
from tests.replay import STALE, write
from tests.servers import Server, free_port, prometheus_config, start_alertmanager, start_prometheus, wait_for


def own_metric(server: Server, name: str) -> float:
    """Return the sum of one of a server's own metrics, as its /metrics says it."""
    import urllib.request

    with urllib.request.urlopen(server.url + "/metrics", timeout=20) as page:
        lines = page.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((name + "{", name + " ")))


def test_an_alert_that_fires_while_alertmanager_is_away_is_reported_when_it_is_back(tmp_path: Path) -> None:
    port = free_port()  # no server listens there yet
    # No agent answers at this address either, so that GpuwatchAgentDown fires.
    config = prometheus_config({"gpuwatch": f"127.0.0.1:{free_port()}"}, alertmanager=f"127.0.0.1:{port}")
    quick = AlertThresholds(agent_down_for_s=1)
    with start_prometheus(tmp_path / "prometheus", config, render(quick)) as prometheus:
        failed = "prometheus_notifications_errors_total"
        wait_for("the failed delivery is counted", lambda: own_metric(prometheus, failed) >= 1, 60)
        with start_alertmanager(tmp_path / "am", port=port) as alertmanager:
            reported = wait_for("it is delivered", lambda: alertmanager.get("/api/v2/alerts"), 120)
    assert [alert["labels"]["alertname"] for alert in reported] == ["GpuwatchAgentDown"]


def test_no_rule_fails_after_a_restart_of_prometheus_in_which_gpus_changed_their_owners(tmp_path: Path) -> None:
    """What was there before the restart, on pages and recorded, is there for five more minutes, as nothing ends it."""
    rules = re.sub(r"(?m)^( +interval: )\w+$", r"\g<1>2s", render())
    gpu = {"job": "gpuwatch", "instance": "n1:9478", "gpu": "0", "UUID": "GPU-0"}
    free, run = gpu, {**gpu, "run": "r1", "rank": "0", "user": "alice", "job_id": "7"}

    def go_on(prometheus: Server, owner: dict[str, str], ended: dict[str, str] | None = None) -> None:
        """Write of a GPU until it has been recorded some times."""
        if ended is not None:
            write(prometheus, [({"__name__": "gpuwatch_gpu_owner_info", **ended}, [(time.time(), STALE)])])
        for _ in range(8):
            now = time.time()
            series = [
                ({"__name__": "gpuwatch_gpu_owner_info", **owner}, [(now, 1.0)]),
                ({"__name__": "gpuwatch_gpu_seconds_total", **gpu, "state": "compute"}, [(now, now)]),
                ({"__name__": "gpuwatch_gpu_ledger_watermark_timestamp_seconds", **gpu}, [(now, now)]),
            ]
            write(prometheus, series)
            time.sleep(1)

    def owners(prometheus: Server) -> list[dict[str, str]]:
        answer = prometheus.get("/api/v1/query", query="gpu:gpuwatch_gpu_owner_info:one")
        return [each["metric"] for each in answer["data"]["result"]]

    def failed(prometheus: Server) -> list[str]:
        found = prometheus.get("/api/v1/rules")["data"]["groups"]
        return [rule["lastError"] for group in found for rule in group["rules"] if rule["health"] == "err"]

    config = json.dumps(REPLAY_CONFIG)
    with start_prometheus(tmp_path / "p", config, rules, REPLAY_OPTIONS) as prometheus:
        go_on(prometheus, free)
        go_on(prometheus, run, ended=free)
        assert [each["run"] for each in owners(prometheus)] == ["r1"]
    with start_prometheus(tmp_path / "p", config, rules, REPLAY_OPTIONS) as prometheus:
        go_on(prometheus, free)
        assert failed(prometheus) == []
        assert len(owners(prometheus)) == 1


def test_two_prometheus_that_read_the_same_agents_send_one_alert(tmp_path: Path) -> None:
    """A pair for availability: each has a label of its own, which it drops from alerts."""
    quick, down = render(AlertThresholds(agent_down_for_s=10)), f"127.0.0.1:{free_port()}"
    with webhook() as inbox:
        settings = quick_config(tmp_path / "am", "webhook", url=inbox.url)
        with start_alertmanager(tmp_path / "am", settings) as alertmanager, ExitStack() as pair:
            for replica in "ab":
                config = json.loads(prometheus_config({"gpuwatch": down}, alertmanager=alertmanager.url))
                config["global"]["external_labels"] = {"replica": replica}
                config["alerting"]["alert_relabel_configs"] = [{"action": "labeldrop", "regex": "replica"}]
                server = pair.enter_context(start_prometheus(tmp_path / replica, json.dumps(config), quick))
                sent = "prometheus_notifications_sent_total"
                wait_for(f"{replica} has sent it", lambda: own_metric(server, sent) >= 1, 60)  # noqa: B023
            wait_for("the message arrives", lambda: inbox.accepted, 30)
            time.sleep(5)  # a second one would come with the next evaluations
            [alert] = alertmanager.get("/api/v2/alerts")
    assert "replica" not in alert["labels"]
    assert [len(message["alerts"]) for message in inbox.accepted] == [1]


def test_a_webhook_that_times_out_is_counted_and_tried_again(tmp_path: Path) -> None:
    with (
        webhook() as inbox,
        start_alertmanager(tmp_path / "am", quick_config(tmp_path / "am", "webhook", url=inbox.url)) as alertmanager,
    ):
        inbox.delay_s = 13.0  # Alertmanager waits 10 s for a receiver
        inbox.answer = lambda: 504
        post(alertmanager, [STARVED])
        wait_for("it is tried", lambda: inbox.posts, 30)
        failed = "alertmanager_notifications_failed_total"
        wait_for("the failure is counted", lambda: own_metric(alertmanager, failed) >= 1, 60)
        inbox.delay_s, inbox.answer = 0.0, lambda: 200
        message = wait_for("it is delivered", lambda: inbox.accepted and inbox.accepted[0], 60)
    assert message["alerts"][0]["labels"]["run"] == "r1"


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        ("[alerts]\nstarved_ration = 0.3", [], "starved_ration is not a key; did you mean starved_ratio?"),
        ("[alerts]\nstarved_ratio = 30", [], "starved_ratio = 30: a share must be above 0 and at most 1"),
        ("", ["--write", "{dir}/gpuwatch.toml"], "--write {dir}/gpuwatch.toml: File exists"),
    ],
)
def test_rules_name_what_is_wrong_and_write_nothing(
    tmp_path: Path, text: str, arguments: list[str], message: str
) -> None:
    (tmp_path / "gpuwatch.toml").write_text(text)
    command = [sys.executable, "-m", "gpuwatch", "rules", "--config", str(tmp_path / "gpuwatch.toml")]
    done = subprocess.run(
        [*command, *(each.format(dir=tmp_path) for each in arguments)], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert message.format(dir=tmp_path) in " ".join(done.stderr.split())


def test_rules_are_written_with_the_file_s_thresholds_and_prices(tmp_path: Path) -> None:
    (tmp_path / "gpuwatch.toml").write_text(
        "[alerts]\nstarved_ratio = 0.35\n[prices]\ngpu_hour = 2.5\ncurrency = 'EUR'\n"
    )
    command = [sys.executable, "-m", "gpuwatch", "rules", "--config", str(tmp_path / "gpuwatch.toml")]
    done = subprocess.run(
        [*command, "--write", str(tmp_path / "rules")], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split() == [str(tmp_path / "rules/gpuwatch.yml")]
    rules = json.dumps(yaml.safe_load((tmp_path / "rules/gpuwatch.yml").read_text()))
    assert "> 0.35" in rules and "EUR" in rules and "* 2.5" in rules
