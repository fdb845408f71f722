"""What the training process can measure of its node: CPU, pressure, /dev/shm, its loader workers, its GPU; every two seconds, in about 0.1 ms."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ParamSpec, TypeVar

import msgspec

from gpuwatch.diagnosis.window import GpuFacts, HostFacts
from gpuwatch.errors import NoData
from gpuwatch.host import blocked, cgroup, proc

P = ParamSpec("P")
T = TypeVar("T")
_MAX_WORKERS = 64
_MEMORY_EVERY = 8  # memory is read in one of so many samples
_MIN_READINGS = 3
_MIN_COMPUTE_S = 3.0


class HostSample(msgspec.Struct, frozen=True):
    """One sample of the node. Times in seconds; None: not measured."""

    at_s: float
    busy_s: float | None  # since boot, as all up to `received_bytes`
    cpu_s: float | None
    cpu_pressure_s: float | None
    io_pressure_s: float | None
    received_bytes: int | None
    shm: tuple[int, int] | None
    worker_cpu_s: dict[int, float]
    worker_queue_s: dict[int, float]  # time that each worker was ready to run and had no core
    worker_waits: tuple[str, ...]  # what each worker was blocked on
    quota: cgroup.Quota | None
    disks: dict[str, proc.Disk] | None


def usable_cores() -> int | None:
    """Return how many cores this process may use: its affinity, and its cgroup's quota rounded up."""
    try:
        cores = len(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        return os.cpu_count()
    return cgroup.within_quota(cores)


class HostWatcher:
    """The node over the last minutes, as one process sees it."""

    def __init__(
        self, procfs: Path = Path("/proc"), shm: Path = Path("/dev/shm"), keep: int = 150, sysfs: Path = Path("/sys")
    ) -> None:
        self._procfs, self._sysfs, self._shm = procfs, sysfs, shm
        self._samples: deque[HostSample] = deque(maxlen=keep)
        self._first: HostSample | None = None
        self._taken = 0
        self._memory_available: int | None = None
        self.worker_private_bytes: int | None = None  # private memory of one loader worker; None before it was read
        self._cores = usable_cores()

    def sample(self, at_s: float, worker_pids: Sequence[int]) -> None:
        """Take one sample."""
        procfs = self._procfs
        busy_s, cpu_s = _optional(proc.cpu_times_s, procfs) or (None, None)
        sample = HostSample(
            at_s=at_s,
            busy_s=busy_s,
            cpu_s=cpu_s,
            cpu_pressure_s=_optional(proc.pressure_s, "cpu", procfs),
            io_pressure_s=_optional(proc.pressure_s, "io", procfs),
            received_bytes=_optional(proc.received_bytes, "self", procfs),
            shm=_optional(proc.shm_bytes, self._shm),
            worker_cpu_s=proc.by_pid(proc.process_cpu_s, worker_pids, procfs),
            worker_queue_s=proc.by_pid(proc.run_queue_s, worker_pids, procfs),
            worker_waits=tuple(wait for pid in worker_pids[:_MAX_WORKERS] if (wait := blocked.blocked_on(pid, procfs))),
            quota=cgroup.quota(procfs, self._sysfs),
            disks=_optional(proc.disks, procfs),
        )
        if self._taken % _MEMORY_EVERY == 0 or (worker_pids and self.worker_private_bytes is None):
            available = _optional(proc.memory_available_bytes, procfs)
            self._memory_available = cgroup.within_limit(available, procfs, self._sysfs)
            if worker_pids and (private := _optional(proc.private_bytes, worker_pids[0], procfs)) is not None:
                self.worker_private_bytes = private
        self._taken += 1
        self._samples.append(sample)
        self._first = self._first or sample

    def facts(self) -> HostFacts:
        """Return means since the first sample, which need two samples; of /dev/shm the maximum."""
        samples = list(self._samples)  # another thread may be sampling
        if self._first is None or not samples:
            return HostFacts(cpu_cores=self._cores)
        first, last = self._first, samples[-1]
        elapsed = last.at_s - first.at_s

        def growth(name: str) -> float | None:
            then, now = getattr(first, name), getattr(last, name)
            return None if then is None or now is None else now - then

        received, disks = growth("received_bytes"), None
        if first.disks is not None and last.disks is not None and elapsed > 0:
            disks = [(now, first.disks[name]) for name, now in last.disks.items() if name in first.disks]
        shm = [sample.shm for sample in samples if sample.shm is not None]
        return HostFacts(
            cpu_cores=self._cores,
            cpu_busy_ratio=_ratio(growth("busy_s"), growth("cpu_s")),
            cpu_pressure_ratio=_ratio(growth("cpu_pressure_s"), elapsed),
            cpu_quota_cores=last.quota.cores if last.quota else None,
            cpu_throttled_ratio=cgroup.throttled_ratio(first.quota, last.quota),
            io_pressure_ratio=_ratio(growth("io_pressure_s"), elapsed),
            disk_busy_ratio=_ratio(max(now.busy_s - then.busy_s for now, then in disks), elapsed) if disks else None,
            disk_read_bytes_per_s=(
                None
                if disks is None
                else sum(max(0, now.read_bytes - then.read_bytes) for now, then in disks) / elapsed
            ),
            network_receive_bytes_per_s=(None if received is None or elapsed <= 0 else max(0.0, received) / elapsed),
            memory_available_bytes=self._memory_available,
            shm_size_bytes=shm[-1][0] if shm else None,
            shm_used_bytes=max(used for _, used in shm) if shm else None,
        )

    def worker_cpu_ratios(self) -> tuple[float, ...] | None:
        """Return each loader worker's CPU use, 1.0 = one core, of the last sample that has workers; None with fewer than two samples."""
        return self._worker_ratios([(sample.at_s, sample.worker_cpu_s) for sample in list(self._samples)])

    def worker_busy_ratios(self) -> tuple[float, ...] | None:
        """Return the same plus the time in which a worker was ready to run and had no core; None where that is not measured."""
        found = []
        for sample in list(self._samples):
            queue_s = sample.worker_queue_s
            busy_s = {pid: cpu_s + queue_s[pid] for pid, cpu_s in sample.worker_cpu_s.items() if pid in queue_s}
            found.append((sample.at_s, busy_s))
        return self._worker_ratios(found)

    def _worker_ratios(self, found: Sequence[tuple[float, dict[int, float]]]) -> tuple[float, ...] | None:
        samples = [(at_s, seconds) for at_s, seconds in found if seconds]
        if not samples:
            return None
        last_s, last = samples[-1]
        ratios = []
        for pid, worked_s in last.items():
            first_s, first = next((at_s, seconds) for at_s, seconds in samples if pid in seconds)
            if last_s > first_s:
                ratios.append((worked_s - first[pid]) / (last_s - first_s))
        return tuple(ratios) if ratios else None

    def worker_waits(self) -> dict[str, float] | None:
        """Return the share of samples in which workers were blocked on each of `blocked.WAITS`; None with too few samples."""
        return blocked.shares(wait for sample in list(self._samples) for wait in sample.worker_waits)


class StepIdle:
    """For how long, in steps on the CPU, no thread of the process has work for a core: a lower bound, as threads may run at once."""

    def __init__(self, procfs: Path = Path("/proc")) -> None:
        self._procfs = procfs
        self._last: tuple[float, dict[int, float]] | None = None
        self._busy_s = self._compute_s = 0.0

    def sample(self, compute_s: float) -> None:
        """Take a sample. Up to now steps have computed for so long."""
        threads = _optional(proc.own_threads_busy_s, self._procfs)
        last, self._last = self._last, None if threads is None else (compute_s, threads)
        if last is not None and threads is not None:
            self._busy_s += sum(max(0.0, busy - last[1].get(thread, 0.0)) for thread, busy in threads.items())
            self._compute_s += compute_s - last[0]

    @property
    def ratio(self) -> float | None:
        """The share of compute, 0–1; None before it was measured for a while."""
        if self._compute_s < _MIN_COMPUTE_S:
            return None
        return min(1.0, max(0.0, 1 - self._busy_s / self._compute_s))


class OwnGpu:
    """The mean of the driver's utilization readings of the training's GPU, by nvidia-ml-py: an upper bound of what this training keeps busy."""

    def __init__(self, uuid: str) -> None:
        self._uuid = uuid
        self._percent: Callable[[], float] | None = None
        self._is_off = False
        self._sum = self._readings = 0.0

    def sample(self) -> None:
        """Take a reading; after a failure no further ones. The first call loads the library."""
        if self._is_off:
            return
        try:
            if self._percent is None:
                import pynvml

                pynvml.nvmlInit()
                handle = pynvml.nvmlDeviceGetHandleByUUID(self._uuid)
                self._percent = lambda: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu
            self._sum += self._percent() / 100
            self._readings += 1
        except Exception:  # no such package, no driver, a MIG instance, a GPU that is gone
            self._is_off = True

    def facts(self) -> tuple[GpuFacts, ...]:
        """Return the GPU with its utilization so far; nothing with fewer than three readings."""
        if self._is_off or self._readings < _MIN_READINGS:
            return ()
        return (GpuFacts("", self._uuid, utilization_ratio=self._sum / self._readings),)


def _optional(read: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
    try:
        return read(*args, **kwargs)
    except (NoData, ValueError, IndexError):
        return None


def _ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or whole is None or whole <= 0 else min(1.0, max(0.0, part / whole))
