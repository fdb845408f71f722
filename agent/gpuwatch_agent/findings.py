"""Findings over time: one begins when it has been there for some seconds and ends when it has been gone for some."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from gpuwatch.diagnosis import Finding, in_order, is_explained
from gpuwatch.stacks.records import Stacks

BEGIN_AFTER_NS = 3_000_000_000
END_AFTER_NS = 10_000_000_000


@dataclass
class ActiveFinding:
    """A finding as it stands now."""

    finding: Finding
    since_s: float
    """Unix time of the first sign."""
    seen_s: float
    since_ns: int
    seen_ns: int
    """The same on the agent's monotonic clock: the wall clock may be set."""
    active: bool = False
    looked_at: bool = False
    """Stacks were asked for."""
    stacks: Stacks | None = None
    """Where the processes stood when it began, where that was looked at."""


@dataclass
class FindingBook:
    """Findings of all runs and GPUs, by (run, rank, cause, gpu). `run` is empty for the node's own."""

    entries: dict[tuple[str, int, str, str], ActiveFinding] = field(default_factory=dict)
    causes_seen: dict[tuple[str, int], set[str]] = field(default_factory=dict)
    """Causes that were ever active, so that their series can say 0 when they have gone."""

    def update(self, run: str, rank: int, findings: Sequence[Finding], now_ns: int, now_s: float) -> None:
        """Take this moment's findings of one run."""
        for finding in findings:
            key = (run, rank, finding.cause, finding.gpu or "")
            entry = self.entries.get(key)
            if entry is None:
                entry = self.entries[key] = ActiveFinding(finding, now_s, now_s, now_ns, now_ns)
            entry.finding, entry.seen_s, entry.seen_ns = finding, now_s, now_ns
            if now_ns - entry.since_ns >= BEGIN_AFTER_NS:
                entry.active = True
                self.causes_seen.setdefault((run, rank), set()).add(finding.cause)
        for key, entry in list(self.entries.items()):
            gone_ns = now_ns - entry.seen_ns
            if key[:2] == (run, rank) and gone_ns > (END_AFTER_NS if entry.active else BEGIN_AFTER_NS):
                del self.entries[key]

    def end_run(self, run: str, rank: int) -> None:
        """A run has ended: what was found of it is no longer active."""
        for key in [key for key in self.entries if key[:2] == (run, rank)]:
            del self.entries[key]

    def last_words(
        self, run: str, rank: int, findings: Sequence[Finding], now_ns: int, now_s: float
    ) -> list[ActiveFinding]:
        """A run has ended, and this is why: active at once, until the next `end_run`; whatever was found before is over."""
        self.end_run(run, rank)
        for finding in findings:
            entry = ActiveFinding(finding, now_s, now_s, now_ns, now_ns, active=True)
            self.entries[run, rank, finding.cause, finding.gpu or ""] = entry
            self.causes_seen.setdefault((run, rank), set()).add(finding.cause)
        return self.active(run, rank)

    def keep_only(self, runs: Collection[tuple[str, int]]) -> None:
        """Forget every run but these, and but the node itself."""
        for run, rank in {key[:2] for key in self.entries} | self.causes_seen.keys():
            if run and (run, rank) not in runs:
                self.end_run(run, rank)
                self.causes_seen.pop((run, rank), None)

    def active(self, run: str, rank: int) -> list[ActiveFinding]:
        """Return the run's active findings in the diagnosis's order of the last moment."""
        found = [entry for key, entry in self.entries.items() if key[:2] == (run, rank) and entry.active]
        causes = {entry.finding.cause for entry in found}
        # What is not proven lingers for some seconds when its cause is known by now.
        found = [entry for entry in found if not is_explained(entry.finding, causes)]
        by_key = {(entry.finding.cause, entry.finding.gpu): entry for entry in found}
        ordered = []
        for finding in in_order([entry.finding for entry in found]):  # a root that is not active yet is none
            entry = by_key[finding.cause, finding.gpu]
            entry.finding = finding
            ordered.append(entry)
        return ordered
