"""AMD GPUs through `amdsmi`, ROCm's own Python package: gpuwatch_gpu_*, GPUs seen and expected, and the processes on each.

All calls are made in one thread with a deadline, as a driver may hang. The readings take the `amdsmi` module and a processor handle, and
raise its `AmdSmiException`; "N/A" is its text for "not measured".
*Tested against a module with amdsmi's function names; never run on real hardware yet.* Metrics with NVML in their name count amdsmi's calls here.
Source: https://rocm.docs.amd.com/projects/amdsmi, Python API; the names are those of amdsmi 7.0.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from gpuwatch.errors import GpuwatchError, NoData
from gpuwatch.metrics import Sample
from gpuwatch_agent.collectors.drivers import (
    CallCosts,
    DeadlineThread,
    Gpu,
    GpuDevice,
    GpuProcess,
    Value,
    WarnOnce,
    gpu_samples,
)

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


def _reading(function: Callable[[Smi, Handle], list[Value]], interval_s: float) -> AmdReading:
    return AmdReading(function.__name__, function, interval_s)


READINGS = (
    *(_reading(function, 1.0) for function in (activity, memory, power, energy, temperature, clocks)),
    *(_reading(function, 10.0) for function in (ecc_errors, pcie)),
)
"""What is read of every GPU. Throttling is left out: `amdsmi_get_violation_status` takes a tenth of a second per GPU."""


def _known(value: Any) -> Any:
    """Return a value, None for "N/A"."""
    return None if value is None or value == "N/A" else value


def _scaled(metric: str, value: Any, factor: float, *labels: str) -> list[Value]:
    known = _known(value)
    return [] if known is None else [(metric, float(known) * factor, labels)]


log = logging.getLogger(__name__)

_RETRY_S = 10.0
_GOOD_FOR_INTERVALS = 3
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


@dataclass
class _Gpu:
    gpu: Gpu
    driver: str
    values: dict[str, list[Value]] = field(default_factory=dict)

    def samples(self) -> list[Sample]:
        device = self.gpu.device
        info = (device.name, device.pci_bus_id, self.driver)
        return gpu_samples(
            device, [("gpuwatch_gpu_info", 1, info), *(v for each in self.values.values() for v in each)]
        )


class AmdCollector:
    """Samples of all AMD GPUs, once a tick; process lists every `process_interval_s`."""

    name = "gpu"

    def __init__(
        self,
        *,
        load: Callable[[], Any] = load_amdsmi,
        clock: Callable[[], float] = time.monotonic,
        deadline_s: float = 2.0,
        process_interval_s: float = 10.0,
        readings: tuple[AmdReading, ...] = READINGS,
    ) -> None:
        self._load = load
        self._clock = clock
        self._thread = DeadlineThread("amdsmi", deadline_s)
        self._process_interval_s = process_interval_s
        self._readings = readings
        self._costs = CallCosts(clock)
        self._smi: Any = None
        self._gpus: tuple[_Gpu, ...] = ()
        self._processes: dict[str, tuple[float, tuple[GpuProcess, ...]]] = {}
        self._expected = 0
        self._retry_due_s = float("-inf")
        self._warn = WarnOnce()

    def collect(self) -> Iterable[Sample]:
        """Return samples of every GPU that answers.

        Raises: NoData without ROCm's library or a GPU; TimeoutError while amdsmi does not answer; GpuwatchError for one that fails.
        """
        try:
            return self._thread.call(self._tick)
        except TimeoutError as error:
            self._processes = {}  # whether a process that held a GPU before the hang still does is not known
            raise TimeoutError(f"{error} ({self._costs.current or 'listing the GPUs'})") from None

    def devices(self) -> tuple[GpuDevice, ...]:
        """Return the GPUs that answered in the last tick that came back, by index."""
        return tuple(each.gpu.device for each in self._gpus)

    def processes(self) -> dict[str, tuple[GpuProcess, ...]]:
        """Return the processes of each GPU by UUID; an absent UUID is not known."""
        listed = {each.gpu.device.uuid for each in self._gpus}
        good_s = _GOOD_FOR_INTERVALS * self._process_interval_s
        known = self._processes.items()
        return {uuid: found for uuid, (at_s, found) in known if uuid in listed and self._clock() - at_s <= good_s}

    def process_list_age_s(self, uuid: str) -> float:
        """Return how old a GPU's process list is, 0 where there is none."""
        known = self._processes.get(uuid)
        return 0.0 if known is None else max(0.0, self._clock() - known[0])

    def _tick(self) -> list[Sample]:
        if len(self._gpus) < max(1, self._expected) and self._clock() >= self._retry_due_s:
            self._retry_due_s = self._clock() + _RETRY_S
            self._enumerate()
        due = [reading for reading in self._readings if self._costs.due(reading.name, reading.interval_s)]
        list_processes = self._costs.due("processes", self._process_interval_s)
        spent_s = dict.fromkeys([*(reading.name for reading in due), *(["processes"] if list_processes else [])], 0.0)
        self._gpus = tuple(gpu for gpu in self._gpus if self._read(gpu, due, list_processes, spent_s))
        if self._gpus:
            for name, seconds in spent_s.items():
                self._costs.done(name, seconds)
        if not self._expected:
            raise NoData("amdsmi lists no GPU")
        samples = [sample for each in self._gpus for sample in each.samples()]
        samples += self._costs.samples()
        samples.append(Sample("gpuwatch_gpus_seen", len(self._gpus)))
        samples.append(Sample("gpuwatch_gpus_expected", self._expected))
        return samples

    def _enumerate(self) -> None:
        """Start amdsmi again and list the GPUs."""
        if self._smi is None:
            self._smi = self._load()
        smi = self._smi
        self._gpus, self._processes = (), {}
        self._costs.forget_due_times()
        with contextlib.suppress(smi.AmdSmiException):
            smi.amdsmi_shut_down()
        try:
            smi.amdsmi_init(smi.AmdSmiInitFlags.INIT_AMD_GPUS)
            handles = smi.amdsmi_get_processor_handles()
        except smi.AmdSmiException as error:
            if not self._expected:
                raise GpuwatchError(f"amdsmi does not start: {error}") from error
            self._warn(f"amdsmi does not start: {error}")
            return
        found = []
        for index, handle in enumerate(handles):
            try:
                found.append(_Gpu(Gpu(describe(smi, handle, index), handle), driver_version(smi, handle)))
            except smi.AmdSmiException as error:
                self._warn(f"GPU {index} is listed but does not answer: {error}")
        self._gpus = tuple(found)
        self._expected = max(self._expected, len(handles))
        log.info("amdsmi lists %s GPUs", len(found))

    def _read(self, known: _Gpu, due: list[AmdReading], list_processes: bool, spent_s: dict[str, float]) -> bool:
        """Read what is due of a GPU; return False for one that is lost."""
        gpu, uuid = known.gpu, known.gpu.device.uuid

        def listed(smi: Any, handle: Any) -> list[Value]:
            self._processes[uuid] = (self._clock(), processes(smi, handle))
            return [("gpuwatch_gpu_processes", len(self._processes[uuid][1]), ())]

        for reading in [*due, *([AmdReading("processes", listed, 0.0)] if list_processes else [])]:
            with self._costs.calling(f"{reading.name} of GPU {gpu.device.index}") as took:
                try:
                    known.values[reading.name] = reading.read(self._smi, gpu.handle)
                except self._smi.AmdSmiException as error:
                    known.values.pop(reading.name, None)  # not measured: absent
                    if getattr(error, "err_code", None) in _LOST:
                        self._warn(f"{gpu} is lost: {error}")
                        return False
            spent_s[reading.name] += took[0]
        return True
