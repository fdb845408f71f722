from __future__ import annotations

from functools import partial

import pytest

from gpuwatch.errors import NoData
from gpuwatch_agent.collectors.node import load, parse_loadavg


def test_values(node, values):
    assert values(partial(load, node)) == {("gpuwatch_load1",): 6.21, ("gpuwatch_procs_running",): 9}


def test_no_file(bare, values):
    with pytest.raises(NoData, match="loadavg does not exist"):
        values(partial(load, bare))


@pytest.mark.parametrize("text", ["0.20 0.18 0.12", "0.20 0.18 0.12 80 11206", "a b c 1/80 1"])
def test_odd_text(text):
    with pytest.raises(ValueError):
        parse_loadavg(text)


def test_an_empty_file_is_no_data():
    with pytest.raises(NoData):
        parse_loadavg("\n")
