"""The node on one line, or on two where it is narrow."""

from __future__ import annotations

from rich.text import Text

from gpuwatch.units import size
from gpuwatch_dashboards.terminal.facts import Facts, Strands
from gpuwatch_dashboards.terminal.lines import flowed
from gpuwatch_dashboards.terminal.looks import DIM, words
from gpuwatch_dashboards.units import scale_for

_RATES = (("net", (("↓", "received"), ("↑", "sent"))), ("disk", (("read ", "read"), ("write ", "written"))))
"""By name, the legends of the panels that they come from, and how each is marked."""
_SHORT = {"memory": "mem"}
HIGH_RATIO = 0.9
"""From here on a share of something that runs out is marked."""


def node_lines(facts: Facts, width: int) -> list[Text]:
    """Return CPU, pressure, /dev/shm, memory, network and disk now; what was not measured is left out."""
    strands = facts.strands
    pieces = [piece for piece in (_cpu(strands), _pressure(strands), _shm(strands), _memory(strands)) if piece]
    pieces += _rates(strands)
    failed = [collector.name for collector in facts.collectors if collector.success is False]
    if failed:
        pieces.append(_piece("fails:", ", ".join(failed), True))
    if facts.history_failures:
        pieces.append(_piece("history:", f"{facts.history_failures} commits failed", True))
    if not pieces:
        return [words(" node: no samples yet", DIM)]
    return flowed(pieces, width)


def _piece(name: str, value: str, marked: bool = False) -> Text:
    return words(f"{name} ", DIM).append(value, "bold reverse" if marked else "bold")


def _cpu(strands: Strands) -> Text | None:
    busy = next((value for _, value in reversed(strands.cpu_ratio) if value is not None), None)
    if busy is None:
        return None
    piece = _piece("CPU", f"{busy:.0%}", busy >= HIGH_RATIO)
    if (strands.cpu_iowait_ratio or 0.0) >= 0.01:
        piece.append(" iowait ", DIM).append(f"{strands.cpu_iowait_ratio:.0%}", "bold")
    return piece


def _pressure(strands: Strands) -> Text | None:
    if not strands.pressure:
        return None
    piece = words("pressure", DIM)
    for resource, ratio in strands.pressure.items():
        piece.append(f" {_SHORT.get(resource, resource)} ", DIM).append(f"{ratio:.0%}", "bold")
    return piece


def _shm(strands: Strands) -> Text | None:
    if strands.shm_used_bytes is None:
        return None
    whole = strands.shm_size_bytes
    value = _of(strands.shm_used_bytes, whole) if whole else size(strands.shm_used_bytes)
    return _piece("shm", value, bool(whole) and strands.shm_used_bytes / (whole or 1.0) >= HIGH_RATIO)


def _memory(strands: Strands) -> Text | None:
    available, total = strands.memory_available_bytes, strands.memory_total_bytes
    if available is None or not total:
        return None
    return _piece("mem", _of(total - available, total), 1 - available / total >= HIGH_RATIO)


def _rates(strands: Strands) -> list[Text]:
    """Return network and disk, both directions in the unit of the faster."""
    pieces: list[Text] = []
    for name, directions in _RATES:
        known = [(sign, strands.rates[legend]) for sign, legend in directions if legend in strands.rates]
        if not known:
            continue
        scale = scale_for("bytes/s", max(value for _, value in known))
        piece = words(name, DIM)
        for sign, value in known:
            piece.append(f" {sign}", DIM).append(_three_digits(value * scale.factor), "bold")
        pieces.append(piece.append(scale.suffix, DIM))
    return pieces


def _of(used_bytes: float, whole_bytes: float) -> str:
    """Return e.g. "25/64 MiB"."""
    scale = scale_for("bytes", whole_bytes)
    if 0 < used_bytes * scale.factor < 0.1:
        return f"{size(used_bytes)}/{size(whole_bytes)}"
    return f"{_three_digits(used_bytes * scale.factor)}/{_three_digits(whole_bytes * scale.factor)}{scale.suffix}"


def _three_digits(value: float) -> str:
    if value < 0.005:
        return "0"
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
