"""What the chart installs, compared with tests/golden/helm; UPDATE_GOLDEN=1 writes it again. Its files are links."""

from __future__ import annotations

import os
import shutil
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

import gpuwatch
from tests.charts import CHART, EVERYTHING, Manifest, manifests
from tests.programs import ROOT

RULES = ROOT / "deploy/prometheus/rules/gpuwatch.yml"
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
    assert text == golden.read_text(), "is it meant? `make golden` writes it again"


def test_the_charts_files_are_links_and_the_packaged_chart_has_their_contents(tmp_path: Path) -> None:
    """Helm follows links out of the chart, so that rules and dashboards exist once in the repository."""
    assert (CHART / "files/rules.yml").is_symlink() and (CHART / "files/dashboards").is_symlink()
    helm = pytest.importorskip("helm_python", reason="helm-python-sdk has no wheel for this platform")
    with tarfile.open(helm.package(CHART, destination=tmp_path)) as archive:
        found = {
            member.name.removeprefix("gpuwatch/files/"): archive.extractfile(member).read().decode()  # type: ignore[union-attr]
            for member in archive.getmembers()
            if member.name.startswith("gpuwatch/files/")
        }
    sources = [(f"dashboards/{path.name}", path) for path in (ROOT / "dashboards/grafana").glob("*.json")]
    assert len(sources) > 2
    assert found == {name: path.read_text() for name, path in [("rules.yml", RULES), *sources]}


@pytest.mark.parametrize("missing", ["rules.yml", "dashboards"])
def test_a_chart_whose_links_are_lost_is_an_error_that_names_the_file(tmp_path: Path, missing: str) -> None:
    helm = pytest.importorskip("helm_python", reason="helm-python-sdk has no wheel for this platform")
    chart = tmp_path / "gpuwatch"
    shutil.copytree(CHART, chart, ignore=lambda _folder, names: {missing} & set(names))
    with (
        helm.Chart.load(chart) as loaded,
        pytest.raises(helm.HelmRenderError, match=f"files/{missing}, a link .* is missing"),
    ):
        loaded.render({"prometheus": {"operator": "always"}}, name="demo", namespace="ml-system")


def test_dashboards_link_to_the_runbooks_that_the_chart_names() -> None:
    labelled = [each for each in manifests(EVERYTHING) if "grafana_dashboard" in each["metadata"].get("labels", {})]
    found = [each["data"] for each in labelled]
    assert [list(data) for data in found] == [[f"gpuwatch-{name}.json"] for name in ("fleet", "node", "run")]
    text = "".join(content for data in found for content in data.values())
    assert "https://example.com/runbooks/GpuStarved.md" in text and "docs/runbooks/" not in text


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
