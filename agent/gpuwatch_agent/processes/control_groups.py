"""The limits and the pressure of each run's own control group: its container's, its job's. Versions 1 and 2.

A control group is given once, for the lowest rank in it. The root group is the node itself, which the collectors tell of.
Source: Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from gpuwatch.host.cgroup import kills_in
from gpuwatch.metrics import Sample
from gpuwatch_agent.collectors.pressure import parse_pressure
from gpuwatch_agent.processes import ProcessTable
from gpuwatch_agent.processes.cgroups import cgroup_paths
from gpuwatch_agent.runs import RUNNING, Run

_NO_LIMIT = 1 << 60
"""Version 1 says "no limit" by a number of pages that no machine has."""
_PRESSURE = {
    "cpu": "gpuwatch_run_pressure_cpu_waiting_seconds_total",
    "io": "gpuwatch_run_pressure_io_waiting_seconds_total",
    "memory": "gpuwatch_run_pressure_memory_waiting_seconds_total",
}


def group_samples(runs: Sequence[Run], table: ProcessTable, procfs: Path, sysfs: Path) -> Iterator[Sample]:
    """Yield the series of every control group that a run lives in."""
    told: set[tuple[str, str]] = set()
    for run in sorted(runs, key=lambda run: (run.run, run.rank)):
        pid = table.host_pid(run.hello) if run.status == RUNNING and run.hello is not None else None
        text = _read(procfs / str(pid) / "cgroup") if pid is not None else None
        if text is None:
            continue
        unified, controllers = cgroup_paths(text)
        key = (run.run, f"{unified} {controllers.get('memory')}")
        if key in told:
            continue
        told.add(key)
        labels = (run.run, str(run.rank))
        root = sysfs / "fs" / "cgroup"
        if "memory" in controllers:
            yield from _memory_v1(root / "memory", controllers["memory"], labels)
        elif unified is not None:
            yield from _memory_v2(root, unified, labels)
        if unified is not None:
            base = root / "unified" if (root / "unified").is_dir() else root
            yield from _pressure(base, unified, labels)


def _memory_v2(root: Path, path: str, labels: tuple[str, str]) -> Iterator[Sample]:
    limits = [int(text) for directory in _up(root, path) if (text := _word(directory / "memory.max")).isdigit()]
    if limits:
        yield Sample("gpuwatch_run_memory_limit_bytes", min(limits), labels)
    used = _word(root / path.lstrip("/") / "memory.current") if _within(path) else ""
    if used.isdigit():
        yield Sample("gpuwatch_run_memory_used_bytes", int(used), labels)
    yield from _kills(root, path, labels)


def _memory_v1(root: Path, path: str, labels: tuple[str, str]) -> Iterator[Sample]:
    texts = [_word(directory / "memory.limit_in_bytes") for directory in _up(root, path)]
    limits = [int(text) for text in texts if text.isdigit() and int(text) < _NO_LIMIT]
    if limits:
        yield Sample("gpuwatch_run_memory_limit_bytes", min(limits), labels)
    used = _word(root / path.lstrip("/") / "memory.usage_in_bytes") if _within(path) else ""
    if used.isdigit():
        yield Sample("gpuwatch_run_memory_used_bytes", int(used), labels)
    yield from _kills(root, path, labels)


def _kills(root: Path, path: str, labels: tuple[str, str]) -> Iterator[Sample]:
    kills = kills_in(root / path.lstrip("/")) if _within(path) else None
    if kills is not None:
        yield Sample("gpuwatch_run_oom_kills_total", kills, labels)


def _pressure(root: Path, path: str, labels: tuple[str, str]) -> Iterator[Sample]:
    for resource, metric in _PRESSURE.items() if _within(path) else ():
        text = _read(root / path.lstrip("/") / f"{resource}.pressure")
        try:
            total_s = parse_pressure(text or "").get("some")
        except ValueError:
            continue
        if total_s is not None:
            yield Sample(metric, total_s, labels)


def _up(root: Path, path: str) -> Iterator[Path]:
    """Yield a group's folder and those of the groups around it, the root left out: the least limit of all of them counts."""
    if _within(path):
        parts = PurePosixPath(path.lstrip("/")).parts
        for count in range(len(parts), 0, -1):
            yield root.joinpath(*parts[:count])


def _within(path: str) -> bool:
    """Return whether the path names a group that can be found here: not the root, not one beside our own cgroup namespace."""
    return path not in ("", "/") and ".." not in PurePosixPath(path).parts


def _word(path: Path) -> str:
    return (_read(path) or "").strip()


def _read(path: Path) -> str | None:
    """Return a kernel file's text; None for one that is not there, or that this kernel has switched off."""
    try:
        return path.read_text()
    except OSError:
        return None
