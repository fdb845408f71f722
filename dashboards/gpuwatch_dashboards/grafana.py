"""The Grafana dashboards, built from the list of panels: `python -m gpuwatch_dashboards.grafana [--write | --check]`.

Without an option the JSON is printed. The files are in dashboards/grafana/; a test fails when they are stale.
Building needs grafana-foundation-sdk (in the `dev` extra); using the files needs nothing.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.builders import common, dashboard, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models

from gpuwatch_dashboards.model import Scope
from gpuwatch_dashboards.palette import LOOKS
from gpuwatch_dashboards.panels import Curve, Panel
from gpuwatch_dashboards.panels.gpu import GPU_PANELS
from gpuwatch_dashboards.panels.node import NODE_PANELS
from gpuwatch_dashboards.panels.run import RUN_PANELS
from gpuwatch_dashboards.promql import render

FOLDER = Path(__file__).parents[1] / "grafana"
DATASOURCE_UID = "gpuwatch-prometheus"
"""The uid that the provisioned datasource has, and that the datasource variable starts with."""
SCOPE = Scope(run="$run", rank="$rank", instance="$instance")
WINDOW = "$__rate_interval"
OF_RUN = 'label_values(gpuwatch_run_info{{run="$run"}}, {})'
UNITS = {
    "s": "s",
    "ratio": "percentunit",
    "bytes": "bytes",
    "bytes/s": "binBps",
    "1/s": "ops",
    "watts": "watt",
    "1": "short",
}
THRESHOLD_COLOURS = {"warning": "orange", "critical": "red"}
ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    ("The run", RUN_PANELS),
    ("GPUs of the run's nodes", GPU_PANELS),
    ("The run's nodes", NODE_PANELS),
)
WIDE = {"ledger": (16, 10), "findings": (8, 10)}
"""Width and height of panels that are not of the usual size, on Grafana's grid of 24 columns."""
USUAL = (8, 8)
FIRST = ("ledger", "findings")
"""Beside each other on top: where the time goes, and why."""


def run_dashboard() -> dict[str, Any]:
    """Return the dashboard "Training run"."""
    builder = (
        dashboard.Dashboard("Training run")
        .uid("gpuwatch-run")
        .description("Where every second of a training run goes, and why. Generated from gpuwatch's list of panels.")
        .tags(["gpuwatch"])
        .timezone("browser")
        .time("now-30m", "now")
        .refresh("10s")
        .readonly()
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .with_variable(_datasource_variable())
        .with_variable(_variable("run", "Run", "label_values(gpuwatch_run_info, run)"))
        # ".*" and not the list of ranks: one that starts later is in it too. Of nodes, only the run's own
        .with_variable(_several(_variable("rank", "Rank", OF_RUN.format("rank"))).all_value(".*"))
        .with_variable(_several(_variable("instance", "Node", OF_RUN.format("instance"))))
    )
    number = 0
    for title, panels in ROWS:
        number += 1
        builder = builder.with_row(dashboard.Row(title).id(number))
        for panel in sorted(panels, key=lambda p: FIRST.index(p.key) if p.key in FIRST else len(FIRST)):
            number += 1
            builder = builder.with_panel(_panel(panel).id(number))
    plain: dict[str, Any] = json.loads(json.dumps(builder.build(), cls=JSONEncoder, sort_keys=True))
    return plain


DASHBOARDS = {"gpuwatch-run.json": run_dashboard}


def text_of(name: str) -> str:
    """Return a dashboard file's content: the same for the same panels."""
    return json.dumps(DASHBOARDS[name](), indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def _datasource() -> models.DataSourceRef:
    return models.DataSourceRef(type_val="prometheus", uid="${datasource}")


def _datasource_variable() -> dashboard.DatasourceVariable:
    current = models.VariableOption(selected=True, text="gpuwatch", value=DATASOURCE_UID)
    return dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus").current(current)


def _variable(name: str, label: str, query: str) -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .query(query)
        .datasource(_datasource())
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
    )


def _several(variable: dashboard.QueryVariable) -> dashboard.QueryVariable:
    """Let several values be chosen; all of them at first."""
    everything = models.VariableOption(selected=True, text="All", value="$__all")
    return variable.include_all(True).multi(True).current(everything)


def _panel(panel: Panel) -> timeseries.Panel:
    width, height = WIDE.get(panel.key, USUAL)
    built = (
        timeseries.Panel()
        .title(panel.title)
        .description(panel.question)
        .datasource(_datasource())
        .unit(UNITS[panel.unit])
        .min(0)
        .no_value(panel.empty)
        .span(width)
        .height(height)
        .line_width(0 if panel.stacked else 2)
        .fill_opacity(85 if panel.stacked else 8)
        .show_points(common_models.VisibilityMode.NEVER)
        .span_nulls(False)
        .legend(
            common.VizLegendOptions()
            .display_mode(common_models.LegendDisplayMode.LIST)
            .placement(common_models.LegendPlacement.BOTTOM)
            .show_legend(True)
            .calcs(["mean" if panel.stacked else "lastNotNull"])
        )
        .tooltip(common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI))
    )
    if panel.maximum is not None:
        built = built.max(panel.maximum)
    if panel.stacked:
        built = built.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL).group("A"))
    if panel.thresholds:
        steps = [models.Threshold(value=None, color="transparent")]
        steps += [models.Threshold(value=t.value, color=THRESHOLD_COLOURS[t.severity]) for t in panel.thresholds]
        built = built.thresholds(dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps))
        style = common.GraphThresholdsStyleConfig().mode(common_models.GraphTresholdsStyleMode.DASHED)
        built = built.thresholds_style(style)
    for number, curve in enumerate(panel.curves):
        built = built.with_target(
            prometheus.Dataquery()
            .ref_id(chr(ord("A") + number))
            .expr(render(curve.query, SCOPE, WINDOW))
            .legend_format(_legend(panel, curve))
            .range()
        )
        for name, properties in _overrides(curve).items():
            built = built.override_by_name(name, properties)
    return built


def _legend(panel: Panel, curve: Curve) -> str:
    legend = re.sub(r"\{(\w+)\}", r"{{\1}}", curve.legend)
    return legend if panel in RUN_PANELS else f"{legend} · {{{{instance}}}}"


def _overrides(curve: Curve) -> dict[str, list[models.DynamicConfigValue]]:
    """Return colour and name of each state or phase, by the name that the legend format gives it."""
    for label, looks in LOOKS.items():
        if curve.legend == f"{{{label}}}":
            return {
                value: [
                    models.DynamicConfigValue("displayName", look.name),
                    models.DynamicConfigValue("color", {"mode": "fixed", "fixedColor": look.colour}),
                ]
                for value, look in looks.items()
            }
    return {}


def main(arguments: list[str] | None = None) -> int:
    """Print, write or check the dashboards; return the exit status: 0, or 1 when a file is stale."""
    parser = argparse.ArgumentParser(prog="python -m gpuwatch_dashboards.grafana", description=__doc__)
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--write", action="store_true", help=f"write the files in {FOLDER}")
    choice.add_argument("--check", action="store_true", help="say which files are stale; status 1 when one is")
    options = parser.parse_args(arguments)
    stale = 0
    for name in DASHBOARDS:
        path, text = FOLDER / name, text_of(name)
        if options.write:
            path.write_text(text, encoding="utf-8")
        elif not options.check:
            sys.stdout.write(text)
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            print(f"{path} is stale: run `python -m gpuwatch_dashboards.grafana --write`", file=sys.stderr)
            stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main())
