"""The samples of CONTRIBUTING.md are code that works."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpuwatch.diagnosis.finding import Evidence, Rule, found, rule
from gpuwatch.diagnosis.rules.input import input_disk
from gpuwatch_agent.collectors.node import load
from tests.unit.rules.windows import STARVED

PAGE = (Path(__file__).parents[3] / "CONTRIBUTING.md").read_text()
SAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.S)


def test_the_sample_of_a_rules_test_passes() -> None:
    sample = next(each for each in SAMPLES if "def test_a_slow_disk" in each)
    names = {"replace": replace, "STARVED": STARVED, "pytest": pytest, "input_disk": input_disk}
    exec(sample, names)
    names["test_a_slow_disk"]()


def test_the_sample_of_a_rule_has_the_facts_of_that_rule() -> None:
    sample = next(each for each in SAMPLES if "@rule(" in each).replace(
        "Evidence(…)", 'Evidence("what", 1.0, "", "text")'
    )
    names = {"rule": rule, "found": found, "Evidence": Evidence}
    exec(f"from __future__ import annotations\n{sample}", names)
    (shown,) = (each for each in names.values() if isinstance(each, Rule))
    differs = [each.name for each in fields(Rule) if getattr(shown, each.name) != getattr(input_disk, each.name)]
    assert differs == ["find"] and shown.cause == "input_disk"
    assert shown(replace(STARVED, states_s={})) is None
    finding = shown(STARVED)
    assert finding is not None and (finding.ratio, finding.advice) == (0.4, "…")


def test_the_sample_of_a_collector_is_that_collector() -> None:
    sample = next(each for each in SAMPLES if "def load(" in each)
    assert f'"""{load.__doc__}"""' in sample
