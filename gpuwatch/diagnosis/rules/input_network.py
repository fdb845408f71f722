"""Loader workers that stand at the network."""

from __future__ import annotations

from gpuwatch.diagnosis.finding import Evidence, Finding
from gpuwatch.diagnosis.rules.input_wait import (
    expectation,
    limited,
    make_plan,
    rounded,
    wait_evidence,
    waits_at,
)
from gpuwatch.diagnosis.thresholds import THRESHOLDS
from gpuwatch.diagnosis.window import Window
from gpuwatch.formatting import percent, size
from gpuwatch.host.blocked import NETWORK


def input_network(window: Window) -> Finding | None:
    """Found when training waits for workers that wait for a socket while bytes arrive over the network."""
    wait, at_network = window.input_wait, waits_at(window, NETWORK)
    loader, host = window.loader, window.host
    if wait is None or at_network is None or at_network < THRESHOLDS.worker_waiting:
        return None
    if loader is None or not loader.num_workers or host is None or host.network_receive_bytes_per_s is None:
        return None
    rate = host.network_receive_bytes_per_s
    ratios = window.worker_busy_ratios or window.worker_cpu_ratios or ()
    # A worker that has nothing to do waits as one at a socket does. It has nothing to do while another one is the slow one.
    if rate < THRESHOLDS.network_bytes_per_s or max(ratios, default=0.0) >= THRESHOLDS.worker_busy:
        return None
    plan = make_plan(window, wait, on_cpu=False)
    more = ""
    if plan.workers > loader.num_workers:
        more = f"; more requests at a time: num_workers {loader.num_workers} → {plan.workers}{limited(plan)}{expectation(plan)}"
    return Finding(
        cause="input_network",
        severity=wait.severity,
        title="loader workers wait for the network",
        ratio=wait.share,
        evidence=(
            wait_evidence(window, wait),
            Evidence("workers at the network", at_network, "ratio", f"in {percent(at_network)} of the looks a worker waited for a socket"),
            Evidence("received", rate, "bytes/s", f"{size(rate)}/s arrive over the network"),
        ),
        advice=(
            "keep the data in a local cache, reuse connections and read larger ranges; where the link is full "
            f"nothing but fewer bytes will help{more}"
        ),
        predicted_speedup=rounded(plan)[1] if more else None,
        predicted_range=(1.0, rounded(plan)[1]) if more else None,
    )  # fmt: skip
