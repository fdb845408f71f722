"""Run py-spy on a process and its children, and reduce what it wrote to the user's line that each process was at.

py-spy only reads their memory: they are not stopped, and need nothing installed.

A user's line is the deepest frame that is neither Python's own nor an installed package's nor gpuwatch's. A forked
worker carries its parent's stack below its own: what lies below multiprocessing's `_bootstrap` is not the worker's.
Source: https://www.speedscope.app/file-format-schema.json; frames are listed from the outermost on.
"""

import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import msgspec

from gpuwatch.errors import GpuwatchError, MissingExtra, usable
from gpuwatch.hook.requests import ask
from gpuwatch.host.frames import is_users, may_be_users
from gpuwatch.tools.stacks.records import CHILD, TRAINING, WORKER, HotLine, ProcessStacks, Stacks

_SLACK_S = 30.0  # py-spy first reads the symbols of every process, which takes a while on a busy node
_LINES = 5
_REMEDY = (
    "run it as root (sudo); in a container start it with --cap-add SYS_PTRACE (and the agent with pid: host); "
    "or, for your own processes, sysctl kernel.yama.ptrace_scope=0"
)
_MAIN_THREAD = re.compile(r'^Process (\d+) Thread (?:\1 ".*"|\S+ "MainThread")$')  # its number is the process's


@dataclass(frozen=True)
class Target:
    """A training process, by its number in this pid namespace, and where its flame graph goes."""

    rank: int
    pid: int
    flame_graph: Path


def find_py_spy() -> Path:
    found = shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")
    if found is None:
        raise MissingExtra("py-spy", "stacks")
    return Path(found)


def check_readable(pid: int, procfs: Path = Path("/proc")) -> None:
    """Raise GpuwatchError, with the remedy, where a process is gone or its memory may not be read.

    Opening /proc/PID/mem needs the same permission as py-spy (PTRACE_MODE_ATTACH, ptrace(2)); py-spy's own error is
    only that it found no Python there.
    """
    try:
        with (procfs / str(pid) / "mem").open("rb"):
            pass
    except FileNotFoundError as error:
        raise GpuwatchError(f"pid {pid} is gone: stacks can be taken only while it runs") from error
    except OSError as error:
        raise GpuwatchError(f"the memory of pid {pid} may not be read ({error.strerror}); {_REMEDY}") from error


def _unreadable(pid: int) -> GpuwatchError | None:
    try:
        check_readable(pid)
    except GpuwatchError as error:
        return error
    return None


def take(targets: Sequence[Target], seconds: float, rate_hz: int) -> Stacks:
    """Sample all targets at once for this long. Raises: GpuwatchError where none of them can be read."""
    try:
        program: Path | None = find_py_spy()
    except MissingExtra:
        program = None  # each process samples itself
    unreadable = {each.pid: cause for each in targets if program is not None and (cause := _unreadable(each.pid))}
    if len(unreadable) == len(targets):  # before earlier graphs are replaced
        raise unreadable[targets[0].pid]
    for target in targets:
        place = target.flame_graph
        with usable(str(place), "choose a folder that you may write to"):
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(b"")

    def record(target: Target) -> str | GpuwatchError:
        """Return py-spy's error output, or why it was not asked; one that does not end is killed."""
        if program is None:
            try:
                target.flame_graph.write_bytes(ask(target.pid, seconds=seconds, rate_hz=rate_hz))
            except GpuwatchError as error:
                return error
            return ""
        if target.pid in unreadable:
            return unreadable[target.pid]
        # --nonblocking: the training is not stopped. --idle: waiting threads are of interest too.
        command = [
            str(program), "record", "--pid", str(target.pid), "--subprocesses", "--threads", "--idle", "--nonblocking",
            "--format", "speedscope", "--rate", str(rate_hz), "--duration", str(max(1, round(seconds))), "--output", str(target.flame_graph),
        ]  # fmt: skip
        try:
            timeout_s = seconds + _SLACK_S
            return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False).stderr
        except subprocess.TimeoutExpired:
            return "Error: did not end in time"

    begun_s = time.time()
    with ThreadPoolExecutor(len(targets)) as pool:
        failures = list(pool.map(record, targets))
    processes: list[ProcessStacks] = []
    failed: list[ProcessStacks] = []
    graphs: list[str] = []
    for target, failure in zip(targets, failures, strict=True):
        if text := target.flame_graph.read_bytes():
            processes += read_profile(text, target.pid, target.rank)
            graphs.append(str(target.flame_graph))
        else:
            target.flame_graph.unlink()
            why = f"not sampled: {_reason(failure)}"
            failed.append(ProcessStacks(target.rank, target.pid, TRAINING, 0, 0, (), 1.0, why))
    if not processes:
        if error := next((each for each in failures if isinstance(each, GpuwatchError)), None):
            raise error
        reason = _reason("\n".join(map(str, failures)))
        raise GpuwatchError(f"py-spy: {reason!r}: is pid {targets[0].pid} a Python program?")
    return Stacks(begun_s, seconds, rate_hz, (*processes, *failed), tuple(graphs))


def _reason(failure: str | GpuwatchError) -> str:
    if isinstance(failure, GpuwatchError):
        return str(failure)
    errors = (line.removeprefix("Error: ") for line in failure.splitlines() if line.startswith("Error:"))
    return next(errors, "found no stack")


class _Frame(msgspec.Struct):
    name: str
    file: str | None = None
    line: int | None = None

    @property
    def path(self) -> str:
        return self.file or ""


class _Shared(msgspec.Struct):
    frames: list[_Frame]


class _Profile(msgspec.Struct):
    name: str
    samples: list[list[int]]


class _File(msgspec.Struct):
    shared: _Shared
    profiles: list[_Profile]


_Stack = list[_Frame]  # one sample, cut to the process's own frames


def read_profile(text: bytes, pid: int, rank: int = 0) -> tuple[ProcessStacks, ...]:
    """Return a profile's main threads: of the training `pid`, then its workers, then others. Raises: GpuwatchError."""
    try:
        found = msgspec.json.decode(text, type=_File)
    except (msgspec.MsgspecError, ValueError) as error:
        raise GpuwatchError(f"py-spy's output is not a profile: {error}; is it py-spy 0.4 or later?") from error
    by_pid: dict[int, list[_Stack]] = {}
    for profile in found.profiles:
        if (named := _MAIN_THREAD.match(profile.name)) is not None:
            stacks = [_own([found.shared.frames[index] for index in sample]) for sample in profile.samples]
            by_pid.setdefault(int(named[1]), []).extend(stacks)
    result: list[ProcessStacks] = []
    for kind in (TRAINING, WORKER, CHILD):
        index = 0
        for each in sorted(each for each, stacks in by_pid.items() if _kind(each, pid, stacks) == kind):
            process = _process(rank, each, kind, index, by_pid[each])
            if kind != CHILD or process.lines:  # not multiprocessing's own helpers
                index += 1
                result.append(process)
    return tuple(result)


def _own(frames: _Stack) -> _Stack:
    """Return the frames that are the process's own; py-spy's headings of processes and threads have no file."""
    start = 0
    for index, frame in enumerate(frames):
        if not frame.file or (frame.name.endswith("_bootstrap") and frame.path.endswith("/multiprocessing/process.py")):
            start = index + 1
    return frames[start:]


def _kind(pid: int, training: int, stacks: Sequence[_Stack]) -> str:
    if pid == training:
        return TRAINING
    frames = (frame for stack in stacks for frame in stack)
    loops = any(frame.name.endswith("_worker_loop") and frame.path.endswith("/worker.py") for frame in frames)
    return WORKER if loops else CHILD


def _process(rank: int, pid: int, kind: str, index: int, stacks: Sequence[_Stack]) -> ProcessStacks:
    deepest = [_deepest(stack, is_users) for stack in stacks]
    if not any(deepest):  # an installed package may be the user's own
        deepest = [_deepest(stack, may_be_users) for stack in stacks]
    whole = max(1, len(stacks))
    users = [frame for frame in deepest if frame is not None]
    lines = Counter((frame.path, frame.line or 0, frame.name) for frame in users)
    functions = Counter((frame.path, frame.name) for frame in users)
    hottest = sorted(lines, key=lambda at: (-functions[at[0], at[2]], -lines[at], at))
    others = [stack[-1] for stack, frame in zip(stacks, deepest, strict=True) if frame is None and stack]
    elsewhere = Counter(f"{PurePosixPath(frame.path).name}:{frame.line or 0} {frame.name}" for frame in others)
    return ProcessStacks(
        rank=rank,
        pid=pid,
        kind=kind,
        index=index,
        samples=len(stacks),
        lines=tuple(
            HotLine(file, line, name, lines[file, line, name] / whole, functions[file, name] / whole)
            for file, line, name in hottest[:_LINES]
        ),
        elsewhere_ratio=1 - len(users) / whole,
        elsewhere=elsewhere.most_common(1)[0][0] if elsewhere else "",
    )


def _deepest(stack: _Stack, wanted: Callable[[str], bool]) -> _Frame | None:
    return next((frame for frame in reversed(stack) if wanted(frame.path)), None)
