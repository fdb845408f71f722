from __future__ import annotations

import dataclasses
import errno
from functools import partial
from pathlib import Path

import pytest

from gpuwatch.errors import NoData
from gpuwatch.host import proc
from gpuwatch.host.proc import parse_pressure
from gpuwatch_agent.collectors.node import pressure


def test_values(node, values):
    assert values(partial(pressure, node)) == {
        ("gpuwatch_pressure_cpu_waiting_seconds_total",): 14.036781,
        ("gpuwatch_pressure_io_waiting_seconds_total",): 2.965216,
        ("gpuwatch_pressure_io_stalled_seconds_total",): 2.747136,
        ("gpuwatch_pressure_memory_waiting_seconds_total",): 0.80025,
        ("gpuwatch_pressure_memory_stalled_seconds_total",): 0.000003,
    }


def test_a_resource_that_is_missing_leaves_the_others(node, values, tmp_path):
    (tmp_path / "pressure").mkdir()
    (tmp_path / "pressure" / "cpu").write_text("some avg10=0.00 avg60=0.00 avg300=0.00 total=1500000\n")
    roots = dataclasses.replace(node, procfs=tmp_path)
    assert values(partial(pressure, roots)) == {("gpuwatch_pressure_cpu_waiting_seconds_total",): 1.5}


def test_no_file(bare, values):
    with pytest.raises(NoData, match="psi=1"):
        values(partial(pressure, bare))


def test_switched_off_at_boot(node, values, monkeypatch):
    """With psi=0 the files are there, and opening one gives EOPNOTSUPP."""

    def refuse(path: Path, **_: object) -> str:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported", str(path))

    monkeypatch.setattr(proc, "text_in", refuse)
    with pytest.raises(NoData, match="psi=1"):
        values(partial(pressure, node))


def test_another_failure_is_one(node, values, monkeypatch):
    def refuse(path: Path, **_: object) -> str:
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(proc, "text_in", refuse)
    with pytest.raises(OSError, match="Input/output error"):
        values(partial(pressure, node))


def test_odd_text():
    with pytest.raises(ValueError, match=r"avg10=0\.00"):
        parse_pressure("some avg10=0.00\n")
