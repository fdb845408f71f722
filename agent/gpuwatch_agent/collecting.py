"""Run the collectors: each is timed, and its failure is its own."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from gpuwatch import api
from gpuwatch.errors import NoData
from gpuwatch.metrics import Sample
from gpuwatch_agent.collectors import Collector

logger = logging.getLogger(__name__)


class Collecting:
    """All collectors of the node. What one says for the first time is logged, its repetitions are not."""

    def __init__(self, collectors: Sequence[Collector]) -> None:
        self._collectors = collectors
        self._said: dict[str, str | None] = {}
        self.outcomes: list[api.Collector] = []

    def turn(self) -> list[Sample]:
        """Return the samples of all collectors, with their own durations and success."""
        samples: list[Sample] = []
        outcomes = []
        for collector in self._collectors:
            outcome = self._one(collector, samples)
            outcomes.append(outcome)
            samples.append(Sample("gpuwatch_collector_duration_seconds", outcome.duration_s or 0.0, (outcome.name,)))
            if outcome.success is not None:
                samples.append(Sample("gpuwatch_collector_success", float(outcome.success), (outcome.name,)))
        self.outcomes = outcomes
        return samples

    def _one(self, collector: Collector, samples: list[Sample]) -> api.Collector:
        begin = time.perf_counter()
        success: bool | None = True
        message: str | None = None
        try:
            samples.extend(list(collector.collect()))
        except NoData as reason:
            success, message = None, str(reason)
        except Exception as error:
            success, message = False, f"{type(error).__name__}: {error}"
        self._say(collector.name, success, message)
        return api.Collector(collector.name, success, message, time.perf_counter() - begin)

    def _say(self, name: str, success: bool | None, message: str | None) -> None:
        if self._said.get(name) == message:
            return
        self._said[name] = message
        if message is None:
            logger.info("collector %s works again", name)
        elif success is None:
            logger.info("collector %s: nothing to measure here: %s", name, message)
        else:
            logger.warning("collector %s failed: %s", name, message)
