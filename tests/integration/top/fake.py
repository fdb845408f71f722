"""A fake agent with eight GPUs whose states, owners and ledgers are known, for `gpuwatch top`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from tests.integration.dashboards.fake import RUN_ID, FakeAgent

SHARES = {"compute": 0.25, "input_wait": 0.75}
GPU_STATES = ("input_wait", "compute", "held_idle", "unallocated", "busy_unattributed", "compute", "transfer", "eval")


@dataclass
class NodeWithGpus(FakeAgent):
    """FakeAgent, and what a real agent says of GPUs beyond it."""

    count: int = 8

    def answer(self, path: str, query: dict[str, str]) -> dict[str, Any] | None:
        if path == "/api/v1/series" and not self.runs:
            return {"series": []}
        output = super().answer(path, query)
        if path == "/api/v1/findings":
            return {"findings": self._findings()}
        if path == "/api/v1/status" and output is not None and self.gpus:
            output["gpus"] = [self._gpu(number) for number in range(self.count)]
        if path == "/api/v1/series" and output is not None and self.gpus:
            if query["metric"] == "gpuwatch_gpu_seconds_total":
                output["series"] = [self._ledger(n, state) for n in range(self.count) for state in SHARES]
            if query["metric"].startswith("gpuwatch_memory"):
                total = query["metric"].endswith("total_bytes")
                output["series"] = [{"labels": {}, "points": [[time.time(), (256.0 if total else 192.0) * 2**30]]}]
        return output

    def _gpu(self, number: int) -> dict[str, Any]:
        held = GPU_STATES[number % 8] != "unallocated"
        return {
            "gpu": str(number), "uuid": f"GPU-{number}", "name": "NVIDIA H200" if number else "",
            "state": GPU_STATES[number % 8], "utilization_ratio": 0.1 * number, "memory_used_bytes": 2**30 * (61 + number),
            "memory_total_bytes": 2**30 * 141, "power_watts": 120.0 + 70 * number,
            "run": RUN_ID if number < 2 else None, "owner": f"alice, pid {4711 + number} (python)" if held else None,
        }  # fmt: skip

    def _ledger(self, number: int, state: str) -> dict[str, Any]:
        labels = {"gpu": str(number), "UUID": f"GPU-{number}", "state": state}
        now = int(time.time())
        return {"labels": labels, "points": [[t, SHARES[state] * t] for t in range(now - 60, now + 1, 2)]}

    def _findings(self) -> list[dict[str, Any]]:
        idle = {
            "run": None, "rank": 0, "name": "", "cause": "held_idle", "severity": "warning", "gpu": "GPU-2",
            "title": "GPU 2 is held and does nothing", "ratio": 1.0, "since_s": time.time() - 900,
            "evidence": [{"what": "idle", "value": 900, "unit": "s", "text": "no work for 15m 00s"}],
            "advice": "end pid 4713 (python) of alice", "predicted_speedup": None,
        }  # fmt: skip
        return [idle] if self.gpus else []
