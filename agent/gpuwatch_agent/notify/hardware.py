"""What the agent tells people of its own page: lost GPUs, XIDs, a /dev/shm that is nearly full. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from gpuwatch.alert_rules import AlertThresholds
from gpuwatch.alerting.gpu_alerts import XIDS, XIDS_OF_PROGRAMS
from gpuwatch_agent.exporter import Page
from gpuwatch_agent.notify.conditions import SEVERITY, Condition


def hardware_conditions(page: Page, now_s: float, thresholds: AlertThresholds) -> Iterator[Condition]:
    """Yield what is wrong with the node itself, as the rules of Prometheus would find it."""
    yield from _gpus_lost(page, now_s, thresholds)
    yield from _xids(page, now_s, thresholds)
    yield from _shm(page, now_s, thresholds)


def _gpus_lost(page: Page, now_s: float, thresholds: AlertThresholds) -> Iterator[Condition]:
    seen, expected = page.value("gpuwatch_gpus_seen"), page.value("gpuwatch_gpus_expected")
    if seen is None or expected is None or expected <= seen:
        return
    lost = expected - seen
    title = f"{lost:g} GPU{'' if lost == 1 else 's'} fell off the bus"
    body = "Do: drain the node; dmesg -T | grep -i xid says why; reset the GPU or reboot"
    yield Condition("GpuLost", "GpuLost", SEVERITY["GpuLost"], thresholds.gpu_lost_for_s, now_s, title, body)


def _xids(page: Page, now_s: float, thresholds: AlertThresholds) -> Iterator[Condition]:
    times = page.values("gpuwatch_gpu_last_xid_timestamp_seconds")
    for (gpu, uuid), number in page.values("gpuwatch_gpu_last_xid").items():
        xid, time_s = int(number), times.get((gpu, uuid))
        if time_s is None or xid in XIDS_OF_PROGRAMS or now_s - time_s >= thresholds.xid_window_s:
            continue
        what = XIDS.get(xid, "see NVIDIA's list of XIDs")
        title = f"GPU {gpu} ({uuid}) reported XID {xid}: {what}"
        body = "Do: end the run on it, drain the node, reset the GPU (nvidia-smi --gpu-reset -i N)"
        yield Condition(f"GpuXid/{uuid}/{xid}", "GpuXid", SEVERITY["GpuXid"], thresholds.xid_for_s, time_s, title, body)


def _shm(page: Page, now_s: float, thresholds: AlertThresholds) -> Iterator[Condition]:
    sizes = page.values("gpuwatch_shm_size_bytes")
    for (mount,), used in page.values("gpuwatch_shm_used_bytes").items():
        size = sizes.get((mount,), 0.0)
        if size > 0 and used / size > thresholds.shm_used_ratio:
            title = f"/dev/shm ({mount}) is {used / size:.0%} full"
            body = "Do: enlarge it (docker run --shm-size), or lower num_workers or prefetch_factor"
            key = f"ShmNearlyFull/{mount}"
            yield Condition(key, "ShmNearlyFull", SEVERITY["ShmNearlyFull"], thresholds.shm_for_s, now_s, title, body)
