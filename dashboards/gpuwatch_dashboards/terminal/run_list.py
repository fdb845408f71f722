"""Every run on one line: name, status, speed, ledger bar, verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from gpuwatch.api import Recent, Run
from gpuwatch_dashboards.selection import key_of
from gpuwatch_dashboards.terminal.bars import bar
from gpuwatch_dashboards.terminal.lines import cell, harmless
from gpuwatch_dashboards.terminal.looks import BOLD, DIM, verdict_style, words
from gpuwatch_dashboards.units import digits, display

STATUS_SIGNS = {"running": "●", "ended": "■", "lost": "✕", "gone": "○"}
NO_VERDICT = "no verdict yet: the first steps are being measured"


@dataclass(frozen=True)
class Columns:
    """Widths in cells; 0: left out."""

    name: int
    status: int
    steps: int
    p50: int
    bar: int

    @classmethod
    def of(cls, width: int) -> Columns:
        if width < 76:
            return cls(name=12, status=1, steps=6, p50=7, bar=10)
        if width < 120:
            return cls(name=15, status=9, steps=6, p50=7, bar=14)
        return cls(name=26, status=9, steps=8, p50=8, bar=32)


def run_list(runs: Sequence[Run], selected: str | None, width: int, rows: int) -> list[Text]:
    """Return a head and at most `rows` runs, the selected one among them; the head says where more are hidden."""
    columns = Columns.of(width)
    keys = [key_of(run) for run in runs]
    first = window_start(keys.index(selected) if selected in keys else 0, len(runs), rows)
    shown = runs[first : first + rows]
    hidden = f"  {first + 1}–{first + len(shown)} of {len(runs)}" if len(shown) < len(runs) else ""
    head = [
        cell("run", columns.name),
        cell("status" if columns.status > 1 else "", columns.status),
        cell("step/s", columns.steps, right=True),
        cell("p50", columns.p50, right=True),
        cell("last minute", columns.bar),
        f"verdict{hidden}",
    ]
    return [words("  " + " ".join(head), DIM), *(_line(run, key_of(run) == selected, columns) for run in shown)]


def window_start(selected: int, count: int, rows: int) -> int:
    """Return the first row to show so that the selected one is in sight, in the middle where that is possible."""
    return max(0, min(selected - rows // 2, count - rows))


def title_of(run: Run) -> str:
    return harmless(f"{run.name or run.run}{f' #{run.rank}' if run.world_size > 1 else ''}")


def _line(run: Run, selected: bool, columns: Columns) -> Text:
    recent = run.recent or Recent()
    sign = STATUS_SIGNS[run.status]
    line = words("▸ " if selected else "  ", BOLD if selected else "")
    line.append(cell(title_of(run), columns.name), BOLD if selected else "")
    line.append(" ")
    line.append(
        cell(f"{sign} {run.status}" if columns.status > 1 else sign, columns.status),
        "green" if run.status == "running" else DIM,
    )
    speed = digits(recent.steps_per_s) if recent.steps_per_s is not None else "–"
    line.append(
        f" {cell(speed, columns.steps, right=True)} {cell(display(recent.step_s_p50, 's'), columns.p50, right=True)} "
    )
    line.append_text(bar(recent.states or run.states, columns.bar))
    line.append(" ")
    verdict = run.verdict
    line.append(" ", verdict_style(verdict.state if verdict else None))
    line.append(f" {verdict.sentence if verdict else NO_VERDICT}", BOLD if selected else "")
    return line
