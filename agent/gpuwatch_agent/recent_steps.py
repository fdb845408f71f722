"""The step records of a run's last minute, as they came over the wire: turned into steps only when somebody looks at them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from gpuwatch import wire

KEPT = 1200
"""Steps of one run: a minute at 20 a second. A faster run keeps a shorter while."""
_NEEDED = {"start_ns", "data_wait_ns", "transfer_ns", "compute_ns"}


@dataclass(slots=True)
class RecentStep:
    """A step as the agent keeps it for a minute, by the device's timeline where that measured it.

    Times in ns, `end_ns` on the agent's clock; see `gpuwatch.window.StepColumns`.
    """

    end_ns: int
    data_wait_ns: int
    transfer_ns: int
    compute_ns: int
    samples: int
    epoch_start: bool
    hidden_ns: int = 0
    comm_wait_ns: int = wire.MISSING
    """The part of `compute_ns` that waited for other ranks; -1: not measured."""


class _Chunk:
    """The records of one message."""

    __slots__ = ("_columns", "_offset_ns", "_steps", "count", "end_ns")

    def __init__(self, columns: Mapping[str, bytes], offset_ns: int, count: int) -> None:
        self._columns: Mapping[str, bytes] = columns
        self._offset_ns = offset_ns
        self._steps: list[RecentStep] | None = None
        self.count = min(count, KEPT)
        last = (int.from_bytes(columns[name][-8:], "little", signed=True) for name in _NEEDED)
        self.end_ns = sum(last) + offset_ns

    @classmethod
    def of(cls, steps: list[RecentStep]) -> _Chunk:
        chunk = cls.__new__(cls)
        chunk._columns, chunk._offset_ns, chunk._steps = {}, 0, steps
        chunk.count, chunk.end_ns = len(steps), steps[-1].end_ns
        return chunk

    @property
    def steps(self) -> list[RecentStep]:
        if self._steps is None:
            self._steps = _steps_of(self._columns, self._offset_ns)
            self._columns = {}
        return self._steps


class RecentSteps:
    """A run's last steps, oldest first: those of the last minute, `KEPT` at most (and the rest of the oldest message)."""

    def __init__(self) -> None:
        self._chunks: deque[_Chunk] = deque()
        self._count = 0

    def take(self, columns: Mapping[str, bytes], offset_ns: int) -> int | None:
        """Append a message's records; return when the last one ended on the agent's clock, None without what a step needs."""
        count = wire.step_count(columns)
        if not count or not columns.keys() >= _NEEDED:
            return None
        self._append(_Chunk(columns, offset_ns, count))
        return self._chunks[-1].end_ns

    def append(self, step: RecentStep) -> None:
        """Append one step."""
        self._append(_Chunk.of([step]))

    def clear(self) -> None:
        """Forget all of them: another process's steps follow."""
        self._chunks.clear()
        self._count = 0

    def drop_before(self, moment_ns: int) -> None:
        """Forget the messages whose last step ended before a moment."""
        while self._chunks and self._chunks[0].end_ns < moment_ns:
            self._count -= self._chunks.popleft().count

    def __len__(self) -> int:
        return min(self._count, KEPT)

    def __iter__(self) -> Iterator[RecentStep]:
        surplus = self._count - len(self)
        for number, chunk in enumerate(self._chunks):
            yield from chunk.steps[surplus:] if number == 0 and surplus else chunk.steps

    def __getitem__(self, index: int) -> RecentStep:
        """Return the first (0) or the last (-1) step. Raises: IndexError without any."""
        if not self._chunks or index not in (0, -1):
            raise IndexError(index)
        return next(iter(self)) if index == 0 else self._chunks[-1].steps[-1]

    def ends_ns(self) -> tuple[int, int] | None:
        """Return when the first and the last step ended; None without any."""
        return (self[0].end_ns, self._chunks[-1].end_ns) if self._chunks else None

    def _append(self, chunk: _Chunk) -> None:
        self._chunks.append(chunk)
        self._count += chunk.count
        while len(self._chunks) > 1 and self._count - self._chunks[0].count >= KEPT:
            self._count -= self._chunks.popleft().count


def _steps_of(columns: Mapping[str, bytes], offset_ns: int) -> list[RecentStep]:
    """Return the steps in a message's columns, the last `KEPT` at most."""
    found = {name: wire.unpack(column[-8 * KEPT :]) for name, column in columns.items()}
    starts, waits, copies, computes = (
        found[name] for name in ("start_ns", "data_wait_ns", "transfer_ns", "compute_ns")
    )
    missing = [wire.MISSING] * len(starts)
    ends = [sum(parts) + offset_ns for parts in zip(starts, waits, copies, computes, strict=True)]
    firsts = [first == 1 for first in found.get("epoch_start", missing)]
    rows = zip(ends, waits, copies, computes, found.get("samples", missing), firsts, strict=True)
    steps = [RecentStep(*row) for row in rows]
    if columns.keys() >= set(wire.DEVICE_COLUMNS):
        _put_device_times(steps, found)
    for step, waited_ns in zip(steps, found.get("comm_wait_ns", ()), strict=False):
        step.comm_wait_ns = waited_ns
    return steps


def _put_device_times(steps: list[RecentStep], columns: Mapping[str, Sequence[int]]) -> None:
    """Replace the host's times of those steps that the device's timeline measured."""
    rows = zip(steps, *(columns[name] for name in wire.DEVICE_COLUMNS), strict=True)
    for step, input_wait, host_wait, transfer, compute in rows:
        if input_wait >= 0:
            step.hidden_ns = max(0, step.data_wait_ns - input_wait)
            step.data_wait_ns, step.transfer_ns = input_wait, transfer
            step.compute_ns = compute + max(0, host_wait)


__all__ = ["KEPT", "RecentStep", "RecentSteps"]
