"""The node's GPUs as a table: what each does now, where its time went, and who holds it. HTML, everything escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from gpuwatch.api import Gpu, Run
from gpuwatch.formatting import percent
from gpuwatch_dashboards.model import Growth
from gpuwatch_dashboards.query import Query
from gpuwatch_dashboards.render.palette import STATES, Look
from gpuwatch_dashboards.render.units import digits, display

LEDGER = Query("gpuwatch_gpu_seconds_total", by=("gpu", "UUID", "state"))
COLUMNS = ("GPU", "Now", "Time", "Utilisation", "Memory", "Power", "Held by")
LEAST_SAID = 0.005
_NOT_KNOWN = Look("not known", STATES["unknown"].colour)


def shares_by_gpu(growth: Sequence[Growth]) -> dict[str, dict[str, float]]:
    """Return each GPU's share of time by state, 0–1, by UUID. A GPU without any time is left out."""
    seconds: dict[str, dict[str, float]] = {}
    for each in growth:
        if each.value > 0.0:
            seconds.setdefault(each.labels["UUID"], {})[each.labels["state"]] = each.value
    return {uuid: {s: value / sum(of.values()) for s, value in of.items()} for uuid, of in seconds.items()}


def strip(gpus: Sequence[Gpu], shares: Mapping[str, Mapping[str, float]], runs: Sequence[Run]) -> str:
    """Return the table; `shares` are of the time shown, by UUID."""
    names = {run.run: run.name or run.run for run in runs}
    head = "".join(f'<th scope="col">{text}</th>' for text in COLUMNS)
    rows = "".join(_row(gpu, shares.get(gpu.uuid, {}), names) for gpu in gpus)
    return f'<table class="gw-gpus"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'


def _row(gpu: Gpu, shares: Mapping[str, float], names: Mapping[str, str]) -> str:
    look = STATES.get(gpu.state or "", _NOT_KNOWN)
    memory = gpu.memory_used_bytes, gpu.memory_total_bytes
    part = memory[0] / memory[1] if memory[0] is not None and memory[1] else None
    said = f"{display(memory[0], 'bytes')} of {display(memory[1], 'bytes')}" if part is not None else "–"
    held = " · ".join(text for text in (names.get(gpu.run or "", gpu.run or ""), gpu.owner or "") if text) or "nobody"
    cells = (
        ("Now", f'<i class="gw-dot" style="--gw:{look.colour}"></i>{escape(look.name)}'),
        ("Time", share_bar(shares)),
        ("Utilisation", _meter(gpu.utilization_ratio, display(gpu.utilization_ratio, "ratio"))),
        ("Memory", _meter(part, said)),
        ("Power", "–" if gpu.power_watts is None else f"{digits(gpu.power_watts)} W"),
        ("Held by", f"<span>{escape(held)}</span>"),
    )
    return (
        f'<tr data-gpu="{escape(gpu.gpu)}" data-state="{escape(gpu.state or "")}"><th scope="row">{escape(gpu.gpu)}'
        f"<small>{escape(gpu.name)}</small></th>"
        f"{''.join(f'<td data-label={chr(34)}{label}{chr(34)}>{cell}</td>' for label, cell in cells)}</tr>"
    )


def share_bar(shares: Mapping[str, float]) -> str:
    """Return a ledger as one bar, with its shares in words."""
    known = [(state, shares[state]) for state in STATES if shares.get(state, 0.0) >= LEAST_SAID]
    if not known:
        return "–"
    words = ", ".join(f"{STATES[state].name} {percent(share)}" for state, share in known)
    parts = "".join(
        f'<i class="{STATES[state].hatch}" data-state="{state}" '
        f'style="--gw:{STATES[state].colour};width:{100 * share:.2f}%"></i>'
        for state, share in known
    )
    return f'<span class="gw-bar" role="img" aria-label="{escape(words)}" title="{escape(words)}">{parts}</span>'


def _meter(ratio: float | None, text: str) -> str:
    if ratio is None:
        return "–"
    return (
        f'<span class="gw-meter"><i style="width:{100 * min(1.0, ratio):.1f}%"></i></span><span>{escape(text)}</span>'
    )
