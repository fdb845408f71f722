"""What training steps add up to: how many, of what, how long."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from statistics import median

import msgspec

from gpuwatch.ledger.step_records import StepRecord
from gpuwatch.wire import STEP_BUCKETS_S, Counters

MEDIAN_OF = 64
SLOW_FIRST_MEDIANS, SLOW_FIRST_AMONG = 5, 5
BUCKETS_NS = tuple(int(bound * 1e9) for bound in STEP_BUCKETS_S)


class StepCounts(Counters):
    """The counters of all training steps, and the last steps' times. Overhead and fetches are counted elsewhere."""

    phases_ns: dict[str, int] = msgspec.field(default_factory=lambda: {"data_wait": 0, "transfer": 0, "compute": 0})
    first: StepRecord | None = None
    """The run's first step."""
    recent_ns: deque[int] = msgspec.field(default_factory=lambda: deque(maxlen=MEDIAN_OF))

    def add(self, record: StepRecord) -> None:
        """Count one step."""
        self.steps += 1
        self.first = self.first or record
        if record.samples >= 0:
            self.samples = max(0, self.samples) + record.samples
        if record.tokens is not None:
            self.tokens = max(0, self.tokens) + record.tokens
        if record.comm_wait_ns is not None:
            self.comm_steps += 1
        self.phases_ns["data_wait"] += record.data_wait_ns
        self.phases_ns["transfer"] += record.transfer_ns
        self.phases_ns["compute"] += record.compute_ns
        if not record.verified:
            self.unverified_steps += 1
        if record.exposed is not None and record.exposed.measured:
            self.device_steps += 1
            self.drained_steps += record.exposed.drained
            self.kept_up_steps += record.exposed.kept_up
            self.read_back_steps += record.exposed.read_back
            self.hidden_ns += record.hidden_ns or 0
        self.step_histogram[bisect_left(BUCKETS_NS, record.total_ns)] += 1
        self.recent_ns.append(record.total_ns)

    @property
    def median_ns(self) -> int:
        """Median of the last 64 steps, 0 before the first."""
        return int(median(self.recent_ns)) if self.recent_ns else 0

    @property
    def slow_first(self) -> StepRecord | None:
        """The first step where it is out of proportion (it compiles, tunes, loads libraries), and all others are not few."""
        first = self.first
        if first is None or self.steps < SLOW_FIRST_AMONG or first.total_ns < SLOW_FIRST_MEDIANS * self.median_ns:
            return None
        return first

    @property
    def total_ns(self) -> int:
        """Time in training steps, by the host's clock."""
        return sum(self.phases_ns.values())
