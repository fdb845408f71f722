"""What NVML says of driver and GPUs, or why it says nothing. Nothing here touches CUDA."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, Literal

from gpuwatch.tools.doctor.deadline import Background

_DEADLINE_S = 2.0


@dataclass(frozen=True)
class NvmlFacts:
    """One look at the driver. Everything but `state` and `error` is empty unless `state` is "answers"."""

    state: Literal["answers", "no module", "no library", "not loaded", "mismatch", "hangs", "fails"]
    error: str = ""
    """NVML's own words."""
    driver: str = ""
    cuda: tuple[int, int] | None = None
    """The newest CUDA (major, minor) that the driver runs. None where it does not tell."""
    gpus: tuple[tuple[str, str], ...] = ()
    """(UUID, name) of the GPUs that answer, in NVML's order."""
    silent: tuple[str, ...] = ()
    """The GPUs that are listed and do not answer: which, and NVML's words."""
    pids: frozenset[int] = frozenset()
    """Processes with a compute context on some GPU, in the node's pid namespace."""


def read_nvml() -> NvmlFacts:
    """Return what NVML says within two seconds. It may start the driver, and it may hang with it."""
    try:
        import pynvml
    except ImportError:
        return NvmlFacts("no module")
    try:
        return Background(lambda: _ask(pynvml)).result(_DEADLINE_S)
    except TimeoutError:
        return NvmlFacts("hangs", f"no answer within {_DEADLINE_S:.0f} s")


def _ask(nvml: Any) -> NvmlFacts:
    """Source: https://docs.nvidia.com/deploy/nvml-api."""
    try:
        nvml.nvmlInitWithFlags(nvml.NVML_INIT_FLAG_NO_GPUS)
    except nvml.NVMLError as error:
        states: dict[int, Any] = {
            nvml.NVML_ERROR_LIBRARY_NOT_FOUND: "no library",
            nvml.NVML_ERROR_DRIVER_NOT_LOADED: "not loaded",
            nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "mismatch",
        }
        return NvmlFacts(states.get(error.value, "fails"), str(error))
    try:
        return _look(nvml)
    except nvml.NVMLError as error:
        return NvmlFacts("fails", str(error))
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _look(nvml: Any) -> NvmlFacts:
    gpus, silent, pids = [], [], set()
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            gpu = _text(nvml.nvmlDeviceGetUUID(handle)), _text(nvml.nvmlDeviceGetName(handle))
            with contextlib.suppress(nvml.NVMLError_NotSupported):  # GB10: its memory is the CPU's
                nvml.nvmlDeviceGetMemoryInfo(handle)  # a GPU that fell off the bus may still give its name
        except nvml.NVMLError as error:
            if error.value != nvml.NVML_ERROR_NO_PERMISSION:  # another container's
                silent.append(f"GPU {index}: {error}")
            continue
        gpus.append(gpu)
        with contextlib.suppress(nvml.NVMLError):
            pids |= {process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    cuda = None
    with contextlib.suppress(nvml.NVMLError):
        version = nvml.nvmlSystemGetCudaDriverVersion_v2()
        cuda = (version // 1000, version % 1000 // 10)
    driver = _text(nvml.nvmlSystemGetDriverVersion())
    return NvmlFacts("answers", "", driver, cuda, tuple(gpus), tuple(silent), frozenset(pids))


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
