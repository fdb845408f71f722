"""The parts of top's pages: the list of runs, one run, findings, GPUs and the node, each as lines of text."""

from collections.abc import Mapping, Sequence

from rich.style import Style
from rich.text import Text

from gpuwatch.api import Finding, Gpu, Recent, Run
from gpuwatch.diagnosis.rates import money
from gpuwatch.formatting import duration, harmless, percent, size
from gpuwatch.tools.reports import display as shown
from gpuwatch.tools.reports.display import display
from gpuwatch_dashboards.panels import THRESHOLDS
from gpuwatch_dashboards.selection import concluded, facts_of, key_of
from gpuwatch_dashboards.top import Facts, Sampled
from gpuwatch_dashboards.top import drawing as d
from gpuwatch_dashboards.top.drawing import BOLD, DIM, LABEL, Curve

SEVERITY_SIGNS = {"critical": "‼", "warning": "!", "info": "i"}
NO_VERDICT = "no verdict yet: measuring the first steps"
_INDENT = 8
RUN_WIDTHS = {0: (14, 1, 0, 7, 0), 56: (12, 1, 6, 7, 10), 76: (15, 9, 6, 7, 14), 120: (26, 9, 8, 8, 32)}
GPU_WIDTHS = {
    0: (0, 10, 10, 0, 0), 56: (0, 10, 10, 5, 6), 76: (0, 16, 11, 5, 14), 120: (22, 22, 11, 6, 22), 140: (22, 22, 11, 6, 32),
}  # fmt: skip
"""Cells of the columns, by the least width of the screen that they are for; 0 leaves one out."""


def _widths(of: Mapping[int, tuple[int, ...]], width: int) -> tuple[int, ...]:
    return of[max((least for least in of if least <= width), default=0)]


def title_of(run: Run) -> str:
    return harmless(f"{run.name or run.run}{f' #{run.rank}' if run.world_size > 1 else ''}")


def run_list(runs: Sequence[Run], selected: str | None, width: int, rows: int) -> list[Text]:
    """Return a header and at most `rows` runs, including the selected one."""
    name, status, speed, p50, bars = _widths(RUN_WIDTHS, width)
    columns: list[tuple[str, int | None]] = [("run", name), ("status" if status > 1 else "", status)]
    columns += [("step/s", -speed), ("p50", -p50), ("last minute", bars), ("verdict", None)]
    keys = [key_of(run) for run in runs]
    lines: list[Sequence[str | Text]] = []
    for run in runs:
        recent = run.recent or Recent()
        sign = d.cell(status_of(run) if status > 1 else shown.STATUS_SIGNS[run.status], status)
        state = d.styled(sign, "green" if run.status == "running" else "dim")
        verdict = d.styled(" ", verdict_style(run)).append(f" {run.verdict.sentence if run.verdict else NO_VERDICT}")
        per_s = shown.digits(recent.steps_per_s) if recent.steps_per_s is not None else "–"
        drawn = d.bar(recent.states or run.states, bars)
        lines.append((title_of(run), state, per_s, display(recent.step_s_p50, "s"), drawn, verdict))
    return d.table(columns, lines, keys.index(selected) if selected in keys else None, rows)


def status_of(run: Run) -> str:
    return f"{shown.STATUS_SIGNS[run.status]} {run.status}"


def verdict_style(run: Run) -> Style:
    return d.plate(shown.VERDICTS.get(run.verdict.state if run.verdict else "", shown.VERDICTS["unknown"]))


def verdict_lines(run: Run, width: int) -> list[Text]:
    facts = [f"rank {run.rank} of {run.world_size}"] if run.world_size > 1 else []
    facts += ["@".join(part for part in (run.user, run.host) if part)] if run.user or run.host else []
    if run.loader and run.loader.num_workers is not None:
        facts.append(shown.counted(run.loader.num_workers, "worker"))
    facts += [duration(run.watermark_s - run.started_s), shown.counted(run.steps, "step")]
    head = d.styled(title_of(run), BOLD)
    head.append(f" {status_of(run)}", "green" if run.status == "running" else DIM)
    head.append(f" · {' · '.join(facts)}", DIM)
    head.truncate(width - 6, overflow="ellipsis")
    sentence = d.wrapped(run.verdict.sentence if run.verdict else NO_VERDICT, width - 3)
    return [d.rule(head, width), *(Text(" ").append(f" {line.plain} ", verdict_style(run)) for line in sentence)]


def ledger_lines(run: Run, width: int, least: float = 0.0005) -> list[Text]:
    """Return the bars of the last minute and the whole run, and a legend of states with a share of at least `least`."""
    recent = run.recent.states if run.recent else {}
    bars = [("last minute", recent)] if recent else []
    bars.append(("(whole run)" if recent else "whole run", run.states))
    rows = [d.figure(f" {d.cell(name, LABEL - 2)} ", "").append_text(d.bar(of, width - LABEL - 1)) for name, of in bars]
    return [*rows, *d.flowed(d.legend(recent, run.states, least), width)]


def step_lines(run: Run, series: Sampled, width: int) -> list[Text]:
    """Return step time, throughput, MFU and cost, and the phases of the last minute's mean step."""
    recent = run.recent or Recent()
    pieces: list[Text] = []
    for name, seconds in (("step p50 ", recent.step_s_p50), ("p95 ", recent.step_s_p95)):
        pieces += [d.figure(name, display(seconds, "s"))] if seconds is not None else []
    rates = ((recent.steps_per_s, "steps"), (recent.samples_per_s, "samples"), (recent.tokens_per_s, "tokens"))
    pieces += [d.figure("", shown.digits(rate), f" {what}/s") for rate, what in rates if rate is not None]
    mfus = ((recent.mfu_ratio, ""), (recent.mfu_estimated_ratio, " (estimated)"))
    pieces += [d.figure("MFU ", percent(ratio), how) for ratio, how in mfus if ratio is not None]
    if run.cost is not None:
        lost = money(run.cost.outside_compute, run.cost.currency)
        pieces.append(d.figure("", money(run.cost.total, run.cost.currency), f" ({lost} outside compute)"))
    lines = d.flowed(pieces, width, gap=" · ")
    phases = series.phases_s() if series.run == key_of(run) and width >= 56 else {}
    if known := [phase for phase in reversed(shown.PHASES) if phase in phases]:
        whole = d.figure("mean ", display(sum(phases.values()), "s"), " = ") if width >= 76 else Text()
        parts = [d.figure("", display(phases[phase], "s"), f" {shown.PHASES[phase].name}") for phase in known]
        lines.append(Text(" ").append_text(whole).append_text(d.styled(" + ", DIM).join(parts)))
    return lines


def run_curves(series: Sampled, width: int, rows: int = 1) -> list[Text]:
    wait = series.first("ledger {state}", state="input_wait").points
    curves = [
        Curve("step time", series.first("step").points, "s", shown.PHASES["compute"].colour, None),
        Curve("input wait", wait, "ratio", shown.PHASES["data_wait"].colour),
        Curve("CPU", series.first("cpu busy, of all cores").points, "ratio"),
        Curve("/dev/shm", series.shm().points, "ratio"),
    ]
    return d.curve_lines(curves, series.start_s, series.end_s, width, rows)


def area_lines(series: Sampled, width: int, rows: int) -> list[Text]:
    """Return the shares of time over the last minutes, a column for each interval."""
    drawn = d.area(series.traces.get("ledger {state}", ()), width - LABEL - 1, rows, series.start_s, series.end_s)
    labels = ["100%", *[""] * (rows - 2), f"{(series.end_s - series.start_s) / 60:.0f} min"]
    starts = (d.figure(f" {d.cell(label, LABEL - 2)} ", "") for label in labels)
    return [start.append_text(line) for start, line in zip(starts, drawn, strict=True)]


def finding_lines(found: Sequence[Finding], now_s: float, live: bool, width: int, full: bool = True) -> list[Text]:
    """Return each root cause with advice and evidence, then its consequences; only titles unless `full`."""
    if not found:
        text = "No bottleneck found in the last minute." if live else "No finding was active when the run stopped."
        return [d.styled(f" {text}", DIM)]
    lines: list[Text] = []
    depths: dict[str | None, int] = {}
    for finding in found:
        depths[finding.cause] = depths.get(finding.root, -1) + 1
        lines += _finding(finding, now_s, width, depths[finding.cause], full)
    return lines


def run_findings(run: Run, now_s: float, width: int, full: bool = True) -> list[Text]:
    """Return a run's findings, or after its end those over the whole run, with a heading that says so."""
    over = concluded(run)
    lines = finding_lines(over or run.findings, now_s, run.status == "running", width, full)
    return [d.styled(" Found over the whole run:", DIM), *lines] if over else lines


def _finding(finding: Finding, now_s: float, width: int, depth: int, full: bool) -> list[Text]:
    sign = d.styled(f" {SEVERITY_SIGNS[finding.severity]} ", d.plate(shown.SEVERITIES[finding.severity]))
    indent = _INDENT + 2 * depth
    head = Text(" ").append_text(sign) if depth == 0 else d.styled(f"{'':>{indent - 3}}└", DIM)
    left = 5 if depth == 0 else indent
    lines = d.wrapped(finding.title, width - 1, BOLD if depth == 0 else "", left, head)
    tail = d.styled(f"  {', '.join(facts_of(finding, now_s))}", DIM)
    if full and lines[-1].cell_len + tail.cell_len > width:
        lines.append(Text(" " * (left - 2)))
    if lines[-1].cell_len + tail.cell_len <= width:
        lines[-1].append_text(tail)
    advice = f"{finding.advice} → {finding.gain} faster" if finding.advice and finding.gain else finding.advice
    why = "; ".join(item.text.strip() for item in finding.evidence)
    for name, text, style in (("do", advice, BOLD), ("why", why, "")):
        if text and (full or depth == 0):
            label = d.styled(f"{name:>{indent - 5 + len(name)}}", DIM)
            lines += d.wrapped(text, width - 1, style, indent, label)
    return lines


def all_findings(facts: Facts, width: int) -> list[Text]:
    """Return the findings of all runs and GPUs, those of the selected run first."""
    lines: list[Text] = []
    for run in sorted(facts.runs, key=lambda run: key_of(run) != facts.series.run):
        if run.findings or concluded(run):
            lines += [d.rule(title_of(run), width), *run_findings(run, facts.time_s, width)]
    if facts.node.findings:
        lines += [d.rule("GPUs without a run", width), *finding_lines(facts.node.findings, facts.time_s, True, width)]
    return lines or [d.styled(" No findings: no run and no GPU has a bottleneck that gpuwatch knows.", DIM)]


TALL, TALL_ROWS = 28, 3  # from this height on curves have several lines
NO_GPU, NOT_KNOWN = "No GPU on this node.", "This source does not know which GPUs the node has."


def gpu_table(facts: Facts, selected: int | None, width: int, rows: int) -> list[Text]:
    """Return a header and at most `rows` GPUs, including the `selected` row."""
    if not facts.gpus:
        return [d.styled(f" {NO_GPU if facts.node.gpus is not None else NOT_KNOWN}", DIM)]
    name, state, memory, power, bars = _widths(GPU_WIDTHS, width)
    columns: list[tuple[str, int | None]] = [("GPU", 3), ("model", name), ("", 1), ("state now", state), ("util", -4)]
    columns += [("memory", -memory), ("power", -power), ("last minute", bars), ("owner", None)]
    lines: list[Sequence[str | Text]] = []
    for gpu in facts.gpus:
        sign, now = (d.swatch(gpu.state, 1), d.state_name(gpu.state)) if gpu.state else (Text(" "), "–")
        watts = f"{gpu.power_watts:.0f} W" if gpu.power_watts is not None else "–"
        drawn, held = d.bar(facts.series.gpu_shares(gpu), bars), owner(gpu, facts.runs)
        busy, used = display(gpu.utilization_ratio, "ratio"), memory_of(gpu)
        lines.append((gpu.gpu, gpu.name, sign, now, busy, used, watts, drawn, held))
    return d.table(columns, lines, selected, rows)


def memory_of(gpu: Gpu) -> str:
    """Return e.g. "61/141 GiB"."""
    if gpu.memory_used_bytes is None:
        return "–"
    used = f"{gpu.memory_used_bytes / 2**30:.0f}"
    return f"{used}/{gpu.memory_total_bytes / 2**30:.0f} GiB" if gpu.memory_total_bytes else f"{used} GiB"


def owner(gpu: Gpu, runs: Sequence[Run]) -> str:
    """Return the name of the run and the processes that hold the GPU."""
    run = next((run for run in runs if run.run == gpu.run), None)
    return shown.holder(gpu, title_of(run) if run is not None else gpu.run if gpu.run == "shared" else None)


def gpu_detail(facts: Facts, gpu: Gpu, width: int, height: int) -> list[Text]:
    """Return one GPU: a bar of its last minute, its findings and curves."""
    title = harmless(" · ".join([f"GPU {gpu.gpu}", gpu.name or gpu.uuid, owner(gpu, facts.runs)]))
    shares = facts.series.gpu_shares(gpu)
    bar = Text(" ").append_text(d.bar(shares, width - 2))
    lines = [d.rule(title, width), bar, *d.flowed(d.legend(shares, {}), width)]
    found = [finding for finding in facts.node.findings if finding.gpu in (gpu.gpu, gpu.uuid)]
    lines += finding_lines(found, facts.time_s, True, width) if found else []
    measured = (
        ("utilisation", "gpu_utilization", "ratio", shown.BLUE, 1.0),
        ("memory", "gpu_memory", "ratio", shown.GREEN, 1.0),
        ("power", "gpu_power", "watts", shown.ORANGE, None),
        ("temperature", "gpu_temperature", "celsius", "default", 100.0),
    )
    curves = [
        Curve(name, facts.series.first(f"{key} GPU {{gpu}}", gpu=gpu.gpu, UUID=gpu.uuid).points, unit, colour, top)
        for name, key, unit, colour, top in measured
    ]
    if any(curve.points for curve in curves):
        rows = TALL_ROWS if height >= TALL else 1
        lines += d.curve_lines(curves, facts.series.start_s, facts.series.end_s, width, rows)
    return lines


def gpu_strip(gpus: Sequence[Gpu], width: int) -> list[Text]:
    """Return the state and utilisation of as many GPUs as fit on one line."""
    pieces = [d.styled("GPU", DIM)]
    for gpu in gpus:
        pieces.append(d.styled(f"{gpu.gpu} ", DIM).append_text(d.swatch(gpu.state or "unknown", 1)))
        pieces[-1].append(f" {display(gpu.utilization_ratio, 'ratio')}", BOLD)
    lines = d.flowed(pieces, width)
    if len(lines) > 1:
        lines = d.flowed(pieces, width - 8)
        lines[0].append("  g: all", DIM)
    return lines[:1]


def node_lines(facts: Facts, width: int) -> list[Text]:
    """Return CPU, pressure, /dev/shm, memory, network and disk now; without what was not measured.

    Failures come first, then what training runs out of: a small screen shows only two lines.
    """
    series, pieces = facts.series, []
    if failed := [collector.name for collector in facts.node.collectors if collector.success is False]:
        pieces.append(d.figure("fails: ", ", ".join(failed), marked=True))
    if failures := facts.node.history.failures:
        pieces.append(d.figure("history: ", f"{failures} commits failed", marked=True))
    busy, iowait = series.first("cpu busy, of all cores").last, series.first("cpu idle, waiting for I/O").last
    if busy is not None:
        pieces.append(d.figure("CPU ", f"{busy:.0%}", marked=busy >= THRESHOLDS.cores_exhausted))
        if (iowait or 0.0) >= 0.01:
            pieces[-1].append_text(d.figure(" iowait ", f"{iowait:.0%}"))
    curves = (("CPU", "CPU"), ("I/O", "I/O"), ("mem", "memory"))
    pressure = [(name, series.first(f"pressure {curve}").last) for name, curve in curves]
    known = [d.figure(f" {name} ", f"{ratio:.0%}") for name, ratio in pressure if ratio is not None]
    pieces += [Text().join([d.styled("pressure", DIM), *known])] if known else []
    used, whole = (series.shm(f"shm {part} ({{mount}})").last for part in ("used", "size"))
    if used is not None and whole:
        pieces.append(_share("shm ", used, whole, THRESHOLDS.shm_used))
    available, total = series.first("memory available").last, series.first("memory total").last
    if available is not None and total:
        pieces.append(_share("mem ", total - available, total, THRESHOLDS.memory_used))
    for name, ways in (
        ("network", (("net ↓", "received"), (" ↑", "sent"))),
        ("disk", (("disk read ", "read"), (" write ", "written"))),
    ):
        rates = [(sign, rate) for sign, way in ways if (rate := series.first(f"{name} {way}").last) is not None]
        if rates:
            scale = shown.scale_for("bytes/s", max(rate for _, rate in rates))
            pieces.append(Text().join(d.figure(sign, _three_digits(rate * scale.factor)) for sign, rate in rates))
            pieces[-1].append(scale.suffix, DIM)
    return d.flowed(pieces, width) if pieces else [d.styled(" node: no samples yet", DIM)]


def _share(name: str, used_bytes: float, whole_bytes: float, high_ratio: float) -> Text:
    """Return e.g. "shm 25/64 MiB", highlighted from `high_ratio` on."""
    scale = shown.scale_for("bytes", whole_bytes)
    text = "/".join(_three_digits(each * scale.factor) for each in (used_bytes, whole_bytes)) + scale.suffix
    if 0 < used_bytes * scale.factor < 0.1:
        text = f"{size(used_bytes)}/{size(whole_bytes)}"
    return d.figure(name, text, marked=used_bytes / whole_bytes >= high_ratio)


def _three_digits(value: float) -> str:
    if value < 0.1:
        return f"{value:.2f}" if value >= 0.005 else "0"
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
