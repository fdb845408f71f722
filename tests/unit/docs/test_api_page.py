"""docs/reference/api.md has every field that the agent returns, from the structs; its examples are decoded."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import msgspec

from gpuwatch import api
from tests.programs import ROOT

PAGE = (ROOT / "docs/reference/api.md").read_text()


def test_the_committed_fields_are_those_of_the_structs() -> None:
    program = "import sys; sys.path.insert(0, sys.argv[1]); import api_page; sys.stdout.write(api_page.page())"
    command = [sys.executable, "-c", program, str(ROOT / "scripts")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout == PAGE, "run `make golden`"
    sections = dict(re.findall(r"### (\w+)\n(.*?)(?=\n### |\Z)", PAGE, re.DOTALL))
    for kind in (api.Run, api.Recent, api.Finding, api.Gpu, api.Status, api.Steps, api.LastSteps, api.GpuSeconds):
        listed = re.findall(r"^\| `(\w+)`", sections[kind.__name__], re.MULTILINE)
        assert listed == list(kind.__struct_encode_fields__), kind


def test_the_example_of_a_run_has_every_field_that_an_agent_answers_with() -> None:
    example = PAGE.split("## `/api/v1/runs`")[1].split("```json\n")[1].split("```")[0]
    run = msgspec.json.decode(example, type=api.Runs).runs[0]
    assert run.findings[0].predicted_range == (1.9, 2.6) and run.loader is not None and run.loader.batches == 782
    (shown,) = json.loads(example)["runs"]
    assert set(shown) == set(api.Run.__struct_encode_fields__)
    assert set(shown["findings"][0]) == set(api.Finding.__struct_encode_fields__)
    assert set(shown["recent"]) == set(api.Recent.__struct_encode_fields__)
