"""What holds for every collector."""

from __future__ import annotations

import re
from pathlib import Path

import gpuwatch_agent.collectors as package
from gpuwatch_agent.collectors import build, gpu_source
from tests.catalogue import check

OF_GPUS = {"gpu"}
"""One of these runs, by what the node has."""


def test_every_collector_of_the_folder_runs(node):
    sources = [path.read_text() for path in Path(package.__file__).parent.glob("*.py")]
    classes = r"^class (?!Driver)(\w+)Collector:"
    functions = r"^def (\w+)\(roots: Roots\) -> Iterable\[Sample\]:"
    declared = [
        found.lower() for text in sources for each in (classes, functions) for found in re.findall(each, text, re.M)
    ]
    built, expected = {collector.name for collector in build(node, gpu_source(node))}, {*declared} - OF_GPUS | {"gpu"}
    assert expected - built == set(), (
        "add the collector to READS in agent/gpuwatch_agent/collectors/node.py, or to build() in its __init__.py"
    )
    assert built - expected == set(), (
        "the collector is in READS, but its signature is not `def name(roots: Roots) -> Iterable[Sample]:`, or it is in "
        "build(), but it is not a class called …Collector"
    )
    assert len(build(node, gpu_source(node))) == len(built) >= 9


def test_every_collector_has_its_row_in_the_docs(node):
    """By the words of the table; the agent's own process is no source of its own."""
    words = {
        "gpu": "NVIDIA GPUs",
        "amd": "AMD GPUs",
        "dcgm": "dcgm-exporter",
        "shm": "/dev/shm",
        "infiniband": "InfiniBand",
    }
    table = (Path(__file__).parents[3] / "docs/deploy/agent.md").read_text().split("**NVML in tiers")[0].lower()
    names = {collector.name for collector in build(node, gpu_source(node))} - {"agent_process"}
    assert [name for name in sorted(names) if words.get(name, name).lower() not in table] == [], "docs/deploy/agent.md"


def test_samples_are_as_the_catalogue_has_them(node):
    """On the fixture node every collector but the GPUs' has samples, no series comes twice and every label is there."""
    found = {c.name: list(check(iter(c.collect()))) for c in build(node, gpu_source(node)) if c.name != "gpu"}
    series = [(sample.metric, sample.labels) for samples in found.values() for sample in samples]
    assert all(found.values()) and len(series) == len(set(series)) >= 37
