"""The node: its GPUs, one line each, and what it has left of CPU, memory, network and disk."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from gpuwatch.api import Gpu, Run
from gpuwatch.diagnosis.thresholds import THRESHOLDS
from gpuwatch.formatting import size
from gpuwatch.tools.reports.display import BLUE, GREEN, ORANGE, display, scale_for
from gpuwatch_dashboards.top.drawing import (
    BOLD,
    DIM,
    Curve,
    bar,
    curve_lines,
    figure,
    flowed,
    harmless,
    legend,
    rule,
    state_name,
    swatch,
    table,
    words,
)
from gpuwatch_dashboards.top.reading import Facts, Sampled, last
from gpuwatch_dashboards.top.runs import finding_lines, title_of

TALL, TALL_ROWS = 28, 3
"""From this height on curves are of several lines."""
NO_GPU, NOT_KNOWN = "No GPU on this node.", "This source does not know which GPUs the node has."


def gpu_table(facts: Facts, selected: int | None, width: int, rows: int) -> list[Text]:
    """Return a head and at most `rows` GPUs; `selected` (a row, or None) is among them."""
    if not facts.gpus:
        return [words(f" {NO_GPU if facts.node.gpus is not None else NOT_KNOWN}", DIM)]
    if width < 76:
        name, state, memory, power, bars = (0, 10, 10, 5, 6) if width >= 56 else (0, 10, 10, 0, 0)
    elif width < 120:
        name, state, memory, power, bars = 0, 16, 11, 5, 14
    else:
        name, state, memory, power, bars = 22, 22, 11, 6, 22 if width < 140 else 32
    columns: list[tuple[str, int | None]] = [("GPU", 3), ("model", name), ("", 1), ("state now", state), ("util", -4)]
    columns += [("memory", -memory), ("power", -power), ("last minute", bars), ("owner", None)]
    lines: list[Sequence[str | Text]] = []
    for gpu in facts.gpus:
        sign, now = (swatch(gpu.state, 1), state_name(gpu.state)) if gpu.state else (Text(" "), "–")
        watts = f"{gpu.power_watts:.0f} W" if gpu.power_watts is not None else "–"
        drawn, held = bar(facts.series.gpu_shares(gpu), bars), owner(gpu, facts.runs) or "no process"
        lines.append((gpu.gpu, gpu.name, sign, now, utilization(gpu), memory_of(gpu), watts, drawn, held))
    return table(columns, lines, selected, rows)


def utilization(gpu: Gpu) -> str:
    return f"{gpu.utilization_ratio:.0%}" if gpu.utilization_ratio is not None else "–"


def memory_of(gpu: Gpu) -> str:
    """Return e.g. "61/141 GiB"."""
    if gpu.memory_used_bytes is None:
        return "–"
    used = f"{gpu.memory_used_bytes / 2**30:.0f}"
    return f"{used}/{gpu.memory_total_bytes / 2**30:.0f} GiB" if gpu.memory_total_bytes else f"{used} GiB"


def owner(gpu: Gpu, runs: Sequence[Run]) -> str:
    """Return the run's name where one is known, and the processes that hold the GPU."""
    run = next((run for run in runs if run.run == gpu.run), None)
    name = title_of(run) if run is not None else gpu.run if gpu.run == "shared" else None
    return " · ".join(part for part in (name, gpu.owner) if part)


def gpu_detail(facts: Facts, gpu: Gpu, width: int, height: int) -> list[Text]:
    """Return one GPU's last minute with its legend, its findings, and its last minutes."""
    title = harmless(" · ".join([f"GPU {gpu.gpu}", gpu.name or gpu.uuid, owner(gpu, facts.runs) or "no process"]))
    shares = facts.series.gpu_shares(gpu)
    lines = [rule(title, width), Text(" ").append_text(bar(shares, width - 2)), *flowed(legend(shares, {}), width)]
    found = [finding for finding in facts.node.findings if finding.gpu in (gpu.gpu, gpu.uuid)]
    lines += finding_lines(found, facts.time_s, True, width) if found else []
    return lines + _gpu_curves(facts.series, gpu, width, TALL_ROWS if height >= TALL else 1)


def _gpu_curves(series: Sampled, gpu: Gpu, width: int, rows: int) -> list[Text]:
    """Return one GPU's curves; none where nothing was sampled."""
    names = ("gpu_utilization GPU {gpu}", "gpu_memory GPU {gpu}", "gpu_power GPU {gpu}", "gpu_temperature GPU {gpu}")
    points = [series.points(name, gpu=gpu.gpu, UUID=gpu.uuid) for name in names]
    if not any(points):
        return []
    lasts = [last(each) for each in points]
    curves = [
        Curve("utilisation", points[0], display(lasts[0], "ratio"), BLUE),
        Curve("memory", points[1], display(lasts[1], "ratio"), GREEN),
        Curve("power", points[2], display(lasts[2], "watts"), ORANGE, None),
        Curve("temperature", points[3], "–" if lasts[3] is None else f"{lasts[3]:.0f} °C", "default", 100.0),
    ]
    return curve_lines(curves, series.start_s, series.end_s, width, rows)


def gpu_strip(gpus: Sequence[Gpu], width: int) -> list[Text]:
    """Return every GPU's state and utilisation on one line, as many as fit."""
    pieces = [words("GPU", DIM)]
    for gpu in gpus:
        pieces.append(words(f"{gpu.gpu} ", DIM).append_text(swatch(gpu.state or "unknown", 1)))
        pieces[-1].append(f" {utilization(gpu)}", BOLD)
    lines = flowed(pieces, width)
    if len(lines) > 1:
        lines = flowed(pieces, width - 8)
        lines[0].append("  g: all", DIM)
    return lines[:1]


def node_lines(facts: Facts, width: int) -> list[Text]:
    """Return CPU, pressure, /dev/shm, memory, network and disk now; what was not measured is left out.

    What fails comes first, and then what training runs out of: a small screen shows two lines.
    """
    series, pieces = facts.series, []
    failed = [collector.name for collector in facts.node.collectors if collector.success is False]
    if failed:
        pieces.append(figure("fails: ", ", ".join(failed), marked=True))
    if facts.node.history_failures:
        pieces.append(figure("history: ", f"{facts.node.history_failures} commits failed", marked=True))
    busy, iowait = series.last("cpu busy, of all cores"), series.last("cpu idle, waiting for I/O")
    if busy is not None:
        pieces.append(figure("CPU ", f"{busy:.0%}", marked=busy >= THRESHOLDS.cores_exhausted))
        if (iowait or 0.0) >= 0.01:
            pieces[-1].append_text(figure(" iowait ", f"{iowait:.0%}"))
    pressure = [
        (name, series.last(f"pressure {legend}"))
        for name, legend in (("CPU", "CPU"), ("I/O", "I/O"), ("mem", "memory"))
    ]
    known = [figure(f" {name} ", f"{ratio:.0%}") for name, ratio in pressure if ratio is not None]
    pieces += [Text().join([words("pressure", DIM), *known])] if known else []
    used, whole = (last(points) for points in series.shm_bytes())
    if used is not None:
        pieces.append(_share("shm ", used, whole, THRESHOLDS.shm_used))
    available, total = series.last("memory available"), series.last("memory in all")
    if available is not None and total:
        pieces.append(_share("mem ", total - available, total, THRESHOLDS.memory_used))
    for name, ways in (
        ("network", (("net ↓", "received"), (" ↑", "sent"))),
        ("disk", (("disk read ", "read"), (" write ", "written"))),
    ):
        rates = [(sign, rate) for sign, way in ways if (rate := series.last(f"{name} {way}")) is not None]
        if rates:
            scale = scale_for("bytes/s", max(rate for _, rate in rates))
            pieces.append(Text().join(figure(sign, _three_digits(rate * scale.factor)) for sign, rate in rates))
            pieces[-1].append(scale.suffix, DIM)
    return flowed(pieces, width) if pieces else [words(" node: no samples yet", DIM)]


def _share(name: str, used_bytes: float, whole_bytes: float | None, high_ratio: float) -> Text:
    """Return e.g. "shm 25/64 MiB", marked from `high_ratio` on."""
    if not whole_bytes:
        return figure(name, size(used_bytes))
    scale, marked = scale_for("bytes", whole_bytes), used_bytes / whole_bytes >= high_ratio
    if 0 < used_bytes * scale.factor < 0.1:
        return figure(name, f"{size(used_bytes)}/{size(whole_bytes)}", marked=marked)
    numbers = "/".join(_three_digits(each * scale.factor) for each in (used_bytes, whole_bytes))
    return figure(name, f"{numbers}{scale.suffix}", marked=marked)


def _three_digits(value: float) -> str:
    if value < 0.005:
        return "0"
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
