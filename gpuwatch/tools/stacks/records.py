"""What a look at the stacks found, as plain records: in the API, in reports, in `gpuwatch stacks --json`. Ratios 0–1."""

from __future__ import annotations

import msgspec

TRAINING, WORKER, CHILD = "training", "worker", "child"


class HotLine(msgspec.Struct, frozen=True):
    """A line of the user's code, the deepest one on the stack when it was looked at."""

    file: str
    line: int
    function: str
    ratio: float
    """Share of the looks at its process in which that was where it stood."""
    function_ratio: float
    """The same for any line of the function."""


class ProcessStacks(msgspec.Struct, frozen=True):
    """The main thread of one process."""

    rank: int
    pid: int
    kind: str
    """training, worker (of a DataLoader) or child."""
    index: int
    """Workers are counted from 0 in the order of their pids."""
    looks: int
    lines: tuple[HotLine, ...]
    """The hottest first, five at most; empty where it never stood in the user's code."""
    elsewhere_ratio: float
    """Share of looks without a line of the user's on the stack: in libraries only, or waiting for work."""
    elsewhere: str = ""
    """Where it stood then most often, e.g. "selectors.py:415 PollSelector.select"."""


class Stacks(msgspec.Struct, frozen=True):
    """One look at a run's processes on one node."""

    time_s: float
    """Unix time of its begin."""
    seconds: float
    rate_hz: float
    processes: tuple[ProcessStacks, ...]
    flame_graphs: tuple[str, ...]
    """Files on the node where they were taken, one a rank: speedscope's format."""

    @property
    def workers(self) -> tuple[ProcessStacks, ...]:
        return tuple(each for each in self.processes if each.kind == WORKER)
