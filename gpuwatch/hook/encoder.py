"""The messages of one run, said under its name and numbered: what was folded, in the words of `wire`."""

from __future__ import annotations

import itertools
import platform
import sys
import time
import uuid

import msgspec

from gpuwatch import __version__, wire
from gpuwatch.hook.account import device
from gpuwatch.hook.identity import Identity
from gpuwatch.ledger.step_records import PhaseRecord, StepRecord

_PHASE_TIME_TO_LIVE_S = 3600.0


class RunFacts(msgspec.Struct, frozen=True):
    """What the user said of the run."""

    name: str
    job: str
    tags: dict[str, str]
    flops: wire.Flops | None = None


class Speaker:
    """Says who the run is and what it did, as encoded frames. Its numbers tell the agent what got lost."""

    def __init__(self, identity: Identity, facts: RunFacts) -> None:
        self.identity = identity
        self._facts = facts
        self._id = uuid.uuid4().hex
        self._seq = itertools.count(1)

    def hello(self, loader: wire.Loader | None, timeline: str, deaths: tuple[wire.WorkerDeath, ...] = ()) -> bytes:
        """Return the message that says who speaks. `timeline`: "host" or "device", which clock the states come from."""
        who = self.identity
        torch = sys.modules.get("torch")
        versions = {"gpuwatch": __version__, "python": platform.python_version()}
        if torch is not None:
            versions["torch"] = str(getattr(torch, "__version__", ""))[:64]
        return wire.encode(
            wire.Hello(
                origin=self._origin(),
                run=who.run,
                name=self._facts.name,
                job=self._facts.job,
                rank=who.rank,
                local_rank=who.local_rank,
                world_size=who.world_size,
                pid=who.pid,
                process_start_ticks=who.process_start_ticks,
                pid_namespace=who.pid_namespace,
                host=who.host,
                timeline=timeline,
                device=device(),
                loader=loader,
                versions=versions,
                tags=self._facts.tags,
                flops=self._facts.flops,
                worker_deaths=deaths,
            )
        )

    def steps(
        self,
        steps: list[StepRecord],
        first_step: int,
        totals: wire.Totals,
        activity: str,
        fetch_cpu_ratio: float | None,
    ) -> bytes:
        """Return the message of these steps; of none it is a heartbeat."""
        return wire.encode(
            wire.Steps(
                origin=self._origin(),
                run=self.identity.run,
                rank=self.identity.rank,
                totals=totals,
                activity=activity,
                first_step=first_step,
                columns=columns(steps),
                fetch_cpu_ratio=fetch_cpu_ratio,
            )
        )

    def phase(self, phase: PhaseRecord, totals: wire.Totals) -> bytes:
        """Return the message of a phase that began or ended."""
        return wire.encode(
            wire.Phase(
                origin=self._origin(),
                run=self.identity.run,
                rank=self.identity.rank,
                totals=totals,
                name=phase.name,
                start_ns=phase.start_ns,
                seconds=None if phase.end_ns is None else (phase.end_ns - phase.start_ns) / 1e9,
                time_to_live_s=_PHASE_TIME_TO_LIVE_S,
            )
        )

    def bye(self, reason: str, totals: wire.Totals) -> bytes:
        """Return the run's last message."""
        return wire.encode(
            wire.Bye(
                origin=self._origin(), run=self.identity.run, rank=self.identity.rank, totals=totals, reason=reason
            )
        )

    def _origin(self) -> wire.Origin:
        return wire.Origin(
            version=wire.PROTOCOL_VERSION,
            sender=self._id,
            seq=next(self._seq),
            boot_id=self.identity.boot_id,
            monotonic_ns=time.monotonic_ns(),
            time_ns=time.time_ns(),
        )


def columns(steps: list[StepRecord]) -> dict[str, bytes]:
    """Return the steps as packed columns; one that says nothing of any of them is left out."""
    if not steps:
        return {}
    rows = {
        "start_ns": [step.start_ns for step in steps],
        "data_wait_ns": [step.data_wait_ns for step in steps],
        "transfer_ns": [step.transfer_ns for step in steps],
        "compute_ns": [step.compute_ns for step in steps],
        "samples": [step.samples for step in steps],
    }
    if any(step.epoch_start for step in steps):
        rows["epoch_start"] = [int(step.epoch_start) for step in steps]
    if any(step.exposed is not None for step in steps):
        rows["input_wait_ns"] = [wire.MISSING if s.exposed is None else s.exposed.input_wait_ns for s in steps]
        rows["host_wait_ns"] = [
            wire.MISSING if s.exposed is None or s.exposed.host_wait_ns is None else s.exposed.host_wait_ns
            for s in steps
        ]
        rows["device_transfer_ns"] = [wire.MISSING if s.exposed is None else s.exposed.transfer_ns for s in steps]
        rows["device_compute_ns"] = [wire.MISSING if s.exposed is None else s.exposed.compute_ns for s in steps]
    if any(step.comm_wait_ns is not None for step in steps):
        rows["comm_wait_ns"] = [wire.MISSING if step.comm_wait_ns is None else step.comm_wait_ns for step in steps]
    return {name: wire.pack(column) for name, column in rows.items()}
