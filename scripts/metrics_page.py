"""Write docs/reference/metrics.md from the catalogue: `python scripts/metrics_page.py > docs/reference/metrics.md` (`make golden` does)."""

from __future__ import annotations

from gpuwatch.metrics import CATALOGUE, Metric

HEAD = """\
# Metrics

Served by the agent at `/metrics` (port 9478), written from `gpuwatch/metrics.py` by `make golden`. Base units; ratios are 0–1; `_total`
is a counter, `_info` is 1 with facts as labels. What was not measured is absent, never 0.

Join with dcgm-exporter by `gpu` and `UUID`, with node_exporter by `instance`. `run` is a unique id; its name for people, its job and
its user are in `gpuwatch_run_info`.

Series that stay at 0 are not served. A counter that is served from its first count on is 0 for two scrapes first, so that `increase` sees
the rise; a ledger's other states and its watermark wait with it, so that shares add up at every sample. A run's series go when two scrapes
have taken them after its end, its `gpuwatch_run_up` two minutes after it (five where it was lost); its totals stay in the agent's API.

| metric | kind | unit | labels | |
|---|---|---|---|---|
"""

WHEN = {
    "always": "",
    "counted": " *From its first count on; with `--series full` from 0.*",
    "seen": " *From its first count on; with `--series full` from 0.*",
    "full": " *With `--series full`.*",
    "history": " *With `--series full`; in the API always.*",
}


def page() -> str:
    """Return the page."""
    return HEAD + "".join(row(metric) for metric in CATALOGUE)


def row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{metric.name}` | {metric.kind} | {metric.unit} | {labels} | {metric.help}{WHEN[metric.when]} |\n"


if __name__ == "__main__":
    print(page(), end="")
