"""Notifications without Alertmanager: a thread that reads the snapshots and sends through Apprise, which is imported lazily.

A receiver that fails or hangs holds up nothing but itself: each letter is tried again by itself, for a day.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from gpuwatch.alerting.thresholds import AlertThresholds
from gpuwatch.config import NotifySettings
from gpuwatch.errors import ConfigError, MissingExtra
from gpuwatch.metrics import Sample
from gpuwatch_agent.exporter import Snapshot
from gpuwatch_agent.notify.conditions import conditions, hardware_conditions
from gpuwatch_agent.notify.notification_state import NotificationState

logger = logging.getLogger(__name__)

INTERVAL_S = 2.0
STALE_S = 10.0
"""An older snapshot is ignored."""


class Sender(Protocol):
    """Delivers one message; false, or any exception, when it has not arrived."""

    def __call__(self, title: str, body: str, urgent: bool) -> bool: ...


class Notifier:
    """Evaluates, remembers and sends in a thread of its own."""

    def __init__(
        self,
        snapshot: Callable[[], Snapshot | None],
        settings: NotifySettings,
        thresholds: AlertThresholds,
        host: str,
        path: Path | None,
        senders: dict[str, Sender] | None = None,
    ) -> None:
        """`senders` by URL replaces Apprise. Raises: ConfigError for a URL that is none; MissingExtra."""
        self._snapshot = snapshot
        self._thresholds = thresholds
        by_url = apprise_senders(settings.urls) if senders is None else senders
        self._senders = {_target(url): sender for url, sender in by_url.items()}
        self._state = NotificationState(
            path,
            tuple(self._senders),
            name=settings.name or host,
            keep_s=thresholds.keep_firing_for_s,
            repeat_s=settings.repeat_s,
            min_severity=settings.min_severity,
        )
        for letter in list(self._state.state.letters):
            if letter.target not in self._senders:  # its receiver is no longer configured
                self._state.state.letters.remove(letter)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="notifier", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End after the delivery under way; what waits is kept for the next start."""
        self._stop.set()
        self._thread.join(timeout=15.0)

    def samples(self) -> Iterable[Sample]:
        """Return the counters for /metrics."""
        state = self._state.state
        return (
            Sample("gpuwatch_notifications_sent_total", state.sent),
            Sample("gpuwatch_notification_failures_total", state.failed),
            Sample("gpuwatch_notifications_dropped_total", state.dropped),
            Sample("gpuwatch_notifications_waiting", len(state.letters)),
        )

    def tick(self, now_s: float) -> None:
        """Evaluate the snapshot once, and try once each letter that is due."""
        snapshot = self._snapshot()
        if snapshot is not None and now_s - snapshot.time_s < STALE_S:
            found = conditions(snapshot.runs, snapshot.findings, self._thresholds)
            found += hardware_conditions(snapshot.page, now_s, self._thresholds)
            self._state.update(found, now_s)
            self._state.save()  # before it is sent: a kill between the two sends twice rather than never
        for letter in self._state.due(now_s):
            if self._stop.is_set():
                break
            if self._deliver(letter.target, letter.title, letter.body, letter.urgent):
                self._state.delivered(letter)
            else:
                self._state.refused(letter, now_s)
            self._state.save()

    def _deliver(self, target: str, title: str, body: str, urgent: bool) -> bool:
        try:
            arrived = self._senders[target](title, body, urgent)
            if not arrived:
                logger.warning("a notification was not delivered, and is tried again: %s", title)
            return arrived
        except Exception as error:
            logger.warning("a notification was not delivered: %s", error)
            return False

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            try:
                self.tick(time.time())
            except Exception:
                logger.exception("a tick of the notifier failed; the next one goes ahead")


def apprise_senders(urls: Sequence[str]) -> dict[str, Sender]:
    """Return a sender for each Apprise URL. Raises: ConfigError naming the URL's kind but not its secrets; MissingExtra."""
    try:
        import apprise
    except ImportError:
        raise MissingExtra("apprise", "agent") from None
    logging.getLogger("apprise").setLevel(logging.CRITICAL)  # it logs URLs, which hold secrets
    return {url: _apprise_sender(apprise, url) for url in urls}


def _apprise_sender(apprise: Any, url: str) -> Sender:
    service = apprise.Apprise()
    if not service.add(url):
        kind = url.partition("://")[0] if "://" in url else "a URL without a kind"
        raise ConfigError(
            f"--notify: Apprise does not take {kind}://…; see its list of URLs, e.g. slack://TOKENS, mailto://USER:PASSWORD@HOST, "
            "json://HOST:PORT/PATH"
        )

    def send(title: str, body: str, urgent: bool) -> bool:
        kind = apprise.NotifyType.FAILURE if urgent else apprise.NotifyType.WARNING
        if title.startswith("[resolved]"):
            kind = apprise.NotifyType.SUCCESS
        return bool(service.notify(title=title, body=body, notify_type=kind))

    return send


def _target(url: str) -> str:
    return hashlib.sha256(url.encode()).hexdigest()[:16]
