"""The node's GPUs for the ledger and for people: what the collector saw, joined with the processes behind it."""

from __future__ import annotations

from collections.abc import Iterable

from gpuwatch import api
from gpuwatch_agent.collectors import GpuSource
from gpuwatch_agent.gpu_ledger import GpuAccount, GpuReading
from gpuwatch_agent.node_memory import NodeMemory
from gpuwatch_agent.processes import ProcessTable
from gpuwatch_agent.runs import Run


def gpu_readings(collector: GpuSource | None, node: NodeMemory, table: ProcessTable) -> list[GpuReading]:
    """Return what the driver says of each GPU now, processes that have ended since it was asked left out."""
    if collector is None:
        return []
    held = {uuid: tuple(process.pid for process in processes) for uuid, processes in collector.processes().items()}
    ended = table.ended({pid for pids in held.values() for pid in pids})
    readings = []
    for device in collector.devices():
        pids = held.get(device.uuid)
        if pids is not None:
            pids = tuple(pid for pid in pids if pid not in ended)
        utilization = node.latest("gpuwatch_gpu_utilization_ratio", str(device.index), device.uuid)
        age_ns = int(collector.process_list_age_s(device.uuid) * 1e9)
        readings.append(GpuReading(str(device.index), device.uuid, pids, utilization, age_ns))
    return readings


def owner_text(account: GpuAccount, table: ProcessTable) -> str:
    """Return the processes on a GPU for people: "alice, pid 4711 (python)"; empty without any."""
    return "; ".join(f"{table.user(pid) or '?'}, pid {pid} ({table.name(pid) or '?'})" for pid in account.pids[:3])


def note_gpus(runs: Iterable[Run], accounts: Iterable[GpuAccount], collector: GpuSource | None) -> None:
    """Let each run remember the GPUs that it holds now, alone; one that holds none any more keeps its last ones."""
    names = {device.uuid: device.name for device in collector.devices()} if collector is not None else {}
    held: dict[tuple[str, int], dict[str, str]] = {}
    for account in accounts:
        if account.run is not None:
            held.setdefault((account.run.run, account.run.rank), {})[account.uuid] = names.get(account.uuid, "")
    for run in runs:
        now = held.get((run.run, run.rank))
        if now is not None and now != run.gpus:
            run.gpus, run.changed = now, True


def gpu_view(account: GpuAccount, collector: GpuSource | None, node: NodeMemory, table: ProcessTable) -> api.Gpu:
    """Return one entry of `gpus` in /api/v1/status."""
    devices = collector.devices() if collector is not None else ()

    def latest(metric: str) -> float | None:
        return node.latest(metric, account.gpu, account.uuid)

    return api.Gpu(
        gpu=account.gpu,
        uuid=account.uuid,
        name=next((device.name for device in devices if device.uuid == account.uuid), ""),
        state=account.state,
        utilization_ratio=latest("gpuwatch_gpu_utilization_ratio"),
        memory_used_bytes=latest("gpuwatch_gpu_memory_used_bytes"),
        memory_total_bytes=latest("gpuwatch_gpu_memory_total_bytes"),
        power_watts=latest("gpuwatch_gpu_power_watts"),
        run=account.owner or None,
        owner=owner_text(account, table) or None,
    )
