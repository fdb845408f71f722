"""Past one Prometheus: one in agent mode writes to a real VictoriaMetrics, whose vmalert evaluates our rules there."""

from __future__ import annotations

import json
import os
import re
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen

import pytest

from gpuwatch.alerting.render import render
from gpuwatch.alerting.thresholds import AlertThresholds
from tests.servers import GO, free_port, get_json, require, start_alertmanager, stop, wait_for

QUICK = AlertThresholds(
    ledger_window_s=20, starved_window_s=20, starved_min_training_s=5, starved_for_s=3, keep_firing_for_s=0
)
"""vmalert knows `keep_firing_for` from 1.91 on; Debian's is older."""


@contextmanager
def program(log: Path, *command: str, ready: str) -> Iterator[None]:
    with log.open("wb") as output:
        process = Popen(command, stdout=output, stderr=STDOUT, stdin=DEVNULL, env={**os.environ, **GO})

    def answers() -> bool:
        assert process.poll() is None, f"{command[0]} ended:\n{log.read_text()[-3000:]}"
        with urllib.request.urlopen(ready, timeout=5) as response:
            return bool(response.status == 200)

    try:
        wait_for(f"{command[0]} is ready", answers, 60)
        yield
    finally:
        stop(process, 15)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[str]:
    port = free_port()
    command = (sys.executable, "-m", "benchmarks.simulation", "--nodes", "12", "--gpus", "2", "--port", str(port))
    with program(tmp_path / "fleet.log", *command, ready=f"http://127.0.0.1:{port}/sd"):
        yield f"http://127.0.0.1:{port}/sd"


def test_rules_and_queries_answer_in_victoriametrics(tmp_path: Path, fleet: str) -> None:
    store, prometheus, rules = (f"127.0.0.1:{free_port()}" for _ in range(3))
    (tmp_path / "rules.yml").write_text(re.sub(r"(?m)^  interval: \w+$", "  interval: 4s", render(QUICK)))
    (tmp_path / "prometheus.yml").write_text(
        json.dumps(
            {
                "global": {"scrape_interval": "1s", "external_labels": {"cluster": "a"}},
                "scrape_configs": [
                    {"job_name": "gpuwatch", "http_sd_configs": [{"url": fleet, "refresh_interval": "5s"}]}
                ],
                "remote_write": [
                    {"url": f"http://{store}/api/v1/write", "queue_config": {"batch_send_deadline": "1s"}}
                ],
            }
        )
    )

    def value(expr: str) -> float | None:
        found = get_json(f"http://{store}/api/v1/query", 20, query=expr)["data"]["result"]
        return float(found[0]["value"][1]) if found else None

    with (
        start_alertmanager(tmp_path / "alertmanager") as alertmanager,
        program(
            tmp_path / "store.log", require("victoria-metrics"), f"-storageDataPath={tmp_path / 'store'}",
            f"-httpListenAddr={store}", ready=f"http://{store}/health",
        ),
        program(
            tmp_path / "prometheus.log", require("prometheus"), "--enable-feature=agent",
            f"--storage.agent.path={tmp_path / 'wal'}", f"--config.file={tmp_path / 'prometheus.yml'}",
            f"--web.listen-address={prometheus}", ready=f"http://{prometheus}/-/ready",
        ),
        program(
            tmp_path / "vmalert.log", require("vmalert"), f"-rule={tmp_path / 'rules.yml'}", f"-datasource.url=http://{store}",
            f"-remoteWrite.url=http://{store}", f"-remoteRead.url=http://{store}", f"-notifier.url={alertmanager.url}",
            "-evaluationInterval=4s", "-external.label=cluster=a", f"-httpListenAddr={rules}", ready=f"http://{rules}/health",
        ),
    ):  # fmt: skip
        recorded = 'kind:gpuwatch_gpu_seconds:rate20s{kind="all"}'

        def all_counted() -> float | None:
            up, gpus = value("count(up == 1)") or 0, value(recorded) or 0
            return gpus if up >= 8 and gpus == pytest.approx(2 * up, rel=0.1) else None

        # Each GPU is one GPU-second a second. The store answers with its default latency of 30 s, as a site's does.
        wait_for("the time of all GPUs of all nodes is recorded", all_counted, 180)
        starved = "max(max_over_time(run_rank_state:gpuwatch_run_training_seconds:share[5m]))"
        highest = wait_for("and starvation", lambda: value(starved), 60)
        assert highest <= 1.001, "no share is above all of the time, from a run's first minute on"
        useful = 'kind:gpuwatch_gpu_seconds:share20s{kind="useful"}'
        raw = 'sum(rate(gpuwatch_gpu_seconds_total{state="compute"}[20s])) / sum(rate(gpuwatch_gpu_seconds_total[20s]))'

        def useful_and_raw() -> (
            tuple[float, float] | None
        ):  # two queries see two moments, which are alike once both have settled
            recorded_share, raw_share = value(useful), value(raw)
            close = recorded_share and raw_share and recorded_share == pytest.approx(raw_share, abs=0.05)
            return (recorded_share, raw_share) if close else None

        wait_for("the recorded useful share is that of the counters", useful_and_raw, 60)
        assert value(f"count({useful})") == 1
        groups = get_json(f"http://{rules}/api/v1/rules", 20)["data"]["groups"]
        failed = [rule for group in groups for rule in group["rules"] if rule.get("lastError")]
        assert failed == []
        assert sum(len(group["rules"]) for group in groups) > 40
        reported = wait_for(
            "alerts reach Alertmanager from there",
            lambda: [a for a in alertmanager.get("/api/v2/alerts") if a["labels"]["alertname"] == "GpuStarved"],
            60,
        )
    assert reported[0]["labels"]["cluster"] == "a"
    assert "waits for input" in reported[0]["annotations"]["summary"]
