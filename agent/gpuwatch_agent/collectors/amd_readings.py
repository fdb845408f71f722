"""What AMD's SMI library says of one GPU, in our names and base units. State and failures are `amd.py`'s affair.

Every function takes the `amdsmi` module and a processor handle, and raises its `AmdSmiException`. "N/A" is its word for "not told". *Never run on real hardware yet.*
Source: https://rocm.docs.amd.com/projects/amdsmi, Python API; the names are those of amdsmi 7.0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpuwatch_agent.collectors.nvml import GpuDevice, GpuProcess, Value

_MIB = float(1 << 20)
Smi = Any
Handle = Any


@dataclass(frozen=True)
class AmdReading:
    """Something that is read of every GPU, and how often."""

    name: str
    read: Callable[[Smi, Handle], list[Value]]
    interval_s: float


def describe(smi: Smi, handle: Handle, index: int) -> GpuDevice:
    """Return what a GPU is."""
    bdf = str(smi.amdsmi_get_gpu_device_bdf(handle))
    domain, _, rest = bdf.partition(":")
    return GpuDevice(
        index=index,
        uuid=str(smi.amdsmi_get_gpu_device_uuid(handle)),
        name=str(_known(smi.amdsmi_get_gpu_asic_info(handle).get("market_name")) or ""),
        pci_bus_id=f"{domain:0>8}:{rest}".upper(),
        minor=None,
    )


def driver_version(smi: Smi, handle: Handle) -> str:
    """Return the kernel driver's version, empty where it is not told."""
    return str(_known(smi.amdsmi_get_gpu_driver_info(handle).get("driver_version")) or "")


def activity(smi: Smi, handle: Handle) -> list[Value]:
    """Return the share of time in which the graphics engine, which runs kernels, was busy. amdsmi's unit is percent."""
    return _scaled("gpuwatch_gpu_utilization_ratio", smi.amdsmi_get_gpu_activity(handle).get("gfx_activity"), 0.01)


def memory(smi: Smi, handle: Handle) -> list[Value]:
    """Return memory in use and in all. amdsmi's unit is MiB."""
    usage = smi.amdsmi_get_gpu_vram_usage(handle)
    used = _scaled("gpuwatch_gpu_memory_used_bytes", usage.get("vram_used"), _MIB)
    return used + _scaled("gpuwatch_gpu_memory_total_bytes", usage.get("vram_total"), _MIB)


def power(smi: Smi, handle: Handle) -> list[Value]:
    """Return the power draw of the socket: MI300 and later tell the current one, earlier ones an average."""
    told = smi.amdsmi_get_power_info(handle)
    names = ("current_socket_power", "average_socket_power", "socket_power")
    watts = next((value for name in names if (value := _known(told.get(name)))), None)
    return _scaled("gpuwatch_gpu_power_watts", watts, 1.0)


def energy(smi: Smi, handle: Handle) -> list[Value]:
    """Return the energy since the driver was loaded: a counter, and what one of it is, in µJ."""
    told = smi.amdsmi_get_energy_count(handle)
    return _scaled("gpuwatch_gpu_energy_joules_total", told["energy_accumulator"] * told["counter_resolution"], 1e-6)


def temperature(smi: Smi, handle: Handle) -> list[Value]:
    """Return the temperature of the hottest spot, else of the edge (not on every GPU)."""
    for sensor in (smi.AmdSmiTemperatureType.HOTSPOT, smi.AmdSmiTemperatureType.EDGE):
        try:
            celsius = smi.amdsmi_get_temp_metric(handle, sensor, smi.AmdSmiTemperatureMetric.CURRENT)
        except smi.AmdSmiLibraryException:
            if sensor == smi.AmdSmiTemperatureType.EDGE:
                raise
        else:
            return _scaled("gpuwatch_gpu_temperature_celsius", celsius, 1.0)
    return []


def clocks(smi: Smi, handle: Handle) -> list[Value]:
    """Return the clocks of compute units and memory. amdsmi's unit is MHz."""
    graphics = smi.amdsmi_get_clock_info(handle, smi.AmdSmiClkType.GFX).get("clk")
    memory_clock = smi.amdsmi_get_clock_info(handle, smi.AmdSmiClkType.MEM).get("clk")
    found = _scaled("gpuwatch_gpu_sm_clock_hertz", graphics, 1e6)
    return found + _scaled("gpuwatch_gpu_memory_clock_hertz", memory_clock, 1e6)


def ecc_errors(smi: Smi, handle: Handle) -> list[Value]:
    """Return memory errors since the driver was loaded."""
    told = smi.amdsmi_get_gpu_total_ecc_count(handle)
    kinds = {"corrected": "correctable_count", "uncorrected": "uncorrectable_count"}
    return [
        v for kind, name in kinds.items() for v in _scaled("gpuwatch_gpu_ecc_errors_total", told.get(name), 1, kind)
    ]


def pcie(smi: Smi, handle: Handle) -> list[Value]:
    """Return lanes of the link now, its generation, and how many packets were sent again."""
    told = smi.amdsmi_get_pcie_info(handle)
    lanes = _scaled("gpuwatch_gpu_pcie_lanes", told["pcie_metric"].get("pcie_width"), 1)
    generation = _scaled("gpuwatch_gpu_pcie_generation", told["pcie_static"].get("pcie_interface_version"), 1)
    replays = _scaled("gpuwatch_gpu_pcie_replays_total", told["pcie_metric"].get("pcie_replay_count"), 1)
    return lanes + generation + replays


def processes(smi: Smi, handle: Handle) -> tuple[GpuProcess, ...]:
    """Return the processes that the driver lists for a GPU, by pid."""
    listed = smi.amdsmi_get_gpu_process_list(handle)
    used = {int(each["pid"]): _known(each.get("memory_usage", {}).get("vram_mem")) for each in listed}
    return tuple(GpuProcess(pid, None if bytes_ is None else int(bytes_)) for pid, bytes_ in sorted(used.items()))


def _reading(function: Callable[[Smi, Handle], list[Value]], interval_s: float) -> AmdReading:
    return AmdReading(function.__name__, function, interval_s)


READINGS = (
    *(_reading(function, 1.0) for function in (activity, memory, power, energy, temperature, clocks)),
    *(_reading(function, 10.0) for function in (ecc_errors, pcie)),
)
"""What is read of every GPU. Throttling is left out: `amdsmi_get_violation_status` takes a tenth of a second a GPU to tell it."""


def _known(value: Any) -> Any:
    """Return a value, None for "N/A"."""
    return None if value is None or value == "N/A" else value


def _scaled(metric: str, value: Any, factor: float, *labels: str) -> list[Value]:
    known = _known(value)
    return [] if known is None else [(metric, float(known) * factor, labels)]
