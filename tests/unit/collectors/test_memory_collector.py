from __future__ import annotations

from functools import partial

import pytest

from gpuwatch.errors import NoData
from gpuwatch_agent.collectors.node import memory


def test_values(node, values):
    assert values(partial(memory, node)) == {
        ("gpuwatch_memory_total_bytes",): 131898840 * 1024,
        ("gpuwatch_memory_available_bytes",): 96214012 * 1024,
    }


def test_no_file(bare, values):
    with pytest.raises(NoData, match="meminfo does not exist"):
        values(partial(memory, bare))


def test_no_total(bare, values):
    bare.procfs.mkdir()
    (bare.procfs / "meminfo").write_text("MemFree: 1 kB\n")
    with pytest.raises(NoData, match="no entry MemAvailable, MemTotal"):
        values(partial(memory, bare))


def test_odd_text(bare, values):
    bare.procfs.mkdir()
    (bare.procfs / "meminfo").write_text("MemTotal: four kB\n")
    with pytest.raises(ValueError):
        values(partial(memory, bare))
