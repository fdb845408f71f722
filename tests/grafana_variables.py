"""A dashboard's queries as Grafana would send them: variables replaced by the rules of its Prometheus data source.

Source: Grafana's documentation, "Template variables" of the Prometheus data source and "Global variables"; and, for the
quoting of values, `interpolateQueryExpr`: a variable of one value is quoted as a string, one of several as a regular
expression.
"""

from __future__ import annotations

import json
import re
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.servers import get_json

FOLDER = Path(__file__).parents[1] / "dashboards/grafana"
BUILT_IN = {"__rate_interval": "20s", "__interval": "5s", "__interval_ms": "5000", "__range": "300s"}
"""For the provisioned data source (an interval of 5 s) and the last five minutes on a panel of 200 points or less."""


def load(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return loaded


@dataclass(frozen=True)
class Asked:
    """One query of a panel."""

    panel: str
    ref_id: str
    expr: str
    instant: bool


@dataclass
class Variables:
    """A dashboard's variables against a Prometheus, each at what the reader finds at first, or at what is chosen."""

    dashboard: Mapping[str, Any]
    url: str
    chosen: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.texts: dict[str, str] = dict(BUILT_IN)
        self.values: dict[str, list[str]] = {}
        for variable in self.dashboard["templating"]["list"]:
            if variable["type"] == "query":
                self._resolve(variable)

    def _resolve(self, variable: Mapping[str, Any]) -> None:
        name, several = variable["name"], bool(variable.get("multi") or variable.get("includeAll"))
        match = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"])
        assert match, variable["query"]
        selector, label = self.filled(match[1]), match[2]
        query = urllib.parse.urlencode({"match[]": selector})
        found = [v for v in get_json(f"{self.url}/api/v1/label/{label}/values?{query}")["data"] if v]
        self.values[name] = found
        if name in self.chosen:
            self.texts[name] = _quoted([self.chosen[name]], several)
        elif (variable.get("current") or {}).get("value") == "$__all":
            self.texts[name] = variable["allValue"] if "allValue" in variable else _quoted(found, several)
        else:
            self.texts[name] = _quoted(found[:1], several)

    def filled(self, expr: str, **scoped: str) -> str:
        """Return an expression with all variables put in; `scoped` are those of a repeated panel."""
        texts = {**self.texts, **{name: _quoted([value], True) for name, value in scoped.items()}}
        return re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda m: texts[m[1] or m[2]], expr)

    def asked(self) -> Iterator[Asked]:
        """Yield every query of every panel; a repeated panel's once for each value."""
        for panel in self.dashboard["panels"]:
            scopes = [{panel["repeat"]: v} for v in self.values[panel["repeat"]]] if panel.get("repeat") else [{}]
            for scope in scopes:
                for target in panel.get("targets", []):
                    expr = self.filled(target["expr"], **scope)
                    yield Asked(panel["title"], target["refId"], expr, bool(target.get("instant")))


def _quoted(values: list[str], several: bool) -> str:
    if not several:
        return values[0].replace("\\", "\\\\").replace('"', '\\"') if values else ""
    escaped = [re.sub(r"[$^*{}\[\]'+?.()|]", r"\\\\\g<0>", v.replace("\\", "\\\\\\\\")) for v in values]
    return escaped[0] if len(escaped) == 1 else f"({'|'.join(escaped)})"
