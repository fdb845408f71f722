"""What a rule declares about itself, and what follows from that."""

from __future__ import annotations

from dataclasses import MISSING, fields
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import pytest
from msgspec.structs import replace

from gpuwatch.alerting.render import alerts, groups
from gpuwatch.diagnosis import rules
from gpuwatch.diagnosis.finding import Finding, Rule, rule
from gpuwatch.diagnosis.rules import BY_CAUSE, CAUSES, RULES, diagnose, roots_of
from gpuwatch.diagnosis.thresholds import Thresholds
from gpuwatch.diagnosis.window import Window
from gpuwatch.wire import Loader
from tests.unit.rules.windows import STARVED, steps, window

FACTS = [each.name for each in fields(Rule) if each.name != "find" and each.default is MISSING]
COMPLETE = {
    "change": "do less of it",
    "explains": (),
    "explained_by": (),
    "stacks": None,
    "alert": None,
    "runbook": "Findings",
}


def nothing(window: Window, thresholds: Thresholds) -> Finding | None:
    return None


@pytest.mark.parametrize("missing", FACTS)
def test_a_rule_that_lacks_a_fact_is_refused(missing: str) -> None:
    assert rule(**COMPLETE)(nothing).cause == "nothing"
    with pytest.raises(TypeError, match=missing):
        rule(**{name: fact for name, fact in COMPLETE.items() if name != missing})(nothing)
    with pytest.raises(TypeError, match="runbok"):
        rule(**COMPLETE, runbok="Findings")(nothing)


@pytest.mark.parametrize("each", RULES, ids=lambda each: each.cause)
def test_the_facts_of_a_rule_name_what_exists(each: Rule) -> None:
    assert {*each.explains, *each.explained_by} <= set(CAUSES) - {each.cause}
    assert each.stacks in ("workers", "training", "all ranks", None)
    assert each.alert is None or each.alert in alerts()
    assert each.alert in (each.runbook, None)
    assert each.delays_rank in ("input", "host", None)


def test_every_rule_of_the_folder_is_in_the_list() -> None:
    modules = [import_module(f"{rules.__name__}.{each.name}") for each in iter_modules(rules.__path__)]
    defined = [each for module in modules for each in vars(module).values() if isinstance(each, Rule)]
    assert len(modules) >= 5
    assert sorted(each.cause for each in defined) == sorted(CAUSES)


def test_what_a_rule_says_of_itself_is_no_literal_elsewhere() -> None:
    special = [rule.cause for rule in RULES if rule.all_is_well or rule.costs_later]
    assert special == ["memory_creep", "gpu_saturated", "compute_bound"]
    root = Path(__file__).parents[3]
    files = (
        "gpuwatch/alerting/alerts.yml",
        "gpuwatch/alerting/ledgers.yml",
        "agent/gpuwatch_agent/notify/conditions.py",
    )
    assert [(file, cause) for file in files for cause in special if cause in (root / file).read_text()] == []
    expr = next(r["expr"] for g in groups() for r in g["rules"] if r.get("record") == "alert:RunInefficient:value")
    assert 'cause!~"memory_creep"' in expr and 'gpuwatch_finding_active{cause=~"memory_creep"}' in expr


def test_no_cause_is_a_consequence_of_itself_through_others() -> None:
    for cause in CAUSES:
        seen, todo = set(), [*roots_of(cause)]
        while todo:
            root = todo.pop()
            assert root != cause
            if root not in seen:
                seen.add(root)
                todo += roots_of(root)


def test_the_most_telling_root_comes_first() -> None:
    assert roots_of("stalled") == ("hung", "shm_exhaustion")
    roots = roots_of("burst_every_n")
    assert roots.index("input_single_process") < roots.index("input_handover") and len(roots) > 8
    assert list(roots) == sorted(roots, key=CAUSES.index), "as in `RULES`"
    assert roots_of("input_unexplained") == ("stalled",), "what explains a fallback replaces it"
    assert [each.cause for each in RULES if each.fallback] == ["input_unexplained"]
    assert [each.cause for each in RULES if each.ends_run] == ["worker_killed", "training_killed"]


def test_a_slow_worker_explains_that_the_others_are_too_few() -> None:
    """`input_cpu` was shown beside `slow_worker`, as two things to do: the table of roots lacked the latter's line."""
    columns = steps(80, 0.001, 0.040)
    waits = tuple(0.2 if index % 4 == 0 else 0.001 for index in range(80))
    uneven = window(replace(columns, data_wait_s=waits), worker_cpu_ratios=(0.95, 0.85, 0.1, 0.1))
    found = [(finding.cause, finding.root) for finding in diagnose(uneven)]
    assert found == [("slow_worker", None), ("input_cpu", "slow_worker"), ("burst_every_n", "slow_worker")]


def test_a_rule_compares_with_the_thresholds_that_it_is_given() -> None:
    single = replace(STARVED, loader=Loader(num_workers=0))
    found = BY_CAUSE["input_single_process"]
    assert found(single, Thresholds(input_share=0.7)) is None
    mild, severe = found(single, Thresholds(input_share_critical=0.7)), found(single)
    assert mild is not None and severe is not None
    assert (mild.severity, severe.severity) == ("warning", "critical")
