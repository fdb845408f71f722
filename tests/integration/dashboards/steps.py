"""Made-up step records with a known truth, downsampled as the agent does it.

Source: docs/reference/api.md, `/api/v1/runs/{run}/steps?points=`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

SLOW_S = 0.5
"""What the first step of each epoch waits."""


@dataclass(frozen=True)
class MadeUpSteps:
    """Steps of a run: `wait_s` of waiting (each epoch's first one `SLOW_S`), 3 ms of transfer, the rest computing."""

    count: int
    step_s: float
    wait_s: float
    epoch_steps: int
    device: bool = False
    """Whether the device measured them: then 60% of the wait was hidden, 4 ms were host wait and 2 ms transfer."""

    def begin_s(self, step: int) -> float:
        """Return a step's begin after the run's start."""
        epochs = (step + self.epoch_steps - 1) // self.epoch_steps
        return step * self.step_s + epochs * (SLOW_S - self.wait_s)

    def wait(self, step: int) -> float:
        return SLOW_S if step % self.epoch_steps == 0 else self.wait_s

    def downsampled(self, start_s: float, query: dict[str, str]) -> dict[str, Any] | None:
        """Return the answer; `start_s` is the run's start in Unix time."""
        since = float(query.get("start", start_s)) - start_s
        until = float(query.get("end", math.inf)) - start_s
        first = next((n for n in range(self._guess(since), self.count) if self.begin_s(n) >= since), self.count)
        last = self.count if until == math.inf else self._guess(until) + 1
        while last < self.count and self.begin_s(last) <= until:
            last += 1
        while last > first and self.begin_s(last - 1) > until:
            last -= 1
        total = min(last, self.count) - first
        if total <= 0:
            return None
        size = max(1, -(-total // int(query["points"])))
        steps = list(range(first, first + total, size))
        counts = [min(size, first + total - step) for step in steps]
        slow = [-(-(s + c) // self.epoch_steps) - -(-s // self.epoch_steps) for s, c in zip(steps, counts, strict=True)]
        waits = {
            "mean": [(n * SLOW_S + (c - n) * self.wait_s) / c for n, c in zip(slow, counts, strict=True)],
            "min": [SLOW_S if n == c else self.wait_s for n, c in zip(slow, counts, strict=True)],
            "max": [SLOW_S if n else self.wait_s for n in slow],
        }
        computes = [self.step_s - self.wait_s - 0.003] * len(steps)
        columns: dict[str, Any] = {"data_wait_s": waits, "transfer_s": _same([0.003] * len(steps))}
        columns["compute_s"] = _same(computes)
        device = {
            "input_wait_s": {kind: [0.4 * value for value in values] for kind, values in waits.items()},
            "host_wait_s": _same([0.004] * len(steps)),
            "device_transfer_s": _same([0.002] * len(steps)),
            "device_compute_s": _same(
                [0.6 * wait + compute - 0.003 for wait, compute in zip(waits["mean"], computes, strict=True)]
            ),
        }
        columns |= device if self.device else dict.fromkeys(device)
        epochs = range(-(-first // self.epoch_steps) * self.epoch_steps, first + total, self.epoch_steps)
        return {
            "steps": total,
            "bucket_steps": size,
            "epochs": [{"step": step, "time_s": start_s + self.begin_s(step)} for step in epochs][:2000],
            "step_s": {"p5": self.step_s, "p50": self.step_s, "p95": self.step_s, "p99": self.step_s},
            "step": steps,
            "time_s": [start_s + self.begin_s(step) for step in steps],
            "end_s": [start_s + self.begin_s(s + c) for s, c in zip(steps, counts, strict=True)],
            "count": counts,
            "samples": [64 * c for c in counts],
            "bucket_s": {name: [self.step_s] * len(steps) for name in ("p5", "p50", "p95")},
            "columns": columns,
        }

    def records(self, start_s: float, last: int) -> dict[str, Any]:
        """Return the last steps one by one: /api/v1/runs/{run}/steps?last=."""
        steps = range(max(0, self.count - last), self.count)
        waits = [self.wait(step) for step in steps]
        compute_s = self.step_s - self.wait_s - 0.003
        nothing = [None] * len(steps)
        return {
            "first_step": steps.start,
            "time_s": [start_s + self.begin_s(step) for step in steps],
            "data_wait_s": waits,
            "transfer_s": [0.003] * len(steps),
            "compute_s": [compute_s] * len(steps),
            "input_wait_s": [0.4 * wait for wait in waits] if self.device else nothing,
            "host_wait_s": [0.004] * len(steps) if self.device else nothing,
            "device_transfer_s": [0.002] * len(steps) if self.device else nothing,
            "device_compute_s": [0.6 * wait + compute_s - 0.003 for wait in waits] if self.device else nothing,
            "samples": [64] * len(steps),
            "epoch_start": [int(step % self.epoch_steps == 0) for step in steps],
        }

    def _guess(self, after_s: float) -> int:
        """Return a step that begins before this moment, and not long before it."""
        per_epoch = self.epoch_steps * self.step_s + SLOW_S - self.wait_s
        return max(0, int(after_s / per_epoch) * self.epoch_steps)


def _same(values: list[float]) -> dict[str, list[float]]:
    return {"mean": values, "min": values, "max": values}
