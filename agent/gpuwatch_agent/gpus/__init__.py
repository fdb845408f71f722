"""Each GPU's ledger of wall clock by state, from the runs' ledgers, the driver's process lists and utilisation.

A GPU follows the ledgers of the runs on it: one run's to the nanosecond, several runs' merged by priority. No I/O and
no clock. Times in ns of the agent's monotonic clock.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from gpuwatch.diagnosis.thresholds import THRESHOLDS
from gpuwatch.ledger import states as st
from gpuwatch.ledger.events import IDLE
from gpuwatch_agent.gpus.allocations import completed
from gpuwatch_agent.gpus.energy import EnergyAccount, MeteredLedger
from gpuwatch_agent.processes.owners import SHARED, Owner
from gpuwatch_agent.runs import RUNNING, Run, RunKey
from gpuwatch_agent.runs.timeline import Segment, Stretch, arrange, cut, parts_of

Account = tuple[str, str, str, str]  # an owner of processes for whom time is counted: user, job, namespace, pod
_MOST_ACCOUNTS = 32


def account_of(owner: Owner) -> Account:
    return owner.user, owner.job, owner.namespace, owner.pod


class OwnerRecord(msgspec.Struct):
    """A run that holds a GPU, and those of its totals that are in the GPU's ledger."""

    run: str
    rank: int
    applied_ns: dict[str, int]


class GpuRecord(msgspec.Struct):
    """A GPU's ledger as it is kept over a restart of the agent."""

    uuid: str
    gpu: str
    boot_id: str
    ledger: tuple[int, int, dict[str, int]]  # `Ledger.kept`
    free: list[tuple[str, int]] = msgspec.field(default_factory=list)
    """(state, until when) without a process, oldest first; not all of that time is in the ledger yet."""
    owners: list[OwnerRecord] = msgspec.field(default_factory=list)
    energy: EnergyAccount = msgspec.field(default_factory=EnergyAccount)
    shared_s: dict[Account, float] = msgspec.field(default_factory=dict)
    size_ratio: float = 1.0
    listed_ns: int = 0  # when the driver last listed it


@dataclass(frozen=True)
class GpuReading:
    """A GPU, or a MIG instance, now, from the driver. None: not measured."""

    gpu: str
    uuid: str
    pids: tuple[int, ...] | None
    utilization_ratio: float | None
    list_age_ns: int = 0
    allocated: tuple[Owner, ...] | None = None  # those whom a scheduler has given the GPU to. None: not known.
    energy_joules: float | None = None  # the driver's counter
    shares: Mapping[Account, float] = field(default_factory=dict)
    """Of the time of a GPU that processes of several owners hold; they sum to 1. Empty otherwise."""
    size_ratio: float = 1.0  # of an instance, and of a split GPU: `GpuDevice.size_ratio`


PRIORITY = (
    *(st.COMPUTE, st.TRANSFER, st.EVAL, st.CHECKPOINT, st.COMPILE, st.STARTUP),
    *(st.COMM_WAIT, st.OTHER, st.INPUT_WAIT, st.HOST_WAIT, st.STALLED, st.UNKNOWN),
)
"""The GPU is in the first of these that a run on it is in: if one computes, it is busy, whatever others wait for."""


def fuse(timelines: Sequence[Sequence[Segment]], begin_ns: int, until_ns: int) -> Iterator[tuple[str | None, int]]:
    """Yield (state, until) without a gap; None where no run has a state. Each timeline is in order, without overlap."""
    edges = {edge for timeline in timelines for begin, end, _ in timeline for edge in (begin, end)}
    moments = sorted(edge for edge in edges | {begin_ns, until_ns} if begin_ns <= edge <= until_ns)
    at = [0] * len(timelines)
    for moment, following in itertools.pairwise(moments):
        states = []
        for number, timeline in enumerate(timelines):
            while at[number] < len(timeline) and timeline[at[number]][1] <= moment:
                at[number] += 1
            if at[number] < len(timeline) and timeline[at[number]][0] <= moment:
                states.append(timeline[at[number]][2])
        yield min(states, key=PRIORITY.index, default=None), following


@dataclass
class _Followed:
    """One run on the GPU."""

    run: Run
    head: Stretch | None = None  # its time before the trace that is not in the GPU's ledger yet: between two agents
    left_ns: int | None = None  # up to when its time counts, once it no longer holds the GPU

    @property
    def end_ns(self) -> int:
        """Up to when its time is final."""
        if self.left_ns is not None:
            return self.left_ns
        return self.run.ledger.watermark_ns if self.run.ledger is not None else 0

    def segments(self, after_ns: int, until_ns: int, exact: bool) -> list[Segment]:
        head = cut(arrange(self.head), after_ns, until_ns) if self.head is not None else []
        return head + self.run.trace.segments(after_ns, min(until_ns, self.end_ns), exact)


class RunsOnGpu:
    """The runs on a GPU. True while there is one, or one that left and whose time is not booked yet."""

    def __init__(self, ledger: st.Ledger, awaited: Sequence[OwnerRecord] = ()) -> None:
        """`awaited` held the GPU when a former agent stopped: their next messages cover the time without an agent."""
        self._ledger = ledger
        self._followed: dict[RunKey, _Followed] = {}
        self._awaited: dict[RunKey, OwnerRecord] = {(owner.run, owner.rank): owner for owner in awaited}

    def __bool__(self) -> bool:
        return bool(self._followed)

    def resume_awaited(self, running: Sequence[Run]) -> bool:
        """Follow those awaited runs that hold the GPU now; return whether there is one."""
        for run in running:
            if (owner := self._awaited.get(run.key)) is not None:
                self._followed[run.key] = _Followed(run, self._head(run, owner))
        self._awaited = {}
        return bool(self._followed)

    def advance(self, running: Sequence[Run], renamed: Mapping[str, str]) -> dict[str, int]:
        """Book the time that is final for all runs; return it by state, in ns. `renamed`: states booked as others."""
        keys = {run.key for run in running}
        for run in running:
            followed = self._followed.setdefault(run.key, _Followed(run))
            followed.run, followed.left_ns = run, None
        for key, followed in self._followed.items():
            if key not in keys and followed.left_ns is None:
                followed.left_ns = followed.end_ns
        booked: dict[str, int] = {}
        if self._followed:
            ends = [one.end_ns for one in self._followed.values() if one.left_ns is None]
            until_ns = min(ends) if ends else max(one.end_ns for one in self._followed.values())
            begin_ns = self._ledger.watermark_ns
            several = len(self._followed) > 1  # one run's states need no order: energy is known by the second
            timelines = [one.segments(begin_ns, until_ns, several) for one in self._followed.values()]
            for state, moment_ns in fuse(timelines, begin_ns, until_ns):
                name = st.UNKNOWN if state is None else renamed.get(state, state)
                booked[name] = booked.get(name, 0) + self._ledger.book(name, moment_ns)
        watermark_ns = self._ledger.watermark_ns
        self._followed = {k: f for k, f in self._followed.items() if f.left_ns is None or f.left_ns > watermark_ns}
        return {state: ns for state, ns in booked.items() if ns}

    def records(self) -> list[OwnerRecord]:
        """Return the runs on the GPU, and those of their totals that are in its ledger."""
        records = list(self._awaited.values())
        for (name, rank), followed in self._followed.items():
            ledger = followed.run.ledger
            if followed.left_ns is None and ledger is not None:
                open_ns = parts_of(followed.segments(self._ledger.watermark_ns, ledger.watermark_ns, exact=True))
                applied = {state: ns - open_ns.get(state, 0) for state, ns in ledger.totals_ns.items() if ns}
                records.append(OwnerRecord(name, rank, applied))
        return records

    def _head(self, run: Run, owner: OwnerRecord) -> Stretch | None:
        """Return a restored run's time that the former agent's GPU ledger did not have yet."""
        if run.ledger is None:
            return None
        traced, before = parts_of(run.trace.segments(0)), owner.applied_ns
        begin_ns = self._ledger.watermark_ns
        end_ns = run.trace.begin_ns() or run.ledger.watermark_ns
        totals = run.ledger.totals_ns.items()
        parts = {state: left for state, ns in totals if (left := ns - traced.get(state, 0) - before.get(state, 0)) > 0}
        if sum(parts.values()) != end_ns - begin_ns or not parts:
            return None  # inconsistent: no timeline
        return Stretch(begin_ns, end_ns, parts)


PROCESS_LIST_AGE_NS = 11_000_000_000  # process lists are polled every 10 s: a new process can be missing for so long
AWAIT_NS = 10_000_000_000
"""A restarted agent waits so long for the first process list before it books the time without an agent as unknown."""
LATE_NS = 5_000_000_000  # A longer time between two ticks is unobserved: a stopped agent, a paused machine
_IDLE = THRESHOLDS.gpu_idle_utilization
CONTRADICTED_NS = 10_000_000_000  # for so long a hook's `compute` counts on a GPU on which the driver sees no kernel


class GpuAccount:
    """The ledger of one GPU or MIG instance, and who holds it; a split GPU's is that of the rest, in no instance."""

    def __init__(
        self, gpu: str, uuid: str, now_ns: int, idle_utilization: float = _IDLE, size_ratio: float = 1.0
    ) -> None:
        self.gpu = gpu
        self.uuid = uuid
        self.size_ratio = size_ratio  # its seconds count as so many of a GPU's
        self._idle_utilization = idle_utilization
        self.ledger = MeteredLedger(now_ns, size_ratio < 1)
        self.run: Run | None = None
        self.running: list[Run] = []  # the runs that hold it, `run` if there is only one
        self.owner = ""  # its id, "shared" for several runs, empty without a hook
        self.pids: tuple[int, ...] = ()
        self.state = st.UNKNOWN
        self.idle_since_ns: int | None = None
        self.following = RunsOnGpu(self.ledger)
        self.allocated: tuple[Owner, ...] = ()
        self._free: list[tuple[str, int]] = []
        """(state, until when) in which the GPU was seen idle and without a process, oldest first. Such time is booked
        late: when no process can be missing from the list, or by the run that turns out to have held the GPU."""
        self._await_until_ns: int | None = None  # set by `restore`, until the runs that held the GPU are seen again
        self._sampled_ns: int | None = None
        self.listed_ns = now_ns
        self._contradicted_since_ns: int | None = None
        self.shared_s: dict[Account, float] = {}
        """Seconds in which several owners' processes held the GPU, divided among these; the last holders are last."""

    def advance(self, reading: GpuReading, runs: Sequence[Run], now_ns: int) -> None:
        """Book the time up to now (or up to the owning runs' watermark). `runs`: those with a process on this GPU."""
        passed_s = 0.0 if self._sampled_ns is None else (now_ns - self._sampled_ns) / 1e9
        missed = passed_s > LATE_NS / 1e9
        shared = {} if missed else reading.shares
        for owner, share in shared.items():
            self.shared_s[owner] = self.shared_s.pop(owner, 0.0) + share * passed_s
        for owner in list(self.shared_s)[:-_MOST_ACCOUNTS]:
            del self.shared_s[owner]
        held_before, before = self.running, dict(self.ledger.energy.joules)
        self.ledger.energy.read(reading.energy_joules, now_ns)
        self._book_time(reading, runs, now_ns, missed)
        used = {state: joules - before.get(state, 0.0) for state, joules in self.ledger.energy.joules.items()}
        holders = self.running or held_before  # those that have just left: their last seconds
        of = [account_of(completed(each.owner, self.allocated)) for each in holders]
        for each, account in zip(holders, of, strict=True):
            share = shared.get(account, of.count(account) / len(of)) / of.count(account)
            each.lent_s += passed_s * (1 - share) if self.running else 0.0
            each.add_energy(used, share)

    def _book_time(self, reading: GpuReading, runs: Sequence[Run], now_ns: int, missed: bool) -> None:
        running = [run for run in runs if run.status == RUNNING and run.ledger is not None]
        self.run, self.running = running[0] if len(running) == 1 else None, running
        self.gpu, self.pids, self.allocated = reading.gpu, reading.pids or (), reading.allocated or ()
        self.owner = SHARED if len(running) > 1 else (self.run.run if self.run is not None else "")
        self._sampled_ns = now_ns
        if self._await_until_ns is not None:
            if reading.pids is None and now_ns < self._await_until_ns:
                return
            self._await_until_ns = None
            if not self.following.resume_awaited(running):
                self.ledger.book(st.UNKNOWN, now_ns)
        if running and not self.following:
            self._open(running)
        if booked := self.following.advance(running, self._renamed(reading, running, now_ns)):
            self.state = max(booked, key=lambda state: booked[state])
        if not self.following:
            self._book_without_hook(reading, now_ns, missed)
        is_idle = self.state == st.HELD_IDLE and reading.utilization_ratio is not None
        since_ns = None if missed else self.idle_since_ns
        self.idle_since_ns = (since_ns or now_ns) if is_idle else None

    def _open(self, running: Sequence[Run]) -> None:
        """Book the time before the first run's hook was there."""
        begin_ns = min(run.process_start_ns for run in running)
        if self._free and begin_ns >= self.ledger.watermark_ns:  # all of its time is still open
            self._book_free(begin_ns)
            self.ledger.book(st.BUSY_UNATTRIBUTED, begin_ns)
            self._free = []
        else:
            self._book_free()

    def _book_free(self, until_ns: int | None = None) -> None:
        """Book the time seen without a process, up to a moment: all of it by default, and then it is forgotten."""
        for state, end_ns in self._free:
            self.ledger.book(state, end_ns if until_ns is None else min(end_ns, until_ns))
        still_open = [each for each in self._free if each[1] > self.ledger.watermark_ns]
        self._free = [] if until_ns is None else still_open or self._free[-1:]

    def _renamed(self, reading: GpuReading, running: Sequence[Run], now_ns: int) -> dict[str, str]:
        """Return states that the reading changes: `compute` after 10 s with no kernel, `other` after the last loop."""
        utilization, renamed = reading.utilization_ratio, dict[str, str]()
        since_ns = self._contradicted_since_ns
        contradicted = utilization == 0 and self.following and self.state in (st.COMPUTE, st.UNKNOWN)
        self._contradicted_since_ns = since_ns = (now_ns if since_ns is None else since_ns) if contradicted else None
        if since_ns is not None and now_ns - since_ns >= CONTRADICTED_NS:
            renamed[st.COMPUTE] = st.UNKNOWN
        is_idle = utilization is not None and utilization <= self._idle_utilization
        if is_idle and running and all(run.activity == IDLE for run in running):
            renamed[st.OTHER] = st.HELD_IDLE
        return renamed

    def _book_without_hook(self, reading: GpuReading, now_ns: int, missed: bool) -> None:
        before, self.state = self.state, self._state_without_hook(reading)
        if missed:
            self._book_free()
            self.ledger.book(st.UNKNOWN, now_ns)
        unlisted = reading.pids == ()
        if not unlisted or (before == st.BUSY_UNATTRIBUTED and self.state != before):
            self._book_free()
            self.ledger.book(before if unlisted else self.state, now_ns)
        if unlisted:
            if self.state in st.WITHOUT_PROCESS:
                if self._free and self._free[-1][0] == self.state:
                    self._free.pop()
                self._free.append((self.state, now_ns))
            sure_ns = now_ns - max(PROCESS_LIST_AGE_NS, reading.list_age_ns + 1_000_000_000)
            self._book_free(sure_ns)
            self.ledger.book(self.state, sure_ns)

    def _state_without_hook(self, reading: GpuReading) -> str:
        busy = reading.utilization_ratio is not None and reading.utilization_ratio > self._idle_utilization
        if busy:  # by a process that the list is too old to name, or that the agent may not see, too
            return st.BUSY_UNATTRIBUTED
        if reading.pids == ():
            given = reading.allocated
            return st.UNALLOCATED if given is None else st.ALLOCATED_UNUSED if given else st.FREE
        return st.HELD_IDLE if reading.pids and reading.utilization_ratio is not None else st.UNKNOWN

    def record(self, boot_id: str) -> GpuRecord:
        """Return what is kept over a restart of the agent."""
        same = {name: getattr(self, name) for name in ("uuid", "gpu", "shared_s", "size_ratio", "listed_ns")}
        ledger, owners, energy = self.ledger.kept(), self.following.records(), self.ledger.energy
        return GpuRecord(boot_id=boot_id, ledger=ledger, owners=owners, free=self._free, energy=energy, **same)

    @classmethod
    def restore(cls, record: GpuRecord, now_ns: int, idle_utilization: float = _IDLE) -> GpuAccount:
        """Return the ledger as a former agent left it: the time since is booked by the owning runs, else as unknown."""
        account = cls(record.gpu, record.uuid, now_ns, idle_utilization, record.size_ratio)
        account.ledger.restore(*record.ledger)
        account.ledger.energy, account.shared_s, account.listed_ns = record.energy, record.shared_s, record.listed_ns
        if record.owners:
            account.following = RunsOnGpu(account.ledger, record.owners)
            account._await_until_ns = now_ns + AWAIT_NS
        else:
            account._free = record.free
            account._book_free()
            account.ledger.book(st.UNKNOWN, now_ns)
        return account


class GpuLedgers:
    """The ledgers of all GPUs that this agent has seen."""

    def __init__(self, idle_utilization: float = _IDLE) -> None:
        self._idle_utilization = idle_utilization
        self.accounts: dict[str, GpuAccount] = {}
        self._most = 0  # GPUs at once
        self.failed: list[tuple[Run, Exception]] = []  # runs whose GPU could not be booked the last time

    def advance(self, readings: Sequence[GpuReading], runs_by_pid: Mapping[int, Run], now_ns: int) -> None:
        """Book all GPUs up to now; as `unknown` those that the driver no longer lists.

        A MIG instance that its GPU no longer has ends, as does a replaced GPU; what has another size now begins at 0.
        """
        self.failed = []
        by_uuid, listed = {reading.uuid: reading for reading in readings}, {reading.gpu for reading in readings}
        for uuid, reading in by_uuid.items():
            if uuid not in self.accounts or self.accounts[uuid].size_ratio != reading.size_ratio:
                self.accounts[uuid] = GpuAccount(reading.gpu, uuid, now_ns, self._idle_utilization, reading.size_ratio)
        whole = sum(":" not in gpu for gpu in listed)
        self._most = max(self._most, whole)
        unlisted = {uuid: account.gpu for uuid, account in self.accounts.items() if uuid not in by_uuid}
        there = listed - set(unlisted.values())  # the index of a GPU that is missing may be another's now
        for uuid, gpu in unlisted.items():
            if whole == self._most or (":" in gpu and gpu.partition(":")[0] in there):
                del self.accounts[uuid]
        for uuid, account in self.accounts.items():
            # Of one that the driver does not list nothing is known.
            reading = by_uuid.get(uuid) or GpuReading(account.gpu, uuid, None, None)
            account.listed_ns = now_ns if uuid in by_uuid else account.listed_ns
            runs = {id(runs_by_pid[pid]): runs_by_pid[pid] for pid in reading.pids or () if pid in runs_by_pid}
            try:
                account.advance(reading, list(runs.values()), now_ns)
            except Exception as error:
                self.failed += [(run, error) for run in runs.values()]

    def restore(self, records: Sequence[GpuRecord], boot_id: str, now_ns: int, memory_s: float = 0.0) -> int:
        """Load ledgers that an agent of this boot kept; return how many GPUs were listed lately and are expected."""
        for record in records:
            if record.boot_id == boot_id:
                self.accounts[record.uuid] = GpuAccount.restore(record, now_ns, self._idle_utilization)
        listed_ns = [account.listed_ns for account in self.accounts.values() if ":" not in account.gpu]
        self._most = len(listed_ns)
        return sum(now_ns - each <= memory_s * 1e9 for each in listed_ns)
