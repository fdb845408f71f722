"""Where each GPU's wall clock goes: fused from the runs' ledgers, the driver's process lists and utilisation.

No I/O and no clock. Times in ns of the agent's monotonic clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from gpuwatch.ledger import BUSY_UNATTRIBUTED, GPU_STATES, HELD_IDLE, UNALLOCATED, UNKNOWN, Ledger
from gpuwatch.thresholds import THRESHOLDS
from gpuwatch_agent.runs import RUNNING, Run

SHARED = "shared"
PROCESS_LIST_AGE_NS = 11_000_000_000
"""The driver is asked for the processes on its GPUs every 10 s: a new one can have been missed for so long."""
AWAIT_NS = 10_000_000_000
"""A restarted agent waits so long for the driver's first process list before it takes the time without it for unknown."""


class GpuRecord(msgspec.Struct):
    """A GPU's ledger as it outlives the agent."""

    uuid: str
    gpu: str
    boot_id: str
    start_ns: int
    watermark_ns: int
    states_ns: dict[str, int]
    owner: tuple[str, int] | None = None
    """(run, rank) of the one run that held it."""
    applied_ns: dict[str, int] = msgspec.field(default_factory=dict)
    """That run's totals as far as they are in this ledger."""
    free_ns: int | None = None
    """Up to when it was seen to be free; not all of that time is in the ledger yet."""


@dataclass(frozen=True)
class GpuReading:
    """What the driver says of a GPU now. None: not told."""

    gpu: str
    uuid: str
    pids: tuple[int, ...] | None
    utilization_ratio: float | None


class GpuAccount:
    """One GPU's ledger and who holds it."""

    def __init__(self, gpu: str, uuid: str, now_ns: int) -> None:
        self.gpu = gpu
        self.uuid = uuid
        self.ledger = Ledger(now_ns, GPU_STATES)
        self.run: Run | None = None
        """The one run that holds the GPU."""
        self.owner = ""
        """Its id, "shared" for several runs, empty without a hook."""
        self.pids: tuple[int, ...] = ()
        self.state = UNKNOWN
        self.idle_since_ns: int | None = None
        self._applied_ns: dict[str, int] = {}
        self._free_ns: int | None = None
        """Up to when the GPU was seen to be free and idle. Time without a listed process is booked late: when one can no
        longer have been missed, or by the run that turns out to have held it."""
        self._awaited: tuple[str, int] | None = None
        """The run that held the GPU when a former agent stopped, until it is seen again."""
        self._await_until_ns = 0

    def advance(self, reading: GpuReading | None, runs: Sequence[Run], now_ns: int) -> None:
        """Book the time up to now (or up to the owning run's watermark). `runs` are those with a process on this GPU."""
        running = [run for run in runs if run.status == RUNNING and run.ledger is not None]
        run = running[0] if len(running) == 1 else None
        self.gpu = reading.gpu if reading is not None else self.gpu
        self.pids = (reading.pids or ()) if reading is not None else ()
        self.owner = SHARED if len(running) > 1 else (run.run if run is not None else "")
        if self._awaited is not None:
            unseen = reading is None or reading.pids is None
            if unseen and now_ns < self._await_until_ns:
                return
            self._meet_again(run, now_ns)
        if run is not self.run:
            self._change_hands(run)
        if run is not None and run.ledger is not None:
            self._follow(run.ledger)
        else:
            self._go_on_without_hook(reading, len(running), now_ns)
        self._note_idle(reading, now_ns)

    def _meet_again(self, run: Run | None, now_ns: int) -> None:
        """See who holds the GPU after a restart of the agent: the former run explains the time without one."""
        if run is not None and (run.run, run.rank) == self._awaited:
            self.run = run
        else:
            self.ledger.book(UNKNOWN, now_ns)
        self._awaited = None

    def _change_hands(self, run: Run | None) -> None:
        """Close the account of the run that held the GPU, and open the next one's."""
        if self.run is not None and self.run.ledger is not None:
            self._follow(self.run.ledger)
        self.run, self._applied_ns = run, {}
        if run is None or run.ledger is None:
            return
        begin_ns = run.ledger.start_ns
        if self._free_ns is not None and begin_ns >= self.ledger.watermark_ns:  # all of the run's time is still open
            self.ledger.book(UNALLOCATED, min(self._free_ns, begin_ns))
            self.ledger.book(BUSY_UNATTRIBUTED, begin_ns)
        else:
            self._applied_ns = dict(run.ledger.totals_ns)
            self.ledger.book(UNALLOCATED, self._free_ns or 0)
        self._free_ns = None

    def _go_on_without_hook(self, reading: GpuReading | None, running: int, now_ns: int) -> None:
        before, self.state = self.state, self._state_without_hook(reading, running)
        unlisted = reading is not None and reading.pids == () and not running
        if not unlisted or (before == BUSY_UNATTRIBUTED and self.state != before):
            self.ledger.book(UNALLOCATED, self._free_ns or 0)
            self.ledger.book(before if unlisted else self.state, now_ns)
            self._free_ns = None
        if unlisted:
            if self.state == UNALLOCATED:
                self._free_ns = now_ns
            sure_ns = now_ns - PROCESS_LIST_AGE_NS
            self.ledger.book(UNALLOCATED, min(sure_ns, self._free_ns or 0))
            self.ledger.book(self.state, sure_ns)

    def _follow(self, ledger: Ledger) -> None:
        """Book what the owning run's ledger has grown by."""
        grown = {s: ns - self._applied_ns.get(s, 0) for s, ns in ledger.totals_ns.items()}
        grown = {state: ns for state, ns in grown.items() if ns > 0}
        if grown:
            self.ledger.book_mixture(grown, ledger.watermark_ns)
            self._applied_ns = dict(ledger.totals_ns)
            self.state = max(grown, key=lambda state: grown[state])

    def _state_without_hook(self, reading: GpuReading | None, running: int) -> str:
        if reading is None or running > 1:
            return UNKNOWN if reading is None else BUSY_UNATTRIBUTED
        busy = reading.utilization_ratio is not None and reading.utilization_ratio > THRESHOLDS.gpu_idle_utilization
        if busy:  # by a process that the list is too old to name, or that the agent may not see, too
            return BUSY_UNATTRIBUTED
        if reading.pids is not None and not reading.pids:
            return UNALLOCATED
        return HELD_IDLE if reading.pids and reading.utilization_ratio is not None else UNKNOWN

    def _note_idle(self, reading: GpuReading | None, now_ns: int) -> None:
        if self.state != HELD_IDLE or reading is None:
            self.idle_since_ns = None
        elif self.idle_since_ns is None:
            self.idle_since_ns = now_ns

    def record(self, boot_id: str) -> GpuRecord:
        return GpuRecord(
            uuid=self.uuid,
            gpu=self.gpu,
            boot_id=boot_id,
            start_ns=self.ledger.start_ns,
            watermark_ns=self.ledger.watermark_ns,
            states_ns={state: ns for state, ns in self.ledger.totals_ns.items() if ns},
            owner=None if self.run is None else (self.run.run, self.run.rank),
            applied_ns=self._applied_ns,
            free_ns=self._free_ns,
        )

    @classmethod
    def restore(cls, record: GpuRecord, now_ns: int) -> GpuAccount:
        """Return the ledger as a former agent left it: what passed since is the owning run's to explain, else unknown."""
        account = cls(record.gpu, record.uuid, record.start_ns)
        account.ledger.watermark_ns = record.watermark_ns
        account.ledger.totals_ns.update(record.states_ns)
        account._awaited, account._applied_ns = record.owner, dict(record.applied_ns)
        account._await_until_ns = now_ns + AWAIT_NS
        if record.owner is None:
            account.ledger.book(UNALLOCATED, record.free_ns or 0)
            account.ledger.book(UNKNOWN, now_ns)
        return account


class GpuBook:
    """The ledgers of all GPUs that were ever seen by this agent."""

    def __init__(self) -> None:
        self.accounts: dict[str, GpuAccount] = {}

    def advance(self, readings: Sequence[GpuReading], runs_by_pid: Mapping[int, Run], now_ns: int) -> None:
        """Book all GPUs up to now. One that the driver no longer lists goes on as `unknown`."""
        by_uuid = {reading.uuid: reading for reading in readings}
        for uuid, reading in by_uuid.items():
            if uuid not in self.accounts:
                self.accounts[uuid] = GpuAccount(reading.gpu, uuid, now_ns)
        for uuid, account in self.accounts.items():
            found = by_uuid.get(uuid)
            pids = found.pids if found is not None and found.pids else ()
            runs = {id(runs_by_pid[pid]): runs_by_pid[pid] for pid in pids if pid in runs_by_pid}
            account.advance(found, list(runs.values()), now_ns)

    def restore(self, records: Sequence[GpuRecord], boot_id: str, now_ns: int) -> None:
        """Take up the ledgers that a former agent of this boot kept."""
        for record in records:
            if record.boot_id == boot_id:
                self.accounts[record.uuid] = GpuAccount.restore(record, now_ns)
