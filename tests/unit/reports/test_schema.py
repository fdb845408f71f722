"""The JSON is a contract: its fields are those of docs/guides/report.md.

Its schemas are committed, so that a change of them shows here.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from gpuwatch.diagnosis.finding import Evidence, Verdict
from gpuwatch.formatting import as_json
from gpuwatch.tools.reports import model
from gpuwatch.tools.reports.comparison import Comparison, Prediction, compare
from gpuwatch.tools.reports.gather import gather
from tests.programs import ROOT
from tests.unit.reports.fake_source import FINDING, START_S, FakeSource

DOCS = ROOT / "docs" / "guides" / "report.md"
SCHEMAS = ROOT / "docs" / "reference" / "schemas"


def documented(heading: str) -> set[str]:
    """Return every name in backquotes below a heading."""
    section = DOCS.read_text().split(f"## {heading}")[1].split("\n## ")[0]
    return {name.removesuffix("[]") for name in re.findall(r"`([a-z0-9_]+(?:\[\])?)`", section)}


def test_every_field_of_a_report_is_documented_and_nothing_else() -> None:
    fields: set[str] = set()
    for kind in (
        model.RunReport,
        Verdict,
        model.StepStatistics,
        model.Found,
        Evidence,
        model.Rank,
        model.LedgerOverTime,
        model.StepsOverTime,
        model.Cost,
    ):
        fields |= set(kind.__struct_fields__)
    assert documented("JSON: `gpuwatch-report/1`") - {"null", "states"} == fields - {"states"}


def test_every_field_of_a_comparison_is_documented_and_nothing_else() -> None:
    fields = {*Comparison.__struct_fields__, *Prediction.__struct_fields__}
    assert documented("JSON: `gpuwatch-compare/1`") == fields


def schema(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((SCHEMAS / name).read_text())
    jsonschema.Draft202012Validator.check_schema(found)
    return found


def test_the_committed_schemas_are_those_of_the_records(tmp_path: Path) -> None:
    program = "import sys; sys.path.insert(0, sys.argv[1]); import report_schemas, json; print(json.dumps(report_schemas.texts()))"
    command = [sys.executable, "-c", program, str(ROOT / "scripts")]
    texts = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout)
    assert texts == {path.name: path.read_text() for path in SCHEMAS.iterdir()}, "run `make golden`"


def test_reports_and_comparisons_are_as_their_schemas_say() -> None:
    report = gather(FakeSource(findings=[FINDING]), "resnet", START_S + 100)
    text = json.loads(as_json(report))
    jsonschema.validate(text, schema("gpuwatch-report-1.json"))
    jsonschema.validate(json.loads(as_json(compare(report, report))), schema("gpuwatch-compare-1.json"))
    for wrong in ({**text, "shares": None}, {**text, "schema": "gpuwatch-report/2"}, {k: v for k, v in text.items() if k != "findings"}):  # fmt: skip
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema("gpuwatch-report-1.json"))


def test_what_a_first_report_had_is_still_there_and_read() -> None:
    """Fields are only added within a schema's number: the first report that was kept is valid, and is read."""
    old = ROOT / "tests" / "fixtures" / "reports" / "report-1.json"
    kept = json.loads(old.read_text())
    jsonschema.validate(kept, schema("gpuwatch-report-1.json"))
    assert model.from_json(old.read_bytes(), str(old)).steps == kept["steps"]
    now = json.loads(as_json(gather(FakeSource(findings=[FINDING]), "resnet", START_S + 100)))
    assert kept.keys() <= now.keys()
    assert kept["findings"][0].keys() <= now["findings"][0].keys()
