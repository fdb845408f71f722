"""The samples of CONTRIBUTING.md are code that works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from msgspec.structs import replace

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


def test_the_sample_of_a_collector_is_that_collector() -> None:
    sample = next(each for each in SAMPLES if "def load(" in each)
    assert f'"""{load.__doc__}"""' in sample
