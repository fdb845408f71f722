"""The metric catalogue, in `metrics.yml` beside this: every name that gpuwatch exports, once. Needs PyYAML (extras)."""

from typing import Literal

import msgspec

from gpuwatch.tables import table

Kind = Literal["counter", "gauge", "info"]
Unit = Literal["seconds", "bytes", "ratio", "watts", "joules", "celsius", "hertz", "timestamp", "count"]

When = Literal["always", "counted", "seen", "history", "full"]
"""Which series a node has. "counted" and "seen": on /metrics from their first count on, after a 0; before, the agent's
history has "seen" ones. "history": in its history and API alone. "full": nowhere. `--series full`: all, from 0 on."""


class Metric(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One metric family."""

    name: str  # as a query names it: with `_total` for counters and `_info` for info metrics
    kind: Kind
    unit: Unit
    help: str
    labels: tuple[str, ...] = ()
    when: When = "always"
    counter: str | None = None  # which of `wire.Counters` it is, where a hook counts it
    needs: str | None = None  # which of those must be above 0 for the metric to be served; None: it always is


class Sample(msgspec.Struct, frozen=True, gc=False):
    """One value of one series. `labels` are the values of the metric's labels, in the catalogue's order."""

    metric: str
    value: float
    labels: tuple[str, ...] = ()


RUN = ("run", "rank")
GPU = ("gpu", "UUID")
CATALOGUE = tuple(msgspec.convert({"name": key, **of}, Metric) for key, of in table("gpuwatch", "metrics.yml").items())
BY_NAME: dict[str, Metric] = {metric.name: metric for metric in CATALOGUE}


def labels_of(sample: Sample) -> dict[str, str]:
    """Return a sample's labels by name."""
    return dict(zip(BY_NAME[sample.metric].labels, sample.labels, strict=True))
