"""What the training process measures of its node every 2 s in about 0.1 ms: CPU, pressure, /dev/shm, workers, GPU."""

import os
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from gpuwatch.diagnosis.window import GpuFacts, HostFacts
from gpuwatch.hook.identity import LOCAL_WORLD_SIZE, SLURM_TASKS_HERE, integer
from gpuwatch.host import blocked, cgroup, proc

_SAMPLES_KEPT, _WINDOW_S = 150, 300.0
_MEMORY_EVERY = 8  # memory is read in one of so many samples
_MIN_READINGS = 3
_MIN_COMPUTE_S = 3.0
_MOST_IN_PHASES = 0.1  # of phases, as a multiple of compute, between two samples that show the CPU time of steps


class HostSample(msgspec.Struct, frozen=True):
    """One sample of the node. Times in seconds; None: not measured."""

    at_s: float
    busy_s: float | None  # since boot, as all up to `received_bytes`
    cpu_s: float | None
    cpu_pressure_s: float | None
    io_pressure_s: float | None
    received_bytes: int | None
    quota: cgroup.Quota | None
    disks: dict[str, proc.Disk] | None


def usable_cores() -> int | None:
    """Return how many cores the ranks here may use: this one's affinity, and its cgroup's quota rounded up."""
    try:
        cores = len(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        return os.cpu_count()
    tasks, ranks = (integer(os.environ, names, 1) for names in (SLURM_TASKS_HERE, LOCAL_WORLD_SIZE))
    of_job = integer(os.environ, ("SLURM_CPUS_ON_NODE",), 0)
    if ranks == tasks:  # each rank may be a task that is bound to cores of its own
        cores = max(cores, min(cores * tasks, of_job))
    return cgroup.within_quota(cores, cgroup.quota(cgroup.folders("cpu")))


class HostWatcher:
    """The node over the last minutes, as one process sees it."""

    def __init__(self, procfs: Path = Path("/proc"), shm: Path = Path("/dev/shm"), sysfs: Path = Path("/sys")) -> None:
        self._procfs, self._sysfs, self._shm = procfs, sysfs, shm
        self._first: HostSample | None = None
        self._last: HostSample | None = None
        self._shm_seen: deque[tuple[int, int]] = deque(maxlen=_SAMPLES_KEPT)
        self._taken = 0
        self._memory_available: int | None = None
        self.workers = blocked.Workers(_WINDOW_S, _SAMPLES_KEPT)
        """The loader's workers; when they have gone, as they were last."""
        self._cores = usable_cores()

    def sample(self, at_s: float, worker_pids: Sequence[int]) -> None:
        procfs = self._procfs
        busy_s, cpu_s = proc.optional(proc.cpu_times_s, procfs) or (None, None)
        self._last = HostSample(
            at_s=at_s,
            busy_s=busy_s,
            cpu_s=cpu_s,
            cpu_pressure_s=proc.optional(proc.pressure_s, procfs / "pressure/cpu"),
            io_pressure_s=proc.optional(proc.pressure_s, procfs / "pressure/io"),
            received_bytes=proc.optional(proc.received_bytes, "self", procfs),
            quota=cgroup.quota(cgroup.folders("cpu", procfs, self._sysfs)),
            disks=proc.optional(proc.read, f"{procfs}/diskstats", proc.parse_disks),
        )
        self._first = self._first or self._last
        if (shm := proc.optional(proc.shm_bytes, self._shm)) is not None:
            self._shm_seen.append(shm)
        if worker_pids:
            self.workers.sample(at_s, proc.by_pid(proc.stat, worker_pids, procfs), procfs)
        if self._taken % _MEMORY_EVERY == 0:
            available = (proc.optional(proc.memory_bytes, procfs) or {}).get("MemAvailable")
            room = cgroup.memory_room(cgroup.folders("memory", procfs, self._sysfs))
            self._memory_available = cgroup.within_limit(available, room)
        self._taken += 1

    def facts(self) -> HostFacts:
        """Return means since the first sample, which need two samples; of /dev/shm the maximum."""
        first, last, shm = self._first, self._last, list(self._shm_seen)  # another thread may be sampling
        if first is None or last is None:
            return HostFacts(cpu_cores=self._cores)
        elapsed = last.at_s - first.at_s

        def growth(name: str) -> float | None:
            then, now = getattr(first, name), getattr(last, name)
            return None if then is None or now is None else now - then

        received, disks = growth("received_bytes"), []
        if first.disks and last.disks and elapsed > 0:
            disks = [(now, first.disks[name]) for name, now in last.disks.items() if name in first.disks]
        read = sum(max(0, now.read_bytes - then.read_bytes) for now, then in disks)
        return HostFacts(
            cpu_cores=self._cores,
            cpu_busy_ratio=_ratio(growth("busy_s"), growth("cpu_s")),
            cpu_pressure_ratio=_ratio(growth("cpu_pressure_s"), elapsed),
            cpu_quota_cores=last.quota.cores if last.quota else None,
            cpu_throttled_ratio=cgroup.throttled_ratio(first.quota, last.quota),
            io_pressure_ratio=_ratio(growth("io_pressure_s"), elapsed),
            disk_busy_ratio=_ratio(max(now.busy_s - then.busy_s for now, then in disks), elapsed) if disks else None,
            disk_read_bytes_per_s=read / elapsed if disks else None,
            network_receive_bytes_per_s=None if received is None or elapsed <= 0 else max(0.0, received) / elapsed,
            memory_available_bytes=self._memory_available,
            shm_size_bytes=shm[-1][0] if shm else None,
            shm_used_bytes=max(used for _, used in shm) if shm else None,
        )


class StepIdle:
    """How long, in steps on the CPU, no thread here has work for a core: a lower bound, as threads may run at once."""

    def __init__(self, procfs: Path = Path("/proc")) -> None:
        self._procfs = procfs
        self._last: tuple[float, dict[int, float]] | None = None
        self._busy_s = self._compute_s = self._phases_s = 0.0

    def sample(self, compute_s: float, phases_s: float = 0.0) -> None:
        """Take a sample. Up to now steps have computed for so long, and phases lasted, which do not count."""
        threads = proc.optional(proc.own_threads_busy_s, self._procfs)
        last, self._last = self._last, None if threads is None else (compute_s, threads)
        in_phases_s, self._phases_s = phases_s - self._phases_s, phases_s
        if last is not None and threads is not None and in_phases_s <= _MOST_IN_PHASES * (compute_s - last[0]):
            self._busy_s += sum(max(0.0, busy - last[1].get(thread, 0.0)) for thread, busy in threads.items())
            self._compute_s += compute_s - last[0]

    @property
    def cores(self) -> float | None:
        """Its threads' time on a CPU or in a run queue, with fetches, as a multiple of compute; None before any."""
        return self._busy_s / self._compute_s if self._compute_s > 0 else None

    @property
    def ratio(self) -> float | None:
        """The share of compute, 0–1; None before it was measured for a while."""
        return None if self.cores is None or self._compute_s < _MIN_COMPUTE_S else min(1.0, max(0.0, 1 - self.cores))


class OwnGpu:
    """The mean utilization of the training's GPU by nvidia-ml-py: an upper bound of what this training keeps busy."""

    def __init__(self, uuid: str) -> None:
        self.uuid = uuid
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
                handle = pynvml.nvmlDeviceGetHandleByUUID(self.uuid)
                self._percent = lambda: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu
            self._sum += self._percent() / 100
            self._readings += 1
        except Exception:  # no such package, no driver, a MIG instance, a GPU that is gone
            self._is_off = True

    def facts(self) -> tuple[GpuFacts, ...]:
        """Return the GPU with its utilization so far; nothing with fewer than three readings."""
        if self._is_off or self._readings < _MIN_READINGS:
            return ()
        return (GpuFacts("", self.uuid, utilization_ratio=self._sum / self._readings),)


def _ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or whole is None or whole <= 0 else min(1.0, max(0.0, part / whole))
