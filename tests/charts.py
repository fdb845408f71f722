"""Render the Helm chart for tests, with Helm's own library and without a cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

CHART = Path(__file__).parents[1] / "deploy/helm/gpuwatch"
Manifest = dict[str, Any]

EVERYTHING: Mapping[str, Any] = {
    "image": {"registry": "registry.example.com/ml/", "tag": "1.2.3", "pullSecrets": [{"name": "registry"}]},
    "agent": {
        "config": '[agent]\nkeep_days = 3\n\n[notify]\nurls = ["json://example.com"]',
        "extraArgs": ["--series", "full"],
        "extraEnv": [{"name": "TZ", "value": "UTC"}],
        "gpu": {"runtimeClassName": "", "migMonitor": True},
        "socket": {"hostPath": "/run/other", "gid": None},
        "tcp": {"enabled": True, "port": 19479, "tokenSecret": "hook-token"},
        "apiTokenSecret": "api-token",
        "web": {"configSecret": "web-config", "scheme": "HTTPS"},
        "history": {"hostPath": ""},
        "port": 19478,
        "nodeSelector": {"accelerator": "h200"},
        "affinity": {"nodeAffinity": {}},
        "priorityClassName": "system-node-critical",
        "maxUnavailable": 2,
        "podAnnotations": {"team": "ml"},
        "podLabels": {"team": "ml"},
    },
    "prometheus": {
        "operator": "always",
        "monitor": "ServiceMonitor",
        "labels": {"release": "kube-prometheus-stack"},
        "endpoint": {"scheme": "https", "tlsConfig": {"insecureSkipVerify": True}},
        "rules": {"runbooks": "https://example.com/runbooks/", "dashboards": "https://grafana.example.com/"},
    },
    "networkPolicy": {
        "enabled": True,
        "from": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
    },
    "dashboard": {
        "enabled": True,
        "prometheus": "http://prometheus-operated.monitoring:9090",
        "nodeSelector": {"pool": "web"},
        "tolerations": [{"operator": "Exists"}],
    },
}
"""Every value but `ipv6` that is not its default."""


def render(
    values: Mapping[str, Any] | None = None, release: str = "demo", namespace: str = "ml-system"
) -> dict[str, str]:
    """Return the text of each template by its path in the chart, as `helm template` gives it."""
    helm = pytest.importorskip("helm_python", reason="helm-python-sdk has no wheel for this platform")
    with helm.Chart.load(CHART) as chart:
        rendered = chart.render(dict(values or {}), name=release, namespace=namespace)
    return {path.removeprefix("gpuwatch/templates/"): text for path, text in rendered.items()}


def manifests(
    values: Mapping[str, Any] | None = None, release: str = "demo", namespace: str = "ml-system"
) -> list[Manifest]:
    """Return the objects that an installation with these values makes."""
    return list(_documents(render(values, release, namespace)))


def one(objects: list[Manifest], kind: str, name: str) -> Manifest:
    """Return the object of this kind whose name ends so."""
    found = [each for each in objects if each["kind"] == kind and each["metadata"]["name"].endswith(name)]
    assert len(found) == 1, [(each["kind"], each["metadata"]["name"]) for each in objects]
    return found[0]


def _documents(rendered: Mapping[str, str]) -> Iterator[Manifest]:
    for path, text in sorted(rendered.items()):
        if path.endswith(".yaml"):
            yield from (document for document in yaml.safe_load_all(text) if document)
