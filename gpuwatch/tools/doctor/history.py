"""Where the agent keeps its history: can it be written, and is there room."""

from __future__ import annotations

from pathlib import Path

from gpuwatch.tools.doctor.outcome import Outcome, ok, problem, skipped, warning
from gpuwatch.tools.doctor.surroundings import Surroundings
from gpuwatch.tools.doctor.web import is_local

_MIB, _GIB = 1 << 20, 1 << 30
_LEAST, _ENOUGH = 100 * _MIB, 2 * _GIB
"""The history is kept below 2 GiB unless told."""


def history(around: Surroundings) -> Outcome:
    """The history file of the agent that answers, else of the one that this user would start."""
    status = around.agent().status if is_local(around.agent_url) else None
    kept = None if status is None or status.history.path is None else status.history
    path = Path(kept.path) if kept is not None and kept.path else around.history
    if path is None:
        return skipped("no agent answers, and none can be started here", "pip install 'gpuwatch-training[agent]'")
    if kept is not None and kept.failures:
        return problem(f"{path}: {kept.failures} writes of the agent failed", "is its disk full or read-only? df -h")
    try:
        place = _nearest(path)
    except OSError as error:
        if kept:
            return skipped(f"{path} is written by the agent, and is not for this user to see")
        return problem(f"{path}: {error.strerror}", "gpuwatch agent --history FILE, or GPUWATCH_HISTORY=FILE")
    if not around.writes(place) and not kept:
        return problem(f"{path}: {place} cannot be written", "gpuwatch agent --history FILE, or GPUWATCH_HISTORY=FILE")
    if place != path and not place.is_dir():
        return problem(f"{path}: {place} is a file, not a folder", "gpuwatch agent --history FILE")
    size, used = around.space(place)
    free = size - used
    found = f"{path}, {free / _GIB:.3g} GiB free"
    if free < _LEAST:
        return problem(
            found, "make room: without it the agent's counters are held back; or gpuwatch agent --history FILE"
        )
    if free < _ENOUGH:
        return warning(found, "make room, or keep less: gpuwatch agent --keep-gib 0.5")
    return ok(found)


def _nearest(path: Path) -> Path:
    """Return the file, or the nearest folder above it that there is. Raises: OSError where this user may not look."""
    for place in (path, *path.parents):
        try:
            place.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        return place
    raise FileNotFoundError(2, "No such file or directory")
