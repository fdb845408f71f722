"""Evaluates each run and GPU of the node: diagnoses its window, tracks its findings, makes its verdict and API view."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from gpuwatch import api
from gpuwatch.config import Config
from gpuwatch.diagnosis.finding import Finding
from gpuwatch.diagnosis.report import give_verdict, is_short
from gpuwatch.diagnosis.rules import diagnose, in_order, is_explained, why_it_ended
from gpuwatch.diagnosis.window import HostFacts, RankFacts, Window
from gpuwatch.ledger.events import PHASE
from gpuwatch_agent.gpus import GpuAccount
from gpuwatch_agent.gpus.readings import GpuTrends, gpu_facts, owner_text
from gpuwatch_agent.processes.workers import WorkerWatch
from gpuwatch_agent.runs import RUNNING, Run, RunKey, RunRegistry
from gpuwatch_agent.runs.views import ActiveFinding, finding_view, recent_view, run_view
from gpuwatch_agent.runs.window import KEPT, RecentSamples, host_facts, ranks_by_run, run_window

BEGIN_AFTER_NS = 3_000_000_000
END_AFTER_NS = 10_000_000_000
_SETTLED_AFTER_NS = 15_000_000_000
QUIET_S = 60.0  # A finding that was not seen for so long has ended: a restarted agent needs time to find it again


@dataclass
class FindingTracker:
    """Findings of all runs and GPUs, by (run, rank, cause, gpu). `run` is empty for the node's own."""

    entries: dict[tuple[str, int, str, str], ActiveFinding] = field(default_factory=dict)
    causes_seen: dict[RunKey, set[str]] = field(default_factory=dict)
    """Causes that were ever active, whose series are 0 now."""

    def update(self, run: str, rank: int, findings: Sequence[Finding], now_ns: int, now_s: float) -> None:
        """Update one run's findings with those of now."""
        for finding in findings:
            key = (run, rank, finding.cause, finding.gpu or "")
            entry = self.entries.setdefault(key, ActiveFinding(finding, now_s, now_s, now_ns, now_ns))
            entry.finding, entry.seen_s, entry.seen_ns = finding, now_s, now_ns
            if now_ns - entry.since_ns >= BEGIN_AFTER_NS:
                entry.active = True
                self.causes_seen.setdefault((run, rank), set()).add(finding.cause)
            is_better = not entry.brief or (finding.gain and not entry.has_gain)
            if is_better and now_ns - entry.since_ns >= _SETTLED_AFTER_NS:
                entry.brief, entry.has_gain = finding.brief(rank), bool(finding.gain)
        for key, entry in list(self.entries.items()):
            gone_ns = now_ns - entry.seen_ns
            if key[:2] == (run, rank) and gone_ns > (END_AFTER_NS if entry.active else BEGIN_AFTER_NS):
                del self.entries[key]

    def end_run(self, run: str, rank: int, why: Finding | None, now_ns: int, ended_s: float) -> None:
        """A run has ended, for this reason if known: active at once, until the next `end_run`; earlier findings end."""
        self.entries = {key: entry for key, entry in self.entries.items() if key[:2] != (run, rank)}
        if why is not None:
            entry = ActiveFinding(why, ended_s, ended_s, now_ns, now_ns, active=True, brief=why.brief(rank))
            self.entries[run, rank, why.cause, why.gpu or ""] = entry
            self.causes_seen.setdefault((run, rank), set()).add(why.cause)

    def keep_only(self, runs: Collection[RunKey]) -> None:
        """Forget every run except these and the node itself."""
        self.entries = {key: entry for key, entry in self.entries.items() if not key[0] or key[:2] in runs}
        self.causes_seen = {key: causes for key, causes in self.causes_seen.items() if not key[0] or key in runs}

    def active(self, run: str, rank: int) -> list[ActiveFinding]:
        """Return the run's active findings, in the order of a diagnosis."""
        found = [entry for key, entry in self.entries.items() if key[:2] == (run, rank) and entry.active]
        causes = {entry.finding.cause for entry in found}
        # A fallback stays for some seconds after the cause is known.
        by_key = {(e.finding.cause, e.finding.gpu): e for e in found if not is_explained(e.finding, causes)}
        ordered = []
        # A root that is not active yet does not count.
        for finding in in_order([entry.finding for entry in by_key.values()]):
            entry = by_key[finding.cause, finding.gpu]
            entry.finding = finding
            ordered.append(entry)
        return ordered


EVERY_TICKS = 5
"""Running runs and GPUs are diagnosed every fifth tick, a fifth of the runs in each. Counters update in every tick."""
_YOUNG_S = 30.0  # a younger run is diagnosed in every tick: it may soon end


class Evaluator:
    """Findings about the node's runs and GPUs, and the runs' views."""

    def __init__(self, node: RecentSamples, workers: WorkerWatch, config: Config) -> None:
        self._thresholds, self._prices = config.thresholds, config.prices
        self._node, self._workers, self._table = node, workers, workers.table
        self._trends = GpuTrends(config.thresholds.memory_creep_s)
        self._ranks: dict[str, tuple[RankFacts, ...]] = {}
        self._host = HostFacts()
        self._tick = 0
        self.findings = FindingTracker()
        self.views: dict[RunKey, api.Run] = {}

    def evaluate(self, runs: RunRegistry, accounts: Sequence[GpuAccount], now_ns: int, now_s: float) -> None:
        """Evaluate the runs that are due, and all GPUs. A run that cannot be evaluated is dropped."""
        self._tick += 1
        self.findings.keep_only(runs.runs.keys())
        self.views = {key: view for key, view in self.views.items() if key in runs.runs}
        self._trends.sample(accounts, self._node, now_ns)
        all_due = self._tick % EVERY_TICKS == 1
        if all_due:
            self._ranks = ranks_by_run(list(runs.runs.values()), self._table)
            self._host = host_facts(self._node)
        self._in_phase = {one.run for one in runs.runs.values() if one.activity.startswith(PHASE)}
        for number, run in enumerate(list(runs.runs.values())):
            with runs.guard(run, "evaluate", now_s):
                held = [account for account in accounts if account.run is run]
                self._evaluate(run, self._is_due(run, number, now_s), held, now_ns, now_s)
        if all_due:
            facts = ((gpu_facts(each, self._node, now_ns, GpuTrends()), each) for each in accounts)
            gpus = (replace(each, owner=owner_text(account, self._table)) for each, account in facts)
            of_each = (diagnose(Window(duration_s=float(KEPT), gpus=(gpu,)), self._thresholds) for gpu in gpus)
            found = [finding for each in of_each for finding in each if finding.gpu is not None]
            self.findings.update("", 0, found, now_ns, now_s)

    def _evaluate(self, run: Run, due: bool, held: Sequence[GpuAccount], now_ns: int, now_s: float) -> None:
        """Renew a run's view, and if it is due its findings."""
        before = self.views.pop(run.key, None)
        if due or before is None:
            gpus = tuple(gpu_facts(account, self._node, now_ns, self._trends) for account in held)
            window = run_window(run, self._host, gpus, self._workers, now_ns, self._ranks.get(run.run, ()))
            recent = recent_view(run, window)
            mfu_ratio = None if recent is None else recent.mfu_ratio
            window = replace(window, mfu_ratio=mfu_ratio, may_wait_for_phase=run.run in self._in_phase)
            if run.status == RUNNING:
                short = is_short(run.counts.steps, sum(run.counts.phases_ns.values()) / 1e9, self._thresholds)
                found = diagnose(replace(window, is_short=short), self._thresholds)
                self.findings.update(*run.key, found, now_ns, now_s)
            found = [entry.finding for entry in self.findings.active(*run.key)]
            verdict = give_verdict(window, found, self._thresholds) if window.states_s else None
            if run.status != RUNNING:
                self.findings.end_run(*run.key, why_it_ended(window, self._thresholds), now_ns, run.ended_s or now_s)
            findings = tuple(map(finding_view, self.findings.active(*run.key)))
        else:
            recent, verdict, findings = before.recent, before.verdict, before.findings
            if run.status != RUNNING:
                self.findings.end_run(*run.key, None, now_ns, now_s)
                self.views[run.key] = before
                return
        ledger = run.ledger
        self.views[run.key] = run_view(
            run,
            self._prices,
            run.started_s if ledger is None else now_s + (ledger.watermark_ns - now_ns) / 1e9,
            host_pid=self._table.host_pid(run.live_hello),
            activity=run.activity,
            recent=recent,
            verdict=verdict,
            findings=findings,
        )

    def _is_due(self, run: Run, number: int, now_s: float) -> bool:
        seen = self.views.get(run.key)
        if seen is None or seen.status != run.status:
            return True
        if run.status != RUNNING:  # it has ended, and stays as it was
            return seen.last_message_s != run.last_message_s
        return now_s - run.started_s < _YOUNG_S or (self._tick + number) % EVERY_TICKS == 0
