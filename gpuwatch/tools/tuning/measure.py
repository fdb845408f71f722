"""Run a trial in a child process: start it, watch its memory, end it. What happens in it becomes a row of the table.

The child is forked, so that any function can be tried; has its own session, so that its workers can be ended with it;
is the first that the kernel kills when memory runs out; and dies with us.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import re
import signal
import tempfile
import time
import traceback
import warnings
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import BinaryIO

from gpuwatch.errors import ConfigError
from gpuwatch.formatting import size
from gpuwatch.hook.loader_health import OomKills
from gpuwatch.host.cgroup import folders, memory_room
from gpuwatch.host.proc import mapped_bytes, memory_bytes, optional, shm_bytes, stat
from gpuwatch.tools.tuning.result import Failed, FailureKind, Measured, Room, Setting, Usage
from gpuwatch.tools.tuning.target import Target, place_of
from gpuwatch.tools.tuning.trial import Plan, descendants, run_trial

_POLL_S = 0.02
_MEMORY_EVERY_S = 0.25
_END_WAIT_S = 2.0
_KEEP_FREE_RATIO, _KEEP_FREE_BYTES = 0.10, 2 * 1024**3
"""A trial that leaves less free than the smaller of the two, of memory or /dev/shm, is ended, whatever was forecast."""
_OUTPUT_KEPT = 4000
_PR_SET_PDEATHSIG = 1
_NO_SHM = re.compile(r"\b[Bb]us error|allocate shared memory|write to file </torch_")  # torch's words
_BUS_ERROR = "a worker was killed by a bus error: /dev/shm was full"


def room(shm: Path = Path("/dev/shm")) -> Room:
    """Return what is free now, within the memory limit of the container or the job."""
    node, limit, mount = optional(memory_bytes) or {}, memory_room(folders("memory")), optional(shm_bytes, shm)
    rooms = [(node["MemAvailable"], node["MemTotal"])] if "MemAvailable" in node else []
    rooms += [(limit.available_bytes, limit.limit_bytes)] if limit is not None else []
    found = {"memory": min(rooms)} if rooms else {}
    return found if mount is None else found | {"/dev/shm": (mount[0] - mount[1], mount[0])}


def measure(target: Target, setting: Setting, plan: Plan, cores: int) -> Measured | Failed:
    """Return the result of a trial. A KeyboardInterrupt propagates once the processes are gone."""
    kills = OomKills()
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryFile() as output, receiver:
        process = context.Process(target=_child, args=(target, setting, plan, cores, sender, output))
        with warnings.catch_warnings():
            # A fork of a process with threads, as every DataLoader makes:
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        sender.close()
        assert process.pid is not None
        watch = _Watch(process.pid)
        answer: Measured | Failed | None = None
        try:
            answer = _answer(receiver, watch, setting, plan)
        finally:
            _end(process, at_once=not isinstance(answer, Measured))
        if isinstance(answer, Measured):
            others = answer.others_cores if cores == os.cpu_count() else None  # else they may be on other cores
            return replace(answer, others_cores=others, usage=Usage(**watch.most))
        output.seek(max(0, output.seek(0, os.SEEK_END) - _OUTPUT_KEPT))
        printed = output.read().decode(errors="replace").strip()
        failed = answer or _ended(setting, process.exitcode or 0)
        kind, text = failed.kind, failed.text
        if kind == "killed" and kills.grown():
            kind, text = "out_of_memory", f"{text}: killed by the OOM killer"
        elif kind == "killed" and _NO_SHM.search(printed):
            kind, text = "bus_error", _BUS_ERROR
        return Failed(setting, kind, text, "\n".join(part for part in (failed.detail, printed) if part))


def _answer(receiver: Connection, watch: _Watch, setting: Setting, plan: Plan) -> Measured | Failed | None:
    """Return what the child sends; None where it ended without sending anything."""
    deadline = time.perf_counter() + plan.limit_s + 1.0  # it ends by itself, between two batches, at plan.limit_s
    while not receiver.poll(_POLL_S):
        for what, (free, total) in watch.sample().items():
            if free < min(_KEEP_FREE_RATIO * total, _KEEP_FREE_BYTES):
                text = f"ended to protect the host: {what} had {size(free)} of {size(total)} left"
                return Failed(setting, "host_protected", text)
        if time.perf_counter() >= deadline:
            return Failed(setting, "timeout", f"nothing measured within {plan.limit_s:.0f} s")
    try:
        answer: Measured | Failed = receiver.recv()
    except EOFError:
        return None
    watch.sample()
    return answer


class _Watch:
    """Samples what a trial takes; `most` is the most so far, by the fields of `Usage`."""

    def __init__(self, pid: int) -> None:
        self._pid, self._memory_due, self.most = pid, 0.0, dict[str, int]()
        self._shm = Path(f"/proc/{pid}/root/dev/shm")
        self._begun = room(self._shm)

    def sample(self) -> Room:
        free, now, used = room(self._shm), time.perf_counter(), dict[str, int]()
        if "/dev/shm" in free and "/dev/shm" in self._begun:
            used["shm_bytes"] = self._begun["/dev/shm"][0] - free["/dev/shm"][0]
        if now >= self._memory_due:
            (resident, private), *workers = map(_memory_of, (self._pid, *descendants(self._pid)))
            largest = max((own for _, own in workers), default=0)
            found = {"main_rss_bytes": resident, "main_private_bytes": private, "worker_private_bytes": largest}
            used |= {name: count for name, count in found.items() if count}
            self._memory_due = now + max(_MEMORY_EVERY_S, 20 * (time.perf_counter() - now))  # at most 5% of a core
        for name, count in used.items():
            self.most[name] = max(count, self.most.get(name, 0))
        return free


def _memory_of(pid: int) -> tuple[int, int]:
    """Return (resident, private) bytes of a process; 0 if it is gone or not ours."""
    sizes = optional(mapped_bytes, pid) or {}
    return sizes.get("Rss", 0), sum(sizes.get(name, 0) for name in ("Private_Clean", "Private_Dirty", "Swap"))


def _child(target: Target, setting: Setting, plan: Plan, cores: int, sender: Connection, output: BinaryIO) -> None:
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["GPUWATCH_DISABLE"] = "1"  # a watched loader would print a verdict on the trial
    warnings.simplefilter("ignore")  # DataLoader warns of more workers than cores
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    with suppress(OSError):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    try:
        run_trial(target, setting, plan, sender.send)
    except BaseException as error:
        sender.send(Failed(setting, *_failure_of(error), traceback.format_exc()))


def _failure_of(error: BaseException) -> tuple[FailureKind, str]:
    """Return what an exception in a trial means. DataLoader reports a worker's death only in the message."""
    message = str(error).strip()
    first = message.partition("\n")[0] or "no message"
    if isinstance(error, ConfigError):
        return "no_loader", message
    if _NO_SHM.search(message):
        return "bus_error", _BUS_ERROR
    if isinstance(error, MemoryError):
        return "killed", "out of memory"
    if "killed by signal" in message or "exited unexpectedly" in message:
        return "killed", first
    # A worker's exception arrives as text: its place is the last "File" line of its traceback.
    remote = [line.strip() for line in message.splitlines() if line.strip().startswith('File "')]
    place = remote[-1] if remote else place_of(error)
    last = message.splitlines()[-1] if remote else f"{type(error).__name__}: {first}"
    return "error", f"{last} ({place})" if place else last


def _ended(setting: Setting, exit_code: int) -> Failed:
    """Return the failure of a process that ended without a word."""
    if exit_code >= 0:
        return Failed(setting, "error", f"the loader's process ended with status {exit_code}")
    name = signal.Signals(-exit_code).name if -exit_code in set(signal.Signals) else f"signal {-exit_code}"
    kind: FailureKind = "bus_error" if name == "SIGBUS" else "killed"
    return Failed(setting, kind, f"the loader's process was killed by {name}")


def _end(process: BaseProcess, at_once: bool) -> None:
    """End a trial's process and all that it started, and wait for them."""
    assert process.pid is not None
    if not at_once:
        process.join(_END_WAIT_S)
    others = descendants(process.pid)
    process.kill()
    with suppress(ProcessLookupError, PermissionError):  # it had not reached setsid yet, or left none
        os.killpg(process.pid, signal.SIGKILL)  # its workers, which must not live on while its end is awaited
    process.join()
    deadline = time.perf_counter() + _END_WAIT_S
    while any(found.alive for pid in others if (found := optional(stat, pid))) and time.perf_counter() < deadline:
        time.sleep(0.01)
