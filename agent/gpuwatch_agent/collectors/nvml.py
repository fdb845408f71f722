"""NVML's answers about one GPU, in base units; `gpu.py` keeps state and handles failures.

Every function takes a device handle of `pynvml` and raises its `NVMLError`. *Those of links, memory errors and MIG have never run on real hardware yet.*
Source: https://docs.nvidia.com/deploy/nvml-api, and nvml.h for the units.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pynvml

from gpuwatch_agent.collectors.drivers import GpuDevice, GpuProcess, Reading, Value

Handle = Any

_THROTTLE_BITS = {
    "power": pynvml.nvmlClocksEventReasonSwPowerCap | pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown,
    "thermal": pynvml.nvmlClocksEventReasonSwThermalSlowdown | pynvml.nvmlClocksEventReasonHwThermalSlowdown,
    # HwSlowdown: clocks at half or less, because of heat, a power brake or a fast trigger; the other two say which
    "hardware": pynvml.nvmlClocksEventReasonHwSlowdown
    | pynvml.nvmlClocksEventReasonHwThermalSlowdown
    | pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown,
}
"""Reasons by label. A hardware reason is also counted under its cause. GpuIdle, application clocks, sync boost and display clocks are
settings or the absence of work, not throttling."""

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
"""The driver's own reasons: `--series full`."""


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


def _reading(function: Callable[[Handle], list[Value]], interval_s: float) -> Reading:
    return Reading(function.__name__, lambda gpu: function(gpu.handle), interval_s)


READINGS = tuple(_reading(each, 1.0) for each in (utilization, memory, power, energy, temperature, throttled, clocks))
"""Read in every tick, each in microseconds; anything slower belongs to the slow tier."""


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


_ALL_LINKS = 0xFFFFFFFF
"""As a field's scope: the sum over a GPU's NVLinks."""
_LINK_ERRORS = (
    pynvml.NVML_NVLINK_ERROR_DL_REPLAY,
    pynvml.NVML_NVLINK_ERROR_DL_RECOVERY,
    pynvml.NVML_NVLINK_ERROR_DL_CRC_FLIT,
    pynvml.NVML_NVLINK_ERROR_DL_CRC_DATA,
)
_KIB = 1024


def pcie_link(handle: Handle) -> list[Value]:
    """Return generation and lanes of the link as it is now: both are lower while the GPU saves power."""
    generation = pynvml.nvmlDeviceGetCurrPcieLinkGeneration(handle)
    lanes = pynvml.nvmlDeviceGetCurrPcieLinkWidth(handle)
    return [("gpuwatch_gpu_pcie_generation", generation, ()), ("gpuwatch_gpu_pcie_lanes", lanes, ())]


def pcie_replays(handle: Handle) -> list[Value]:
    """Return how many packets were sent again: a riser, a slot or a cable that does not hold its speed."""
    return [("gpuwatch_gpu_pcie_replays_total", pynvml.nvmlDeviceGetPcieReplayCounter(handle), ())]


def ecc_errors(handle: Handle) -> list[Value]:
    """Return memory errors since the driver was loaded. Not supported where ECC is off."""
    kinds = {
        "corrected": pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED,
        "uncorrected": pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
    }
    return [
        (
            "gpuwatch_gpu_ecc_errors_total",
            pynvml.nvmlDeviceGetTotalEccErrors(handle, code, pynvml.NVML_VOLATILE_ECC),
            (kind,),
        )
        for kind, code in kinds.items()
    ]


def nvlinks(handle: Handle) -> list[Value]:
    """Return how many NVLinks are up, and the errors of those. A GPU without any: not supported."""
    up, errors, counted = 0, 0, False
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            active = pynvml.nvmlDeviceGetNvLinkState(handle, link)
        except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_InvalidArgument):
            if link == 0:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED) from None
            break  # there are no more
        if not active:
            continue
        up += 1
        for counter in _LINK_ERRORS:
            try:
                errors += pynvml.nvmlDeviceGetNvLinkErrorCounter(handle, link, counter)
                counted = True
            except pynvml.NVMLError_NotSupported:
                continue
    values: list[Value] = [("gpuwatch_gpu_nvlink_links", up, ())]
    return [*values, ("gpuwatch_gpu_nvlink_errors_total", errors, ())] if counted else values


def nvlink_bytes(handle: Handle) -> list[Value]:
    """Return the data over all NVLinks since the driver was loaded. NVML's unit is KiB."""
    fields = {
        "gpuwatch_gpu_nvlink_transmit_bytes_total": pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX,
        "gpuwatch_gpu_nvlink_receive_bytes_total": pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX,
    }
    answers = pynvml.nvmlDeviceGetFieldValues(handle, [(field, _ALL_LINKS) for field in fields.values()])
    return [
        (metric, answer.value.ullVal * _KIB, ())
        for metric, answer in zip(fields, answers, strict=True)
        if answer.nvmlReturn == pynvml.NVML_SUCCESS
    ]


def mig_instances(handle: Handle) -> list[Value]:
    """Return a GPU's MIG instances and their memory; nothing where MIG is off."""
    if pynvml.nvmlDeviceGetMigMode(handle)[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
        return []
    values: list[Value] = []
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            instance = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except (pynvml.NVMLError_NotFound, pynvml.NVMLError_InvalidArgument):
            continue  # no instance has this index now
        number = str(pynvml.nvmlDeviceGetGpuInstanceId(instance))
        name = pynvml.nvmlDeviceGetName(instance)
        profile = (name.decode(errors="replace") if isinstance(name, bytes) else name).rpartition(" MIG ")[2]
        profile = profile.rpartition("c.")[2]  # "1c.3g.71gb": one of several compute instances of a 3g.71gb
        memory = pynvml.nvmlDeviceGetMemoryInfo(instance)
        values += [
            ("gpuwatch_gpu_mig_info", 1, (number, profile)),
            ("gpuwatch_gpu_mig_memory_used_bytes", memory.used, (number,)),
            ("gpuwatch_gpu_mig_memory_total_bytes", memory.total, (number,)),
        ]
    seen = {value[:1] + value[2:]: value for value in values}  # two compute instances of one GPU instance are one here
    return list(seen.values())


LINK_READINGS = tuple(
    _reading(each, 10.0) for each in (pcie_link, pcie_replays, ecc_errors, nvlinks, nvlink_bytes, mig_instances)
)

ABSENT = {
    pynvml.NVML_ERROR_NOT_SUPPORTED,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    pynvml.NVML_ERROR_NO_PERMISSION,
    pynvml.NVML_ERROR_NOT_FOUND,
    pynvml.NVML_ERROR_NO_DATA,
    pynvml.NVML_ERROR_NOT_READY,
}
"""This GPU has no such value: leave it out."""

LOST = {
    pynvml.NVML_ERROR_GPU_IS_LOST,
    pynvml.NVML_ERROR_GPU_NOT_FOUND,
    pynvml.NVML_ERROR_RESET_REQUIRED,
    pynvml.NVML_ERROR_UNINITIALIZED,
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
}
"""This GPU does not answer until the devices are enumerated again."""

DOUBTFUL = {
    pynvml.NVML_ERROR_UNKNOWN,
    pynvml.NVML_ERROR_INVALID_ARGUMENT,  # the handle may be of an earlier enumeration
}
"""This value is left out; enumerating again may repair it."""

NO_DRIVER = {
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "libnvidia-ml.so.1 was not found: there is no NVIDIA driver here,"
    " or this container was started without its GPU runtime",
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "the NVIDIA driver is not loaded",
}
"""Errors of a node without GPUs, as text."""
