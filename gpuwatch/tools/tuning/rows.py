"""The rows of a tuning table: what was tried, with what result. Times in seconds, sizes in bytes, ratios 0–1; None: not measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FailureKind = Literal["error", "no_loader", "out_of_memory", "bus_error", "killed", "timeout", "host_protected"]
Limit = Literal["cpu", "memory", "shm", "max_workers", "budget", "failures"]


@dataclass(frozen=True)
class Setting:
    """One way to start a loader."""

    num_workers: int
    prefetch_factor: int | None = None
    """Batches each worker makes ahead; None without workers, as DataLoader wants it."""
    pin_memory: bool = False
    persistent_workers: bool = False

    def keywords(self) -> dict[str, int | bool | None]:
        """Return it as the keyword arguments of a DataLoader."""
        return {
            "num_workers": self.num_workers,
            "prefetch_factor": self.prefetch_factor,
            "pin_memory": self.pin_memory,
            "persistent_workers": self.persistent_workers,
        }

    @property
    def batches_ahead(self) -> int:
        """How many batches are made before any is asked for."""
        return self.num_workers * (self.prefetch_factor or 0)

    def __str__(self) -> str:
        words = [f"num_workers={self.num_workers}"]
        if self.prefetch_factor is not None:
            words.append(f"prefetch_factor={self.prefetch_factor}")
        words += [name for name, on in (("pin_memory", self.pin_memory), ("persistent", self.persistent_workers)) if on]
        return " ".join(words)


@dataclass(frozen=True)
class Usage:
    """What a trial took of the machine, at its peak."""

    main_rss_bytes: int | None = None
    workers_rss_bytes: int | None = None
    """Of all workers together; pages that they share count once for each."""
    main_private_bytes: int | None = None
    worker_private_bytes: int | None = None
    """Of the largest worker, without what it shares: what one more worker takes."""
    shm_bytes: int | None = None
    """What /dev/shm, as the trial saw it, grew by."""


@dataclass(frozen=True)
class Measured:
    """A trial that ran."""

    setting: Setting
    make_s: float
    """To call make_loader."""
    first_batch_s: float
    """From `iter()` to the first batch: the workers' start and one fetch."""
    batch_s: float
    """Time between batches once the ready-made ones are used up, median; a cycle of all workers counts as one."""
    spread_ratio: float | None
    """Half of the interquartile range over the median; None with fewer than four cycles."""
    batches: int
    """How many counted."""
    steady: bool = True
    """False: a pass is shorter than what is made ahead, and whole passes were timed, start-up included."""
    batch_bytes: int | None = None
    """The largest batch's tensors and arrays."""
    shared_bytes: int | None = None
    """Those of them that workers hand over through /dev/shm: torch tensors."""
    cpu_cores: float | None = None
    """Cores that main process and workers kept busy."""
    others_cores: float | None = None
    """Cores that everything else on the node kept busy meanwhile."""
    main_cpu_ratio: float | None = None
    """CPU use of the main process, 1.0 = one core."""
    worker_cpu_ratio: float | None = None
    """CPU use of a worker, 1.0 = one core, on average."""
    cpu_demand_ratio: float | None = None
    """Share of its time in which who fetches (a worker, or the main process) ran or waited for a core, 0–1: on a machine that is
    shared, a fetch that computes has less CPU than it wants."""
    read_bytes_per_s: float | None = None
    """Read from storage (not from the page cache)."""
    second_first_batch_s: float | None = None
    """First batch of a second pass, where one was measured."""
    copy_s: float | None = None
    """To copy a batch to the GPU, median; None without CUDA."""
    usage: Usage = field(default_factory=Usage)

    @property
    def batches_per_s(self) -> float:
        return 1 / self.batch_s if self.batch_s > 0 else float("inf")


@dataclass(frozen=True)
class Failed:
    """A trial that ended without a measurement."""

    setting: Setting
    kind: FailureKind
    text: str
    """What happened, in one line."""
    detail: str = ""
    """The traceback or the last output, for people."""


@dataclass(frozen=True)
class LeftOut:
    """A setting that was not tried, since a forecast was against it."""

    setting: Setting
    limit: Limit
    text: str


Row = Measured | Failed | LeftOut
