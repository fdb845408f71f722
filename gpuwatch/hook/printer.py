"""When a verdict is said on stderr: after the first pass, at the end, and one line early in a long first pass. Never twice the same."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpuwatch.diagnosis.report import Report

_EARLY_NS = 60_000_000_000
"""Age of a run from which on one line is printed in a first pass that has not ended."""


class VerdictPrinter:
    """Prints one run's verdicts; what fails is told to `failed` and goes no further."""

    def __init__(
        self,
        report: Callable[[], Report],
        quiet: bool,
        failed: Callable[[str, BaseException], None],
        start_ns: int = 0,
    ) -> None:
        self._report = report
        self._quiet = quiet
        self._failed = failed
        self._last = (0, 0.0)
        """Steps and seconds of the verdict that was printed last."""
        self._early_ns = start_ns + _EARLY_NS
        self._early_done = False

    @property
    def printed(self) -> bool:
        """Whether a verdict was printed."""
        return bool(self._last[0])

    def print(self) -> None:
        """Print the verdict, if there was a step."""
        if not self._quiet:
            self._guarded(lambda: self._say(self._report()))

    def print_last(self) -> None:
        """Print the verdict of a run that has ended, if more than a moment has passed since one was printed."""

        def say() -> None:
            report = self._report()
            steps, duration_s = self._last
            if report.steps > steps or report.duration_s > 1.02 * duration_s + 1.0:
                self._say(report)

        if not self._quiet:
            self._guarded(say)

    def print_early(self, now_ns: int) -> None:
        """Print one line after the first minute of a long first pass. Called on each sampled fetch of the training thread."""
        if now_ns < self._early_ns or self._early_done:
            return
        self._early_done = True
        if not self._quiet and not self.printed:
            self._guarded(self._say_early)

    def _say_early(self) -> None:
        report = self._report()
        self._early_done = bool(report.steps)
        if report.steps:
            print(f"\ngpuwatch: {report.verdict.sentence}", file=sys.stderr, flush=True)

    def _say(self, report: Report) -> None:
        if report.steps:
            self._last = (report.steps, report.duration_s)
            print(report, file=sys.stderr, flush=True)

    def _guarded(self, say: Callable[[], None]) -> None:
        try:
            say()
        except Exception as error:
            self._failed("printing the verdict", error)
