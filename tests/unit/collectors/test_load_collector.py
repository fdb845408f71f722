from __future__ import annotations

from functools import partial

import pytest

from gpuwatch.errors import NoData
from gpuwatch_agent.collectors.node import load


def test_values(node, values):
    assert values(partial(load, node)) == {("gpuwatch_load1",): 6.21, ("gpuwatch_procs_running",): 9}


def test_no_file(bare, values):
    with pytest.raises(NoData, match="loadavg does not exist"):
        values(partial(load, bare))


@pytest.mark.parametrize("text", ["\n", "0.20 0.18 0.12", "0.20 0.18 0.12 80 11206", "a b c 1/80 1"])
def test_odd_text(bare, values, text):
    bare.procfs.mkdir()
    (bare.procfs / "loadavg").write_text(text)
    with pytest.raises(ValueError):
        values(partial(load, bare))
