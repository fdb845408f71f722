"""Compose's Grafana finds the dashboards, and the data source that they read."""

from __future__ import annotations

import yaml

from gpuwatch_dashboards.grafana import DATASOURCE
from tests.programs import ROOT


def test_the_provisioned_data_source_is_the_one_that_the_dashboards_begin_with() -> None:
    [source] = yaml.safe_load((ROOT / "deploy/grafana/provisioning/datasources/gpuwatch.yml").read_text())[
        "datasources"
    ]
    assert (source["uid"], source["type"]) == (DATASOURCE, "prometheus")
    assert source["jsonData"]["timeInterval"] == "5s"  # as Prometheus scrapes: $__rate_interval is made of it
    prometheus = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    assert prometheus["global"]["scrape_interval"] == "5s"


def test_the_provider_reads_the_folder_that_compose_mounts() -> None:
    [provider] = yaml.safe_load((ROOT / "deploy/grafana/provisioning/dashboards/gpuwatch.yml").read_text())["providers"]
    mounts = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["grafana"]["volumes"]
    assert f"./dashboards/grafana:{provider['options']['path']}:ro" in mounts
    assert len(list((ROOT / "dashboards/grafana").glob("gpuwatch-*.json"))) == 3
