"""A tuning result: what was tried and what to take; as text for people and as JSON for scripts."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from gpuwatch.formatting import duration, percent, size
from gpuwatch.tools.tuning.choose import cost_s
from gpuwatch.tools.tuning.rows import Failed, LeftOut, Measured, Row, Setting

WIDTH, LEAST_WIDTH = 80, 40
_NARROW_HEAD = f"{'workers':>7} {'prefetch':>8} {'batch every':>11} {'step':>7}"
"""Where the other columns have no room."""
_HEAD = f"{'workers':>7} {'prefetch':>8} {'first':>7} {'batch every':>15} {'batch/s':>8} {'cores':>5} {'memory':>8} {'step':>7}"


@dataclass(frozen=True)
class TuneResult:
    """What was tried, what to take and why. `str()` is the table with the verdict."""

    rows: tuple[Row, ...]
    chosen: Setting | None
    """The smallest setting that feeds the step; without a step, or where nothing feeds it, the smallest within 5% of the best."""
    feeds: bool | None
    """Whether `chosen` feeds the step with 10% to spare; None: no step was given."""
    why: str
    """The verdict, one sentence or two."""
    step_s: float | None
    cores: int
    stopped: str
    """Why no more was tried."""
    notes: tuple[str, ...] = ()
    elapsed_s: float = 0.0
    facts: Mapping[str, float | None] = field(default_factory=dict)
    """What the machine had free at the start: memory_available_bytes, shm_free_bytes."""

    def keywords(self) -> dict[str, int | bool | None]:
        """Return the chosen setting as keyword arguments: `DataLoader(dataset, **result.keywords())`."""
        return self.chosen.keywords() if self.chosen else {}

    def measured(self) -> tuple[Measured, ...]:
        return tuple(row for row in self.rows if isinstance(row, Measured))

    def __str__(self) -> str:
        return table(self)


def table(result: TuneResult, width: int = WIDTH) -> str:
    """Return the table, the verdict under it, and what to write; lines of at most `width` characters, 40 or more."""
    width = max(LEAST_WIDTH, width)
    head = _NARROW_HEAD if _is_narrow(width) else _HEAD
    lines = [head if result.step_s is not None else head[:-8]]
    for row in result.rows:
        lines += _row(row, result, width)
    lines.append("")
    lines += _paragraph(result.why, width)
    for note in result.notes:
        lines += _paragraph(f"- {note}", width, "  ")
    lines += _paragraph(f"stopped after {duration(result.elapsed_s)}: {result.stopped}", width)
    if result.chosen is not None:
        words = ", ".join(f"{key}={value}" for key, value in result.keywords().items())
        lines += ["", *_paragraph(f"DataLoader(…, {words})", width, "    ")]
    return "\n".join(lines)


def line(row: Row) -> str:
    """Return a row in one line, for a log."""
    if isinstance(row, Measured):
        return f"{row.setting}: a batch every {duration(row.batch_s)}"
    return f"{row.setting}: {'failed' if isinstance(row, Failed) else 'left out'}: {row.text}"


def as_json(result: TuneResult) -> dict[str, Any]:
    """Return the result as plain values. Times in seconds, sizes in bytes, ratios 0–1; null: not measured."""
    return {
        "chosen": result.chosen.keywords() if result.chosen else None,
        "feeds": result.feeds,
        "why": result.why,
        "step_s": result.step_s,
        "cores": result.cores,
        "stopped": result.stopped,
        "notes": list(result.notes),
        "elapsed_s": result.elapsed_s,
        "facts": dict(result.facts),
        "rows": [
            {"result": _kind(row), **asdict(row), **({"kind": row.kind} if isinstance(row, Failed) else {})}
            for row in result.rows
        ],
    }


def _kind(row: Row) -> str:
    return "measured" if isinstance(row, Measured) else "failed" if isinstance(row, Failed) else "left_out"


def _row(row: Row, result: TuneResult, width: int) -> list[str]:
    mark = "*" if row.setting == result.chosen else " "
    start = f"{row.setting.num_workers:>7} {row.setting.prefetch_factor or '-':>8} "
    if isinstance(row, LeftOut | Failed):
        text = f"{'left out' if isinstance(row, LeftOut) else 'FAILED'}: {row.text}"
        first, *rest = textwrap.wrap(text, width - len(start) - 1)
        return [f"{start} {first}", *(" " * (len(start) + 1) + part for part in rest)]
    spread = f"±{percent(row.spread_ratio)}" if row.spread_ratio is not None else ""
    unsteady = "" if row.steady else "*"
    memory = (row.usage.main_rss_bytes or 0) + row.setting.num_workers * (row.usage.worker_private_bytes or 0)
    time = duration(row.batch_s) + unsteady
    if _is_narrow(width):
        cells = [f"{time:>11}"]
    else:
        cells = [
            f"{duration(row.first_batch_s):>7}",
            f"{time:>9} {spread:>5}",
            f"{row.batches_per_s:>8.3g}",
            f"{row.cpu_cores:>5.1f}" if row.cpu_cores is not None else f"{'-':>5}",
            f"{size(memory) if memory else '-':>8}",
        ]
    if result.step_s is not None:
        cells.append(f"{duration(cost_s(row, result.step_s)):>7}")
    tail = _options(row.setting, row)
    text = start + " ".join(cells)
    if mark == "*":
        text = text + " <-"
    indent = " " * (4 if _is_narrow(width) else len(start))
    return [text, *textwrap.wrap(tail, width, initial_indent=indent, subsequent_indent=indent)]


def _is_narrow(width: int) -> bool:
    return width < len(_HEAD) + len(" <-")


def _options(setting: Setting, row: Measured) -> str:
    words = []
    if setting.pin_memory:
        words.append(f"pin_memory: copies take {duration(row.copy_s)}" if row.copy_s is not None else "pin_memory")
    if setting.persistent_workers:
        again = row.second_first_batch_s
        words.append("persistent_workers" + (f": later passes start in {duration(again)}" if again is not None else ""))
    return ", ".join(words)


def _paragraph(text: str, width: int, indent: str = "") -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
