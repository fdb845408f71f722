"""What the agent reads, and where it keeps its history."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from gpuwatch.config import AgentSettings

DEFAULTS = AgentSettings()


@dataclass(frozen=True)
class Roots:
    """Mount points of the kernel's file systems; different in a container or a test."""

    procfs: Path = Path(DEFAULTS.procfs)
    sysfs: Path = Path(DEFAULTS.sysfs)
    shm: Path = Path(DEFAULTS.shm)


def default_history() -> Path:
    """Return the default history file: below XDG_STATE_HOME, for root in /var/lib/gpuwatch."""
    if state := os.environ.get("XDG_STATE_HOME"):
        return Path(state) / "gpuwatch" / "history.db"
    if os.getuid() == 0:
        return Path("/var/lib/gpuwatch/history.db")
    return Path.home() / ".local" / "state" / "gpuwatch" / "history.db"
