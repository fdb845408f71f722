"""What holds for every collector."""

from __future__ import annotations

from gpuwatch.metrics import check
from gpuwatch_agent.collectors import build


def test_every_collector_is_listed_once(node):
    names = [collector.name for collector in build(node)]
    assert names == [
        "cpu",
        "load",
        "pressure",
        "memory",
        "shm",
        "disk",
        "network",
        "infiniband",
        "agent_process",
        "gpu",
    ]


def test_samples_are_as_the_catalogue_has_them(node):
    """On the fixture node, of every collector but the GPUs', no series comes twice and every label is there."""
    samples = [s for c in build(node) if c.name != "gpu" for s in check(iter(c.collect()))]
    series = [(sample.metric, sample.labels) for sample in samples]
    assert len(series) == len(set(series)) == 39
