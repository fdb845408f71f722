"""The tables of causes in the docs are written from the rules.

Every cause is there, its numbers are the thresholds', and its roots the diagnosis'.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import tables as page

from gpuwatch.diagnosis.finding import Rule
from gpuwatch.diagnosis.rules import CAUSES, RULES, roots_of
from gpuwatch.diagnosis.thresholds import Thresholds
from gpuwatch.diagnosis.window import Window
from tests.programs import ROOT

PAGE = (ROOT / "docs" / "concepts" / "causes.md").read_text()
TABLE, ROOT_TABLE = (part.split("\n## ")[0] for part in (PAGE, PAGE.split("## Root first")[1]))
ROWS = dict(re.findall(r"^\| (`[^|]+) \| ([^|]+) \|", TABLE, re.M))


def row(cause: str) -> str:
    return next(text for names, text in ROWS.items() if f"`{cause}`" in names)


def test_the_committed_tables_are_those_of_the_rules() -> None:
    assert [each.name for each in page.PAGES if page.written(each) != each.read_text()] == [], "run `make golden`"
    listed = re.findall(r"^\| `(\w+)` .*\| \[(\w+)\]", TABLE, re.M)
    assert listed == [(rule.cause, rule.runbook) for rule in RULES]


def test_a_stale_table_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = [replace(rule, change="wait") if rule.cause == "input_cpu" else rule for rule in RULES]
    monkeypatch.setattr(page, "RULES", rules)
    stale = [each.name for each in page.PAGES if page.written(each) != each.read_text()]
    assert stale == ["causes.md", "GpuStarved.md"]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.cause)
def test_a_rule_says_when_it_is_found_and_what_to_change(rule: Rule) -> None:
    assert page.found_when(rule)[0] and "`_" not in page.found_when(rule)[0]
    assert 20 <= len(rule.change) <= 120 and not rule.change.endswith("."), "one line, which alerts put into a sentence"
    assert not re.search(r"[`|]|\{\{|\$\{|\n", rule.change), "an alert's template and a table's row take it as it is"


def test_a_rule_without_a_docstring_is_refused() -> None:
    def silent(window: Window, thresholds: Thresholds) -> None: ...

    with pytest.raises(SystemExit, match=r"silent: its docstring does not begin with 'Found when'"):
        page.found_when(replace(RULES[0], find=silent))


def test_a_runbook_without_a_place_for_its_causes_is_refused(tmp_path: Path) -> None:
    runbook = tmp_path / "runbooks" / "GpuHeldIdle.md"
    runbook.parent.mkdir()
    runbook.write_text("# GpuHeldIdle\n")
    with pytest.raises(SystemExit, match=r"docs/runbooks/GpuHeldIdle.md: two lines are missing"):
        page.written(runbook)
    runbook.with_name("GpuLost.md").write_text("# GpuLost\n")
    assert page.written(runbook.with_name("GpuLost.md")) == "# GpuLost\n", "no rule raises it"


def test_every_cause_has_its_row_and_no_other_has() -> None:
    named = {name for names in ROWS for name in re.findall(r"`([a-z_]+)`", names)}
    assert sorted(named ^ set(CAUSES)) == [], "run `make golden`"


def test_numbers_of_the_page_are_those_of_the_table() -> None:
    plain = Thresholds()
    numbers = {
        "outside_torch": f"≥ {plain.input_share:.0%} of the time passes between an optimizer step",
        "input_cpu_saturated": f"≥ {plain.cores_exhausted:.0%}",
        "input_disk": f"≥ {plain.worker_waiting:.0%}",
        "input_network": f"≥ {plain.network_bytes_per_s / 1e3:.0f} kB/s",
        "artificial_limit": f"≥ {plain.worker_waiting:.0%}",
        "burst_every_n": f"(autocorrelation ≥ {plain.burst_correlation:.1f}) and is concentrated in one step of each round "
        f"(≥ {plain.burst_share:.0%}",
        "too_many_workers": f"≥ {plain.workers_per_core:g} workers per core fill ≥ {plain.cores_exhausted:.0%} of the "
        f"cores, and tasks wait for a CPU ≥ {plain.cpu_pressure:.0%}",
        "epoch_start_pause": f"≥ {plain.first_batch_factor:.0f} × the median wait and ≥ {plain.first_batch_share:.0%}",
        "transfer_pageable": f"≥ {plain.transfer_share:.0%}",
        "transfer_pcie": f"≥ {plain.pcie_bytes_per_s / 1e9:.0f} GB/s",
        "host_bound": f"runs each kernel as it is launched in ≥ {plain.kept_up_share:.0%} of the steps",
        "checkpoint_interval": f"≥ {plain.checkpoint_interruptions:.0f} interruptions of a job, another interval "
        f"gains ≥ {plain.checkpoint_gain:.0%}",
        "straggler": f"≥ {plain.straggler_share:.0%}",
        "eval_share": f"≥ {plain.phase_share:.0%}",
        "shm_exhaustion": f"≥ {plain.shm_used:.0%}",
        "hung": f"≥ {plain.gpu_busy:.0%} busy at ≤ {plain.power_fallen:.0%}",
        "memory_creep": f"by ≥ {plain.memory_creep_share:.0%} of its size in ≥ {plain.memory_creep_s / 60:.0f} minutes",
        "throttled": f"≥ {plain.throttled_share:.0%}",
        "held_idle": f"≥ {plain.gpu_idle_s / 60:.0f} minutes at ≤ {plain.gpu_idle_utilization:.0%}",
        "mfu_mismatch": f"≥ {plain.mfu_gap:.0%} of the peak",
        "gpu_saturated": f"compute is ≥ {plain.saturated_share:.0%} of the time, and the driver sees the run's GPUs "
        f"≥ {plain.gpu_busy:.0%}",
    }
    assert {cause: text for cause, text in numbers.items() if text not in row(cause)} == {}
    assert f"input wait takes ≥ {plain.input_share:.0%} of the time (`input_share`)" in TABLE


def test_the_roots_of_the_page_are_those_of_the_diagnosis() -> None:
    named = {name for name in re.findall(r"`([a-z_]+)`", ROOT_TABLE)} - {"root"}
    in_code = {name for cause in CAUSES if (roots := roots_of(cause)) for name in (cause, *roots)}
    assert in_code == named, "run `make golden`"


@pytest.mark.parametrize("alert", sorted({rule.runbook for rule in RULES}))
def test_a_runbook_names_every_cause_that_can_be_the_root_of_its_findings(alert: str) -> None:
    """GpuStarved's had no word of `stalled`, of which a wait for data is a consequence."""
    text = (ROOT / f"docs/runbooks/{alert}.md").read_text()
    causes = [rule.cause for rule in RULES if rule.runbook == alert]
    assert {root for cause in causes for root in roots_of(cause) if f"`{root}`" not in text} == set()


def test_every_rule_has_a_test_in_this_folder() -> None:
    texts = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py") if path != Path(__file__))
    assert [cause for cause in CAUSES if not re.search(rf"\b{cause}\b", texts)] == []
