"""Notifications without Alertmanager: a thread evaluates the snapshots and sends through Apprise, imported lazily.

A receiver that fails or hangs holds up only itself: each message to it is retried separately, for a day. What was
notified or waits is in a small file that survives restarts, with Unix times, which are moved where the clock is set.
"""

import hashlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from gpuwatch.config import Config
from gpuwatch.diagnosis.finding import SEVERITIES
from gpuwatch.errors import ConfigError, require
from gpuwatch.metrics import Sample
from gpuwatch.tools.reports.model import when
from gpuwatch_agent.deadline import Background
from gpuwatch_agent.evaluator import QUIET_S
from gpuwatch_agent.exporter import Snapshot
from gpuwatch_agent.notify.conditions import Condition, conditions
from gpuwatch_agent.state_file import StateFile

logger = logging.getLogger(__name__)

INTERVAL_S = 2.0
STALE_S = 10.0  # an older snapshot is ignored
FIRST_RETRY_S = 5.0
LAST_RETRY_S = 300.0
GIVE_UP_S = 86400.0  # A message that could not be delivered for this long is dropped, and counted
MAX_WAITING = 1000
_CLOCK_SET_S = 1.0

Sender = Callable[[str, str, bool], bool]
"""Delivers one message (title, body, whether it is urgent); false, or any exception, if it was not delivered."""


class ConditionState(msgspec.Struct):
    """A condition over time."""

    since_s: float  # its first sign
    title: str
    over_s: float = 0.0  # since when its alert's threshold is passed
    notified_s: float | None = None  # when it was last notified; None: never


class Letter(msgspec.Struct):
    """One message to one receiver, not delivered yet. `target`: hash of the receiver's URL, which may hold a secret."""

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


class Notifier(Background):
    """Evaluates, deduplicates and sends in its own thread. What waits at its end is kept for the next start."""

    def __init__(
        self,
        snapshot: Callable[[], Snapshot | None],
        config: Config,
        host: str,
        path: Path | None,
        senders: dict[str, Sender] | None = None,
    ) -> None:
        """`senders` by URL replace Apprise; `path` None keeps nothing. Raises: ConfigError (bad URL); MissingExtra."""
        super().__init__("notifier", 15.0)
        self._snapshot, self._config, self._name = snapshot, config, config.notify.name or host
        by_url = apprise_senders(config.notify.urls) if senders is None else senders
        self._senders = {hashlib.sha256(url.encode()).hexdigest()[:16]: sender for url, sender in by_url.items()}
        self._file = StateFile(path, State, "notifications")
        self._state = self._file.state
        self._state.letters = [replace(each, due_s=0.0) for each in self._state.letters if each.target in self._senders]
        for known in self._state.standing.values():
            known.over_s = known.over_s or known.since_s  # by a former version
        self._seen_s: dict[str, float] = {}  # when each that stands was last seen, on the monotonic clock
        self._looked_s = -math.inf  # when it last took what is wrong, on the monotonic clock
        self._offset_s: float | None = None  # Unix time minus the monotonic clock

    def samples(self) -> Iterable[Sample]:
        """Return the counters for /metrics."""
        return (
            Sample("gpuwatch_notifications_sent_total", self._state.sent),
            Sample("gpuwatch_notification_failures_total", self._state.failed),
            Sample("gpuwatch_notifications_dropped_total", self._state.dropped),
            Sample("gpuwatch_notifications_waiting", len(self._state.letters)),
        )

    def tick(self, now_s: float, monotonic_s: float) -> None:
        """Evaluate the snapshot once, and try each message that is due once."""
        self._follow_clock(now_s, monotonic_s)
        snapshot = self._snapshot()
        if snapshot is not None and monotonic_s - snapshot.monotonic_s < STALE_S:
            if not snapshot.page.values("gpuwatch_gpus_seen") and "GpuLost" in self._state.standing:
                self._seen_s["GpuLost"] = monotonic_s  # a driver that does not answer brings no GPU back
            self._update(conditions(snapshot, now_s, self._config), now_s, monotonic_s)
            self._file.save()  # before it is sent: a kill between the two sends twice rather than never
        failed: set[str] = set()  # receivers: a try may take seconds, so their other messages wait for the next tick
        for letter in [letter for letter in self._state.letters if letter.due_s <= now_s]:
            if letter.target not in failed and not self._stop.is_set():
                if not self._deliver(letter, now_s):
                    failed.add(letter.target)
                self._file.save()

    def _follow_clock(self, now_s: float, monotonic_s: float) -> None:
        """Move the times that are kept with a clock that was set; a former agent's are not after now."""
        offset_s = now_s - monotonic_s
        moved_s = 0.0 if self._offset_s is None else offset_s - self._offset_s
        if self._offset_s is not None and abs(moved_s) < _CLOCK_SET_S:
            return
        self._offset_s = offset_s
        for known in self._state.standing.values():
            known.since_s = min(now_s, known.since_s + moved_s)
            known.over_s = min(now_s, known.over_s + moved_s)
            if known.notified_s is not None:
                known.notified_s = min(now_s, known.notified_s + moved_s)
        for letter in self._state.letters:
            letter.written_s, letter.due_s = letter.written_s + moved_s, letter.due_s + moved_s

    def _update(self, found: Sequence[Condition], now_s: float, monotonic_s: float) -> None:
        """Take what is wrong now, and write the messages that are due."""
        standing, settings = self._state.standing, self._config.notify
        gap_s = monotonic_s - self._looked_s  # infinite at first: what a former agent saw counts
        gap_s = gap_s if math.isinf(gap_s) else min(gap_s, STALE_S)
        for condition in found:
            if SEVERITIES.index(condition.severity) > SEVERITIES.index(settings.min_severity):
                continue
            # A finding may be older, but the last look did not have it: its ratio was below its alert's threshold.
            since_s = min(condition.since_s, now_s)
            over_s = max(since_s, now_s - gap_s)
            known = standing.setdefault(condition.key, ConditionState(since_s, condition.title, over_s))
            self._seen_s[condition.key], known.title = monotonic_s, condition.title
            # A restarted agent does not know the power of a run's steps: it finds one that hangs only stalled.
            hung = condition.key.replace("RunStalled/", "RunHung/", 1)
            if hung in standing and standing[hung].notified_s is not None:
                self._seen_s[hung] = monotonic_s
            again = known.notified_s is not None and now_s - known.notified_s >= settings.repeat_s > 0
            if now_s - known.over_s >= condition.hold_s and (known.notified_s is None or again):
                known.notified_s = now_s
                title = f"[{condition.severity}] {condition.alert} on {self._name}"
                text = f"{condition.title}\nSince: {when(known.since_s)}\n{condition.body}"
                self._write(title, text, condition.severity == "critical", now_s)
        self._looked_s = monotonic_s
        for key, known in list(standing.items()):
            seen_s = self._seen_s.setdefault(key, monotonic_s + QUIET_S)  # a former agent's, and not found again yet
            # Never notified: no hold is needed. Notified: a short quiet time does not mean that it is fixed.
            keep_s, quiet_s = self._config.alerts.keep_firing_for_s, monotonic_s - seen_s
            if quiet_s > keep_s if known.notified_s is not None else quiet_s != 0:
                del standing[key], self._seen_s[key]
                if known.notified_s is not None:
                    self._write(f"[resolved] {key.partition('/')[0]} on {self._name}", known.title, False, now_s)

    def _write(self, title: str, body: str, urgent: bool, now_s: float) -> None:
        letters = self._state.letters
        letters += [Letter(target, title, body, urgent, now_s, now_s) for target in self._senders]
        if (too_many := len(letters) - MAX_WAITING) > 0:
            del letters[:too_many]
            self._state.dropped += too_many
            logger.error("the queue of %d notifications is full: the %d oldest are dropped", MAX_WAITING, too_many)

    def _deliver(self, letter: Letter, now_s: float) -> bool:
        """Return whether a message could be delivered; a failure is retried with exponential backoff, for a day."""
        state, reason = self._state, "the receiver refused it"
        try:
            if self._senders[letter.target](letter.title, letter.body, letter.urgent):
                state.letters.remove(letter)
                state.sent += 1
                return True
        except Exception as error:
            reason = str(error)
        logger.warning("a notification was not delivered and will be retried: %s: %s", letter.title, reason)
        state.failed += 1
        letter.attempts += 1
        letter.due_s = now_s + min(LAST_RETRY_S, FIRST_RETRY_S * 2 ** (letter.attempts - 1))
        if now_s - letter.written_s > GIVE_UP_S:
            state.letters.remove(letter)
            state.dropped += 1
            logger.error("a notification could not be delivered for a day and is dropped: %s", letter.title)
        return False

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            try:
                self.tick(time.time(), time.monotonic())
            except Exception:
                logger.exception("an iteration of the notifier failed; it continues with the next one")


def apprise_senders(urls: Sequence[str]) -> dict[str, Sender]:
    """Return senders by Apprise URL. Raises: ConfigError naming the URL's kind but not its secrets; MissingExtra."""
    require("apprise", "agent")
    from apprise import Apprise, AppriseAsset, NotifyFormat, NotifyType

    asset = AppriseAsset()
    asset.http_redirects = False  # a POST that is redirected becomes a GET: what answers that has no message
    logging.getLogger("apprise").setLevel(logging.CRITICAL)  # it logs URLs, which hold secrets

    def sender(url: str) -> Sender:
        service = Apprise(asset=asset)
        if not service.add(url):
            kind = url.partition("://")[0] if "://" in url else "a URL without a scheme"
            raise ConfigError(
                f"--notify: Apprise does not support {kind}://…; see its list of URLs, e.g. slack://TOKENS, mailto://USER:PASSWORD@HOST, "
                "json://HOST:PORT/PATH"
            )

        def send(title: str, body: str, urgent: bool) -> bool:
            kind = NotifyType.FAILURE if urgent else NotifyType.WARNING
            if title.startswith("[resolved]"):
                kind = NotifyType.SUCCESS
            return bool(service.notify(title=title, body=body, notify_type=kind, body_format=NotifyFormat.TEXT))

        return send

    return {url: sender(url) for url in urls}
