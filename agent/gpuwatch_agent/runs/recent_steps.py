"""The step records of a run's last minute, as they came over the wire: turned into columns once, and only when somebody looks at them."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from itertools import chain

from gpuwatch import wire

KEPT = 1200
"""Steps of one run: a minute at 20 a second. A faster run keeps a shorter while."""
_NEEDED = ("start_ns", "data_wait_ns", "transfer_ns", "compute_ns")
_NEEDED_SET = frozenset(_NEEDED)


@dataclass(frozen=True, slots=True)
class RecentColumns:
    """Steps, oldest first, by the device's timeline where that measured them; all columns of the same length [n_steps].

    See `gpuwatch.window.StepColumns`.
    """

    end_ns: tuple[int, ...] = ()
    """On the agent's clock."""
    data_wait_s: tuple[float, ...] = ()
    transfer_s: tuple[float, ...] = ()
    compute_s: tuple[float, ...] = ()
    hidden_s: tuple[float, ...] = ()
    epoch_start: tuple[bool, ...] = ()
    samples: tuple[int, ...] = ()
    """-1: not known."""
    comm_wait_ns: tuple[int, ...] = ()
    """The part of the compute time that waited for other ranks; -1: not measured."""

    def __len__(self) -> int:
        return len(self.end_ns)

    def last(self, count: int) -> RecentColumns:
        """Return the last steps alone."""
        if count >= len(self):
            return self
        return RecentColumns(*(getattr(self, name)[len(self) - count :] for name in _NAMES))


_NAMES = tuple(field.name for field in fields(RecentColumns))


class _Chunk:
    """The records of one message."""

    __slots__ = ("_offset_ns", "_packed", "count", "end_ns")

    def __init__(self, packed: Mapping[str, bytes], offset_ns: int, count: int) -> None:
        self._packed = packed
        self._offset_ns = offset_ns
        self.count = min(count, KEPT)
        last = b"".join(packed[name][-8:] for name in _NEEDED)
        self.end_ns = sum(wire.unpack(last)) + offset_ns

    def columns(self) -> RecentColumns:
        return read_columns(self._packed, self._offset_ns)


class RecentSteps:
    """A run's last steps, oldest first: those of the last minute, `KEPT` at most."""

    def __init__(self) -> None:
        self._columns = RecentColumns()
        self._unread: deque[_Chunk] = deque()
        """What came after `_columns`."""
        self._unread_count = 0
        self._from_ns = 0

    def take(self, packed: Mapping[str, bytes], offset_ns: int) -> int | None:
        """Append a message's records; return when the last one ended on the agent's clock, None without what a step needs."""
        count = wire.step_count(packed)
        if not count or not packed.keys() >= _NEEDED_SET:
            return None
        chunk = _Chunk(packed, offset_ns, count)
        self._unread.append(chunk)
        self._unread_count += chunk.count
        while len(self._unread) > 1 and self._unread_count - self._unread[0].count >= KEPT:
            self._unread_count -= self._unread.popleft().count
        return chunk.end_ns

    def clear(self) -> None:
        """Forget all of them: another process's steps follow."""
        self._columns = RecentColumns()
        self._unread.clear()
        self._unread_count = 0

    def drop_before(self, moment_ns: int) -> None:
        """Forget the steps that ended before a moment."""
        self._from_ns = moment_ns

    @property
    def last_end_ns(self) -> int | None:
        """When the last step ended on the agent's clock; None without any."""
        last_ns = self._unread[-1].end_ns if self._unread else (self._columns.end_ns or (None,))[-1]
        return last_ns if last_ns is not None and last_ns >= self._from_ns else None

    def columns(self) -> RecentColumns:
        """Return the steps, the last `KEPT` at most."""
        if self._unread:
            parts = [self._columns, *(chunk.columns() for chunk in self._unread)]
            joined = (tuple(chain.from_iterable(getattr(part, name) for part in parts)) for name in _NAMES)
            self._columns = RecentColumns(*joined).last(KEPT)
            self._unread.clear()
            self._unread_count = 0
        old = bisect_left(self._columns.end_ns, self._from_ns)
        if old:
            self._columns = self._columns.last(len(self._columns) - old)
        return self._columns


def read_columns(packed: Mapping[str, bytes], offset_ns: int) -> RecentColumns:
    """Return the steps in a message's columns, the last `KEPT` at most."""
    found = {name: wire.unpack(column[-8 * KEPT :]) for name, column in packed.items()}
    host = [found[name] for name in _NEEDED]
    count = len(host[0])
    missing = array("q", [wire.MISSING]) * count
    end_ns = tuple(sum(parts) + offset_ns for parts in zip(*host, strict=True))
    waits, copies, computes = host[1:]
    hidden: Iterable[int] = (0,) * count
    if found.keys() >= set(wire.DEVICE_COLUMNS):
        rows = zip(waits, copies, computes, *(found[name] for name in wire.DEVICE_COLUMNS), strict=True)
        told = [_by_device(*row) for row in rows]
        waits, copies, computes, hidden = (array("q", column) for column in zip(*told, strict=True))
    return RecentColumns(
        end_ns=end_ns,
        data_wait_s=_seconds(waits),
        transfer_s=_seconds(copies),
        compute_s=_seconds(computes),
        hidden_s=_seconds(hidden),
        epoch_start=tuple(first == 1 for first in found.get("epoch_start", missing)),
        samples=tuple(found.get("samples", missing)),
        comm_wait_ns=tuple(found.get("comm_wait_ns", missing)),
    )


def _by_device(
    wait_ns: int, copy_ns: int, compute_ns: int, felt_ns: int, host_ns: int, device_copy_ns: int, device_compute_ns: int
) -> tuple[int, int, int, int]:
    """Return a step's (data wait, transfer, compute, hidden wait): the device's own where it measured the step."""
    if felt_ns < 0:
        return wait_ns, copy_ns, compute_ns, 0
    return felt_ns, device_copy_ns, device_compute_ns + max(0, host_ns), max(0, wait_ns - felt_ns)


def _seconds(values_ns: Iterable[int]) -> tuple[float, ...]:
    return tuple(value / 1e9 for value in values_ns)
