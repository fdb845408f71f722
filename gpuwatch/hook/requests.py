"""What `gpuwatch trace` and `gpuwatch stacks` ask of a training process, and its answers: files in its user's folder.

Nothing listens: the background thread looks for a request twice a second, and reads those of the process's own user.
"""

import fcntl
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from gpuwatch.errors import GpuwatchError
from gpuwatch.hook.recorder import Failed, Recorder
from gpuwatch.hook.torch.patches import Patches
from gpuwatch.host.frames import stacks
from gpuwatch.host.proc import own_number

_TAKEN_S = 5.0
_NOT_ALLOWED = "traces are not allowed: start the run with gpuwatch run --trace, GPUWATCH_TRACE=1 or Watch(trace=True)"


class Request(msgspec.Struct):
    pid: int  # of the process, as it is for who asks
    steps: Annotated[int, Meta(ge=0, le=1000)] = 0  # a trace of so many steps; 0: samples of all threads' stacks
    seconds: Annotated[float, Meta(gt=0, le=600)] = 5.0
    rate_hz: Annotated[float, Meta(ge=1, le=1000)] = 50.0


class Requests:
    """The process's side. The training thread calls `at_step`, the background thread `check`."""

    def __init__(self, recorder: Recorder, may_trace: bool, failed: Failed) -> None:
        self._recorder, self._may_trace, self._failed = recorder, may_trace, failed
        self._files = f"/tmp/gpuwatch-{os.getuid()}/{os.getpid()}"
        self._steps_left = 0  # of the trace that was asked for
        self._profiler: Any = None  # while it is taken
        self._patches = Patches()

    def check(self) -> None:
        """Take a request, if there is one. A link or a pipe is none, nor is another user's file or folder."""
        path, own = f"{self._files}.request", os.getuid()
        try:
            with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
                if {os.fstat(file.fileno()).st_uid, Path(path).parent.lstat().st_uid} != {own}:
                    return
                text = file.read(4096)
            Path(path).unlink()
        except OSError:
            return
        request = msgspec.json.decode(text, type=Request)
        if not request.steps:
            threading.Thread(target=self._answer, args=(lambda path: self._sample(request, path),), daemon=True).start()
        elif self._may_trace:
            self._steps_left = request.steps
        else:
            self._refuse(_NOT_ALLOWED)

    def at_step(self) -> None:
        """Begin the trace asked for, count its step or end it. Called between two steps, any two while one is taken."""
        if not self._steps_left:
            return
        try:
            if self._profiler is None:
                torch = sys.modules["torch"]
                if torch.autograd._profiler_enabled():
                    raise RuntimeError("the program's own profiler is running")
                self._profiler, self._patches = torch.profiler.profile(), Patches()
                self._profiler.start()
                for name in ("_prepare_profiler", "_enable_profiler"):
                    self._patches.wrap(torch.autograd.profiler, name, self._give_way)
            else:
                self._steps_left -= 1
            self._recorder.leave_steady()
            self._recorder.sample_after(1)
            if not self._steps_left:
                self.end_trace()
        except Exception as error:
            self._steps_left, self._profiler = 0, None
            self._refuse(f"torch's profiler failed: {error!r}")

    def end_trace(self, at_end: bool = False) -> None:
        """Stop the trace, if one is taken, and write it: in a thread, but at the run's end."""
        profiler, asked, self._profiler, self._steps_left = self._profiler, self._steps_left, None, 0
        self._patches.restore()
        if profiler is not None:
            profiler.stop()
            if profiler.profiler.kineto_results is None:  # torch ends the process when that is written
                raise RuntimeError("it was ended by another profile")
            writing = threading.Thread(target=self._answer, args=(profiler.export_chrome_trace,), daemon=True)
            writing.run() if at_end else writing.start()
        elif asked:
            self._refuse("the run has ended, before its next step")

    def end_run(self, in_training_thread: bool) -> None:
        """The run ends: who has asked for a trace gets it, or why there is none."""
        try:
            if in_training_thread or self._profiler is None:  # a profiler is ended by the thread that began it
                self.end_trace(at_end=True)
            else:
                self._steps_left = 0
                self._refuse("the run was ended by another thread")
        except Exception as error:
            self._refuse(f"torch's profiler failed: {error!r}")

    def _give_way(self, begin: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """End the trace, as the program's own profile begins: torch can take only one at a time."""
        try:
            self.end_trace()
            if begin.__name__ == "_enable_profiler":  # what was prepared before the trace began is gone
                sys.modules["torch"].autograd.profiler._prepare_profiler(*args, **kwargs)
        except Exception as error:
            self._refuse(f"torch's profiler failed: {error!r}")
        return begin(*args, **kwargs)

    def _refuse(self, why: str) -> None:
        self._answer(_refusal(why))

    def _answer(self, write: Callable[[str], object]) -> None:
        """Write an answer, under another name at first: who waits for it gets it whole."""
        try:
            self._write(write)
        except Exception as error:
            with suppress(OSError):  # in the place of what was written of it: on a full disk there is no other
                self._write(_refusal(f"no answer: {error}"))
            self._failed("answering a request", error)

    def _write(self, write: Callable[[str], object]) -> None:
        write(f"{self._files}.writing")
        Path(f"{self._files}.writing").replace(f"{self._files}.answer")

    def _sample(self, request: Request, path: str) -> None:
        """Write samples of all other threads' stacks in speedscope's format, named as py-spy names them."""
        frames: dict[tuple[str, str, int], int] = {}
        samples: dict[int, list[list[int]]] = {}
        end_s = time.monotonic() + request.seconds
        while time.monotonic() < end_s:
            for thread, stack in stacks().items():
                numbers = [frames.setdefault(each, len(frames)) for each in reversed(stack)]
                samples.setdefault(thread, []).append(numbers)
            time.sleep(1 / request.rate_hz)
        names = {each.ident: each.name for each in threading.enumerate()}
        names[threading.main_thread().ident] = "MainThread"  # whatever the program calls it
        profiles = [
            {"type": "sampled", "name": f'Process {request.pid} Thread {thread} "{names.get(thread, "")}"', "unit": "none",
             "startValue": 0, "endValue": len(taken), "samples": taken, "weights": [1] * len(taken)}
            for thread, taken in samples.items()
        ]  # fmt: skip
        found = {
            "$schema": "https://www.speedscope.app/file-format-schema.json",
            "shared": {"frames": [{"name": name, "file": file, "line": line} for name, file, line in frames]},
            "profiles": profiles,
        }
        Path(path).write_bytes(msgspec.json.encode(found))


def _refusal(why: str) -> Callable[[str], object]:
    return lambda path: Path(path).write_bytes(msgspec.json.encode({"error": why}))


def ask(pid: int, **wanted: Any) -> bytes:
    """Return a process's answer to a request with these fields, after all earlier ones. Raises: GpuwatchError."""
    process = Path(f"/proc/{pid}")
    try:
        with (process / "comm").open() as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)  # one request at a time: else one gets the answer to the other's
            uid = process.stat().st_uid
            is_here = (process / "ns/mnt").stat().st_ino == Path("/proc/self/ns/mnt").stat().st_ino
            folder = Path("/" if is_here else process / "root") / f"tmp/gpuwatch-{uid}"
            if not folder.exists():
                folder.mkdir(mode=0o700)
                os.chown(folder, uid, -1)
            if folder.lstat().st_uid != uid:
                raise GpuwatchError(f"{folder} belongs to another user")
            request, answer = (folder / f"{own_number(pid)}.{kind}" for kind in ("request", "answer"))
            asking = request.with_suffix(".asking")
            for each in (request, answer, asking):
                each.unlink(missing_ok=True)
            with os.fdopen(os.open(asking, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                os.fchown(file.fileno(), uid, -1)
                file.write(msgspec.json.encode(Request(pid, **wanted)))
            asking.replace(request)
            until_s = time.monotonic() + _TAKEN_S
            while not answer.exists():
                if request.exists() and time.monotonic() > until_s:
                    request.unlink(missing_ok=True)
                    raise GpuwatchError(f"pid {pid} does not answer: this gpuwatch version watches no training in it")
                if not process.exists() and not answer.exists():
                    raise GpuwatchError(f"pid {pid} has ended")
                time.sleep(0.1)
            with os.fdopen(os.open(answer, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
                text = file.read()
            answer.unlink()
    except OSError as error:
        do = "; run this as its user, or as root" if isinstance(error, PermissionError) else ""
        raise GpuwatchError(f"pid {pid} cannot be reached: {error.strerror}: {error.filename}{do}") from error
    if text.startswith(b'{"error":'):
        raise GpuwatchError(f"pid {pid}: {msgspec.json.decode(text)['error']}")
    return text
