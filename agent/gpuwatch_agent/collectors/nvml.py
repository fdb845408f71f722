"""NVIDIA GPUs through NVML: gpuwatch_gpu_*, GPUs seen and expected, processes, performance monitoring (GPM), XIDs.

*Readings of links, memory errors and MIG have never run on real hardware yet.*
Source: https://docs.nvidia.com/deploy/nvml-api, and nvml.h for the units.
"""

import contextlib
import ctypes
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pynvml

from gpuwatch.alerting.thresholds import XIDS_OF_PROGRAMS
from gpuwatch.errors import NoData
from gpuwatch.metrics import Sample
from gpuwatch.tables import table
from gpuwatch_agent.collectors.drivers import TIMING, DriverCollector, Fate, GpuDevice, Reads, Timing, Value, values

Handle = Any

_TABLES = table("gpuwatch_agent.collectors", "nvml.yml")
_THROTTLE_BITS = {
    label: sum(getattr(pynvml, f"nvmlClocksEventReason{name}") for name in names)
    for label, names in _TABLES["throttled"].items()
}


def throttle_values(bits: int) -> list[Value]:
    """Return 1 for each reason among these bits of nvmlClocksEventReason* that holds the clocks down now, else 0."""
    return [("gpuwatch_gpu_throttled", float(bool(bits & mask)), (reason,)) for reason, mask in _THROTTLE_BITS.items()]


def _newest(handle: Handle, newest: tuple[Any, ...], older: tuple[Any, ...]) -> Any:
    """Return the answer of `newest` (name, arguments); where this driver or binding does not have it, of `older`."""
    try:
        return getattr(pynvml, newest[0])(handle, *newest[1:])
    except (pynvml.NVMLError_FunctionNotFound, pynvml.NVMLError_ArgumentVersionMismatch, pynvml.NVMLError_Deprecated):
        return getattr(pynvml, older[0])(handle, *older[1:])


def describe(index: int, handle: Handle, driver: str) -> GpuDevice:
    """Return what a GPU is. A Jetson's has no PCI address, one of WSL no minor number."""
    minor, address = None, ""
    with contextlib.suppress(pynvml.NVMLError_NotSupported):
        minor = int(pynvml.nvmlDeviceGetMinorNumber(handle))
    with contextlib.suppress(pynvml.NVMLError_NotSupported):
        address = pynvml.nvmlDeviceGetPciInfo(handle).busId
    uuid, name = pynvml.nvmlDeviceGetUUID(handle), pynvml.nvmlDeviceGetName(handle)
    return GpuDevice(index, uuid, name, address, minor, handle=handle, driver=driver)


def memory(gpu: GpuDevice) -> list[Value]:
    """Return used and total memory, without what the driver reserves: drivers before 510 count that as used."""
    call = "nvmlDeviceGetMemoryInfo"
    info = _newest(gpu.handle, (call, pynvml.nvmlMemory_v2), (call,))
    return values(memory_used_bytes=info.used, memory_total_bytes=info.total)


def temperature(gpu: GpuDevice) -> list[Value]:
    """Return the core's temperature. The call tried first is to go with CUDA 14."""
    calls = ((name, pynvml.NVML_TEMPERATURE_GPU) for name in ("nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureV"))
    return values(temperature_celsius=_newest(gpu.handle, *calls))


def throttled(gpu: GpuDevice) -> list[Value]:
    """Return the reasons for lower clocks. Drivers before 535 know the call by its old name."""
    new, old = "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"
    return throttle_values(_newest(gpu.handle, (new,), (old,)))


FAST: Reads = {
    # share of the driver's sample period (1/6 to 1 s) with a kernel running; not supported under MIG
    "utilization": lambda gpu: values(utilization_ratio=pynvml.nvmlDeviceGetUtilizationRates(gpu.handle).gpu / 100),
    "memory": memory,
    # of the board, in mW: the mean of the last second on Ampere and later
    "power": lambda gpu: values(power_watts=pynvml.nvmlDeviceGetPowerUsage(gpu.handle) / 1000),
    # since the driver was loaded, in mJ
    "energy": lambda gpu: values(
        driver_energy_joules_total=pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu.handle) / 1000
    ),
    "temperature": temperature,
    "throttled": throttled,
    # of the multiprocessors, in MHz
    "clock": lambda gpu: values(sm_clock_hertz=pynvml.nvmlDeviceGetClockInfo(gpu.handle, pynvml.NVML_CLOCK_SM) * 1e6),
}
"""Read in every tick, each in microseconds; anything slower belongs to the slow tier."""


def compute_processes(handle: Handle) -> tuple[int, ...]:
    """Return the pids with a compute context on a GPU. Milliseconds, under a lock of the driver.

    Of a split GPU these are the processes on all its MIG instances, where the agent may see them. Under MPS these are
    the server and its clients. Drivers before 510 have the second version of the call alone.
    """
    call = "nvmlDeviceGetComputeRunningProcesses"
    found = {process.pid for process in _newest(handle, (f"{call}_v3",), (f"{call}_v2",))}
    with contextlib.suppress(pynvml.NVMLError):  # not known to every driver
        found |= {client.pid for client in pynvml.nvmlDeviceGetMPSComputeRunningProcesses_v3(handle)}
    return tuple(sorted(found))


def sm_utilization(handle: Handle, since_s: float) -> dict[int, float] | None:
    """Return the share of multiprocessor time of each process with any since a Unix time; None if unreadable (MIG)."""
    try:
        samples = pynvml.nvmlDeviceGetProcessUtilization(handle, int(since_s * 1e6))
    except pynvml.NVMLError_NotFound:  # no process had any
        return {}
    except pynvml.NVMLError:  # not supported, or one more process came between the two calls
        return None
    return {sample.pid: sample.smUtil / 100 for sample in samples}


def ecc_errors(gpu: GpuDevice) -> list[Value]:
    """Return memory errors since the driver was loaded. Not supported where ECC is off."""
    kinds = ((name, getattr(pynvml, f"NVML_MEMORY_ERROR_TYPE_{name.upper()}")) for name in ("corrected", "uncorrected"))
    read, since = pynvml.nvmlDeviceGetTotalEccErrors, pynvml.NVML_VOLATILE_ECC
    return [("gpuwatch_gpu_ecc_errors_total", read(gpu.handle, code, since), (name,)) for name, code in kinds]


_LINK_ERRORS = [getattr(pynvml, f"NVML_NVLINK_ERROR_DL_{x}") for x in ("REPLAY", "RECOVERY", "CRC_FLIT", "CRC_DATA")]


def nvlinks(gpu: GpuDevice) -> list[Value]:
    """Return the errors of the NVLinks that are up; nothing for a GPU without any."""
    errors: list[int] = []
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            is_up = bool(pynvml.nvmlDeviceGetNvLinkState(gpu.handle, link))
        except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_InvalidArgument):
            break  # there are no more
        for counter in _LINK_ERRORS if is_up else ():
            with contextlib.suppress(pynvml.NVMLError_NotSupported):
                errors.append(pynvml.nvmlDeviceGetNvLinkErrorCounter(gpu.handle, link, counter))
    return values(nvlink_errors_total=sum(errors) if errors else None)


def nvlink_bytes(gpu: GpuDevice) -> list[Value]:
    """Return the data over all NVLinks since the driver was loaded. NVML's unit is KiB."""
    fields = (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX)
    all_links = 0xFFFFFFFF
    answers = pynvml.nvmlDeviceGetFieldValues(gpu.handle, [(each, all_links) for each in fields])
    sent, received = (a.value.ullVal * 1024 if a.nvmlReturn == pynvml.NVML_SUCCESS else None for a in answers)
    return values(nvlink_transmit_bytes_total=sent, nvlink_receive_bytes_total=received)


def mig_instances(gpu: GpuDevice) -> tuple[float, list[GpuDevice]]:
    """Return the share of a GPU that is in no MIG instance, and its instances; (1, none) where MIG is off.

    Two compute instances of one GPU instance are two here, as they are for schedulers: each has a UUID. A GPU has as
    many compute slices as it can have instances: 7, or 4 of an A30.
    """
    is_on = pynvml.nvmlDeviceGetMigMode(gpu.handle)[0] == pynvml.NVML_DEVICE_MIG_ENABLE
    slices = left = pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu.handle) if is_on else 0
    found: list[GpuDevice] = []
    for index in range(slices):
        try:
            handle = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu.handle, index)
        except (pynvml.NVMLError_NotFound, pynvml.NVMLError_InvalidArgument, pynvml.NVMLError_NoPermission):
            continue  # no instance has this index now, or the agent may not see it
        uuid, name = pynvml.nvmlDeviceGetUUID(handle), pynvml.nvmlDeviceGetName(handle)
        instance = str(pynvml.nvmlDeviceGetGpuInstanceId(handle)), name.rpartition(" MIG ")[2]
        size = pynvml.nvmlDeviceGetAttributes_v2(handle).computeInstanceSliceCount
        left -= size
        its = (f"{gpu.index}:{index}", uuid, name, gpu.pci_bus_id, None, instance, size / slices)
        found.append(GpuDevice(*its, handle, gpu.driver, gpu.handle))
    return max(0, left) / slices if found else 1.0, found


SLOW: Reads = {
    # packets that were sent again: a riser, a slot or a cable that does not hold its speed
    "pcie_replays": lambda gpu: values(pcie_replays_total=pynvml.nvmlDeviceGetPcieReplayCounter(gpu.handle)),
    "ecc_errors": ecc_errors,
    "nvlinks": nvlinks,
    "nvlink_bytes": nvlink_bytes,
}

_FATES: Mapping[int, Fate] = {
    getattr(pynvml, f"NVML_ERROR_{name}"): fate for fate, names in _TABLES["fates"].items() for name in names
}
_NO_DRIVER = {
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "libnvidia-ml.so.1 was not found: there is no NVIDIA driver here,"
    " or this container was started without its GPU runtime",
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "the NVIDIA driver is not loaded",
}


_SAMPLED_S = 11.0  # the process lists' interval, and a second


class GpuCollector(DriverCollector):
    """NVIDIA's GPUs; with `only_processes`, the processes on them and their XID errors."""

    library = "NVML"

    def __init__(self, timing: Timing = TIMING, only_processes: bool = False) -> None:
        self._gpm = Gpm()
        measured: Reads = {} if only_processes else {**FAST, "gpm": lambda gpu: self._gpm.read(gpu)}
        fast, slow = {"xids": self._read_xids, **measured}, {"mig_instances": self._list_instances}
        super().__init__(timing, fast, slow if only_processes else {**slow, **SLOW})
        self._xids = XidWatch(timing.wall_clock)

    def collect(self) -> Iterable[Sample]:
        """Return also the XID errors of lost GPUs: of one that falls off the bus (79), no other sample tells why."""
        return [*super().collect(), *self._xids.of_lost({gpu.uuid for gpu in self._gpus})]

    def start(self) -> Iterator[GpuDevice | str]:
        self._gpm.close()
        self._xids.close()
        with contextlib.suppress(pynvml.NVMLError):  # it was not started yet
            pynvml.nvmlShutdown()
        try:
            pynvml.nvmlInitWithFlags(pynvml.NVML_INIT_FLAG_NO_GPUS)
        except pynvml.NVMLError as error:
            if error.value in _NO_DRIVER:
                raise NoData(_NO_DRIVER[error.value]) from error
            raise
        driver = pynvml.nvmlSystemGetDriverVersion()
        gpus = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                gpus.append(describe(index, handle, driver))
            except pynvml.NVMLError_NoPermission:
                continue  # another container's
            except Exception as error:
                yield f"GPU {index} is listed but does not answer: {self.why(error)}"
        self._xids.register(gpus)
        for gpu in gpus:
            with contextlib.suppress(pynvml.NVMLError):  # it cannot be split
                self._list_instances(gpu)
        yield from gpus

    def list_processes(self, gpu: GpuDevice) -> tuple[int, ...]:
        pids = compute_processes(gpu.handle)
        used = sm_utilization(gpu.handle, self.timing.wall_clock() - _SAMPLED_S) if len(pids) > 1 else {}
        if used is not None:
            self.sm_utilization[gpu.uuid] = used
        return pids

    def fate(self, error: Exception) -> Fate:
        return _FATES.get(getattr(error, "value", None) or 0, "failed")

    def why(self, error: Exception) -> str:
        if getattr(error, "value", None) == pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
            return f"{error} The driver was replaced while it was loaded: reboot, or reload it and restart the agent"
        return str(error)

    def _read_xids(self, gpu: GpuDevice) -> list[Value]:
        if gpu.uuid == self._gpus[0].uuid:  # the queue is that of all GPUs
            with contextlib.suppress(pynvml.NVMLError):
                self._xids.poll()
        return self._xids.values(gpu)

    def _list_instances(self, gpu: GpuDevice) -> list[Value]:
        self._instances[gpu.uuid] = mig_instances(gpu)
        return []


_GPM_METRICS, _GPM_METRICS_OF_MIG = (
    {name: (getattr(pynvml, f"NVML_GPM_METRIC_{metric}"), factor) for name, (metric, factor) in _TABLES[of].items()}
    for of in ("gpm", "gpm_of_mig")
)


class Gpm:
    """GPU performance monitoring (GPM) since Hopper: activity of multiprocessors, memory and links, without DCGM.

    A metric is computed from two samples of the driver's counters: the first tick has none. For one thread. *Never run
    on real hardware yet.*
    Source: the GPM functions of https://docs.nvidia.com/deploy/nvml-api; units by the comments in nvml.h.
    """

    def __init__(self) -> None:
        self._samples: dict[str, tuple[Any, Any, bool] | None] = {}
        """By UUID: the older sample, the one to write next, whether the older one is filled. None: not supported."""

    def close(self) -> None:
        """Free the samples; before NVML is shut down."""
        for sample in (sample for pair in self._samples.values() for sample in (pair or ())[:2]):
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlGpmSampleFree(sample)
        self._samples = {}

    def read(self, gpu: GpuDevice) -> list[Value]:
        """Return the metrics that the driver has since the last tick; none in the first one. Raises: NVMLError."""
        uuid = gpu.uuid
        if uuid not in self._samples:
            support = pynvml.nvmlGpmQueryDeviceSupport(gpu.handle if gpu.parent is None else gpu.parent)
            is_measured = support.isSupportedDevice and not gpu.is_part_of_instance
            alloc = pynvml.nvmlGpmSampleAlloc
            self._samples[uuid] = (alloc(), alloc(), False) if is_measured else None
        if (samples := self._samples[uuid]) is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        old, new, filled = samples
        if gpu.parent is not None:
            pynvml.nvmlGpmMigSampleGet(gpu.parent, int(gpu.instance[0]), new)
        else:
            pynvml.nvmlGpmSampleGet(gpu.handle, new)
        self._samples[uuid] = (new, old, True)
        if not filled:
            return []
        metrics = _GPM_METRICS if gpu.parent is None else _GPM_METRICS_OF_MIG
        asked = pynvml.c_nvmlGpmMetricsGet_t()
        asked.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        asked.numMetrics = len(metrics)
        asked.sample1, asked.sample2 = old, new
        for place, (metric_id, _) in enumerate(metrics.values()):
            asked.metrics[place].metricId = metric_id
        pynvml.nvmlGpmMetricsGet(asked)
        found = {
            name: answer.value * factor
            for (name, (_, factor)), answer in zip(metrics.items(), asked.metrics, strict=False)
            if answer.nvmlReturn == pynvml.NVML_SUCCESS and math.isfinite(answer.value)
        }
        return values(**found)


_MOST_A_TICK = 64
_FAULT_STAYS_S = 3600.0  # a fault of the GPU also kills the programs on it, whose XIDs follow its own: they do not take its place for so long


class XidWatch:
    """XID errors of all GPUs since the agent started: count, number and time of the last one.

    The driver queues them from registration on; the queue is polled without waiting. *Never run on real hardware yet.*
    Source: the event functions of https://docs.nvidia.com/deploy/nvml-api.
    """

    def __init__(self, wall_clock: Callable[[], float]) -> None:
        self._wall_clock = wall_clock
        self._events: Any = None
        self._gpus: dict[int, GpuDevice] = {}  # by the address that a handle is
        self._counts: dict[str, int] = {}
        self._last: dict[str, tuple[int, float, GpuDevice]] = {}

    def register(self, gpus: Sequence[GpuDevice]) -> None:
        """Subscribe to these GPUs' errors; GPUs without events are skipped."""
        with contextlib.suppress(pynvml.NVMLError):
            self._events = pynvml.nvmlEventSetCreate()
        for gpu in gpus if self._events is not None else ():
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlDeviceRegisterEvents(gpu.handle, pynvml.nvmlEventTypeXidCriticalError, self._events)
                self._gpus[_address(gpu.handle)] = gpu
                self._counts.setdefault(gpu.uuid, 0)

    def close(self) -> None:
        """Read what is still queued, such as why a GPU was lost, and unsubscribe; before NVML is shut down."""
        with contextlib.suppress(pynvml.NVMLError):
            self.poll()
        if self._events is not None:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlEventSetFree(self._events)
        self._events, self._gpus = None, {}

    def poll(self) -> None:
        """Read the queued events, without waiting. Raises: NVMLError, a timeout after the last one."""
        for _ in range(_MOST_A_TICK if self._gpus else 0):
            event = pynvml.nvmlEventSetWait_v2(self._events, 0)
            gpu = self._gpus.get(_address(event.device))
            if gpu is not None and event.eventType & pynvml.nvmlEventTypeXidCriticalError:
                self._counts[gpu.uuid] += 1
                xid, now_s = int(event.eventData), self._wall_clock()
                before, at_s, _ = self._last.get(gpu.uuid, (0, -math.inf, gpu))
                if xid not in XIDS_OF_PROGRAMS or before in (0, *XIDS_OF_PROGRAMS) or now_s - at_s > _FAULT_STAYS_S:
                    self._last[gpu.uuid] = xid, now_s, gpu

    def values(self, gpu: GpuDevice) -> list[Value]:
        """Return a GPU's errors; nothing for one without events."""
        number, at_s, _ = self._last.get(gpu.uuid, (None, None, gpu))
        count = self._counts.get(gpu.uuid)
        return values(xid_errors_total=count, last_xid=number, last_xid_timestamp_seconds=at_s)

    def of_lost(self, listed: Collection[str]) -> Iterator[Sample]:
        """Yield the errors of GPUs that had one, and are not listed by these UUIDs any more."""
        for gpu in (gpu for uuid, (*_, gpu) in self._last.items() if uuid not in listed):
            yield from (Sample(metric, value, (str(gpu.index), gpu.uuid)) for metric, value, _ in self.values(gpu))


def _address(handle: Any) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0
