"""Log entries that wait for the device: what follows a piece that it has not finished is booked after that piece."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from gpuwatch.device import DeviceTimes
from gpuwatch.entries import AWAIT, DEVICE, ENTER, EXIT, PART, SPAN, STEP
from gpuwatch.ledger import COMPUTE, OTHER, phase_state


class HeldEntries:
    """Entries from the oldest piece on whose device times are not known yet, and the times told since."""

    def __init__(self) -> None:
        self._entries: deque[tuple[Any, ...]] = deque()
        self._times: deque[DeviceTimes | None] = deque()

    def __bool__(self) -> bool:
        return bool(self._entries)

    def takes(self, entry: tuple[Any, ...]) -> bool:
        """Take an entry that must wait, or what the device tells; return False for one that can be booked now."""
        if entry[0] == DEVICE:
            self._times.append(entry[1])
        elif self._entries or entry[0] == AWAIT:
            self._entries.append(entry)
        else:
            return False
        return True

    def told(self) -> Iterator[tuple[tuple[Any, ...], DeviceTimes | None]]:
        """Yield the entries that can be booked by now, in order, a piece with its times (None: the host's clock must do)."""
        held = self._entries
        while held:
            times: DeviceTimes | None = None
            if held[0][0] == AWAIT:
                piece = next((at for at in range(1, len(held)) if held[at][0] in (STEP, PART)), None)
                if not self._times or piece is None:
                    return
                held.popleft()
                for _ in range(piece - 1):  # notes on the piece come before it
                    yield held.popleft(), None
                times = self._times.popleft()
            yield held.popleft(), times

    @property
    def has_phase(self) -> bool:
        """Whether a phase begins among them."""
        return any(entry[0] == ENTER for entry in self._entries)

    def tail(self, parts: list[tuple[str, int]], names: list[str | None]) -> tuple[list[tuple[str, int]], str]:
        """Return how held time looks now, as (state, until) in order behind `parts`, and the state of what follows it.

        A held piece is one that the device still works on; before it comes what the host did after the last launch of the
        piece before. `names` are those of the phases that were open before, outermost first.
        """
        parts, names = list(parts), list(names)

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
