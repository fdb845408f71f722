"""Every run and GPU of the node judged: its window diagnosed, its verdict given, its view for the API made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpuwatch import api
from gpuwatch.alerting.thresholds import Prices
from gpuwatch.diagnosis import diagnose
from gpuwatch.rules import ENDINGS
from gpuwatch.verdict import give_verdict
from gpuwatch.window import GpuFacts, HostFacts, RankFacts
from gpuwatch_agent.findings import FindingBook
from gpuwatch_agent.gpu_ledger import GpuAccount
from gpuwatch_agent.gpu_trends import GpuTrends
from gpuwatch_agent.gpus import owner_text
from gpuwatch_agent.node_memory import NodeMemory
from gpuwatch_agent.processes import ProcessTable
from gpuwatch_agent.ranks import ranks_by_run
from gpuwatch_agent.runs import RUNNING, Run
from gpuwatch_agent.views import Judgement, finding_view, recent_view, run_view
from gpuwatch_agent.windows import gpu_facts, host_facts, look_at_gpus, node_window, run_window
from gpuwatch_agent.workers import WorkerWatch

EVERY_TURNS = 2
"""A run that goes on is diagnosed in every second turn, one half of the runs in each, and so are the GPUs. Counters are shown in every one."""

_Key = tuple[str, int]


@dataclass(frozen=True)
class _Seen:
    """A run as it was when it was judged last."""

    status: str
    last_message_s: float
    judgement: Judgement


class Judge:
    """What is found of the node's runs and GPUs, and the runs' views."""

    def __init__(self, node: NodeMemory, workers: WorkerWatch, table: ProcessTable) -> None:
        self._node = node
        self._workers = workers
        self._table = table
        self._trends = GpuTrends()
        self._seen: dict[_Key, _Seen] = {}
        self._beside: dict[str, tuple[RankFacts, ...]] = {}
        self._turn = 0
        self.findings = FindingBook()
        self.views: dict[_Key, api.Run] = {}

    def look(
        self, runs: Sequence[Run], accounts: Sequence[GpuAccount], now_ns: int, now_s: float, prices: Prices
    ) -> None:
        """Judge what is due of the runs, and all GPUs."""
        self._turn += 1
        self.findings.keep_only([(run.run, run.rank) for run in runs])
        look_at_gpus(self._trends, accounts, self._node, now_ns)
        due = {(run.run, run.rank) for number, run in enumerate(runs) if self._is_due(run, number)}
        everything = self._turn % EVERY_TURNS == 1
        if everything:
            self._beside = ranks_by_run(runs)
        host = host_facts(self._node)
        gpus = {
            account.uuid: gpu_facts(account, self._node, now_ns, self._trends)
            for account in accounts
            if everything or (account.run is not None and (account.run.run, account.run.rank) in due)
        }
        seen = {}
        for run in runs:
            key = (run.run, run.rank)
            if key in due:
                held = tuple(gpus[account.uuid] for account in accounts if account.run is run)
                seen[key] = _Seen(run.status, run.last_message_s, self._judge(run, host, held, now_ns, now_s))
            else:
                seen[key] = self._seen[key]
                if run.status != RUNNING:
                    self.findings.end_run(*key)
        self._seen = seen
        offset_ns = int(now_s * 1e9) - now_ns
        self.views = {
            key: self._view(key, run, key in due, offset_ns, prices) for key, run in zip(seen, runs, strict=True)
        }
        if everything:
            owners = {account.uuid: owner_text(account, self._table) for account in accounts}
            found = diagnose(node_window(gpus, owners)) if accounts else []
            self.findings.update("", 0, [finding for finding in found if finding.gpu is not None], now_ns, now_s)

    def _judge(self, run: Run, host: HostFacts, gpus: tuple[GpuFacts, ...], now_ns: int, now_s: float) -> Judgement:
        key = (run.run, run.rank)
        window = run_window(run, host, gpus, self._workers, self._table, now_ns, self._beside.get(run.run, ()))
        if run.status == RUNNING:
            self.findings.update(*key, diagnose(window), now_ns, now_s)
        active = self.findings.active(*key)
        verdict = give_verdict(window, [entry.finding for entry in active]) if window.states_s else None
        if run.status != RUNNING:
            why = next((found for rule in ENDINGS if (found := rule(window)) is not None), None)
            active = self.findings.last_words(*key, [] if why is None else [why], now_ns, now_s)
        return Judgement(recent_view(run, window), verdict, tuple(map(finding_view, active)))

    def _is_due(self, run: Run, number: int) -> bool:
        seen = self._seen.get((run.run, run.rank))
        if seen is None or seen.status != run.status:
            return True
        if run.status != RUNNING:  # it has ended, and stays as it was
            return seen.last_message_s != run.last_message_s
        return (self._turn + number) % EVERY_TURNS == 0

    def _view(self, key: _Key, run: Run, judged: bool, offset_ns: int, prices: Prices) -> api.Run:
        if run.status != RUNNING and not judged and key in self.views:
            return self.views[key]
        pid = self._table.host_pid(run.hello) if run.status == RUNNING and run.hello is not None else None
        return run_view(run, self._seen[key].judgement, offset_ns, pid, prices)
