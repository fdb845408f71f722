"""The JSON is a contract: its fields are those of docs/report.md, and a change of them shows here."""

from __future__ import annotations

import re
from pathlib import Path

from gpuwatch.reports import model
from gpuwatch.reports.comparing import Comparison, Prediction

DOCS = Path(__file__).parents[3] / "docs" / "report.md"


def documented(heading: str) -> set[str]:
    """Return every name in backquotes below a heading."""
    section = DOCS.read_text().split(f"## {heading}")[1].split("\n## ")[0]
    return {name.removesuffix("[]") for name in re.findall(r"`([a-z0-9_]+(?:\[\])?)`", section)}


def test_every_field_of_a_report_is_documented_and_nothing_else() -> None:
    fields: set[str] = set()
    for kind in (
        model.RunReport,
        model.Verdict,
        model.StepStatistics,
        model.Found,
        model.EvidenceItem,
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
