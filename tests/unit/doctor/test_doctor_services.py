"""Ports and who has them, the history, Prometheus."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpuwatch.api.client import Reply
from gpuwatch.tools.doctor.machine import Machine
from gpuwatch.tools.doctor.services import alert_rules, history, prometheus
from tests.unit.doctor.machines import GIB, alive

MakeMachine = Callable[..., Machine]
PROMETHEUS = "http://prometheus:9090"


def test_history_of_the_agent_that_would_be_started(machine: MakeMachine, tmp_path: Path) -> None:
    assert history(machine()).found == f"{tmp_path}/state/gpuwatch/history.db, 63 GiB free"
    assert history(machine(history=None)).status == "skipped"
    assert history(machine(disk=(64 * GIB, 63 * GIB))).status == "warning"
    assert history(machine(disk=(64 * GIB, 64 * GIB - 1000))).status == "problem"
    refused = history(machine(writes=lambda path: False))
    assert refused.status == "problem" and f"{tmp_path}/state cannot be written" in refused.found
    (tmp_path / "state/gpuwatch").write_text("")
    assert "is a file, not a folder" in history(machine()).found
    unseen = history(
        machine(history=tmp_path / ("x" * 300) / "h.db")
    )  # any error but "absent": it may not be looked at
    assert unseen.status == "problem" and unseen.found.endswith("File name too long")


def test_history_of_the_agent_that_answers(machine: MakeMachine, tmp_path: Path) -> None:
    kept = {"path": str(tmp_path / "h.db"), "failures": 0}
    host = machine(agent=alive(history=kept), writes=lambda path: False)
    assert history(host).found.startswith(f"{tmp_path}/h.db")
    unseen = {"path": str(tmp_path / ("x" * 300) / "h.db"), "failures": 0}
    assert history(machine(agent=alive(history=unseen))).status == "skipped"
    failing = history(machine(agent=alive(history={**kept, "failures": 3})))
    assert failing.status == "problem" and "3 writes" in failing.found


def target(job: str = "gpuwatch", health: str = "up", error: str = "") -> dict[str, Any]:
    return {"labels": {"job": job, "instance": "node-17:9478"}, "health": health, "lastError": error}


@pytest.mark.parametrize(
    ("targets", "status", "words"),
    [
        ([target(), target(job="node")], "ok", "1 of 1 targets up"),
        ([target(), target(health="unknown")], "ok", "1 of 2 targets up, 1 not scraped yet"),
        ([target(job="node")], "problem", "no target of the job 'gpuwatch'"),
        (
            [target(), target(health="down", error="refused")],
            "problem",
            "1 of 2 targets are down: node-17:9478: refused",
        ),
    ],
)
def test_prometheus_targets(machine: MakeMachine, targets: list[Any], status: str, words: str) -> None:
    pages = {f"{PROMETHEUS}/api/v1/targets?state=active": {"data": {"activeTargets": targets}}}
    outcome = prometheus(machine(prometheus_url=PROMETHEUS, pages=pages))
    assert outcome.status == status and words in outcome.found


@pytest.mark.parametrize(
    ("page", "words"),
    [
        (TimeoutError("timed out"), "timed out"),
        (Reply(404, b""), "no Prometheus API there (status 404)"),
        (Reply(200, b"<html>"), "no Prometheus API there"),
        ({"data": None}, "no Prometheus API there"),
    ],
)
def test_what_is_no_prometheus(machine: MakeMachine, page: Any, words: str) -> None:
    pages = {f"{PROMETHEUS}/api/v1/targets?state=active": page, f"{PROMETHEUS}/api/v1/rules?type=alert": page}
    host = machine(prometheus_url=PROMETHEUS, pages=pages)
    for look in (prometheus, alert_rules):
        outcome = look(host)
        assert outcome.status == "problem" and words in outcome.found


@pytest.mark.parametrize(
    ("rules", "status", "words"),
    [
        ([{"name": "GpuStarved", "health": "ok"}, {"name": "GpuHeldIdle", "health": "ok"}], "ok", "2 alerts"),
        ([{"name": "NodeDown", "health": "ok"}], "warning", "are not loaded"),
        ([{"name": "GpuStarved", "health": "err", "lastError": "many-to-many"}], "problem", "GpuStarved: many-to-many"),
    ],
)
def test_alert_rules(machine: MakeMachine, rules: list[Any], status: str, words: str) -> None:
    pages = {f"{PROMETHEUS}/api/v1/rules?type=alert": {"data": {"groups": [{"rules": rules}]}}}
    outcome = alert_rules(machine(prometheus_url=PROMETHEUS, pages=pages))
    assert outcome.status == status and words in outcome.found


def test_no_prometheus_was_named(machine: MakeMachine) -> None:
    assert (prometheus(machine()).status, alert_rules(machine()).status) == ("skipped", "skipped")
