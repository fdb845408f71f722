"""How many processes on the GPUs no hook reports."""

from __future__ import annotations

from pathlib import Path

from gpuwatch_agent.gpus import GpuReading
from gpuwatch_agent.gpus.readings import without_hook
from gpuwatch_agent.processes import ProcessTable


def process(procfs: Path, pid: int, parent: int) -> None:
    (procfs / str(pid)).mkdir(parents=True)
    (procfs / str(pid) / "stat").write_text(f"{pid} (a ) b) S {parent} " + "0 " * 40)


def test_hooks_processes_and_their_children_do_not_count(tmp_path: Path) -> None:
    for pid, parent in ((10, 1), (11, 10), (12, 11), (20, 1), (30, 2)):
        process(tmp_path, pid, parent)
    table = ProcessTable(tmp_path)
    readings = [GpuReading("0", "GPU-a", (10, 11, 12, 20), 0.5), GpuReading("1", "GPU-b", (20, 99), 0.5)]
    assert without_hook(readings, {10}, table) == 2  # 20 on both GPUs, and one that is not visible
    assert without_hook(readings, {10, 20, 99}, table) == 0
    assert without_hook([GpuReading("0", "GPU-a", None, 0.5)], {10}, table) is None
    assert without_hook([], {10}, table) is None
