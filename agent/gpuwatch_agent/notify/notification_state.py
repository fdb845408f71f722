"""Which notifications were sent: hold times, deduplication, retries; kept in a small file that survives restarts.

No network and no clock here: times are Unix seconds that are handed in, because they outlive the process.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec

from gpuwatch_agent.notify.conditions import Condition

logger = logging.getLogger(__name__)

FIRST_RETRY_S = 5.0
LAST_RETRY_S = 300.0
GIVE_UP_S = 86400.0
"""A message that could not be delivered for a day is dropped, and counted."""
MAX_WAITING = 1000


class ConditionState(msgspec.Struct):
    """A condition over time."""

    since_s: float
    seen_s: float
    title: str
    notified_s: float | None = msgspec.field(default=None, name="told_s")
    """When it was last notified; None: never. (The name in the file is that of earlier versions.)"""


class Letter(msgspec.Struct):
    """One message to one receiver that is still to be delivered. `target` is the receiver's URL, hashed: it may hold a secret."""

    target: str
    title: str
    body: str
    urgent: bool
    written_s: float
    due_s: float
    attempts: int = 0


class State(msgspec.Struct):
    """All that outlives the agent."""

    standing: dict[str, ConditionState] = msgspec.field(default_factory=dict)
    letters: list[Letter] = msgspec.field(default_factory=list)
    sent: int = 0
    failed: int = 0
    dropped: int = 0


class NotificationState:
    """Owned by one thread. `path` None: nothing is kept over a restart."""

    def __init__(
        self, path: Path | None, targets: Sequence[str], *, name: str, keep_s: float, repeat_s: float, min_severity: str
    ) -> None:
        self._path = path
        self._targets = tuple(targets)
        self._name = name
        self._keep_s = keep_s
        self._repeat_s = repeat_s
        self._critical_only = min_severity == "critical"
        self.state = _read(path)
        self._kept = b""

    def update(self, conditions: Sequence[Condition], now_s: float) -> None:
        """Take what is wrong now, and write the letters that are due."""
        for condition in conditions:
            if self._critical_only and condition.severity != "critical":
                continue
            known = self.state.standing.get(condition.key)
            if known is None:
                known = self.state.standing[condition.key] = ConditionState(condition.since_s, now_s, condition.title)
            known.seen_s, known.title = now_s, condition.title
            again = known.notified_s is not None and self._repeat_s > 0 and now_s - known.notified_s >= self._repeat_s
            if now_s - known.since_s >= condition.hold_s and (known.notified_s is None or again):
                known.notified_s = now_s
                title = f"[{condition.severity}] {condition.alert} on {self._name}"
                self._write(title, f"{condition.title}\n{condition.body}", condition.severity == "critical", now_s)
        for key, standing in list(self.state.standing.items()):
            # Never notified: no hold is needed. Notified: a short quiet time does not mean that it is fixed.
            if now_s - standing.seen_s > (self._keep_s if standing.notified_s is not None else 0):
                del self.state.standing[key]
                if standing.notified_s is not None:
                    title = f"[resolved] {key.partition('/')[0]} on {self._name}"
                    self._write(title, standing.title, False, now_s)

    def due(self, now_s: float) -> list[Letter]:
        """Return the letters to try now, oldest first."""
        return [letter for letter in self.state.letters if letter.due_s <= now_s]

    def delivered(self, letter: Letter) -> None:
        """It has arrived."""
        self.state.letters.remove(letter)
        self.state.sent += 1

    def refused(self, letter: Letter, now_s: float) -> None:
        """It has not: try again later, each time after twice as long."""
        self.state.failed += 1
        letter.attempts += 1
        letter.due_s = now_s + min(LAST_RETRY_S, FIRST_RETRY_S * 2 ** (letter.attempts - 1))
        if now_s - letter.written_s > GIVE_UP_S:
            self.state.letters.remove(letter)
            self.state.dropped += 1
            logger.error("a notification could not be delivered for a day and is dropped: %s", letter.title)

    def save(self) -> None:
        """Write what has changed since the last time; a failure is logged once per kind."""
        if self._path is None:
            return
        body = msgspec.json.encode(self.state)
        if body == self._kept:
            return
        try:
            new = self._path.with_name(self._path.name + ".new")
            new.write_bytes(body)
            new.replace(self._path)
            self._kept = body
        except OSError as error:
            logger.warning("notifications cannot be remembered in %s: %s", self._path, error.strerror)
            self._kept = body

    def _write(self, title: str, body: str, urgent: bool, now_s: float) -> None:
        for target in self._targets:
            self.state.letters.append(Letter(target, title, body, urgent, now_s, now_s))
        too_many = len(self.state.letters) - MAX_WAITING
        if too_many > 0:
            del self.state.letters[:too_many]
            self.state.dropped += too_many
            logger.error("%d notifications wait to be delivered: the %d oldest are dropped", MAX_WAITING, too_many)


def _read(path: Path | None) -> State:
    """Return what a former agent kept; a damaged file gives a warning and an empty state."""
    if path is None or not path.exists():
        return State()
    try:
        return msgspec.json.decode(path.read_bytes(), type=State)
    except (OSError, msgspec.MsgspecError) as error:
        logger.warning("%s cannot be read (%s): what was notified before is forgotten", path, error)
        return State()
