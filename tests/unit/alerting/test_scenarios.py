"""promtool's scenarios: each alert fires in time in one, stays quiet in one, and has one of vanished series.

test_promtool.py runs them. This file checks that none is missing and that each can fail.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gpuwatch.alerting.render import alerts, groups
from tests.replay import ends, parsed

FOLDER = Path(__file__).parents[3] / "deploy/prometheus/tests"
NAMES = list(alerts())
KINDS = {"fires", "quiet", "stale"}

Scenario = Mapping[str, Any]


def scenarios(name: str, kind: str) -> list[Scenario]:
    path = FOLDER / f"{name}.yml"
    assert path.exists(), f"write the alert's scenarios, {path}, like ShmNearlyFull.yml"
    tests = parsed(path.read_text())["tests"]
    assert {test["name"].partition(":")[0] for test in tests} <= KINDS, (
        "what a scenario is for stands first in its name"
    )
    found = [test for test in tests if test["name"].startswith(f"{kind}:")]
    assert found, f"{path} has no scenario whose name begins with '{kind}: '"
    return found


def expected(test: Scenario, name: str) -> list[tuple[float, bool]]:
    """Return (when, whether it is to fire) of all that a scenario expects of an alert, by time."""
    reported = [
        (seconds(each["eval_time"]), bool(each["exp_alerts"]))
        for each in test.get("alert_rule_test", ())
        if each["alertname"] == name
    ]
    reported += [
        (seconds(each["eval_time"]), bool(each["exp_samples"]))
        for each in test.get("promql_expr_test", ())
        if "ALERTS{" in each["expr"] and re.search(rf'alertname=~?"[^"]*\b{name}\b', each["expr"])
    ]
    return sorted(reported)


def seconds(text: str) -> float:
    return sum(float(number) * {"h": 3600, "m": 60, "s": 1}[unit] for number, unit in re.findall(r"(\d+)([hms])", text))


@pytest.mark.parametrize("name", NAMES)
def test_it_fires_in_time_with_all_that_it_says_and_not_before(name: str) -> None:
    reported = [(test, expected(test, name)) for test in scenarios(name, "fires")]
    whole = [
        each
        for test, _ in reported
        for each in test.get("alert_rule_test", ())
        if any(set(alert["exp_annotations"]) > {"summary", "owner", "cost"} for alert in each["exp_alerts"])
    ]
    assert whole, "labels and annotations are compared as a whole"
    assert any(times and not times[0][1] and times[-1][1] for _, times in reported), "quiet first, then it fires"


@pytest.mark.parametrize("name", NAMES)
def test_it_stays_quiet_on_what_looks_like_it(name: str) -> None:
    for test in scenarios(name, "quiet"):
        times = expected(test, name)
        assert times and not any(fires for _, fires in times), test["name"]
        assert any("max_over_time" in each["expr"] for each in test["promql_expr_test"]), "at no time, not at one time"


@pytest.mark.parametrize("name", NAMES)
def test_it_survives_that_its_series_vanish(name: str) -> None:
    for test in scenarios(name, "stale"):
        ends = [
            when
            for series in test["input_series"]
            if (when := _stale_s(series["values"], test["interval"])) is not None
        ]
        times = expected(test, name)
        assert any(fires and when > min(ends) + 60 for when, fires in times), f"it goes on after: {test['name']}"
        assert not times[-1][1], f"and ends: {test['name']}"


@pytest.mark.parametrize("name", NAMES)
def test_what_ends_it_is_a_value_of_series_that_fire_it(name: str) -> None:
    """So that test_alert_messages.py can send its end."""
    metrics = {
        series["series"].partition("{")[0] for test in scenarios(name, "fires") for series in test["input_series"]
    }
    assert ends((FOLDER / f"{name}.yml").read_text()).keys() <= metrics | {"up"}


def _stale_s(values: str, interval: str) -> float | None:
    """Return when a series goes stale for good; None when it does not."""
    tokens = values.split()
    if tokens[-1] != "stale":
        return None
    counts = [
        int(count[1]) + (not token.startswith("_")) if (count := re.search(r"x(\d+)$", token)) else 1
        for token in tokens
    ]
    return (sum(counts) - 1) * seconds(interval)


def test_traps_are_met_by_all_alerts_at_once() -> None:
    """No alert is named there: whatever fires on a node that does all these harmless things fails it."""
    quiet, _ = parsed((FOLDER / "traps.yml").read_text())["tests"]
    first = quiet["promql_expr_test"][0]
    assert (first["exp_samples"], first["eval_time"]) == ([], "1h59m")
    assert "alertname=" not in first["expr"] and "[2h]" in first["expr"]
    metrics = {re.match(r"\w+", series["series"])[0] for series in quiet["input_series"]}  # type: ignore[index]
    read = set(re.findall(r"(?<!:)\bgpuwatch_\w+\b(?!:)", "\n".join(str(group) for group in groups())))
    absent_when_all_is_well = {
        "gpuwatch_straggler_excess_ratio", "gpuwatch_gpu_last_xid", "gpuwatch_gpu_last_xid_timestamp_seconds",
        "gpuwatch_finding_evidence_ratio", "gpuwatch_gpu_info", "gpuwatch_gpu_temperature_celsius", "gpuwatch_gpu_holder_pid",
        "gpuwatch_gpu_engine_active_ratio", "gpuwatch_gpu_shared_seconds_total", "gpuwatch_gpu_dram_bandwidth_ratio",
        "gpuwatch_finding_info", "gpuwatch_run_job_over",
    }  # fmt: skip
    assert read - metrics == absent_when_all_is_well, "add the series, as on a healthy node, to traps.yml"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yml")), ids=lambda path: path.stem)
def test_golden_groups_are_evaluated_in_the_order_in_which_they_read_each_other(path: Path) -> None:
    order = [group["name"] for group in groups()]
    if os.environ.get("UPDATE_GOLDEN"):
        line = f"group_eval_order: [{', '.join(order)}]"
        path.write_text(re.sub(r"(?m)^group_eval_order: .*$", line, path.read_text()))
    assert parsed(path.read_text())["group_eval_order"] == order, "run `make golden`"
