"""Workers that wait for a disk, the network or a lock; and a wait whose reason is not proven."""

from __future__ import annotations

from gpuwatch.diagnosis.finding import Evidence, Finding, measured, rule
from gpuwatch.diagnosis.input_wait import (
    blocked_evidence,
    input_rule,
    input_wait,
    place_evidence,
    queue_evidence,
    waited,
)
from gpuwatch.diagnosis.prediction import plan_for
from gpuwatch.diagnosis.thresholds import Thresholds
from gpuwatch.diagnosis.window import HostFacts, Window
from gpuwatch.formatting import duration, percent, size
from gpuwatch.host.blocked import DISK, LOCK, NETWORK, QUEUE


@input_rule(explains=("burst_every_n", "input_unexplained"))
def input_disk(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when training waits for workers in uninterruptible sleep, which is that of a disk or of a network file system."""
    wait, host = input_wait(window, thresholds), window.host or HostFacts()
    blocked = blocked_evidence(window, thresholds, DISK, "workers at the disk", "disk I/O")
    if wait is None or blocked is None or not window.workers:
        return None
    read = "" if host.disk_read_bytes_per_s is None else f" and {size(host.disk_read_bytes_per_s)}/s were read"
    plan, more = plan_for(window, wait, on_cpu=False), ""
    if (host.disk_busy_ratio or 0.0) < thresholds.disk_busy and plan.workers > window.workers:
        more = f"; the disk is not fully busy: num_workers {window.workers} → {plan.workers}{plan.note}"
    return wait.finding(
        "input_disk",
        "loader workers wait for the disk",
        blocked,
        *measured("I/O pressure", host.io_pressure_ratio, "some task waited for I/O {} of the time"),
        *measured("disk busy", host.disk_busy_ratio, f"the busiest disk was busy {{}} of the time{read}"),
        advice="read fewer bytes in larger pieces (large sequential record files, only the columns needed), or keep the data on a "
        f"faster or local disk or in the page cache{more}",
        gain=(1.0, plan.gain[1]) if more else None,
    )


@input_rule(explains=("burst_every_n", "input_unexplained"))
def input_network(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when training waits for workers that wait for a socket while bytes arrive over the network."""
    wait, host = input_wait(window, thresholds), window.host
    blocked = blocked_evidence(window, thresholds, NETWORK, "workers at the network", "a socket")
    if wait is None or blocked is None or not window.workers or host is None:
        return None
    rate = host.network_receive_bytes_per_s
    # An idle worker polls like one that waits for a socket. Workers are idle while another one is the slow one.
    another_is_slow = max(window.busy_ratios, default=0.0) >= thresholds.worker_busy
    if rate is None or rate < thresholds.network_bytes_per_s or another_is_slow:
        return None
    plan, more = plan_for(window, wait, on_cpu=False), ""
    if plan.workers > window.workers:
        more = f"; for more requests in flight, num_workers {window.workers} → {plan.workers}{plan.note}"
    return wait.finding(
        "input_network",
        "loader workers wait for the network",
        blocked,
        Evidence("received", rate, "bytes/s", f"{size(rate)}/s arrive over the network"),
        advice="cache the data locally, reuse connections and read larger ranges; if the link is saturated, only fewer bytes "
        f"help{more}",
        gain=(1.0, plan.gain[1]) if more else None,
    )


@input_rule(explains=("burst_every_n", "input_unexplained"))
def artificial_limit(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when training waits for workers that wait for a lock, while neither the CPUs nor a disk are fully used."""
    wait, host = input_wait(window, thresholds), window.host
    blocked = blocked_evidence(window, thresholds, LOCK, "workers at a lock", "a lock")
    if wait is None or blocked is None:
        return None
    if host is None or host.cpu_busy_ratio is None or host.cpu_busy_ratio >= thresholds.cores_exhausted:
        return None
    if host.disk_busy_ratio is not None and host.disk_busy_ratio >= thresholds.disk_busy:
        return None
    disk = "" if host.disk_busy_ratio is None else f", the busiest disk {percent(host.disk_busy_ratio)}"
    return wait.finding(
        "artificial_limit",
        "loader workers wait for a lock while CPUs and disks have capacity left",
        blocked,
        *measured("CPU busy", host.cpu_busy_ratio, f"the CPUs are {{}} busy{disk}"),
        advice="find what the workers queue for (gpuwatch stacks): a lock, a shared file, a fixed pool of connections; give each worker "
        "one to itself. More workers will not help",
    )


@input_rule(explains=("burst_every_n",), fallback=True)
def input_unexplained(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when training waits for data; the advice follows from what is known of the workers."""
    wait = input_wait(window, thresholds)
    if wait is None:
        return None
    evidence, gain, title = queue_evidence(window), None, "training waits for data; the reason is not proven"
    advice = "capture the loader's stacks while training waits, to see what a fetch does (gpuwatch stacks)"
    ratios, fetch = window.worker_cpu_ratios, window.fetch_cpu_ratio
    if ratios:
        mean = sum(ratios) / len(ratios)
        evidence += measured(
            "worker CPU", mean, f"{len(ratios)} loader workers are on the CPU {{}} of the time on average"
        )
        if window.worker_waits is not None:
            kind, share = max(window.worker_waits.items(), key=lambda item: item[1])
            text = f"most often they were found at: {kind} ({{}} of the samples)"
            evidence += measured("workers blocked on", share, text)
        if blocked_evidence(window, thresholds, QUEUE, "workers idle", "their queue") is not None:
            advice = (
                "send fewer and larger tensors, collate in the worker, and leave one core to the training thread: batches are ready, but "
                "taking them over is slow"
            )
        elif mean < thresholds.worker_sleeping:
            advice = "find out what the workers wait for, storage, the network or a lock (gpuwatch stacks): they mostly sleep, so cores do not limit them"
            plan = plan_for(window, wait, on_cpu=False)
            if window.workers and plan.workers > window.workers:
                advice += f"; if each waits independently, num_workers {window.workers} → {plan.workers}{plan.note}"
                gain = (1.0, plan.gain[1])
    elif fetch is not None and window.workers is None:
        computes = fetch >= thresholds.fetch_on_cpu
        text = "{} of a fetch is CPU work" if computes else "only {} of a fetch is CPU work: it waits"
        evidence += measured("fetch on CPU", min(1.0, fetch), text) + place_evidence(window)
        if window.fetch_place is not None and window.fetch_place.ratio >= 0.5:
            title = (
                f"training waits for data: most of a fetch is in {window.fetch_place.function}, in the training thread"
            )
        advice = "make batches in the background: a DataLoader with num_workers, or a prefetching thread"
    return wait.finding(
        "input_unexplained",
        title,
        *evidence,
        advice=advice,
        gain=gain,
    )


@rule(explains=(), explained_by=(), stacks="training", alert=None, runbook="Findings")
def outside_torch(window: Window, thresholds: Thresholds) -> Finding | None:
    """Found when, in a loop without a watched loader, much time passes between the optimizer's step and the next forward pass."""
    wait = waited(window, thresholds)
    if wait is None or not window.bounded_by_optimizer:
        return None
    place = window.fetch_place
    batch = "the line that gets the batch" if place is None else f"what gets the batch (most of the time is in {place})"
    mean = f"on average {duration(wait.wait_s)} of a {duration(wait.wait_s + wait.rest_s)} step"
    text = f"{{}} of the time passed between an optimizer step and the next forward pass ({mean})"
    return Finding(
        cause="outside_torch",
        severity=wait.severity,
        title="no DataLoader is watched, and much of the time between two steps passes outside of torch",
        ratio=wait.share,
        evidence=(*measured("outside torch", wait.share, text), *place_evidence(window, "it")),
        advice=f"to see how much of it is a wait for data, put {batch} into `with w.data():`, where w = gpuwatch.Watch(); make batches ahead "
        "(a DataLoader with num_workers, a thread), and log every N steps",
    )
