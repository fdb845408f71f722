"""What was tried and what to choose: records, table, JSON. In seconds, bytes and ratios 0–1; None: not measured."""

import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal

from gpuwatch.formatting import duration, percent, size

FailureKind = Literal["error", "no_loader", "out_of_memory", "bus_error", "killed", "timeout", "host_protected"]
Limit = Literal["cpu", "memory", "shm", "max_workers", "budget"]
_WIDTH = 80
_HEAD = f"{'workers':>7} {'prefetch':>8} {'first':>7} {'batch every':>15} {'batch/s':>8} {'cores':>5} {'memory':>8} {'step':>7}"


Room = Mapping[str, tuple[int, int]]  # bytes (free, there in all) of "memory" and "/dev/shm"; absent: not known


@dataclass(frozen=True)
class Setting:
    """The settings of a loader; the fields are keyword arguments of a DataLoader."""

    num_workers: int
    prefetch_factor: int | None = None  # Batches each worker makes ahead; None without workers, as DataLoader requires.
    pin_memory: bool = False
    persistent_workers: bool = False

    @property
    def batches_ahead(self) -> int:
        """How many batches are made before any is requested."""
        return self.num_workers * (self.prefetch_factor or 0)

    def __str__(self) -> str:
        parts = [f"num_workers={self.num_workers}"]
        if self.prefetch_factor is not None:
            parts.append(f"prefetch_factor={self.prefetch_factor}")
        parts += [name for name, on in (("pin_memory", self.pin_memory), ("persistent", self.persistent_workers)) if on]
        return " ".join(parts)


SETTINGS = frozenset(Setting.__dataclass_fields__)


@dataclass(frozen=True)
class Usage:
    main_rss_bytes: int | None = None
    main_private_bytes: int | None = None
    worker_private_bytes: int | None = None  # of the largest worker, without what it shares: the cost of one more
    shm_bytes: int | None = None


@dataclass(frozen=True)
class Measured:
    setting: Setting
    make_s: float
    first_batch_s: float  # from `iter()` to the first batch: the workers' start and one fetch
    batch_s: float  # median time between batches after the prefetched ones; a cycle of all workers counts as one
    spread_ratio: float | None  # half of the interquartile range over the median; None with fewer than four cycles
    batches: int
    steady: bool = True  # False: a pass is shorter than what is prefetched; whole passes were timed, with their start
    batch_bytes: int | None = None  # tensors and arrays of the largest batch
    shared_bytes: int | None = None  # those of them that workers pass through /dev/shm: torch tensors
    cpu_cores: float | None = None
    others_cores: float | None = None  # cores that all other processes kept busy; None: they may not be ours
    main_cpu_ratio: float | None = None
    worker_cpu_ratio: float | None = None  # CPU use of a worker, 1.0 = one core, on average
    cpu_demand_ratio: float | None = None
    """Share of time in which the fetching process (a worker, or the main process) ran or waited for a core, 0–1."""
    read_bytes_per_s: float | None = None  # read from storage (not from the page cache)
    second_first_batch_s: float | None = None
    copy_s: float | None = None  # to copy a batch to the GPU, median; None without CUDA
    usage: Usage = field(default_factory=Usage)
    result: Literal["measured"] = "measured"

    @property
    def batches_per_s(self) -> float:
        return 1 / self.batch_s if self.batch_s > 0 else float("inf")


@dataclass(frozen=True)
class Failed:
    setting: Setting
    kind: FailureKind
    text: str
    detail: str = ""
    result: Literal["failed"] = "failed"


@dataclass(frozen=True)
class LeftOut:
    setting: Setting
    limit: Limit
    text: str
    result: Literal["left_out"] = "left_out"


Row = Measured | Failed | LeftOut


def measured(rows: Iterable[Row]) -> list[Measured]:
    return [row for row in rows if isinstance(row, Measured)]


@dataclass(frozen=True)
class TuneResult:
    """What was tried, what to choose and why. `str()` is the table with the verdict."""

    rows: tuple[Row, ...]
    chosen: Setting
    """The smallest that feeds the step; without a step, or if nothing feeds it, the smallest within 5% of the best."""
    feeds: bool | None  # whether `chosen` feeds the step with 10% to spare; None: no step was given
    why: str
    step_s: float | None
    cores: int
    stopped: str
    notes: tuple[str, ...] = ()
    elapsed_s: float = 0.0
    facts: dict[str, int | None] = field(default_factory=dict)  # at the start: memory_available_bytes, shm_free_bytes

    def keywords(self) -> dict[str, int | bool | None]:
        """Return the chosen setting as keyword arguments: `DataLoader(dataset, **result.keywords())`."""
        return asdict(self.chosen)

    def __str__(self) -> str:
        lines = [_HEAD if self.step_s is not None else _HEAD[:-8]]
        for row in self.rows:
            lines += _row(row, self)
        lines += ["", *_wrap(self.why)]
        for note in self.notes:
            lines += _wrap(f"- {note}", "  ")
        lines += _wrap(f"stopped after {duration(self.elapsed_s)}: {self.stopped}")
        keywords = ", ".join(f"{key}={value}" for key, value in self.keywords().items())
        return "\n".join([*lines, "", *_wrap(f"DataLoader(…, {keywords})", "    ")])


def cost_s(row: Measured, step_s: float | None) -> float:
    """Return the time of a training step with this loader; without a known step, of a batch."""
    if step_s is None:
        return row.batch_s
    return row.batch_s + step_s if row.setting.num_workers == 0 else max(step_s, row.batch_s)


def line(row: Row) -> str:
    if isinstance(row, Measured):
        return f"{row.setting}: a batch every {duration(row.batch_s)}"
    return f"{row.setting}: {'failed' if isinstance(row, Failed) else 'left out'}: {row.text}"


def _row(row: Row, result: TuneResult) -> list[str]:
    start = f"{row.setting.num_workers:>7} {row.setting.prefetch_factor or '-':>8} "
    if not isinstance(row, Measured):
        return _wrap(f"{start} {'FAILED' if isinstance(row, Failed) else 'left out'}: {row.text}", " " * 18)
    spread = f"±{percent(row.spread_ratio)}" if row.spread_ratio is not None else ""
    memory = (row.usage.main_rss_bytes or 0) + row.setting.num_workers * (row.usage.worker_private_bytes or 0)
    cells = [
        f"{duration(row.first_batch_s):>7}",
        f"{duration(row.batch_s) + ('' if row.steady else '*'):>9} {spread:>5}",
        f"{row.batches_per_s:>8.3g}",
        f"{'-' if row.cpu_cores is None else format(row.cpu_cores, '.1f'):>5}",
        f"{size(memory) if memory else '-':>8}",
    ]
    if result.step_s is not None:
        cells.append(f"{duration(cost_s(row, result.step_s)):>7}")
    if row.setting == result.chosen:
        cells.append("<-")
    options = []
    if row.setting.pin_memory:
        options.append("pin_memory" + (f": copies take {duration(row.copy_s)}" if row.copy_s is not None else ""))
    if row.setting.persistent_workers:
        again = row.second_first_batch_s
        options.append("persistent_workers" + (f": later passes start in {duration(again)}" if again else ""))
    return [start + " ".join(cells), *(f"{'':17}{option}" for option in options)]


def _wrap(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
