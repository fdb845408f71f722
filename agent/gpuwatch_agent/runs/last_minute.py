"""What a run did in its last minute: the difference of its totals now and then. Times in ns of the agent's monotonic clock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from gpuwatch.ledger import Ledger
from gpuwatch_agent.runs.records import Counts

MINUTE_NS = 60_000_000_000


@dataclass(frozen=True)
class DeviceRatios:
    """Shares of the steps that the device's timeline measured, as in a `Window`; None where it measured none."""

    drained: float | None = None
    kept_up: float | None = None
    read_back: float | None = None


class LastMinute:
    """A run's totals of every second of the last minute; of a younger run all that it has done counts."""

    def __init__(self) -> None:
        self._seen: deque[tuple[int, dict[str, int], Counts]] = deque()
        self._young = True

    def keep(self, now_ns: int, ledger: Ledger, counts: Counts) -> None:
        """Take the totals of this moment."""
        self._seen.append((now_ns, dict(ledger.totals_ns), counts))
        self._young = ledger.sum_ns <= MINUTE_NS
        while len(self._seen) > 2 and self._seen[1][0] <= now_ns - MINUTE_NS:
            self._seen.popleft()

    def states_ns(self, ledger: Ledger) -> tuple[int, dict[str, int]]:
        """Return (time covered, time by state)."""
        then = self._seen[0][1] if self._seen and ledger.sum_ns > MINUTE_NS else {}
        states = {s: ns - then.get(s, 0) for s, ns in ledger.totals_ns.items() if ns > then.get(s, 0)}
        return sum(states.values()), states

    def tokens_a_step(self) -> float | None:
        """Return the tokens a step; None where they are not counted."""
        if len(self._seen) < 2:
            return None
        then, now = self._then(), self._seen[-1][2]
        steps = now.steps - then.steps
        return (now.tokens - max(0, then.tokens)) / steps if now.tokens >= 0 and steps > 0 else None

    def device_ratios(self) -> DeviceRatios:
        """Return what the device's timeline says of the steps that it measured; None each where it measured none."""
        if not self._seen:
            return DeviceRatios()
        then, now = self._then(), self._seen[-1][2]
        steps = now.device_steps - then.device_steps
        if steps <= 0:
            return DeviceRatios()
        return DeviceRatios(
            (now.drained_steps - then.drained_steps) / steps,
            (now.kept_up_steps - then.kept_up_steps) / steps,
            (now.read_back_steps - then.read_back_steps) / steps,
        )

    def counts(self) -> tuple[Counts, Counts]:
        """Return the counts of then and of now."""
        return (self._then(), self._seen[-1][2]) if self._seen else (Counts(), Counts())

    def _then(self) -> Counts:
        return Counts() if self._young else self._seen[0][2]
