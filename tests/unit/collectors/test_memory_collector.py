from __future__ import annotations

import pytest

from gpuwatch.errors import NoData
from gpuwatch_agent.collectors.memory import MemoryCollector, parse_meminfo


def test_values(node, values):
    assert values(MemoryCollector(node)) == {
        ("gpuwatch_memory_total_bytes",): 131898840 * 1024,
        ("gpuwatch_memory_available_bytes",): 96214012 * 1024,
    }


def test_a_kernel_that_does_not_estimate_what_is_available():
    assert parse_meminfo("MemTotal: 4 kB\nMemFree: 1 kB\n") == {"MemTotal": 4096}


def test_no_file(bare, values):
    with pytest.raises(NoData, match="meminfo does not exist"):
        values(MemoryCollector(bare))


def test_neither_entry(bare, values):
    bare.procfs.mkdir()
    (bare.procfs / "meminfo").write_text("MemFree: 1 kB\n")
    with pytest.raises(NoData, match="neither MemTotal nor MemAvailable"):
        values(MemoryCollector(bare))


@pytest.mark.parametrize("text", ["MemTotal: 4 MB\n", "MemTotal:\n", "MemTotal: four kB\n"])
def test_odd_text(text):
    with pytest.raises(ValueError):
        parse_meminfo(text)
