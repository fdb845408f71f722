"""What a check reads: this machine, its GPU driver and agent (tests inject folders and fakes); and what it returns."""

import contextlib
import os
import platform
import resource
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

import gpuwatch
from gpuwatch.api import Status
from gpuwatch.api.client import API_TOKEN, Reply, fetch, reason_of, remedy_of, why, without_password
from gpuwatch.wire import endpoint

DISTRIBUTION = "gpuwatch-training"
_NVML_DEADLINE_S = 2.0
_CONNECT_S = 0.5
T = TypeVar("T")
Fetch = Callable[[str], Reply]


@dataclass(frozen=True)
class Outcome:
    status: Literal["ok", "warning", "problem", "skipped"]
    found: str
    remedy: str | None = None  # one line; None where there is nothing to do
    group: str = ""
    name: str = ""


ok, skipped = partial(Outcome, "ok"), partial(Outcome, "skipped")
warning, problem = partial(Outcome, "warning"), partial(Outcome, "problem")
"""Of `found` and `remedy`. A warning: it could work better, or may soon fail. A problem: it does not work."""


def in_background(call: Callable[[], T]) -> Future[T]:
    """Start a call in a daemon thread and return its future: a call that hangs does not delay the program's exit."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


@dataclass(frozen=True)
class NvmlFacts:
    """The answers of NVML. Everything but `state` and `error` is empty unless `state` is "answers"."""

    state: Literal["answers", "no module", "no library", "not loaded", "mismatch", "hangs", "fails"]
    error: str = ""
    driver: str = ""
    cuda: tuple[int, int] | None = None  # the newest CUDA (major, minor) that the driver runs. None: unknown.
    gpus: tuple[tuple[str, str], ...] = ()  # (UUID, name) of the GPUs that answer, in NVML's order
    lost: tuple[str, ...] = ()  # the GPUs that are listed and do not answer, each with NVML's error message


def read_nvml() -> NvmlFacts:
    """Return the answers of NVML, within two seconds. CUDA is not initialised; the driver may be loaded by this."""
    try:
        import pynvml
    except ImportError:
        return NvmlFacts("no module")
    try:
        return in_background(lambda: _nvml_facts(pynvml)).result(_NVML_DEADLINE_S)
    except FutureTimeout:
        return NvmlFacts("hangs", f"no answer within {_NVML_DEADLINE_S:.0f} s")


def _nvml_facts(nvml: Any) -> NvmlFacts:
    gpus, lost, cuda = [], [], None
    try:
        nvml.nvmlInitWithFlags(nvml.NVML_INIT_FLAG_NO_GPUS)
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                gpu = nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle)
                with contextlib.suppress(nvml.NVMLError_NotSupported):  # GB10: it shares the CPU's memory
                    nvml.nvmlDeviceGetMemoryInfo(handle)  # a GPU that fell off the bus may still give its name
            except nvml.NVMLError as error:
                if error.value != nvml.NVML_ERROR_NO_PERMISSION:  # another container's
                    lost.append(f"GPU {index}: {error}")
                continue
            gpus.append(gpu)
        with contextlib.suppress(nvml.NVMLError):
            version = nvml.nvmlSystemGetCudaDriverVersion_v2()
            cuda = (version // 1000, version % 1000 // 10)
        driver = nvml.nvmlSystemGetDriverVersion()
    except nvml.NVMLError as error:
        states: dict[int, Any] = {
            nvml.NVML_ERROR_LIBRARY_NOT_FOUND: "no library",
            nvml.NVML_ERROR_DRIVER_NOT_LOADED: "not loaded",
            nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "mismatch",
        }
        return NvmlFacts(states.get(error.value, "fails"), str(error))
    return NvmlFacts("answers", "", driver, cuda, tuple(gpus), tuple(lost))


def ask_agent(url: str, wanted: bool, fetch: Fetch) -> tuple[Status | None, Outcome]:
    """Return an agent's /api/v1/status, None where none answers; and whether it answers, and takes its samples.

    `wanted`: the user named it, so that it is a problem where nothing listens.
    """
    asked, url = url, without_password(url)
    start, other = "gpuwatch up starts one", "ss -ltnp shows which; stop it, or give the agent another --http"
    elsewhere = f"{start}; --agent URL names one elsewhere"
    refused = "it runs: do what it says, or name another by --agent URL"
    try:
        answer = fetch(f"{asked}/api/v1/status")
        if answer.status in (401, 403, 421):
            return None, problem(f"{url}: it answers with status {answer.status}: {reason_of(answer)}", refused)
        if answer.status != 200:
            return None, problem(f"{url}: another program answers there (status {answer.status})", other)
        status = msgspec.json.decode(answer.body, type=Status)
        ready = fetch(f"{asked}/readyz")
    except OSError as error:
        if isinstance(error, ConnectionRefusedError) and not wanted:
            return None, skipped(f"no agent at {url}; runs still print their verdicts", start)
        return None, problem(f"{url}: {why(error)}", remedy_of(error, elsewhere))
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None, problem(f"{url}: another program answers there (not the agent's JSON)", other)
    if ready.status == 200:
        return status, ok(f"{url} is ready, gpuwatch {status.version} on {status.host}")
    return status, problem(
        f"{url} is not ready: {ready.body.decode(errors='replace').strip()}",
        "gpuwatch agent's stderr names the collector that hangs; a full or slow disk under the history has the same effect",
    )


@dataclass(eq=False)
class Machine:
    """What a check may read. Every method may be called from any thread; tests replace what they are about."""

    agent_url: str
    prometheus_url: str | None
    history: Path | None  # where an agent started by this user keeps its history. None without the agent extra.
    nvml: Callable[[], NvmlFacts]
    agent: Callable[[], tuple[Status | None, Outcome]]
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    socket_directories: Sequence[Path] = field(default_factory=endpoint.directories)
    uid: int = field(default_factory=os.getuid)
    procfs: Path = Path("/proc")
    sysfs: Path = Path("/sys")
    dev: Path = Path("/dev")
    shm: Path = Path("/dev/shm")
    python: tuple[str, str] = (platform.python_version(), sys.executable)
    gpuwatch_version: str = gpuwatch.__version__
    fetch: Fetch = fetch
    cores: Callable[[], int] = lambda: len(os.sched_getaffinity(0))
    space: Callable[[Path], tuple[int, int, int]] = shutil.disk_usage
    """Of the file system of a path: (size, used, free for this user) in bytes. Raises: OSError."""
    writes: Callable[[Path], bool] = lambda path: os.access(path, os.W_OK)

    def version_of(self, distribution: str) -> str | None:
        """Return the version of an installed distribution, None where it is not installed."""
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            return None

    def requirements(self) -> list[str]:
        """Return what gpuwatch requires; nothing where it is not installed."""
        return metadata.requires(DISTRIBUTION) or [] if self.version_of(DISTRIBUTION) else []

    def folder_of(self, package: str) -> Path | None:
        """Return where a package lies, without importing it; None where it is not installed."""
        spec = find_spec(package)
        return Path(spec.origin).parent if spec is not None and spec.origin else None

    def limits(self, number: int) -> tuple[float, float]:
        """Return (soft, hard) of a resource, inf for none. Source: getrlimit(2)."""
        soft, hard = (float("inf") if each == resource.RLIM_INFINITY else each for each in resource.getrlimit(number))
        return soft, hard

    def reads(self, path: Path) -> bool:
        """Return whether a file of /proc can be read, or a link followed, by trying."""
        with contextlib.suppress(OSError):
            _ = path.readlink() if path.is_symlink() else path.read_bytes()
            return True
        return False

    def connects(self, host: str, port: int) -> bool:
        with contextlib.suppress(OSError):
            socket.create_connection((host, port), _CONNECT_S).close()
            return True
        return False

    def accepts(self, where: str, token: str) -> bool:
        """Return whether an agent accepts a token over TCP, within half a second."""
        from gpuwatch.wire.sockets import ZmqSender

        sender, deadline_s = ZmqSender(where, token), time.monotonic() + _CONNECT_S
        while (accepted := sender.is_accepted()) is None and time.monotonic() < deadline_s:
            time.sleep(0.01)
        sender.close()
        return bool(accepted)


def this_machine(agent_url: str, agent_wanted: bool, prometheus_url: str | None, history: Path | None) -> Machine:
    """Return this machine, as this process sees it. NVML and the agent are read once, in the background."""
    asked = partial(ask_agent, agent_url, agent_wanted, partial(fetch, token=API_TOKEN))
    nvml, agent = in_background(read_nvml), in_background(asked)
    return Machine(agent_url, prometheus_url, history, nvml.result, agent.result)
