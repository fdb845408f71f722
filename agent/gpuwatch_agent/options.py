"""The agent's options, from `gpuwatch agent` and its configuration file."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from gpuwatch.alerting.thresholds import AlertThresholds, Prices
from gpuwatch.config import NotifySettings, StackSettings
from gpuwatch.diagnosis.thresholds import THRESHOLDS, Thresholds


@dataclass(frozen=True)
class Roots:
    """Mount points of the kernel's file systems; different in a container or a test."""

    procfs: Path = Path("/proc")
    sysfs: Path = Path("/sys")
    shm: Path = Path("/dev/shm")


@dataclass(frozen=True)
class Choice:
    """What an agent collects."""

    full: bool = False
    """All series, e.g. those of each core; else the standard set."""
    dcgm_url: str | None = None
    """A dcgm-exporter on this node, read instead of NVML."""
    allocations: Path = Path("/run/gpuwatch/allocations")
    """Where a scheduler's scripts put a file for each job that has GPUs."""
    pod_resources: Path = Path("/var/lib/kubelet/pod-resources/kubelet.sock")
    """The kubelet's list of devices."""


STANDARD = Choice()


@dataclass(frozen=True)
class Options:
    """The options of `gpuwatch agent`."""

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
    """Return the default history file: below XDG_STATE_HOME, for root in /var/lib/gpuwatch."""
    if state := os.environ.get("XDG_STATE_HOME"):
        return Path(state) / "gpuwatch" / "history.db"
    if os.getuid() == 0:
        return Path("/var/lib/gpuwatch/history.db")
    return Path.home() / ".local" / "state" / "gpuwatch" / "history.db"
