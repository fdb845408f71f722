"""What holds for every collector."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tables import PAGES, sampled, written

import gpuwatch_agent.collectors as package
from gpuwatch.errors import NoData
from gpuwatch_agent.collectors import build, gpu_source, name_of
from gpuwatch_agent.collectors.node import COLLECTORS, agent_process
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
    built, expected = build(node, gpu_source(node)).keys(), {*declared} - OF_GPUS | {"gpu"}
    assert expected - built == set(), "add the collector to COLLECTORS in agent/gpuwatch_agent/collectors/node.py"
    assert built - expected == set(), (
        "the collector is in COLLECTORS, but it is neither `def name(roots: Roots) -> Iterable[Sample]:` nor a class "
        "called …Collector"
    )
    assert len(COLLECTORS) + 1 == len(built) >= 9


def test_the_table_in_the_docs_is_that_of_the_collectors():
    page = next(path for path in PAGES if path.name == "agent.md")
    assert written(page) == page.read_text(), "run `make golden`"
    assert [name for name in map(name_of, COLLECTORS) if f"| `{name}` |" not in page.read_text()] == []


def test_a_collector_that_names_no_source_is_refused():
    def silent(roots):
        """Return something of the node."""

    with pytest.raises(SystemExit, match="silent: its docstring does not begin with what it samples"):
        sampled(silent)


@pytest.mark.parametrize("collector", [each for each in COLLECTORS if each is not agent_process], ids=name_of)
def test_a_kernel_that_shows_nothing_is_no_data(bare, collector):
    with pytest.raises(NoData):
        list(build(bare, gpu_source(bare))[name_of(collector)]())


def test_samples_are_as_the_catalogue_has_them(node):
    """On the fixture node every collector but the GPUs' has samples, no series comes twice and every label is there."""
    found = {n: list(check(iter(collect()))) for n, collect in build(node, gpu_source(node)).items() if n != "gpu"}
    series = [(sample.metric, sample.labels) for samples in found.values() for sample in samples]
    assert all(found.values()) and len(series) == len(set(series)) >= 37
