"""Who a training process is: run, rank, job, process. Read from the environment and /proc, once."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from gpuwatch.errors import NoData
from gpuwatch.host.proc import start_ticks as read_start_ticks

MAX_NAME = 128

_RANK = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_LOCAL_RANK = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
_WORLD_SIZE = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_LOCAL_WORLD_SIZE = ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE")


class Identity(msgspec.Struct, frozen=True):
    """What names a process among all others, and its place in a distributed run."""

    run: str
    """Unique, shared by all ranks of a run."""
    job: str
    """The scheduler's job id, empty without one."""
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    pid: int
    process_start_ticks: int
    """Start of the process in clock ticks since boot (/proc/PID/stat field 22); 0 where not known."""
    pid_namespace: int
    """Inode of the pid namespace; 0 where not known."""
    boot_id: str
    host: str


def identify(
    environ: Mapping[str, str] = os.environ, procfs: Path = Path("/proc"), launcher: int | None = None
) -> Identity:
    """Return who this process is.

    `run` is GPUWATCH_RUN, else the scheduler's or torchelastic's id, else what the ranks of a node share by the process that launched
    them (torchrun, or the parent whose pid is `launcher`), else host + pid + start time.
    Source: the environment; /proc/self/stat, proc(5).
    """
    host = socket.gethostname()
    start_ticks = _start_ticks(procfs)
    job = environ.get("SLURM_JOB_ID", "") or environ.get("PBS_JOBID", "") or environ.get("LSB_JOBID", "")
    world_size = max(1, _integer(environ, _WORLD_SIZE, 1))
    return Identity(
        run=(
            _declared_run(environ)
            or _launched_run(environ, host, procfs, launcher)
            or f"{host}-{os.getpid()}-{start_ticks}"
        )[:MAX_NAME],
        job=job[:MAX_NAME],
        rank=_integer(environ, _RANK, 0),
        local_rank=_integer(environ, _LOCAL_RANK, 0),
        world_size=world_size,
        local_world_size=max(1, _integer(environ, _LOCAL_WORLD_SIZE, 1)),
        pid=os.getpid(),
        process_start_ticks=start_ticks,
        pid_namespace=_inode(procfs / "self/ns/pid"),
        boot_id=_text(procfs / "sys/kernel/random/boot_id"),
        host=host[:MAX_NAME],
    )


def is_declared(environ: Mapping[str, str]) -> bool:
    """Whether the environment names the run, the same for all ranks on all nodes."""
    return bool(_declared_run(environ))


def script_name() -> str:
    """Return a name for a run that was given none: the script's, e.g. "train.py"."""
    name = Path(sys.argv[0]).name if sys.argv and sys.argv[0] else ""
    return name[:MAX_NAME] if name not in ("", "-c", "-m") else "python"


def _declared_run(environ: Mapping[str, str]) -> str:
    if declared := environ.get("GPUWATCH_RUN", "").strip():
        return declared
    if slurm := environ.get("SLURM_JOB_ID"):
        step = environ.get("SLURM_STEP_ID")
        return f"slurm-{slurm}" + (f".{step}" if step else "")
    elastic = environ.get("TORCHELASTIC_RUN_ID", "")
    return f"elastic-{elastic}" if elastic not in ("", "none") else ""


def _launched_run(environ: Mapping[str, str], host: str, procfs: Path, launcher: int | None) -> str:
    """Return the id that the ranks of one node share by their parent: torchrun, which by default names no run, or `launcher`.

    Several worlds of one parent differ in their port. Nothing tells two nodes that they belong together.
    """
    if "TORCHELASTIC_RUN_ID" in environ and _integer(environ, _WORLD_SIZE, 1) > 1:
        parent = os.getppid()
        return f"{host}-{parent}-{_start_ticks(procfs, str(parent))}"
    if launcher is None:
        return ""
    port = environ.get("MASTER_PORT", "")
    return f"{host}-{launcher}-{_start_ticks(procfs, str(launcher))}" + (f"-{port}" if port.isdigit() else "")


def _integer(environ: Mapping[str, str], names: tuple[str, ...], default: int) -> int:
    for name in names:
        value = environ.get(name, "")
        if value.isdigit():
            return int(value)
    return default


def _start_ticks(procfs: Path, process: str = "self") -> int:
    try:
        return read_start_ticks(process, procfs)
    except NoData:
        return 0


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:
        return 0


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
