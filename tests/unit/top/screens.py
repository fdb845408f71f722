"""Facts with known numbers, and screens as plain text."""

from __future__ import annotations

from typing import Any

from gpuwatch.api import Finding, Gpu, Points, Recent, Run, Series
from gpuwatch.diagnosis.finding import Evidence, Verdict
from gpuwatch.errors import SourceError
from gpuwatch_dashboards.query import Node
from gpuwatch_dashboards.top import Facts, Sampled
from gpuwatch_dashboards.top.drawing import fitted
from gpuwatch_dashboards.top.pages import View, page

NOW = 1_000_300.0
FINDING = Finding(
    "input_single_process", "warning", "the loader runs in the training process", 0.62,
    (Evidence("wait", 0.62, "ratio", "data wait 62% of the time"), Evidence("idle", 11, "cores", "11 of 16 cores idle")),
    "num_workers 0 → 8", 2.6, since_s=NOW - 95,
)  # fmt: skip


def run(key: str = "r1", **more: Any) -> Run:
    values: dict[str, Any] = {
        "run": key, "rank": 0, "name": f"name-{key}", "status": "running", "started_s": NOW - 400, "watermark_s": NOW,
        "last_message_s": NOW, "host": "node-17", "user": "alice", "steps": 3883,
        "states": {"startup": 20.0, "input_wait": 240.0, "compute": 140.0},
        "recent": Recent(duration_s=60.0, states={"input_wait": 37.2, "compute": 21.0, "transfer": 1.8}, step_s_p50=0.103, step_s_p95=0.131, data_wait_s_p50=0.064, steps_per_s=9.7, samples_per_s=621.4),
        "verdict": Verdict("input", 0.62, "input-bound: 62% of the time training waited for data"),
        "findings": (FINDING,),
    }  # fmt: skip
    return Run(**{**values, **more})


def level(value: float) -> Points:
    return tuple((NOW - 300 + 3 * n, value) for n in range(1, 101))


def trace(value: float, **labels: str) -> list[Series]:
    return [Series(labels, level(value))]


def node_traces(**more: list[Series]) -> dict[str, list[Series]]:
    mib, gib = 2.0**20, 2.0**30
    return {
        "cpu busy, of all cores": trace(0.31), "cpu idle, waiting for I/O": trace(0.05),
        "pressure CPU": trace(0.08), "pressure I/O": trace(0.03), "pressure memory": trace(0.0),
        "node_shm ": trace(0.5, mount="/dev/shm"),
        "shm used ({mount})": trace(32 * mib, mount="/dev/shm"), "shm size ({mount})": trace(64 * mib, mount="/dev/shm"),
        "memory available": trace(192 * gib), "memory total": trace(256 * gib),
        "network received": trace(41 * mib), "network sent": trace(2 * mib),
        "disk read": trace(180 * mib), "disk written": trace(6 * mib), **more,
    }  # fmt: skip


RUN_TRACES = {
    "ledger {state}": trace(0.62, state="input_wait") + trace(0.38, state="compute"),
    "step": trace(0.1),
    "steps": trace(10.0),
    "phases": trace(0.64, phase="data_wait") + trace(0.03, phase="transfer") + trace(0.36, phase="compute"),
}


def gpu_traces(gpus: int) -> dict[str, list[Series]]:
    def each(value: float, **labels: str) -> list[Series]:
        return [Series({"gpu": str(n), "UUID": f"GPU-{n}", **labels}, level(value)) for n in range(gpus)]

    return {
        "gpu states": each(0.25, state="compute") + each(0.75, state="input_wait"),
        "gpu_utilization GPU {gpu}": each(0.25), "gpu_memory GPU {gpu}": each(0.5), "gpu_power GPU {gpu}": each(412.0), "gpu_temperature GPU {gpu}": each(61.0),
    }  # fmt: skip


def facts(*runs: Run, gpus: int = 0, node: dict[str, Any] | None = None, **more: Any) -> Facts:
    key = f"{runs[0].run}/{runs[0].rank}" if runs else ""
    traces = node_traces() | (RUN_TRACES if runs else {}) | (gpu_traces(gpus) if gpus else {})
    cards = tuple(
        Gpu(str(n), f"GPU-{n}", "NVIDIA H200", "compute", n / 10, 2**30 * n, 2**30 * 141, 100.0 * n, None, f"u{n}")
        for n in range(gpus)
    )
    values: dict[str, Any] = {
        "label": "agent at http://127.0.0.1:9478", "time_s": NOW, "runs": runs,
        "node": Node(**{"host": "node-17", "collectors": (), "gpus": cards, **(node or {})}),
        "series": Sampled(key, NOW - 300, NOW, traces),
    }  # fmt: skip
    return Facts(**{**values, **more})


def screen(shown: Facts | SourceError | None, width: int = 80, height: int = 24, view: View | None = None) -> list[str]:
    """Return what a terminal of this size shows between the header and the keys, before any scrolling."""
    drawn = page(view or View(), shown, width, height - 2)
    room = max(0, height - 2 - len(drawn.above) - len(drawn.below))
    body = [fitted(line, width - 1).plain + " " for line in drawn.body[:room]]
    body += [" " * width] * (room - len(body))
    above, below = ([fitted(line, width).plain for line in lines] for lines in (drawn.above, drawn.below))
    return [*above, *body, *below]
