"""Facts with known numbers, and screens as plain text."""

from __future__ import annotations

from typing import Any

from gpuwatch.api import Finding, Points, Recent, Run, Series
from gpuwatch.errors import SourceError
from gpuwatch.finding import Evidence, Verdict
from gpuwatch_dashboards.terminal.facts import Facts, GpuFacts, Strands
from gpuwatch_dashboards.terminal.frame import frame
from gpuwatch_dashboards.terminal.view import View

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
        "recent": Recent(60.0, {"input_wait": 37.2, "compute": 21.0, "transfer": 1.8}, 0.103, 0.131, 0.064, 9.7, 621.4),
        "verdict": Verdict("input", 0.62, "input-bound: 62% of the time training waited for data"),
        "findings": (FINDING,),
    }  # fmt: skip
    return Run(**{**values, **more})


def level(value: float) -> Points:
    return tuple((NOW - 300 + 3 * n, value) for n in range(1, 101))


def facts(*runs: Run, gpus: int = 0, **more: Any) -> Facts:
    strands = Strands(
        key="r1/0" if runs else "", start_s=NOW - 300, end_s=NOW,
        ledger=(Series({"state": "input_wait"}, level(0.62)), Series({"state": "compute"}, level(0.38))),
        step_s=level(0.1), input_ratio=level(0.62), cpu_ratio=level(0.31), shm_ratio=level(0.5),
        phases_s={"data_wait": 0.064, "transfer": 0.003, "compute": 0.036}, cpu_iowait_ratio=0.05,
        pressure={"CPU": 0.08, "I/O": 0.03, "memory": 0.0}, shm_used_bytes=32 * 2**20, shm_size_bytes=64 * 2**20,
        memory_available_bytes=192 * 2**30, memory_total_bytes=256 * 2**30,
        rates={"received": 41 * 2**20, "sent": 2 * 2**20, "read": 180 * 2**20, "written": 6 * 2**20},
    )  # fmt: skip
    cards = tuple(
        GpuFacts(str(n), f"GPU-{n}", "NVIDIA H200", "compute", n / 10, 2**30 * n, 2**30 * 141, 100.0 * n, f"u{n}", None,
                 {"compute": 0.25, "input_wait": 0.75}) for n in range(gpus)
    )  # fmt: skip
    values: dict[str, Any] = {
        "label": "agent at http://127.0.0.1:9478", "time_s": NOW, "host": "node-17", "runs": runs,
        "selected": f"{runs[0].run}/{runs[0].rank}" if runs else None, "strands": strands, "gpus": cards,
    }  # fmt: skip
    return Facts(**{**values, **more})


def screen(shown: Facts | SourceError | None, width: int = 80, height: int = 24, view: View | None = None) -> list[str]:
    return [line.plain for line in frame(view or View(), shown, width, height).lines]
