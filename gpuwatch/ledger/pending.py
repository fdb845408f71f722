"""Pending log entries: what follows a piece that the device has not finished is booked after that piece."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from gpuwatch.ledger.events import ENTER, EXIT, PART, SPAN, STEP
from gpuwatch.ledger.states import COMPUTE, OTHER, phase_state


class PendingEntries:
    """Entries from the oldest piece whose device times are not known yet."""

    def __init__(self) -> None:
        self._entries: deque[tuple[Any, ...]] = deque()

    def __bool__(self) -> bool:
        return bool(self._entries)

    def takes(self, entry: tuple[Any, ...]) -> bool:
        """Take an entry that must wait; return False for one that can be booked now."""
        if self._entries or _waits(entry):
            self._entries.append(entry)
            return True
        return False

    def released(self) -> Iterator[tuple[Any, ...]]:
        """Yield the entries that can be booked now, in order."""
        entries = self._entries
        while entries and not _waits(entries[0]):
            yield entries.popleft()

    @property
    def has_phase(self) -> bool:
        """Whether a phase begins among them."""
        return any(entry[0] == ENTER for entry in self._entries)

    def tail(self, names: list[str | None]) -> tuple[list[tuple[str, int]], str]:
        """Return the provisional states of pending time, as (state, until) in order, and the state of what follows it.

        The device still works on a pending piece. `names` are those of the phases that were open before, outermost first.
        """
        parts: list[tuple[str, int]] = []
        names = list(names)

        def between() -> str:
            name = next((name for name in reversed(names) if name is not None), None)
            return OTHER if name is None else phase_state(name)

        for entry in self._entries:
            kind = entry[0]
            if kind == ENTER:
                parts.append((between(), entry[1]))
                names.append(entry[2])
            elif kind == EXIT:
                parts.append((between(), entry[1]))
                names.pop()
            elif kind == SPAN:
                parts.append((entry[3] if between() == OTHER else between(), entry[2]))
            elif kind in (STEP, PART):
                parts.append((COMPUTE if between() == OTHER else between(), entry[2]))
        return parts, between()


def _waits(entry: tuple[Any, ...]) -> bool:
    """Whether the device has still to finish the piece that this entry describes."""
    piece = entry[7] if entry[0] in (STEP, PART) and len(entry) > 7 else None
    return piece is not None and piece.is_pending
