"""What the chart installs, compared with tests/golden/helm; UPDATE_GOLDEN=1 writes it anew. Its copies are fresh."""

from __future__ import annotations

import os
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

import gpuwatch
from tests.charts import CHART, EVERYTHING, Manifest, manifests

ROOT = Path(__file__).parents[3]
CASES: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "operator": {"prometheus": {"operator": "always"}},
    "everything": EVERYTHING,
}


@pytest.mark.parametrize("case", CASES)
def test_golden_manifests(case: str) -> None:
    golden = ROOT / f"tests/golden/helm/{case}.yaml"
    text = yaml.safe_dump_all([_short(each) for each in manifests(CASES[case])], sort_keys=False, width=120)
    if os.environ.get("UPDATE_GOLDEN") == "1":
        golden.parent.mkdir(parents=True, exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text(), "is it meant? `make golden` writes it anew"


def test_dashboards_link_to_the_runbooks_that_the_chart_names() -> None:
    labelled = [each for each in manifests(EVERYTHING) if "grafana_dashboard" in each["metadata"].get("labels", {})]
    found = [each["data"] for each in labelled]
    assert [list(data) for data in found] == [[f"gpuwatch-{name}.json"] for name in ("fleet", "node", "run")]
    text = "".join(content for data in found for content in data.values())
    assert "https://example.com/runbooks/GpuStarved.md" in text and "docs/runbooks/" not in text


def test_the_charts_copies_are_fresh() -> None:
    wanted = runpy.run_path(str(ROOT / "scripts/chart_files.py"))["wanted"]()
    there = {path: path.read_text() for path in (CHART / "files").rglob("*") if path.is_file()}
    assert there == wanted, "run `make golden`"


def test_the_chart_is_of_this_version() -> None:
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == gpuwatch.__version__


def _short(manifest: Manifest) -> Manifest:
    """Return the object with what is generated left out: that has tests of its own."""
    if manifest["kind"] == "PrometheusRule":
        groups = [group["name"] for group in manifest["spec"]["groups"]]
        return {**manifest, "spec": {"groups": groups}}
    if manifest["kind"] == "ConfigMap" and "grafana_dashboard" in manifest["metadata"].get("labels", {}):
        return {**manifest, "data": sorted(manifest["data"])}
    return manifest
