"""docs/evidence/scale.md, from what `measure.py` saw: tables, and the arithmetic to ten thousand nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

Run = dict[str, Any]
TARGET_NODES = 10_000


def page(runs: Sequence[Run]) -> str:
    """Return the page. `runs`: `Measured` as JSON, the smallest fleet first."""
    return "\n".join([*_head(runs), *_costs(runs), *_groups(runs[-1]), *_queries(runs), *_extrapolation(runs)]) + "\n"


def _head(runs: Sequence[Run]) -> Iterator[str]:
    yield from ("# Scale of one Prometheus", "")
    yield "A real Prometheus with the shipped rules and prices scrapes `python -m benchmarks.simulation`. Written by:"
    yield from ("", "```")
    for run in runs:
        setup = run["setup"]
        nice = f" --nice {setup['nice']}" if setup["nice"] else ""
        often = f" --scrape {setup['scrape_s']} --evaluate {setup['evaluate_s']}"
        yield f"GOGC=75 python -m benchmarks.scale --nodes {setup['nodes']} --minutes {setup['minutes']:g}{often}{nice} --json {_file(run)}"
    files = " ".join(map(_file, runs))
    yield f"python -m benchmarks.scale --page {files} > docs/evidence/scale.md"
    last = runs[-1]
    loads = " and ".join(f"{run['load']:.0f}" for run in runs)
    preferred = (
        " The fleets and their Prometheus had priority over this work (`--nice`)." if last["setup"]["nice"] else ""
    )
    yield from ("```", "")
    yield (
        f"Measured on {last['day']} with Prometheus {last['prometheus'].partition(',')[0]} on {last['cpu_count']} cores that it "
        f"shared with the fleet and other work: the one-minute load was {loads} (medians).{preferred} CPU seconds are those "
        "of Prometheus alone; on crowded cores they are too high rather than too low, and wall times much more so. GOGC=75 is the "
        "default of the Prometheus 3 that compose starts."
    )
    yield ""
    for run in runs:
        if run.get("note"):
            yield from (f"*At {run['setup']['nodes']:,} nodes: {run['note']}*", "")


def _file(run: Run) -> str:
    return f"scale-{run['setup']['nodes']}-{run['setup']['scrape_s']}.json"


def _costs(runs: Sequence[Run]) -> Iterator[str]:
    yield (
        "| "
        + " | ".join(["", *(f"{run['setup']['nodes']:,} nodes × {run['setup']['gpus']} GPUs" for run in runs)])
        + " |"
    )
    yield "|---" * (len(runs) + 1) + "|"
    rows = {
        "scraped, rules evaluated every": lambda run: f"{run['setup']['scrape_s']} s, {run['setup']['evaluate_s']} s",
        "targets up at the end": lambda run: f"{run['targets_up']:,.0f}",
        "series a node, mean (most)": lambda run: f"{run['series_a_node_mean']:.0f} ({run['series_a_node_max']:.0f})",
        "series in memory, recorded ones too": lambda run: f"{run['series_in_head']:,.0f}",
        "samples a second": lambda run: f"{run['samples_per_s']:,.0f}",
        "CPU of Prometheus, cores": lambda run: f"{run['cpu_cores']:.2f}",
        "… of which rules, by their own work below": lambda run: f"{rules_cores(run):.2f}",
        "memory of Prometheus, median (most)": lambda run: f"{run['rss_bytes_median'] / 1e9:.2f} ({run['rss_bytes_max'] / 1e9:.2f}) GB",
        "bytes on disk a sample, write-ahead log included": lambda run: f"{run['disk_bytes'] / run['samples_total']:.1f}",
        "alerts firing": lambda run: f"{run['alerts_firing']:,.0f}",
        "CPU of the simulation, cores": lambda run: f"{run['simulation_cores']:.2f}",
    }  # fmt: skip
    for name, cell in rows.items():
        yield f"| {name} | " + " | ".join(cell(run) for run in runs) + " |"
    yield ""
    yield "A node has the most series in the quarter of an hour after a run, when the old and the new run are both exported."
    yield ""


def rules_cores(run: Run) -> float:
    """Return the cores that all groups take by their own work, each at its interval."""
    groups = (group for group in run["groups"].values() if "cpu_s" in group)
    return float(sum(group.get("least_cpu_s", group["cpu_s"]) / group["interval_s"] for group in groups))


def _groups(run: Run) -> Iterator[str]:
    groups = {name: group for name, group in sorted(run["groups"].items()) if "cpu_s" in group}
    yield from (f"## Rule groups at {run['setup']['nodes']:,} nodes", "")
    yield "| group | every | CPU seconds of an evaluation: least, mean of seven | wall time by Prometheus: median, most |"
    yield "|---|---|---|---|"
    for name, group in groups.items():
        wall = f"{group['last_s_median']:.2f}, {group['last_s_max']:.2f}" if "last_s_median" in group else "not run"
        cpu = f"{group['least_cpu_s']:.2f}, {group['cpu_s']:.2f}"
        yield f"| {name} | {group['interval_s']:.0f} s | {cpu} | {wall} |"
    over = [name for name, group in groups.items() if group["least_cpu_s"] >= 1]
    slow = [name for name, group in groups.items() if group.get("last_s_median", 0) >= 1]
    yield ""
    yield (
        "CPU seconds are those of a group's expressions, evaluated one after another while scraping is stopped, with their results "
        "counted. The lowest value is the work of the expressions; the mean includes garbage collection, which takes about a second "
        "of CPU each time. Writing results and alert texts is only included in the wall times."
    )
    yield ""
    by_wall = "all of them" if not slow else f"all but {', '.join(slow)}"
    yield (
        f"**Under a second?** By their own CPU seconds: {'all of them' if not over else 'all but ' + ', '.join(over)}. By the median "
        f"of their wall time, at a load of {run['load']:.0f}: {by_wall}. The highest values are evaluations during Prometheus's garbage collection."
    )
    yield ""


def _queries(runs: Sequence[Run]) -> Iterator[str]:
    yield from ("## Questions, raw and recorded", "")
    yield "| nodes, scraped every | question | over | raw: wall, CPU | recorded: wall, CPU | faster |"
    yield "|---|---|---|---|---|---|"
    least = 1e9
    for run in runs:
        for row in run["queries"]:
            raw, recorded = row["raw"], row["recorded"]
            over = "now" if row["kind"] == "instant" else f"{min(60.0, run['setup']['minutes']):.0f} min"
            ratio = raw["wall_s"] / recorded["wall_s"]
            least = min(least, ratio)
            yield (
                f"| {run['setup']['nodes']:,}, {run['setup']['scrape_s']} s | {row['name']} | {over} | {_ms(raw)} | {_ms(recorded)} | {ratio:,.0f}× |"
            )
    yield ""
    yield (
        "Medians of wall times, one query after another while scraping is stopped; a range has one point per minute. "
        f"Recording gains at least {least:.0f}× here. CPU is counted in hundredths of a second, so 0 means less than that."
    )
    yield ""


def _ms(timed: dict[str, float]) -> str:
    return f"{1000 * timed['wall_s']:.1f} ms, {1000 * timed['cpu_s']:.0f} ms"


def _extrapolation(runs: Sequence[Run]) -> Iterator[str]:
    small, large = runs[0], runs[-1]
    nodes = large["setup"]["nodes"]
    times = TARGET_NODES / nodes
    rules, total = rules_cores(large), large["cpu_cores"]
    ingest = max(0.0, total - rules)
    series = large["series_in_head"] * times
    yield f"## {TARGET_NODES:,} nodes, by arithmetic"
    yield ""
    yield (
        "Not run as one Prometheus; what was run of the layers in between is on [past one machine](../deploy/past-one-machine.md). "
        "All that is a node's own grows with the nodes; a rule that compares nodes does so within one run."
    )
    yield ""
    yield f"- series in memory: {large['series_in_head']:,.0f} × {times:g} = {series / 1e6:.1f} million"
    yield f"- samples a second: {large['samples_per_s']:,.0f} × {times:g} = {large['samples_per_s'] * times / 1e6:.2f} million"
    yield f"- CPU: {total:.2f} × {times:g} = {total * times:.1f} cores, of which scraping and storing {ingest:.2f} × {times:g} = {ingest * times:.1f} and rules {rules:.2f} × {times:g} = {rules * times:.1f}"
    if small is not large:
        grown = (large["rss_bytes_median"] - small["rss_bytes_median"]) / (nodes - small["setup"]["nodes"])
        yield (
            f"- memory: ({large['rss_bytes_median'] / 1e9:.2f} − {small['rss_bytes_median'] / 1e9:.2f} GB) / ({nodes:,} − {small['setup']['nodes']:,}) = "
            f"{grown / 1e6:.2f} MB a node, × {TARGET_NODES:,} = {grown * TARGET_NODES / 1e9:.0f} GB"
        )
    a_sample = large["disk_bytes"] / large["samples_total"]
    day = a_sample * large["samples_per_s"] * times * 86400
    yield f"- disk: {a_sample:.1f} bytes × {large['samples_per_s'] * times / 1e6:.2f} million × 86,400 s = {day / 1e12:.2f} TB a day before compaction, which leaves less"
    yield f"- a group's evaluation takes {times:g} times as long: those above {1 / times:g} s of CPU pass 1 s, which is most of them"
    yield ""
    yield (
        "One Prometheus for ten thousand nodes is therefore a large machine. Ten shards of a thousand nodes, each as measured, are not: "
        "[past one machine](../deploy/past-one-machine.md)."
    )
