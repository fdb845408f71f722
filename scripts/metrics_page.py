"""Print docs/reference/metrics.md from the catalogue; `make golden` writes it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from gpuwatch.alerting.render import groups
from gpuwatch.alerting.thresholds import Prices
from gpuwatch.metrics import CATALOGUE, Metric
from gpuwatch_dashboards.panels import PANELS, Panel
from gpuwatch_dashboards.query import Query

HEAD = """\
# Metrics

The agent serves these metrics at `/metrics` (port 9478). This page is written from `gpuwatch/metrics.yml` by
`make golden`. Units are base units and ratios are 0–1; `_total` is a counter, and `_info` is 1 and carries information
in its labels. A value that was not measured is absent, never 0.

Join with dcgm-exporter by `gpu` and `UUID` (for a MIG instance, by the number before the colon in its `gpu` and by the
`GPU_I_ID` of `gpuwatch_gpu_mig_ratio`), and with node_exporter by `instance`. `run` is a unique id; the display name,
job and user of a run are in `gpuwatch_run_info`.

Series that stay at 0 are not exported. A counter that appears with its first increment is exported as 0 for two scrapes
first, so that `increase` sees the rise; the ledger's other states and its watermark are delayed with it, so that shares
add up at every sample. When a run has ended, its series are removed once two scrapes have read them, and
`gpuwatch_run_up` two minutes later (five if the run was lost). The series of its job are removed with the run's series
if the job ended normally, else with `gpuwatch_run_up`. The run's totals stay in the agent's API.

"Read by" lists alerts, panels (in quotes) and recorded series. The pages, `gpuwatch top` and reports also read metrics
through the API.

| metric | kind | unit | labels | | read by |
|---|---|---|---|---|---|
"""
RECORDED = """
## Recorded series

The rules of `gpuwatch rules` record these series; those about money only if a price is configured. Series that no rule
or panel reads are for your own queries ([Slurm](../deploy/slurm.md), [costs](../guides/costs.md)) and for
[federation](../deploy/past-one-machine.md#sharding): a few series per node, run, job and user. The page "Fleet" reads
`site:gpuwatch_currency:info`.

| series | every | read by |
|---|---|---|
"""

WHEN = {
    "always": "",
    "counted": " *Exported from the first increment on; with `--series full` from 0 on.*",
    "seen": " *Exported from the first increment on; with `--series full` from 0 on.*",
    "full": " *Exported with `--series full`.*",
    "history": " *Exported with `--series full`; always in the API.*",
}
Readers = dict[str, set[str]]


def page() -> str:
    """Return the page."""
    readers = dict(_readers())
    rows = "".join(row(metric, readers) for metric in CATALOGUE)
    intervals = {rule["record"]: group.get("interval", "15s") for group, rule in _rules() if "record" in rule}
    recorded = (f"| `{name}` | {every} | {_read_by(name, readers)} |\n" for name, every in sorted(intervals.items()))
    return HEAD + rows + RECORDED + "".join(recorded)


def row(metric: Metric, readers: Readers) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    text = f"{metric.help}{WHEN[metric.when]}"
    return (
        f"| `{metric.name}` | {metric.kind} | {metric.unit} | {labels} | {text} | {_read_by(metric.name, readers)} |\n"
    )


def _rules() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for group in groups(prices=Prices(2.5)):
        yield from ((group, rule) for rule in group["rules"])


def _readers() -> Iterator[tuple[str, set[str]]]:
    """Yield each alert, panel and recorded series with the names of the series that it reads."""
    recorded: Readers = {}
    for _, rule in _rules():
        name = str(rule.get("alert") or f"`{rule['record']}`")
        recorded.setdefault(name, set()).update(_names(f"{rule['expr']} {rule.get('annotations', '')}"))
    yield from recorded.items()
    for panel in PANELS:
        yield f"“{panel.title}”", _of_panel(panel)


def _of_panel(panel: Panel) -> set[str]:
    names = {name for curve in panel.curves for name in _names(curve.promql)}
    queries: list[Query | None] = [curve.query for curve in panel.curves if curve.metric]
    while queries:
        if (query := queries.pop()) is not None:
            names.add(query.metric)
            queries.append(query.over)
    return names


def _names(text: str) -> set[str]:
    return set(re.findall(r"alert:\w+:value|(?:\w+:)?gpuwatch_\w+(?::\w+)?", text))


def _read_by(name: str, readers: Readers) -> str:
    return ", ".join(sorted({reader for reader, names in readers.items() if name in names} - {f"`{name}`"}))


if __name__ == "__main__":
    print(page(), end="")
