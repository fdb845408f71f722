"""A hook's messages without a hook: books time on a clock that the test moves, and reports it as the real one would."""

from __future__ import annotations

from gpuwatch import wire
from gpuwatch.ledger.states import Ledger

MS = 1_000_000
S = 1_000_000_000
BOOT = "boot-a"
NOW_S = 1_790_000_000.0
"""Unix time at the agent's monotonic 0."""


class FakeHook:
    """One training process. `at_ns` is its monotonic clock."""

    def __init__(
        self,
        at_ns: int = 100 * S,
        *,
        run: str = "run-a",
        rank: int = 0,
        sender: str = "sender-a",
        boot_id: str = BOOT,
        wall_offset_ns: int = int(NOW_S * S),
        pid: int = 4711,
        job: str = "job-7",
    ) -> None:
        self.at_ns, self.job = at_ns, job
        self.run, self.rank, self.sender, self.boot_id, self.pid = run, rank, sender, boot_id, pid
        self.wall_offset_ns = wall_offset_ns
        self.ledger = Ledger(at_ns)
        self.steps = 0
        self.samples = self.saves = 0
        self.declared_ns: dict[str, int] = {}
        self.breakdown_ns: dict[str, int] = {}
        self.phases_ns = {"data_wait": 0, "transfer": 0, "compute": 0}
        self._unsent: list[tuple[int, int, int, int, int, int]] = []

    def spend(self, state: str, ns: int) -> FakeHook:
        """Let time pass in a state."""
        self.at_ns += ns
        self.ledger.book(state, self.at_ns)
        return self

    def step(self, data_ns: int = 60 * MS, compute_ns: int = 40 * MS, samples: int = 8) -> FakeHook:
        """Make one training step."""
        begin = self.at_ns
        self.spend("input_wait", data_ns).spend("compute", compute_ns)
        self.steps += 1
        self.samples += samples
        self.phases_ns["data_wait"] += data_ns
        self.phases_ns["compute"] += compute_ns
        self._unsent.append((begin, data_ns, 0, compute_ns, samples, int(self.steps == 1)))
        return self

    def totals(self) -> wire.Totals:
        return wire.Totals(
            start_ns=self.ledger.start_ns,
            watermark_ns=self.ledger.watermark_ns,
            states_ns={state: ns for state, ns in self.ledger.totals_ns.items() if ns},
            phases_ns=dict(self.phases_ns),
            declared_ns=dict(self.declared_ns),
            breakdown_ns=dict(self.breakdown_ns),
            steps=self.steps,
            saves=self.saves,
            samples=self.samples if self.steps else -1,
            records_dropped=0,
            overhead_ns=0,
        )

    def origin(self) -> wire.Origin:
        return wire.Origin(
            wire.PROTOCOL_VERSION,
            self.sender,
            self.boot_id,
            self.at_ns,
            self.at_ns + self.wall_offset_ns,
        )

    def hello(
        self,
        *,
        name: str = "resnet",
        worker_pids: tuple[int, ...] = (),
        start_ticks: int = 77,
        first_step: int | None = None,
        rewinds: tuple[tuple[int, int], ...] = (),
    ) -> wire.Hello:
        return wire.Hello(
            origin=self.origin(),
            run=self.run,
            name=name,
            job=self.job,
            rank=self.rank,
            world_size=1,
            pid=self.pid,
            process_start_ticks=start_ticks,
            pid_namespace=0,
            host="node-17",
            timeline="host",
            device="cpu",
            loader=wire.Loader(num_workers=len(worker_pids), worker_pids=worker_pids),
            versions={"gpuwatch": "0.1.0"},
            tags={"team": "vision"},
            first_step=first_step,
            rewinds=rewinds,
        )

    def message(self, activity: str = "step") -> wire.Steps:
        """Return the next message, with the step records since the last one."""
        rows, self._unsent = self._unsent, []
        columns = (
            {name: wire.pack([row[i] for row in rows]) for i, name in enumerate(wire.HOST_COLUMNS)} if rows else {}
        )
        return wire.Steps(
            origin=self.origin(),
            run=self.run,
            rank=self.rank,
            totals=self.totals(),
            activity=activity,
            first_step=self.steps - len(rows),
            columns=columns,
        )

    def bye(self) -> wire.Bye:
        return wire.Bye(self.origin(), self.run, self.rank, self.totals())


def wall_s(now_ns: int) -> float:
    """Return Unix time at a moment of the agent's monotonic clock."""
    return NOW_S + now_ns / 1e9
