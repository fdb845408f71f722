"""The metric catalogue, metrics.csv: every name that gpuwatch exports, once. Exporter, panels, alerts and docs all read it.

Base units, `_total` only on counters, ratios 0–1. Labels are bounded: never a step number, a path or a pid.
"""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from typing import Literal

import msgspec

from gpuwatch.ledger.states import GPU_STATES

Kind = Literal["counter", "gauge", "info"]
Unit = Literal["seconds", "bytes", "ratio", "watts", "joules", "celsius", "hertz", "timestamp", "count"]

When = Literal["always", "counted", "seen", "history", "full"]
"""Which series a node has. "counted" and "seen" are on /metrics from their first count on, after a 0; before, the agent's history has
those that are "seen". "history": in the agent's history and API alone. "full": nowhere. With `--series full` all are everywhere, from 0 on."""


@dataclass(frozen=True)
class Metric:
    """One metric family."""

    name: str  # as a query names it: with `_total` for counters and `_info` for info metrics
    kind: Kind
    unit: Unit
    help: str
    labels: tuple[str, ...] = ()
    when: When = "always"


@dataclass(frozen=True)
class Sample:
    """One value of one series. `labels` are the values of the metric's labels, in the catalogue's order."""

    metric: str
    value: float
    labels: tuple[str, ...] = ()


RUN = ("run", "rank")
GPU = ("gpu", "UUID")


def _catalogue() -> Iterator[Metric]:
    """Yield the rows of metrics.csv: a metric each, its labels with spaces between them. Raises ValidationError for a kind or unit that is none of ours."""
    with (files("gpuwatch") / "metrics.csv").open(encoding="utf-8") as table:
        for row in csv.DictReader(table):
            text = row["help"].replace("{states}", ", ".join(GPU_STATES))
            yield msgspec.convert({**row, "labels": row["labels"].split(), "help": text}, Metric)


CATALOGUE: tuple[Metric, ...] = tuple(_catalogue())
BY_NAME: dict[str, Metric] = {metric.name: metric for metric in CATALOGUE}


def labels_of(sample: Sample) -> dict[str, str]:
    """Return a sample's labels by name."""
    return dict(zip(BY_NAME[sample.metric].labels, sample.labels, strict=True))
