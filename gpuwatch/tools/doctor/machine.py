"""What the checks read: this machine, its GPU driver and its agent. Tests inject directory trees and fakes."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
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
from urllib.parse import urlsplit

import msgspec

import gpuwatch
from gpuwatch.api import Status
from gpuwatch.api.client import Reply, api_token, fetch, reason_of, why, without_password
from gpuwatch.wire import endpoint
from gpuwatch.wire.endpoint import is_loopback

DISTRIBUTION = "gpuwatch-training"
_NVML_DEADLINE_S = 2.0
_CONNECT_S = 0.5
T = TypeVar("T")
Fetch = Callable[[str], Reply]


def in_background(call: Callable[[], T]) -> Future[T]:
    """Start a call in a daemon thread and return its future: a call that hangs does not delay the exit of the program."""
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
    try:
        nvml.nvmlInitWithFlags(nvml.NVML_INIT_FLAG_NO_GPUS)
    except nvml.NVMLError as error:
        states: dict[int, Any] = {
            nvml.NVML_ERROR_LIBRARY_NOT_FOUND: "no library",
            nvml.NVML_ERROR_DRIVER_NOT_LOADED: "not loaded",
            nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "mismatch",
        }
        return NvmlFacts(states.get(error.value, "fails"), str(error))
    gpus, lost, cuda = [], [], None
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                gpu = _text(nvml.nvmlDeviceGetUUID(handle)), _text(nvml.nvmlDeviceGetName(handle))
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
        driver = _text(nvml.nvmlSystemGetDriverVersion())
    except nvml.NVMLError as error:
        return NvmlFacts("fails", str(error))
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()
    return NvmlFacts("answers", "", driver, cuda, tuple(gpus), tuple(lost))


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


@dataclass(frozen=True)
class AgentView:
    url: str
    state: Literal["answers", "refused", "foreign", "unreachable"]
    """An agent answers; the connection is refused; another program answers; any other error."""
    status: Status | None = None  # its /api/v1/status. None unless `state` is "answers".
    error: str = ""
    ready: bool = False
    not_ready: str = ""  # its reason at /readyz


def ask_agent(url: str, fetch: Fetch) -> AgentView:
    asked, url = url, without_password(url)
    try:
        answer = fetch(f"{asked}/api/v1/status")
        if answer.status in (401, 403, 421):
            return AgentView(url, "unreachable", error=f"it answers with status {answer.status}: {reason_of(answer)}")
        if answer.status != 200:
            return AgentView(url, "foreign", error=f"another program answers there (status {answer.status})")
        status = msgspec.json.decode(answer.body, type=Status)
        ready = fetch(f"{asked}/readyz")
    except OSError as error:
        refused = isinstance(error, ConnectionRefusedError)
        return AgentView(url, "refused" if refused else "unreachable", error=why(error))
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return AgentView(url, "foreign", error="another program answers there (not the agent's JSON)")
    reason = ready.body.decode(errors="replace").strip()
    return AgentView(url, "answers", status, ready=ready.status == 200, not_ready=reason)


def is_local(url: str) -> bool:
    return is_loopback(urlsplit(url).hostname or "")


@dataclass(eq=False)
class Machine:
    """What a check may read. Every method may be called from any thread; tests replace what they are about."""

    agent_url: str
    agent_wanted: bool  # whether the user named the agent: one that does not answer is a problem then
    prometheus_url: str | None
    history: Path | None  # where an agent started by this user keeps its history. None without the agent extra.
    nvml: Callable[[], NvmlFacts]
    agent: Callable[[], AgentView]
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

    def version_of(self, distribution: str) -> str | None:
        """Return the version of an installed distribution, None where it is not installed."""
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            return None

    def requirements(self) -> list[str]:
        try:
            return metadata.requires(DISTRIBUTION) or []
        except metadata.PackageNotFoundError:
            return []

    def folder_of(self, package: str) -> Path | None:
        """Return where a package lies, without importing it; None where it is not installed."""
        spec = find_spec(package)
        return Path(spec.origin).parent if spec is not None and spec.origin else None

    def limits(self, number: int) -> tuple[float, float]:
        """Return (soft, hard) of a resource, inf for none. Source: getrlimit(2)."""
        soft, hard = (float("inf") if each == resource.RLIM_INFINITY else each for each in resource.getrlimit(number))
        return soft, hard

    def cores(self) -> int:
        return len(os.sched_getaffinity(0))

    def space(self, path: Path) -> tuple[int, int]:
        """Return (size, used) in bytes of the file system of a path. Raises: OSError."""
        status = os.statvfs(path)
        return status.f_blocks * status.f_frsize, (status.f_blocks - status.f_bavail) * status.f_frsize

    def reads(self, path: Path) -> bool:
        """Return whether a file of /proc can be read, or a link followed, by trying."""
        try:
            _ = path.readlink() if path.is_symlink() else path.read_bytes()
        except OSError:
            return False
        return True

    def connects(self, host: str, port: int) -> bool:
        try:
            socket.create_connection((host, port), _CONNECT_S).close()
        except OSError:
            return False
        return True

    def accepts(self, where: str, token: str) -> bool:
        """Return whether an agent accepts a token over TCP, within half a second."""
        from gpuwatch.wire.sockets import ZmqSender

        sender, deadline_s = ZmqSender(where, token), time.monotonic() + _CONNECT_S
        while (accepted := sender.is_accepted()) is None and time.monotonic() < deadline_s:
            time.sleep(0.01)
        sender.close()
        return bool(accepted)

    def writes(self, path: Path) -> bool:
        return os.access(path, os.W_OK)


def this_machine(agent_url: str, agent_wanted: bool, prometheus_url: str | None, history: Path | None) -> Machine:
    """Return this machine, as this process sees it. NVML and the agent are read once, in the background."""
    nvml, agent = in_background(read_nvml), in_background(lambda: ask_agent(agent_url, partial(fetch, token=api_token)))
    return Machine(agent_url, agent_wanted, prometheus_url, history, nvml.result, agent.result)
