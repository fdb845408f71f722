"""The node's GPUs: readings joined with processes; and each GPU's median power and memory growth beyond the window.

Times in ns of the agent's monotonic clock.
"""

import re
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, median
from typing import NamedTuple

from gpuwatch import api
from gpuwatch.diagnosis.thresholds import THRESHOLDS
from gpuwatch.diagnosis.window import GpuFacts, MemoryTrend
from gpuwatch.tables import table
from gpuwatch_agent.collectors.drivers import DriverCollector
from gpuwatch_agent.gpus import Account, GpuAccount, GpuReading, account_of
from gpuwatch_agent.gpus.allocations import Allocations, completed
from gpuwatch_agent.processes import ProcessTable
from gpuwatch_agent.processes.owners import Owner, together
from gpuwatch_agent.runs import RUNNING, Run, RunKey
from gpuwatch_agent.runs.window import RecentSamples

_MPS_SERVER = "nvidia-cuda-mps"  # as the kernel cuts "nvidia-cuda-mps-server"
_ACTIVITY = ("gpuwatch_gpu_utilization_ratio", "gpuwatch_gpu_engine_active_ratio")  # of a GPU, of a MIG instance


class Peak(NamedTuple):
    """Dense peak of a GPU's tensor cores in 16-bit formats; its data sheet's clock is the first over the second."""

    flops_per_s: float
    flops_per_clock: int  # of all multiprocessors


DENSE_PEAKS = {
    model: Peak(row["tflops_per_s"] * 1e12, row["multiprocessors"] * row["flops_per_clock"])
    for row in table("gpuwatch_agent.gpus", "peaks.yml")
    for model in row["models"]
}


def dense_peak(model: str) -> Peak | None:
    """Return the peak of a model as the driver names it; None if MIG, a vGPU ("NVIDIA A40-48Q") or not in the table."""
    padded = model.replace("-", " ") + " "
    is_part = re.search(r" (MIG|\d+[ABCQ]) ", padded)
    return next((peak for name, peak in DENSE_PEAKS.items() if padded.startswith(name + " ") and not is_part), None)


def gpu_readings(
    collector: DriverCollector, node: RecentSamples, table: ProcessTable, allocations: Allocations
) -> list[GpuReading]:
    """Return each GPU now, without processes that ended since the process list was read."""
    listed, devices, used = collector.processes(), collector.devices(), collector.sm_utilization
    in_instances = {pid for device in devices if device.instance[0] for pid in listed.get(device.uuid, ())}
    ended = table.ended({pid for pids in listed.values() for pid in pids})
    held = {uuid: tuple(pid for pid in pids if pid not in ended) for uuid, pids in listed.items()}
    for uuid, pids in held.items():  # the clients of an MPS server hold the GPU, not the server, which outlives them
        held[uuid] = tuple(pid for pid in pids if table.name(pid) != _MPS_SERVER)
    split = [d.uuid for d in devices if d.size_ratio < 1 and not d.instance[0] and d.uuid in held]
    for uuid in split:  # the driver lists the processes on all of its instances
        held[uuid] = tuple(pid for pid in held[uuid] if pid not in in_instances)
    return [
        GpuReading(
            str(device.index),
            device.uuid,
            held.get(device.uuid),
            node.latest(_ACTIVITY[bool(device.instance[0])], str(device.index), device.uuid),
            int(collector.process_list_age_s(device.uuid) * 1e9),
            allocations.get(device.uuid),
            node.latest("gpuwatch_gpu_driver_energy_joules_total", str(device.index), device.uuid),
            shares(held.get(device.uuid) or (), used.get(device.uuid, {}), table, allocations.get(device.uuid, ())),
            device.size_ratio,
        )
        for device in devices
    ]


def shares(
    pids: Sequence[int], sm_utilization: Mapping[int, float], table: ProcessTable, allocated: Sequence[Owner] = ()
) -> dict[Account, float]:
    """Return each owner's share of a GPU that several owners' processes hold, by their use of its multiprocessors.

    Equal shares for all processes where none used any, or that is not known.
    """
    if len(pids) < 2:
        return {}
    used = {pid: sm_utilization.get(pid, 0.0) for pid in pids}
    whole, found = sum(used.values()), dict[Account, float]()
    for pid, utilization in used.items():
        key = account_of(completed(table.owner(pid), allocated))
        found[key] = found.get(key, 0.0) + (utilization / whole if whole else 1 / len(used))
    return found if len(found) > 1 else {}


def without_hook(readings: Sequence[GpuReading], runs_by_pid: Collection[int], table: ProcessTable) -> int | None:
    """Return how many processes on the GPUs have no hook, nor has a parent of theirs; None without a process list."""
    if not (lists := [reading.pids for reading in readings if reading.pids is not None]):
        return None
    return sum(not any(each in runs_by_pid for each in table.with_parents(pid)) for pid in set[int]().union(*lists))


def gpu_owner(account: GpuAccount, table: ProcessTable) -> Owner:
    """Return whose the processes on a GPU are; without any, whom a scheduler has given it to."""
    if not account.pids:
        return together(account.allocated)
    return together(completed(table.owner(pid), account.allocated) for pid in account.pids)


def owner_text(account: GpuAccount, table: ProcessTable) -> str:
    """Return the processes on a GPU for people: "alice, pid 4711 (python)"; without any, its allocation; else empty."""
    if not account.pids:
        named = ("user", "job", "account", "namespace", "pod", "container")
        owners = [", ".join(f"{n} {v}" for n in named if (v := getattr(a, n))) for a in account.allocated[:3]]
        return f"allocated to {'; '.join(owners)}" if owners else ""
    return "; ".join(f"{table.owner(p).user or '?'}, pid {p} ({table.name(p) or '?'})" for p in account.pids[:3])


def note_gpus(runs: Iterable[Run], accounts: Iterable[GpuAccount], collector: DriverCollector) -> None:
    """Record in each run the GPUs that it holds now, alone or not; a run without any keeps its last ones."""
    names = {device.uuid: device.name for device in collector.devices()}
    held: dict[RunKey, dict[str, str]] = {}
    for account in accounts:
        for run in account.running:
            held.setdefault(run.key, {})[account.uuid] = names.get(account.uuid, "")
            run.owner = completed(run.owner, account.allocated)
    for run in runs:
        if (now := held.get(run.key)) is not None and now != run.gpus:
            run.gpus, run.changed = now, True


def gpu_view(account: GpuAccount, collector: DriverCollector, node: RecentSamples, table: ProcessTable) -> api.Gpu:
    """Return one entry of `gpus` in /api/v1/status."""
    measured = ("utilization_ratio", "memory_used_bytes", "memory_total_bytes", "power_watts")
    return api.Gpu(
        gpu=account.gpu,
        uuid=account.uuid,
        name=next((device.name for device in collector.devices() if device.uuid == account.uuid), ""),
        state=account.state,
        run=account.owner or None,
        owner=owner_text(account, table) or None,
        energy_joules=dict(account.ledger.energy.joules),
        **{name: node.latest(f"gpuwatch_gpu_{name}", account.gpu, account.uuid) for name in measured},
    )


_STEPPING_NS = 5_000_000_000  # A run is stepping when its last step ended so recently
_POWERS = 300
_LEAST_POWERS = 30
_MEMORY_SAMPLES = 10  # samples of a GPU's memory in the time over which it must grow to be a leak
_MEMORIES = 60


@dataclass
class _Trend:
    """One GPU since its holder took it."""

    holder: RunKey | None
    powers: deque[float] = field(default_factory=lambda: deque(maxlen=_POWERS))
    memories: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=_MEMORIES))
    tensor_hertz: deque[float] = field(default_factory=lambda: deque(maxlen=2 * _LEAST_POWERS))
    used: deque[float | None] = field(default_factory=lambda: deque(maxlen=60))  # utilisation, a minute of it


class GpuTrends:
    """Follows every GPU; its samples are dropped when another run takes the GPU."""

    def __init__(self, creep_s: float = THRESHOLDS.memory_creep_s) -> None:
        self._memory_every_ns = creep_s * 1e9 / _MEMORY_SAMPLES
        self._trends: dict[str, _Trend] = {}

    def sample(self, gpus: Sequence[GpuAccount], node: RecentSamples, now_ns: int) -> None:
        """Take this second's readings of all GPUs; forget the others."""
        before, self._trends = self._trends, {}
        for account in gpus:
            run, trend = account.run, before.get(account.uuid)
            holder = None if run is None else run.key
            if trend is None or trend.holder != holder:
                trend = _Trend(holder)
            self._trends[account.uuid] = trend
            if run is None or run.status != RUNNING:
                continue
            names = ("memory_used_bytes", "power_watts", "tensor_active_ratio", "sm_clock_hertz", "utilization_ratio")
            found = [node.latest(f"gpuwatch_gpu_{name}", account.gpu, account.uuid) for name in names]
            memory, power, tensor, clock, utilization = found
            last_ns = run.steps.last_end_ns
            stepping = last_ns is not None and now_ns - last_ns < _STEPPING_NS
            if last_ns is not None:  # no share counts the start-up before
                trend.used.append(utilization)
            if stepping and power is not None:
                trend.powers.append(power)
            # A GPU that is split by MIG has no utilisation, and its tensor cores are those of all its instances.
            if stepping and tensor is not None and clock is not None and utilization is not None:
                trend.tensor_hertz.append(tensor * clock)
            kept = trend.memories
            if memory is not None and (not kept or now_ns - kept[-1][0] >= self._memory_every_ns):
                kept.append((now_ns, int(memory)))

    def median_watts(self, uuid: str) -> float | None:
        """Return the median power while the run made steps; None with less than half a minute of it."""
        trend = self._trends.get(uuid)
        return median(trend.powers) if trend is not None and len(trend.powers) >= _LEAST_POWERS else None

    def utilization(self, uuid: str) -> float | None:
        """Return the mean over the last minute in which a run has held it; None: not measured."""
        used = [each for each in (self._trends[uuid].used if uuid in self._trends else ()) if each is not None]
        return fmean(used) if used else None

    def mfu(self, uuid: str, peak: Peak | None) -> float | None:
        """Return the MFU over the last minute of steps; None with less than half of that, or without a peak."""
        trend = self._trends.get(uuid)
        if trend is None or peak is None or len(trend.tensor_hertz) < _LEAST_POWERS:
            return None
        return fmean(trend.tensor_hertz) * peak.flops_per_clock / peak.flops_per_s

    def memory(self, uuid: str, total_bytes: int | None) -> MemoryTrend | None:
        """Return used memory's change since the run took the GPU, an hour at most; None with fewer than two samples."""
        kept = list(self._trends[uuid].memories) if uuid in self._trends else []
        if len(kept) < 2 or not total_bytes:
            return None
        changes = [after[1] - before[1] for before, after in pairwise(kept)]
        return MemoryTrend(
            span_s=(kept[-1][0] - kept[0][0]) / 1e9,
            rises=sum(change > 0 for change in changes),
            falls=sum(change < 0 for change in changes),
            growth_bytes=kept[-1][1] - kept[0][1],
            total_bytes=total_bytes,
        )


def gpu_facts(account: GpuAccount, node: RecentSamples, now_ns: int, trends: GpuTrends) -> GpuFacts:
    """Return one GPU as it was over the last quarter of a minute, and what is longer known of it."""
    total = node.latest("gpuwatch_gpu_memory_total_bytes", account.gpu, account.uuid)
    memory = node.latest("gpuwatch_gpu_memory_used_bytes", account.gpu, account.uuid)
    ledger = account.run.ledger if account.run is not None else None
    begin_ns = 0 if ledger is None else ledger.start_ns  # earlier utilisation is not this run's
    peak = None if account.run is None else dense_peak(account.run.gpus.get(account.uuid, ""))
    return GpuFacts(
        gpu=account.gpu,
        uuid=account.uuid,
        utilization_ratio=node.mean("gpuwatch_gpu_utilization_ratio", account.gpu, account.uuid, since_ns=begin_ns),
        memory_used_bytes=None if memory is None else int(memory),
        idle_s=None if account.idle_since_ns is None else (now_ns - account.idle_since_ns) / 1e9,
        throttled=node.throttled(account.gpu, account.uuid),
        power_watts=node.mean("gpuwatch_gpu_power_watts", account.gpu, account.uuid),
        minute_ratio=trends.utilization(account.uuid),
        power_usual_watts=trends.median_watts(account.uuid),
        memory_trend=trends.memory(account.uuid, None if total is None else int(total)),
        mfu_ratio=trends.mfu(account.uuid, peak),
        peak_flops=None if peak is None else peak.flops_per_s,
    )
