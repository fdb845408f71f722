"""Run py-spy on a process and its children. It only reads their memory: they are not stopped, and need nothing installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuwatch.errors import GpuwatchError, MissingExtra
from gpuwatch.tools.stacks.profile import read_profile
from gpuwatch.tools.stacks.records import ProcessStacks, Stacks

_SLACK_S = 30.0
"""py-spy reads the symbols of every process first, which takes a while on a busy node."""


@dataclass(frozen=True)
class Target:
    """A training process, by its number in this pid namespace, and where its flame graph goes."""

    rank: int
    pid: int
    flame_graph: Path | None = None


def find_py_spy() -> Path:
    """Return the program. Raises: MissingExtra with the pip line."""
    beside = Path(sys.executable).with_name("py-spy")
    found = str(beside) if beside.exists() else shutil.which("py-spy")
    if found is None:
        raise MissingExtra("py-spy", "stacks")
    return Path(found)


def check_readable(pid: int, procfs: Path = Path("/proc")) -> None:
    """Raise GpuwatchError, with the remedy, where a process is gone or its memory may not be read.

    Opening /proc/PID/mem asks for the same right as py-spy does (PTRACE_MODE_ATTACH, ptrace(2)); py-spy itself says only that it
    found no Python there.
    """
    try:
        with (procfs / str(pid) / "mem").open("rb"):
            pass
    except FileNotFoundError as error:
        raise GpuwatchError(f"pid {pid} is gone: stacks are of a run that lives") from error
    except PermissionError as error:
        raise GpuwatchError(f"the memory of pid {pid} may not be read; {_remedy(procfs)}") from error
    except OSError as error:
        raise GpuwatchError(f"the memory of pid {pid} cannot be read: {error.strerror}") from error


def take(targets: Sequence[Target], seconds: float, rate_hz: int) -> Stacks:
    """Look at all targets at once for so long, and return where they stood.

    Raises: GpuwatchError where none of them can be looked at; MissingExtra.
    """
    program = find_py_spy()
    for target in targets:
        check_readable(target.pid)
    begun_s = time.time()
    with tempfile.TemporaryDirectory(prefix="gpuwatch-stacks-") as folder:
        files = [Path(folder) / f"{index}.json" for index in range(len(targets))]
        spies = [
            subprocess.Popen(
                _command(program, target.pid, seconds, rate_hz, file),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for target, file in zip(targets, files, strict=True)
        ]
        said = [_wait(spy, seconds + _SLACK_S) for spy in spies]
        processes: list[ProcessStacks] = []
        graphs: list[str] = []
        for target, file in zip(targets, files, strict=True):
            if not file.exists():
                continue
            processes += read_profile(file.read_bytes(), target.pid, target.rank)
            if target.flame_graph is not None:
                _keep(file, target.flame_graph)
                graphs.append(str(target.flame_graph))
    if not processes:
        reason = next(
            (line for text in said for line in text.splitlines() if line.startswith("Error:")), "it found nothing"
        )
        raise GpuwatchError(f"py-spy {reason.removeprefix('Error: ')!r}: is pid {targets[0].pid} a Python program?")
    return Stacks(begun_s, seconds, rate_hz, tuple(processes), tuple(graphs))


def _command(program: Path, pid: int, seconds: float, rate_hz: int, file: Path) -> list[str]:
    # --nonblocking: the training is not stopped for a look. --idle: what waits is what is looked for.
    return [
        str(program), "record", "--pid", str(pid), "--subprocesses", "--threads", "--idle", "--nonblocking",
        "--format", "speedscope", "--rate", str(rate_hz), "--duration", str(max(1, round(seconds))), "--output", str(file),
    ]  # fmt: skip


def _wait(spy: subprocess.Popen[str], timeout_s: float) -> str:
    """Return what py-spy said; one that does not end is ended."""
    try:
        return spy.communicate(timeout=timeout_s)[1]
    except subprocess.TimeoutExpired:
        spy.kill()
        return spy.communicate()[1]
    except BaseException:
        spy.kill()
        raise


def _keep(file: Path, place: Path) -> None:
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, place)
    except OSError as error:
        raise GpuwatchError(f"{place}: {error.strerror}; choose a folder that you may write to") from error


def _remedy(procfs: Path) -> str:
    """Return what would permit it here."""
    try:
        scope = (procfs / "sys/kernel/yama/ptrace_scope").read_text().strip()
    except OSError:
        scope = "0"
    ways = ["run it as root (sudo)", "in a container start it with --cap-add SYS_PTRACE (and the agent with pid: host)"]
    if scope == "1":
        ways.append("or, for your own processes, sysctl kernel.yama.ptrace_scope=0")
    return "; ".join(ways)
