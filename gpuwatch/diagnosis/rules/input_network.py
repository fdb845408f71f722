"""Loader workers that are blocked on the network."""

from __future__ import annotations

from gpuwatch.diagnosis.finding import Evidence, Finding, rule
from gpuwatch.diagnosis.input_wait import blocked_evidence, input_wait
from gpuwatch.diagnosis.prediction import plan_for
from gpuwatch.diagnosis.thresholds import Thresholds
from gpuwatch.diagnosis.window import Window
from gpuwatch.formatting import size
from gpuwatch.host.blocked import NETWORK


@rule(
    explains=("burst_every_n", "input_unexplained"),
    explained_by=("stalled",),
    stacks="workers",
    alert="GpuStarved",
    runbook="GpuStarved",
    delays_rank="input",
)
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
    return Finding(
        cause="input_network",
        severity=wait.severity,
        title="loader workers wait for the network",
        ratio=wait.share,
        evidence=(wait.evidence, blocked, Evidence("received", rate, "bytes/s", f"{size(rate)}/s arrive over the network")),
        advice="cache the data locally, reuse connections and read larger ranges; if the link is saturated, only fewer bytes "
        f"help{more}",
        predicted_speedup=plan.gain[1] if more else None,
        predicted_range=(1.0, plan.gain[1]) if more else None,
    )  # fmt: skip
