"""What NVML says of one GPU: thin, typed and in base units. State and failures are `gpu.py`'s affair.

Every function takes a device handle of `pynvml` and raises its `NVMLError`.
Source: https://docs.nvidia.com/deploy/nvml-api, and nvml.h for the units.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pynvml

Handle = Any
Value = tuple[str, float, tuple[str, ...]]
"""A metric, its value, and the labels it has beyond gpu and UUID."""

_THROTTLE_BITS = {
    "power": pynvml.nvmlClocksEventReasonSwPowerCap | pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown,
    "thermal": pynvml.nvmlClocksEventReasonSwThermalSlowdown | pynvml.nvmlClocksEventReasonHwThermalSlowdown,
    # HwSlowdown: clocks at half or less, because of heat, a power brake or a fast trigger; the other two say which
    "hardware": pynvml.nvmlClocksEventReasonHwSlowdown
    | pynvml.nvmlClocksEventReasonHwThermalSlowdown
    | pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown,
}
"""Reasons by label. A reason of the hardware is also counted by its cause. GpuIdle, application clocks, sync boost and
display clocks are settings or the absence of work, and no throttling."""

_EACH_REASON = {
    "sw_power_cap": pynvml.nvmlClocksEventReasonSwPowerCap,
    "sw_thermal": pynvml.nvmlClocksEventReasonSwThermalSlowdown,
    "hw_slowdown": pynvml.nvmlClocksEventReasonHwSlowdown,
    "hw_thermal": pynvml.nvmlClocksEventReasonHwThermalSlowdown,
    "hw_power_brake": pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown,
    "sync_boost": pynvml.nvmlClocksEventReasonSyncBoost,
    "applications_clocks": pynvml.nvmlClocksEventReasonApplicationsClocksSetting,
    "display_clocks": pynvml.nvmlClocksEventReasonDisplayClockSetting,
    "idle": pynvml.nvmlClocksEventReasonGpuIdle,
}
"""The driver's own reasons, each for itself: `--series full`."""


@dataclass(frozen=True)
class GpuDevice:
    """A GPU as the driver lists it."""

    index: int
    """NVML's, in PCI order: neither CUDA's nor the minor number, and another one once a GPU before it is lost."""
    uuid: str
    name: str
    pci_bus_id: str
    """With a domain of eight digits, as in "00000000:3B:00.0"."""
    minor: int | None
    """The N of /dev/nvidiaN. None where there is none (WSL, some virtual GPUs)."""


@dataclass(frozen=True)
class GpuProcess:
    """A process with a compute context on a GPU."""

    pid: int
    """In the node's pid namespace."""
    used_memory_bytes: int | None
    """Over all of the GPU's MIG instances. None where the driver does not tell."""


@dataclass(frozen=True)
class Gpu:
    """A GPU that answers."""

    device: GpuDevice
    handle: Handle


@dataclass(frozen=True)
class Reading:
    """Something that is read of every GPU, and how often."""

    name: str
    read: Callable[[Gpu], list[Value]]
    interval_s: float


def describe(index: int, handle: Handle) -> GpuDevice:
    """Return what a GPU is."""
    try:
        minor = int(pynvml.nvmlDeviceGetMinorNumber(handle))
    except pynvml.NVMLError_NotSupported:
        minor = None
    return GpuDevice(
        index=index,
        uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
        name=_text(pynvml.nvmlDeviceGetName(handle)),
        pci_bus_id=_text(pynvml.nvmlDeviceGetPciInfo(handle).busId),
        minor=minor,
    )


def utilization(handle: Handle) -> list[Value]:
    """Return the share of the driver's sample period (1/6 to 1 s) with a kernel running. Not supported under MIG."""
    percent = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu
    return [("gpuwatch_gpu_utilization_ratio", percent / 100, ())]


def memory(handle: Handle) -> list[Value]:
    """Return memory in use and in all.

    The second version of the call keeps what the driver has reserved for itself apart from what is in use; drivers
    before 510 have the first alone.
    """
    try:
        info = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    except (pynvml.NVMLError_FunctionNotFound, pynvml.NVMLError_ArgumentVersionMismatch):
        info = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return [("gpuwatch_gpu_memory_used_bytes", info.used, ()), ("gpuwatch_gpu_memory_total_bytes", info.total, ())]


def power(handle: Handle) -> list[Value]:
    """Return the power draw of the board: the mean of the last second on Ampere and later. NVML's unit is mW."""
    return [("gpuwatch_gpu_power_watts", pynvml.nvmlDeviceGetPowerUsage(handle) / 1000, ())]


def energy(handle: Handle) -> list[Value]:
    """Return the energy since the driver was loaded. NVML's unit is mJ."""
    return [("gpuwatch_gpu_energy_joules_total", pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000, ())]


def temperature(handle: Handle) -> list[Value]:
    """Return the core's temperature. The call tried first is to go with CUDA 14."""
    try:
        celsius = pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)
    except (pynvml.NVMLError_FunctionNotFound, pynvml.NVMLError_Deprecated):
        celsius = pynvml.nvmlDeviceGetTemperatureV(handle, pynvml.NVML_TEMPERATURE_GPU)
    return [("gpuwatch_gpu_temperature_celsius", celsius, ())]


def throttled(handle: Handle) -> list[Value]:
    """Return 1 for each reason for which the clocks are held down now, 0 for the others.

    Drivers before 535 know the call by its old name.
    """
    try:
        bits = pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
    except pynvml.NVMLError_FunctionNotFound:
        bits = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    return throttle_values(bits)


def throttle_values(bits: int) -> list[Value]:
    """Return 1 for each reason among these bits of nvmlClocksEventReason*, 0 for the others."""
    masks = _THROTTLE_BITS | _EACH_REASON
    return [("gpuwatch_gpu_throttled", float(bool(bits & mask)), (reason,)) for reason, mask in masks.items()]


def clocks(handle: Handle) -> list[Value]:
    """Return the clocks of multiprocessors and memory. NVML's unit is MHz."""
    sm_mhz = pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
    memory_mhz = pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM)
    return [
        ("gpuwatch_gpu_sm_clock_hertz", sm_mhz * 1e6, ()),
        ("gpuwatch_gpu_memory_clock_hertz", memory_mhz * 1e6, ()),
    ]


def _every_turn(function: Callable[[Handle], list[Value]]) -> Reading:
    return Reading(function.__name__, lambda gpu: function(gpu.handle), 1.0)


READINGS = tuple(map(_every_turn, (utilization, memory, power, energy, temperature, throttled, clocks)))
"""What is read of every GPU in every turn. Each is microseconds; anything slower belongs in a slower tier."""


def compute_processes(handle: Handle) -> tuple[GpuProcess, ...]:
    """Return the processes with a compute context on a GPU, by pid. Milliseconds, under a lock of the driver.

    A process on several MIG instances is listed for each: it is one process here. Under MPS the server stands for its
    clients. Drivers before 510 have the second version of the call alone.
    """
    try:
        listed = pynvml.nvmlDeviceGetComputeRunningProcesses_v3(handle)
    except pynvml.NVMLError_FunctionNotFound:
        listed = pynvml.nvmlDeviceGetComputeRunningProcesses_v2(handle)
    used: dict[int, int | None] = {}
    for process in listed:
        before, more = used.get(process.pid), process.usedGpuMemory
        used[process.pid] = before if more is None else more + (before or 0)
    return tuple(GpuProcess(pid, used[pid]) for pid in sorted(used))


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
