from __future__ import annotations

import dataclasses
import shutil

import pytest

from gpuwatch.errors import NoData
from gpuwatch.host.proc import parse_cpu_times
from gpuwatch_agent.collectors.node import CpuCollector, never_back


def test_values(node, values):
    assert values(CpuCollector(node).collect) == {
        ("gpuwatch_cpu_seconds_total", "user"): 3018.54,
        ("gpuwatch_cpu_seconds_total", "nice"): 6.12,
        ("gpuwatch_cpu_seconds_total", "system"): 1119.22,
        ("gpuwatch_cpu_seconds_total", "idle"): 89790.04,
        ("gpuwatch_cpu_seconds_total", "iowait"): 35.52,
        ("gpuwatch_cpu_seconds_total", "irq"): 0.02,
        ("gpuwatch_cpu_seconds_total", "softirq"): 39.44,
        ("gpuwatch_cpu_seconds_total", "steal"): 0.44,
        ("gpuwatch_cpu_cores",): 3,  # cpu2 is offline
    }


def test_guest_time_is_counted_once():
    """100 ticks, all of them spent in a guest: user has them already."""
    times = parse_cpu_times("cpu  100 0 0 0 0 0 0 0 100 0\n", ticks_per_s=100)
    assert sum(times.seconds.values()) == 1.0


def test_modes_that_an_old_kernel_lacks_are_absent():
    assert parse_cpu_times("cpu  10 0 20 70\n", ticks_per_s=100).seconds == {
        "user": 0.1,
        "nice": 0.0,
        "system": 0.2,
        "idle": 0.7,
    }


def test_the_tick_is_the_systems():
    assert parse_cpu_times("cpu  301854 0 20 70\n", ticks_per_s=250).seconds["user"] == 301854 / 250


def test_a_small_step_back_is_held_and_a_large_one_passes():
    assert never_back({"idle": 100.0, "user": 50.0}, {"idle": 99.5, "user": 51.0}) == {"idle": 100.0, "user": 51.0}
    assert never_back({"idle": 100.0}, {"idle": 4.0}) == {"idle": 4.0}


def test_iowait_never_goes_back_between_turns(node, values, tmp_path):
    shutil.copy(node.procfs / "stat", tmp_path / "stat")
    collector = CpuCollector(dataclasses.replace(node, procfs=tmp_path))
    values(collector.collect)
    text = (tmp_path / "stat").read_text()
    (tmp_path / "stat").write_text(text.replace("8979004 3552", "8979100 3500", 1))
    second = values(collector.collect)
    assert second["gpuwatch_cpu_seconds_total", "idle"] == 89791.00
    assert second["gpuwatch_cpu_seconds_total", "iowait"] == 35.52


def test_no_file(bare, values):
    with pytest.raises(NoData, match="stat does not exist"):
        values(CpuCollector(bare).collect)


def test_odd_text():
    with pytest.raises(NoData, match="no line of all CPUs"):
        parse_cpu_times("intr 1 2 3\n", ticks_per_s=100)
    with pytest.raises(ValueError, match="invalid literal"):
        parse_cpu_times("cpu  1 x 3\n", ticks_per_s=100)
