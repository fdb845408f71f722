"""What the GPU ledger reads and what of it outlives the agent: plain records."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


class OwnerRecord(msgspec.Struct):
    """A run that holds a GPU, and its totals as far as they are in the GPU's ledger."""

    run: str
    rank: int
    applied_ns: dict[str, int]


class GpuRecord(msgspec.Struct):
    """A GPU's ledger as it outlives the agent."""

    uuid: str
    gpu: str
    boot_id: str
    start_ns: int
    watermark_ns: int
    states_ns: dict[str, int]
    owner: tuple[str, int] | None = None
    """(run, rank) of the one run that held it, as version 0.1's first records have it; `owners` since."""
    applied_ns: dict[str, int] = msgspec.field(default_factory=dict)
    free_ns: int | None = None
    """Up to when it was seen to be free; not all of that time is in the ledger yet."""
    owners: list[OwnerRecord] = msgspec.field(default_factory=list)

    def all_owners(self) -> list[OwnerRecord]:
        """Return the runs that held the GPU, of either form."""
        if self.owner is not None:
            return [OwnerRecord(*self.owner, self.applied_ns)]
        return self.owners


@dataclass(frozen=True)
class GpuReading:
    """What the driver says of a GPU now. None: not told."""

    gpu: str
    uuid: str
    pids: tuple[int, ...] | None
    utilization_ratio: float | None
    list_age_ns: int = 0
    """For how long `pids` have been known."""
