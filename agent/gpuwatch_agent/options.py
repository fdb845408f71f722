"""How an agent is started, as `gpuwatch agent` and its configuration file say."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from gpuwatch.alerting.thresholds import AlertThresholds, Prices
from gpuwatch.config import NotifySettings, StackSettings
from gpuwatch.diagnosis.thresholds import THRESHOLDS, Thresholds


@dataclass(frozen=True)
class Roots:
    """Where the kernel's file systems are: other places in a container or a test."""

    procfs: Path = Path("/proc")
    sysfs: Path = Path("/sys")
    shm: Path = Path("/dev/shm")


@dataclass(frozen=True)
class Choice:
    """What an agent is to collect beyond the usual."""

    full: bool = False
    """Every series there is: those of each core, say."""
    dcgm_url: str | None = None
    """A dcgm-exporter on this node, to be read instead of asking NVML a second time for the same."""


STANDARD = Choice()


@dataclass(frozen=True)
class Options:
    """How an agent is started; each is an option of `gpuwatch agent`."""

    http: str = "127.0.0.1:9478"
    listen: tuple[str, ...] = ()
    """Endpoints for hooks; empty: this user's socket (`endpoint.default_listen`)."""
    history: Path | None = None
    keep_days: float = 7.0
    keep_gib: float = 2.0
    full_hours: float = 24.0
    roots: Roots = field(default_factory=Roots)
    choice: Choice = STANDARD
    notify: NotifySettings = field(default_factory=NotifySettings)
    thresholds: Thresholds = THRESHOLDS
    alerts: AlertThresholds = field(default_factory=AlertThresholds)
    prices: Prices = field(default_factory=Prices)
    stacks: StackSettings = field(default_factory=StackSettings)


def default_history() -> Path:
    """Return where the history is kept by default: below XDG_STATE_HOME, for root /var/lib/gpuwatch."""
    if state := os.environ.get("XDG_STATE_HOME"):
        return Path(state) / "gpuwatch" / "history.db"
    if os.getuid() == 0:
        return Path("/var/lib/gpuwatch/history.db")
    return Path.home() / ".local" / "state" / "gpuwatch" / "history.db"
