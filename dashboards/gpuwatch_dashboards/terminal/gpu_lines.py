"""GPUs: one line each, and a strip that says the least."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from gpuwatch.api import Run
from gpuwatch_dashboards.terminal.bars import bar, legend, swatch
from gpuwatch_dashboards.terminal.facts import Facts, GpuFacts
from gpuwatch_dashboards.terminal.finding_lines import finding_lines
from gpuwatch_dashboards.terminal.gpu_curves import gpu_curve_lines
from gpuwatch_dashboards.terminal.lines import cell, flowed, harmless, rule
from gpuwatch_dashboards.terminal.looks import BOLD, DIM, state_look, words
from gpuwatch_dashboards.terminal.run_list import title_of, window_start

TALL, TALL_ROWS = 28, 3
"""From this height on curves are of several lines."""
LEAST_GPUS = 8
"""Lines of the table that curves leave to it."""
NO_GPU, NOT_KNOWN = "No GPU on this node.", "This source does not say which GPUs the node has."


@dataclass(frozen=True)
class Columns:
    """Widths in cells; 0: left out."""

    name: int
    state: int
    memory: int
    power: int
    bar: int

    @classmethod
    def of(cls, width: int) -> Columns:
        if width < 76:
            return cls(name=0, state=10, memory=8, power=5, bar=8)
        if width < 120:
            return cls(name=0, state=16, memory=11, power=5, bar=14)
        return cls(name=22, state=22, memory=11, power=6, bar=22 if width < 140 else 32)


def gpu_table(facts: Facts, selected: int | None, width: int, rows: int) -> list[Text]:
    """Return a head and at most `rows` GPUs; `selected` (a row, or None) is among them."""
    if not facts.gpus:
        return [words(f" {NO_GPU if facts.gpus_known else NOT_KNOWN}", DIM)]
    columns = Columns.of(width)
    first = window_start(selected or 0, len(facts.gpus), rows)
    shown = facts.gpus[first : first + rows]
    hidden = f"{first + 1}–{first + len(shown)} of {len(facts.gpus)}  " if len(shown) < len(facts.gpus) else ""
    head = [
        cell("GPU", 3),
        *([cell("model", columns.name)] if columns.name else []),
        cell("state now", columns.state + 2),
        cell("util", 4, right=True),
        cell("memory", columns.memory, right=True),
        cell("power", columns.power, right=True),
        cell("last minute", columns.bar),
        f"{hidden}owner",
    ]
    lines = [words("  " + " ".join(head), DIM)]
    return lines + [_line(gpu, first + n == selected, columns, facts.runs) for n, gpu in enumerate(shown)]


def _line(gpu: GpuFacts, selected: bool, columns: Columns, runs: Sequence[Run]) -> Text:
    style = BOLD if selected else ""
    line = words("▸ " if selected else "  ", style)
    line.append(cell(gpu.gpu, 3), style)
    if columns.name:
        line.append(f" {cell(gpu.name or '', columns.name)}", style)
    line.append(" ")
    line.append_text(swatch(gpu.state)[:1] if gpu.state else Text(" "))
    line.append(f" {cell(state_look(gpu.state).name if gpu.state else '–', columns.state)}", style)
    line.append(f" {cell(utilization(gpu), 4, right=True)} {cell(memory(gpu), columns.memory, right=True)}")
    power = f"{gpu.power_watts:.0f} W" if gpu.power_watts is not None else "–"
    line.append(f" {cell(power, columns.power, right=True)} ")
    line.append_text(bar(gpu.states, columns.bar))
    line.append(f" {owner(gpu, runs) or 'nobody'}", style or ("" if owner(gpu, runs) else DIM))
    return line


def utilization(gpu: GpuFacts) -> str:
    return f"{gpu.utilization_ratio:.0%}" if gpu.utilization_ratio is not None else "–"


def memory(gpu: GpuFacts) -> str:
    """Return e.g. "61/141 GiB"."""
    if gpu.memory_used_bytes is None:
        return "–"
    used = f"{gpu.memory_used_bytes / 2**30:.0f}"
    return f"{used}/{gpu.memory_total_bytes / 2**30:.0f} GiB" if gpu.memory_total_bytes else f"{used} GiB"


def owner(gpu: GpuFacts, runs: Sequence[Run]) -> str:
    """Return the run's name where a hook tells it, else the processes."""
    run = next((run for run in runs if run.run == gpu.run), None)
    name = title_of(run) if run is not None else gpu.run if gpu.run == "shared" else None
    return " · ".join(part for part in (name, gpu.owner) if part)


def gpu_page(facts: Facts, selected: int, width: int, height: int) -> list[Text]:
    """Return all GPUs, and the selected one's ledger with its legend, last minutes and findings below."""
    if not facts.gpus:
        return gpu_table(facts, None, width, height)
    gpu = facts.gpus[selected]
    facts_of_it = [f"GPU {gpu.gpu}", gpu.name or gpu.uuid, owner(gpu, facts.runs) or "nobody"]
    title = harmless(" · ".join(facts_of_it))
    below = [rule(title, width), Text(" ").append_text(bar(gpu.states, width - 2))]
    below += flowed(legend(gpu.states, {}), width)
    found = [f for f in facts.gpu_findings if f.gpu in (gpu.gpu, gpu.uuid)]
    curves = gpu_curve_lines(facts.gpu_curves, (gpu.gpu, gpu.uuid), width, TALL_ROWS if height >= TALL else 1)
    told = finding_lines(found, facts.time_s, True, width) if found else []
    needed = min(LEAST_GPUS, len(facts.gpus)) + 1
    if needed + len(below) + len(curves) + len(told) > height:
        curves = []  # what to do is worth more, and so are the other GPUs
    below += [*curves, *told]
    rows = max(3, height - 1 - len(below))
    return (gpu_table(facts, selected, width, rows) + below)[:height]


def gpu_strip(gpus: Sequence[GpuFacts], width: int) -> list[Text]:
    """Return every GPU's state and utilisation on one line, as many as fit."""
    pieces = []
    for gpu in gpus:
        piece = words(f"{gpu.gpu} ", DIM)
        piece.append_text(swatch(gpu.state or "unknown")[:1])
        piece.append(f" {utilization(gpu)}", BOLD)
        pieces.append(piece)
    lines = flowed([words("GPU", DIM), *pieces], width)
    if len(lines) > 1:
        lines = flowed([words("GPU", DIM), *pieces], width - 8)
        lines[0].append("  g: all", DIM)
    return lines[:1]
