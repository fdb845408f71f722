"""Everything that the checks look at, injected: a test gives trees and fakes, `here` gives this machine."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import gpuwatch
from gpuwatch.http import fetch
from gpuwatch.tools.doctor.deadline import Once
from gpuwatch.tools.doctor.nvml import NvmlFacts, read_nvml
from gpuwatch.tools.doctor.web import AgentView, Fetch, ask_agent
from gpuwatch.wire import endpoint

DISTRIBUTION = "gpuwatch-training"


@dataclass(frozen=True)
class Clocks:
    """Readings taken together, in seconds."""

    wall_s: float
    monotonic_s: float
    """CLOCK_MONOTONIC: stands still while the machine is suspended."""
    boot_s: float
    """CLOCK_BOOTTIME: does not."""


@dataclass(frozen=True, eq=False)
class Surroundings:
    """Where a check looks. Every callable may be called from any thread."""

    environ: Mapping[str, str]
    uid: int
    groups: frozenset[int]
    agent_url: str
    agent_wanted: bool
    """Whether somebody named the agent: one that is absent is a problem then."""
    page_port: int
    prometheus_url: str | None
    history: Path | None
    """Where an agent started by this user keeps its history. None without the agent extra."""
    procfs: Path
    sysfs: Path
    dev: Path
    shm: Path
    socket_directories: Sequence[Path]
    python: tuple[str, str]
    """The interpreter's version and path."""
    gpuwatch_version: str
    """Of the package that is imported."""
    version_of: Callable[[str], str | None]
    """The version of an installed distribution, None where it is not installed."""
    requirements: Callable[[], list[str]]
    """What the gpuwatch distribution requires, as in its metadata."""
    folder_of: Callable[[str], Path | None]
    """Where a package lies that is not imported for that; None where it is not installed."""
    nvml: Callable[[], NvmlFacts]
    agent: Callable[[], AgentView]
    fetch: Fetch
    clocks: Callable[[], Clocks]
    ntp: Callable[[], bool | None]
    """Whether the kernel counts its clock as synchronised. None where it does not tell."""
    limits: Callable[[int], tuple[int, int]]
    """(soft, hard) of a resource, as getrlimit(2)."""
    cores: Callable[[], int]
    """How many cores this process may be scheduled on."""
    space: Callable[[Path], tuple[int, int]]
    """(size, used) in bytes of the file system of a path. Raises: OSError."""
    reads: Callable[[Path], bool]
    """Whether a file of /proc can be read, or a link followed, by trying."""
    writes: Callable[[Path], bool]
    """Whether a file or folder may be written to."""


def here(
    agent_url: str, agent_wanted: bool, prometheus_url: str | None, history: Path | None, page_port: int
) -> Surroundings:
    """Return this machine, as this process sees it."""
    return Surroundings(
        environ=os.environ,
        uid=os.getuid(),
        groups=frozenset((os.getgid(), *os.getgroups())),
        agent_url=agent_url,
        agent_wanted=agent_wanted,
        page_port=page_port,
        prometheus_url=prometheus_url,
        history=history,
        procfs=Path("/proc"),
        sysfs=Path("/sys"),
        dev=Path("/dev"),
        shm=Path("/dev/shm"),
        socket_directories=endpoint.directories(),
        python=(platform.python_version(), sys.executable),
        gpuwatch_version=gpuwatch.__version__,
        version_of=_version_of,
        requirements=_requirements,
        folder_of=_folder_of,
        nvml=Once(read_nvml),
        agent=Once(lambda: ask_agent(agent_url, fetch, time.time)),
        fetch=fetch,
        clocks=_clocks,
        ntp=_ntp,
        limits=resource.getrlimit,
        cores=lambda: len(os.sched_getaffinity(0)),
        space=_space,
        reads=_reads,
        writes=lambda path: os.access(path, os.W_OK),
    )


def _version_of(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _requirements() -> list[str]:
    try:
        return metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return []


def _folder_of(package: str) -> Path | None:
    spec = find_spec(package)
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def _clocks() -> Clocks:
    return Clocks(time.time(), time.clock_gettime(time.CLOCK_MONOTONIC), time.clock_gettime(time.CLOCK_BOOTTIME))


def _ntp() -> bool | None:
    """Source: adjtimex(2), which only reads when asked with modes=0; the status word follows six longs."""
    timex = (ctypes.c_long * 64)()  # larger than any struct timex
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex))
    if state < 0:
        return None
    status = ctypes.c_int.from_buffer(timex, 5 * ctypes.sizeof(ctypes.c_long)).value
    return state != 5 and not status & 0x0040  # TIME_ERROR, STA_UNSYNC


def _space(path: Path) -> tuple[int, int]:
    status = os.statvfs(path)
    return status.f_blocks * status.f_frsize, (status.f_blocks - status.f_bavail) * status.f_frsize


def _reads(path: Path) -> bool:
    try:
        if path.is_symlink():
            path.readlink()
        else:
            path.read_bytes()
    except OSError:
        return False
    return True
