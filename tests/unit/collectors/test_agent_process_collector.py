from __future__ import annotations

from functools import partial

import pytest

from gpuwatch.errors import NoData
from gpuwatch.host.proc import PAGE_BYTES, stat
from gpuwatch_agent.collectors.node import agent_process


@pytest.fixture(autouse=True)
def cpu_time(monkeypatch):
    monkeypatch.setattr("time.process_time", lambda: 1.25)


def test_values(node, values):
    assert values(partial(agent_process, node)) == {
        ("gpuwatch_agent_cpu_seconds_total",): 1.25,
        ("gpuwatch_agent_resident_memory_bytes",): 15260 * PAGE_BYTES,
    }


def test_memory_is_absent_where_proc_does_not_have_the_agent(bare, values):
    assert values(partial(agent_process, bare)) == {
        ("gpuwatch_agent_cpu_seconds_total",): 1.25,
    }


def test_odd_text(tmp_path):
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "stat").write_text("91245\n")
    with pytest.raises(NoData, match="stat"):
        stat("self", tmp_path)
