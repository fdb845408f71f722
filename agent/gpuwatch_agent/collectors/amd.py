"""AMD GPUs through `amdsmi`, ROCm's own Python package: gpuwatch_gpu_*, GPUs seen and expected, and who holds which.

The same small interface as NVML's (`gpu_source.py`). All calls are made in one thread that is given up on when the driver hangs.
*Tested against a module with amdsmi's function names; never run on real hardware yet.* Metrics that have NVML in their name count amdsmi's calls here.
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
from gpuwatch_agent.collectors.amd_readings import READINGS, AmdReading, describe, driver_version, processes
from gpuwatch_agent.collectors.call_costs import CallCosts
from gpuwatch_agent.collectors.driver_calls import DeadlineThread
from gpuwatch_agent.collectors.nvml import GpuDevice, GpuProcess, Value

log = logging.getLogger(__name__)

_RETRY_S = 10.0
_GOOD_FOR_INTERVALS = 3
_LOST = {12, 14, 18, 31, 32, 34, 52, 54}
"""IO, FILE_ERROR, INIT_ERROR, NOT_FOUND, NOT_INIT, DRIVER_NOT_LOADED, FILE_NOT_FOUND, AMDGPU_RESTART_ERR of amdsmi_status_t: nothing
can be had of this GPU until the devices are listed anew."""


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
    device: GpuDevice
    handle: Any
    driver: str
    values: dict[str, list[Value]] = field(default_factory=dict)


class AmdCollector:
    """Samples of all AMD GPUs, once a turn; process lists every `process_interval_s`."""

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
        self._warned: set[str] = set()

    def collect(self) -> Iterable[Sample]:
        """Return samples of every GPU that answers.

        Raises: NoData without ROCm's library or a GPU; TimeoutError while amdsmi does not answer; GpuwatchError for one that fails.
        """
        try:
            return self._thread.call(self._turn)
        except TimeoutError as error:
            self._processes = {}  # who held a GPU before the driver hung is not known to hold it still
            raise TimeoutError(f"{error} ({self._costs.current or 'listing the GPUs'})") from None

    def devices(self) -> tuple[GpuDevice, ...]:
        """Return the GPUs that answered in the last turn that came back, by index."""
        return tuple(gpu.device for gpu in self._gpus)

    def processes(self) -> dict[str, tuple[GpuProcess, ...]]:
        """Return the processes of each GPU by UUID; an absent UUID is not known."""
        listed = {gpu.device.uuid for gpu in self._gpus}
        good_s = _GOOD_FOR_INTERVALS * self._process_interval_s
        known = self._processes.items()
        return {uuid: found for uuid, (at_s, found) in known if uuid in listed and self._clock() - at_s <= good_s}

    def process_list_age_s(self, uuid: str) -> float:
        """Return how old a GPU's process list is, 0 where there is none."""
        known = self._processes.get(uuid)
        return 0.0 if known is None else max(0.0, self._clock() - known[0])

    def _turn(self) -> list[Sample]:
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
        samples = [sample for gpu in self._gpus for sample in self._samples(gpu)]
        for call, cost in self._costs.calls.items():
            samples.append(Sample("gpuwatch_nvml_call_seconds_total", cost.seconds, (call,)))
            samples.append(Sample("gpuwatch_nvml_call_interval_seconds", cost.interval_s, (call,)))
        samples.append(Sample("gpuwatch_gpus_seen", len(self._gpus)))
        samples.append(Sample("gpuwatch_gpus_expected", self._expected))
        return samples

    def _enumerate(self) -> None:
        """Start amdsmi anew and list the GPUs."""
        if self._smi is None:
            self._smi = self._load()
        smi = self._smi
        self._gpus, self._processes = (), {}
        self._costs.forget_dues()
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
                found.append(_Gpu(describe(smi, handle, index), handle, driver_version(smi, handle)))
            except smi.AmdSmiException as error:
                self._warn(f"GPU {index} is listed but does not answer: {error}")
        self._gpus = tuple(found)
        self._expected = max(self._expected, len(handles))
        log.info("amdsmi lists %s GPUs", len(found))

    def _read(self, gpu: _Gpu, due: list[AmdReading], list_processes: bool, spent_s: dict[str, float]) -> bool:
        """Read what is due of a GPU; return False for one that is lost."""

        def listed(smi: Any, handle: Any) -> list[Value]:
            self._processes[gpu.device.uuid] = (self._clock(), processes(smi, handle))
            return [("gpuwatch_gpu_processes", len(self._processes[gpu.device.uuid][1]), ())]

        calls = [*due, *([AmdReading("processes", listed, 0.0)] if list_processes else [])]
        for reading in calls:
            with self._costs.calling(f"{reading.name} of GPU {gpu.device.index}") as took:
                try:
                    gpu.values[reading.name] = reading.read(self._smi, gpu.handle)
                except self._smi.AmdSmiException as error:
                    gpu.values.pop(reading.name, None)  # not told: absent
                    if getattr(error, "err_code", None) in _LOST:
                        self._warn(f"GPU {gpu.device.index} ({gpu.device.uuid}) is lost: {error}")
                        return False
            spent_s[reading.name] += took[0]
        return True

    def _samples(self, gpu: _Gpu) -> list[Sample]:
        labels = (str(gpu.device.index), gpu.device.uuid)
        info = Sample("gpuwatch_gpu_info", 1, (*labels, gpu.device.name, gpu.device.pci_bus_id, gpu.driver))
        return [
            info,
            *(Sample(m, value, (*labels, *more)) for found in gpu.values.values() for m, value, more in found),
        ]

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            log.warning("%s", message)
