"""AMD GPUs through `amdsmi`, ROCm's Python package: gpuwatch_gpu_*, GPUs seen and expected, the processes on each.

The readings take that module and a processor handle, and raise its `AmdSmiException`; "N/A" means "not measured".
*Tested with a module of amdsmi's names; never on real hardware yet.* Metrics with NVML in their name count its calls.
Source: https://rocm.docs.amd.com/projects/amdsmi, Python API; the names are those of amdsmi 7.0.
"""

import contextlib
import importlib
import io
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from gpuwatch.errors import NoData
from gpuwatch_agent.collectors.drivers import TIMING, DriverCollector, Fate, GpuDevice, Timing, Value, values

_MIB = float(1 << 20)
Smi = Any
Handle = Any


def _known(value: Any) -> Any:
    return None if value == "N/A" else value


def _scaled(value: Any, factor: float) -> float | None:
    return None if _known(value) is None else float(value) * factor


def activity(smi: Smi, handle: Handle) -> list[Value]:
    """Return the share of time in which the graphics engine, which runs kernels, was busy."""
    return values(utilization_ratio=_scaled(smi.amdsmi_get_gpu_activity(handle).get("gfx_activity"), 0.01))


def memory(smi: Smi, handle: Handle) -> list[Value]:
    info = smi.amdsmi_get_gpu_vram_usage(handle)
    used, total = _scaled(info.get("vram_used"), _MIB), _scaled(info.get("vram_total"), _MIB)
    return values(memory_used_bytes=used, memory_total_bytes=total)


def power(smi: Smi, handle: Handle) -> list[Value]:
    """Return the power draw of the socket: MI300 and later give the current one, earlier ones an average."""
    info = smi.amdsmi_get_power_info(handle)
    names = ("current_socket_power", "average_socket_power", "socket_power")
    return values(power_watts=next((float(watts) for name in names if (watts := _known(info.get(name)))), None))


def energy(smi: Smi, handle: Handle) -> list[Value]:
    """Return the energy since the driver was loaded: a counter, and what one of it is, in µJ."""
    info = smi.amdsmi_get_energy_count(handle)
    return values(driver_energy_joules_total=info["energy_accumulator"] * info["counter_resolution"] * 1e-6)


def temperature(smi: Smi, handle: Handle) -> list[Value]:
    """Return the temperature of the hottest spot, else of the edge (not on every GPU)."""
    sensors, now = smi.AmdSmiTemperatureType, smi.AmdSmiTemperatureMetric.CURRENT
    try:
        celsius = smi.amdsmi_get_temp_metric(handle, sensors.HOTSPOT, now)
    except smi.AmdSmiLibraryException:
        celsius = smi.amdsmi_get_temp_metric(handle, sensors.EDGE, now)
    return values(temperature_celsius=_scaled(celsius, 1.0))


def clocks(smi: Smi, handle: Handle) -> list[Value]:
    return values(sm_clock_hertz=_scaled(smi.amdsmi_get_clock_info(handle, smi.AmdSmiClkType.GFX).get("clk"), 1e6))


def ecc_errors(smi: Smi, handle: Handle) -> list[Value]:
    """Return memory errors since the driver was loaded."""
    info = smi.amdsmi_get_gpu_total_ecc_count(handle)
    corrected, uncorrected = _scaled(info.get("correctable_count"), 1), _scaled(info.get("uncorrectable_count"), 1)
    return values("corrected", ecc_errors_total=corrected) + values("uncorrected", ecc_errors_total=uncorrected)


def pcie(smi: Smi, handle: Handle) -> list[Value]:
    """Return how many packets were sent again."""
    info = smi.amdsmi_get_pcie_info(handle)["pcie_metric"]
    return values(pcie_replays_total=_scaled(info.get("pcie_replay_count"), 1))


FAST = (activity, memory, power, energy, temperature, clocks)
"""Read in every tick. Throttling is left out: `amdsmi_get_violation_status` takes a tenth of a second per GPU."""
SLOW = (ecc_errors, pcie)
_LOST = {12, 14, 18, 31, 32, 34, 52, 54}
"""IO, FILE_ERROR, INIT_ERROR, NOT_FOUND, NOT_INIT, DRIVER_NOT_LOADED, FILE_NOT_FOUND, AMDGPU_RESTART_ERR of
amdsmi_status_t: this GPU does not answer until the devices are listed again."""


def load_amdsmi() -> Any:
    """Return the module. Raises: NoData where the package or its library is not installed."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # without its library it prints, and fails with a KeyError
            return importlib.import_module("amdsmi")
    except (ImportError, OSError, KeyError, AttributeError) as error:
        why = f"amdsmi cannot be used ({error})"
        raise NoData(f"{why}; it comes with ROCm: pip install /opt/rocm/share/amd_smi") from None


class AmdCollector(DriverCollector):
    """AMD's GPUs."""

    library = "amdsmi"

    def __init__(self, timing: Timing = TIMING, load: Callable[[], Any] = load_amdsmi) -> None:
        fast, slow = ({each.__name__: partial(self._read, each) for each in tier} for tier in (FAST, SLOW))
        super().__init__(timing, fast, slow)
        self._load = load
        self._smi: Any = None

    def start(self) -> Iterator[GpuDevice | str]:
        self._smi = self._smi or self._load()
        with contextlib.suppress(Exception):
            self._smi.amdsmi_shut_down()
        self._smi.amdsmi_init(self._smi.AmdSmiInitFlags.INIT_AMD_GPUS)
        for index, handle in enumerate(self._smi.amdsmi_get_processor_handles()):
            try:
                yield self._describe(index, handle)
            except Exception as error:
                yield f"GPU {index} is listed but does not answer: {error}"

    def _describe(self, index: int, handle: Handle) -> GpuDevice:
        smi, about = self._smi, dict[str, Any]()
        uuid = str(smi.amdsmi_get_gpu_device_uuid(handle))
        for read in (smi.amdsmi_get_gpu_asic_info, smi.amdsmi_get_gpu_driver_info):
            with contextlib.suppress(Exception):  # an old or a virtual GPU may not say it
                about |= read(handle)
        name, driver = (str(_known(about.get(key)) or "") for key in ("market_name", "driver_version"))
        domain, _, rest = str(smi.amdsmi_get_gpu_device_bdf(handle)).partition(":")
        address = f"{domain:0>8}:{rest}".upper()
        return GpuDevice(index, uuid, name or "AMD GPU", address, minor=None, handle=handle, driver=driver)

    def list_processes(self, gpu: GpuDevice) -> tuple[int, ...]:
        return tuple(sorted(int(each["pid"]) for each in self._smi.amdsmi_get_gpu_process_list(gpu.handle)))

    def fate(self, error: Exception) -> Fate:
        code = getattr(error, "err_code", None)  # None: amdsmi, or its answer, is not as it is here
        return "failed" if code is None else "lost" if code in _LOST else "absent"

    def _read(self, read: Callable[[Smi, Handle], list[Value]], gpu: GpuDevice) -> list[Value]:
        return read(self._smi, gpu.handle)
