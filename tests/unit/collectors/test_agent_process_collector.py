from __future__ import annotations

import pytest

from gpuwatch.errors import NoData
from gpuwatch.host.proc import resident_bytes
from gpuwatch_agent.collectors.node import AgentProcessCollector


def test_values(node, values):
    assert values(AgentProcessCollector(node, cpu_time_s=lambda: 1.25, page_bytes=4096)) == {
        ("gpuwatch_agent_cpu_seconds_total",): 1.25,
        ("gpuwatch_agent_resident_memory_bytes",): 15260 * 4096,
    }


def test_memory_is_absent_where_proc_does_not_have_the_agent(bare, values):
    assert values(AgentProcessCollector(bare, cpu_time_s=lambda: 1.25)) == {
        ("gpuwatch_agent_cpu_seconds_total",): 1.25,
    }


def test_odd_text(tmp_path):
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "statm").write_text("91245\n")
    with pytest.raises(NoData, match="statm"):
        resident_bytes("self", tmp_path)
