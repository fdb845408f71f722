"""AMD GPUs through `amdsmi`, ROCm's own Python package: gpuwatch_gpu_*, GPUs seen and expected, and the processes on each.

The readings take the `amdsmi` module and a processor handle, and raise its `AmdSmiException`; "N/A" is its text for "not measured".
*Tested against a module with amdsmi's function names; never run on real hardware yet.* Metrics with NVML in their name count amdsmi's calls here.
Source: https://rocm.docs.amd.com/projects/amdsmi, Python API; the names are those of amdsmi 7.0.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import time
from collections.abc import Callable, Iterator
from typing import Any

from gpuwatch.errors import NoData
from gpuwatch_agent.collectors.driver_collector import DriverCollector, Fate
from gpuwatch_agent.collectors.drivers import Gpu, GpuDevice, GpuProcess, Reading, Value

_MIB = float(1 << 20)
Smi = Any
Handle = Any


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
    """Return the kernel driver's version, empty where it is not known."""
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
    """Return the power draw of the socket: MI300 and later give the current one, earlier ones an average."""
    info = smi.amdsmi_get_power_info(handle)
    names = ("current_socket_power", "average_socket_power", "socket_power")
    watts = next((value for name in names if (value := _known(info.get(name)))), None)
    return _scaled("gpuwatch_gpu_power_watts", watts, 1.0)


def energy(smi: Smi, handle: Handle) -> list[Value]:
    """Return the energy since the driver was loaded: a counter, and what one of it is, in µJ."""
    info = smi.amdsmi_get_energy_count(handle)
    return _scaled("gpuwatch_gpu_energy_joules_total", info["energy_accumulator"] * info["counter_resolution"], 1e-6)


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
    info = smi.amdsmi_get_gpu_total_ecc_count(handle)
    kinds = {"corrected": "correctable_count", "uncorrected": "uncorrectable_count"}
    return [
        v for kind, name in kinds.items() for v in _scaled("gpuwatch_gpu_ecc_errors_total", info.get(name), 1, kind)
    ]


def pcie(smi: Smi, handle: Handle) -> list[Value]:
    """Return lanes of the link now, its generation, and how many packets were sent again."""
    info = smi.amdsmi_get_pcie_info(handle)
    lanes = _scaled("gpuwatch_gpu_pcie_lanes", info["pcie_metric"].get("pcie_width"), 1)
    generation = _scaled("gpuwatch_gpu_pcie_generation", info["pcie_static"].get("pcie_interface_version"), 1)
    replays = _scaled("gpuwatch_gpu_pcie_replays_total", info["pcie_metric"].get("pcie_replay_count"), 1)
    return lanes + generation + replays


def processes(smi: Smi, handle: Handle) -> tuple[GpuProcess, ...]:
    """Return the processes that the driver lists for a GPU, by pid."""
    listed = smi.amdsmi_get_gpu_process_list(handle)
    used = {int(each["pid"]): _known(each.get("memory_usage", {}).get("vram_mem")) for each in listed}
    return tuple(GpuProcess(pid, None if bytes_ is None else int(bytes_)) for pid, bytes_ in sorted(used.items()))


def _known(value: Any) -> Any:
    """Return a value, None for "N/A"."""
    return None if value is None or value == "N/A" else value


def _scaled(metric: str, value: Any, factor: float, *labels: str) -> list[Value]:
    known = _known(value)
    return [] if known is None else [(metric, float(known) * factor, labels)]


FAST = (activity, memory, power, energy, temperature, clocks)
"""Read in every tick. Throttling is left out: `amdsmi_get_violation_status` takes a tenth of a second per GPU."""
SLOW = (ecc_errors, pcie)
_LOST = {12, 14, 18, 31, 32, 34, 52, 54}
"""IO, FILE_ERROR, INIT_ERROR, NOT_FOUND, NOT_INIT, DRIVER_NOT_LOADED, FILE_NOT_FOUND, AMDGPU_RESTART_ERR of amdsmi_status_t: this
GPU does not answer until the devices are listed again."""


def load_amdsmi() -> Any:
    """Return the module. Raises: NoData where the package or its library is not installed."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # without its library it prints, and fails with a KeyError
            return importlib.import_module("amdsmi")
    except (ImportError, OSError, KeyError, AttributeError) as error:
        raise NoData(
            f"amdsmi cannot be used ({error}); it comes with ROCm: pip install /opt/rocm/share/amd_smi"
        ) from None


class AmdCollector(DriverCollector):
    """AMD's GPUs."""

    name = "gpu"
    library = "amdsmi"
    error: type[Exception] = NoData
    """amdsmi's own once it is imported."""

    def __init__(
        self,
        *,
        load: Callable[[], Any] = load_amdsmi,
        clock: Callable[[], float] = time.monotonic,
        deadline_s: float = 2.0,
        slow_wait_s: float = 0.25,
        process_interval_s: float = 10.0,
    ) -> None:
        fast, slow = [self._reading(each, 1.0) for each in FAST], [self._reading(each, 10.0) for each in SLOW]
        super().__init__(clock, deadline_s, slow_wait_s, process_interval_s, fast, slow)
        self._load = load
        self._smi: Any = None

    def start(self) -> Iterator[Gpu | str]:
        if self._smi is None:
            self._smi = self._load()
            self.error = self._smi.AmdSmiException
        smi = self._smi
        with contextlib.suppress(self.error):
            smi.amdsmi_shut_down()
        smi.amdsmi_init(smi.AmdSmiInitFlags.INIT_AMD_GPUS)
        for index, handle in enumerate(smi.amdsmi_get_processor_handles()):
            try:
                yield Gpu(describe(smi, handle, index), handle, driver_version(smi, handle))
            except self.error as error:
                yield f"GPU {index} is listed but does not answer: {error}"

    def list_processes(self, gpu: Gpu) -> tuple[GpuProcess, ...]:
        return processes(self._smi, gpu.handle)

    def fate(self, error: Exception) -> Fate:
        return "lost" if getattr(error, "err_code", None) in _LOST else "absent"

    def _reading(self, read: Callable[[Smi, Handle], list[Value]], interval_s: float) -> Reading:
        return Reading(read.__name__, lambda gpu: read(self._smi, gpu.handle), interval_s)
