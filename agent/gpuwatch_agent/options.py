"""What the agent reads and serves, and where it keeps its history."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from gpuwatch.config import AgentSettings

_DEFAULTS = AgentSettings()


@dataclass(frozen=True)
class Roots:
    """Mount points of the kernel's file systems; different in a container or a test."""

    procfs: Path = Path(_DEFAULTS.procfs)
    sysfs: Path = Path(_DEFAULTS.sysfs)
    shm: Path = Path(_DEFAULTS.shm)


@dataclass(frozen=True)
class Choice:
    """What an agent collects."""

    full: bool = False
    """All series, e.g. those of each core; else the standard set."""
    dcgm_url: str | None = None
    allocations: Path = Path(_DEFAULTS.allocations)
    pod_resources: Path = Path(_DEFAULTS.pod_resources)


STANDARD = Choice()


def default_history() -> Path:
    """Return the default history file: below XDG_STATE_HOME, for root in /var/lib/gpuwatch."""
    if state := os.environ.get("XDG_STATE_HOME"):
        return Path(state) / "gpuwatch" / "history.db"
    if os.getuid() == 0:
        return Path("/var/lib/gpuwatch/history.db")
    return Path.home() / ".local" / "state" / "gpuwatch" / "history.db"
