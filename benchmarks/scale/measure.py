"""One fleet, simulated, scraped by a real Prometheus with the shipped rules: what was measured."""

from __future__ import annotations

import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.scale.queries import QUERIES
from gpuwatch.alerting.render import groups, render
from gpuwatch.alerting.thresholds import Prices
from tests.servers import Server, free_port, get_json, start_prometheus, wait_for

WARM_UP_S = 600.0
LOOK_EVERY_S = 15.0
RANGE_S = 3600.0
RANGE_STEP_S = 60


@dataclass(frozen=True)
class Setup:
    """What is run."""

    nodes: int
    gpus: int
    minutes: float
    scrape_s: int
    evaluate_s: int
    nice: int = 0
    """Below 0: Prometheus and the fleet go before whatever else runs on the machine. Needs root."""

    @property
    def range_s(self) -> float:
        """How much of the past the range queries ask for: an hour, or all that there is."""
        return min(RANGE_S, 60 * self.minutes)


@dataclass
class Measured:
    """What was seen. Times in seconds; CPU in CPU-seconds, or cores where it is a rate."""

    setup: Setup
    day: str
    prometheus: str
    cpu_count: int
    note: str = ""
    """What was out of the ordinary, for the page; written by hand into the file."""
    load: float = 0.0
    """Median of the machine's one-minute load while it ran: everything on it counts."""
    targets_up: float = 0.0
    series_a_node_mean: float = 0.0
    series_a_node_max: float = 0.0
    series_scraped: float = 0.0
    series_in_head: float = 0.0
    samples_per_s: float = 0.0
    cpu_cores: float = 0.0
    rss_bytes_median: float = 0.0
    rss_bytes_max: float = 0.0
    disk_bytes: float = 0.0
    samples_total: float = 0.0
    simulation_cores: float = 0.0
    alerts_firing: float = 0.0
    groups: dict[str, dict[str, float]] = field(default_factory=dict)
    """By group: interval_s, last_s_{min,median,max} as Prometheus reports it, missed iterations; cpu_s (mean) and
    least_cpu_s of an evaluation: the least is without the garbage collection that others' work left."""
    queries: list[dict[str, Any]] = field(default_factory=list)
    """name, kind (instant or range), raw and recorded: wall_s (median), cpu_s (mean) and least_cpu_s."""


def measure(setup: Setup) -> Measured:
    """Run the fleet and Prometheus for `setup.minutes`, then the queries; return what was seen."""
    with tempfile.TemporaryDirectory(prefix="gpuwatch-scale-") as folder, _fleet(setup) as (fleet, address):
        rules = render(prices=Prices(2.5))
        directory = Path(folder) / "prometheus"
        with start_prometheus(directory, _config(setup, address), rules) as prometheus:
            _prefer(setup.nice, prometheus.process.pid, fleet.pid)
            seen = Measured(setup, time.strftime("%Y-%m-%d"), _version(prometheus), os.cpu_count() or 1)
            _watch(seen, prometheus, fleet.pid)
            seen.disk_bytes = sum(each.stat().st_size for each in (directory / "data").rglob("*") if each.is_file())
            now = time.time() - 2 * setup.scrape_s
            _stop_scraping(prometheus, directory)
            _ask(seen, prometheus, now)
            _evaluate(seen, prometheus, now)
    return seen


@contextmanager
def _fleet(setup: Setup) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.simulation", "--nodes", str(setup.nodes), "--gpus", str(setup.gpus)]
    process = subprocess.Popen([*command, "--port", str(port)], stdout=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}/sd"
    try:
        wait_for("the fleet answers", lambda: get_json(address), 60)
        yield process, address
    finally:
        process.terminate()
        process.wait(20)


def _prefer(nice: int, *pids: int) -> None:
    if not nice:
        return
    for pid in pids:
        group = Path(f"/proc/{pid}/autogroup")  # sched(7): where sessions are groups, nice counts only within one
        if group.exists():
            group.write_text(str(nice))
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.setpriority(os.PRIO_PROCESS, int(thread.name), nice)


def _config(setup: Setup, address: str) -> str:
    intervals = {"scrape_interval": f"{setup.scrape_s}s", "evaluation_interval": f"{setup.evaluate_s}s"}
    job = {"job_name": "gpuwatch", "http_sd_configs": [{"url": address}]}
    return json.dumps({"global": intervals, "rule_files": ["rules.yml"], "scrape_configs": [job]})


def _stop_scraping(prometheus: Server, directory: Path) -> None:
    """Leave nothing to do but queries, so that a query's CPU seconds are its own."""
    (directory / "prometheus.yml").write_text("{}")
    prometheus.process.send_signal(signal.SIGHUP)
    time.sleep(10)


def _watch(seen: Measured, prometheus: Server, fleet_pid: int) -> None:
    warm_up_s = min(WARM_UP_S, 30 * seen.setup.minutes)
    time.sleep(warm_up_s)
    pid = prometheus.process.pid
    end_s = time.monotonic() + 60 * seen.setup.minutes - warm_up_s
    begin_s, begin = time.monotonic(), (_cpu_s(pid), _cpu_s(fleet_pid), _own(prometheus))
    loads, sizes, durations = [], [], dict[str, list[float]]()
    while time.monotonic() < end_s:
        loads.append(os.getloadavg()[0])
        sizes.append(_rss_bytes(pid))
        for name, value in _by_group(prometheus, "prometheus_rule_group_last_duration_seconds").items():
            if value > 0:  # else it has not been evaluated yet
                durations.setdefault(name, []).append(value)
        time.sleep(LOOK_EVERY_S)
    wall_s, own = time.monotonic() - begin_s, _own(prometheus)
    seen.load = statistics.median(loads)
    seen.rss_bytes_median, seen.rss_bytes_max = statistics.median(sizes), max(sizes)
    seen.cpu_cores = (_cpu_s(pid) - begin[0]) / wall_s
    seen.simulation_cores = (_cpu_s(fleet_pid) - begin[1]) / wall_s
    appended = "prometheus_tsdb_head_samples_appended_total"
    seen.samples_total = _sum(own, appended)
    seen.samples_per_s = (seen.samples_total - _sum(begin[2], appended)) / wall_s
    seen.series_in_head = _sum(own, "prometheus_tsdb_head_series")
    value = lambda expr: _value(prometheus, expr)  # noqa: E731
    seen.targets_up = value("sum(up)")
    seen.series_scraped = value("sum(scrape_samples_scraped)")
    seen.series_a_node_mean = value("avg(scrape_samples_scraped > 0)")
    seen.series_a_node_max = value("max(scrape_samples_scraped)")
    seen.alerts_firing = value('count(ALERTS{alertstate="firing"}) or vector(0)')
    missed = _by_group(prometheus, "prometheus_rule_group_iterations_missed_total")
    done = _by_group(prometheus, "prometheus_rule_group_iterations_total")
    intervals = _by_group(prometheus, "prometheus_rule_group_interval_seconds")
    for name, values in durations.items():
        seen.groups[name] = {
            "interval_s": intervals[name], "last_s_min": min(values), "last_s_median": statistics.median(values),
            "last_s_max": max(values), "missed": missed.get(name, 0.0), "evaluations": done.get(name, 0.0),
        }  # fmt: skip


def _ask(seen: Measured, prometheus: Server, now: float) -> None:
    for name, (raw, recorded) in QUERIES.items():
        for kind, path, window, times in (
            ("instant", "/api/v1/query", {"time": str(now)}, 7),
            ("range", "/api/v1/query_range",
             {"start": str(now - seen.setup.range_s), "end": str(now), "step": str(RANGE_STEP_S)}, 2),
        ):  # fmt: skip
            row: dict[str, Any] = {"name": name, "kind": kind}
            for which, expr in (("raw", raw), ("recorded", recorded)):
                row[which] = _timed(prometheus, path, {"query": expr, **window}, times if which == "raw" else 7)
            seen.queries.append(row)


def _evaluate(seen: Measured, prometheus: Server, now: float) -> None:
    """Add each group's CPU seconds: its expressions asked for one after another, their results counted, not sent."""
    for group in groups(prices=Prices(2.5)):
        cost = {"cpu_s": 0.0, "least_cpu_s": 0.0}
        for rule in group["rules"]:
            asked = {"query": f"count(\n{rule['expr']}\n)", "time": str(now)}
            timed = _timed(prometheus, "/api/v1/query", asked, 7, empty=True)
            cost = {which: cost[which] + timed[which] for which in cost}
        seen.groups.setdefault(group["name"], {"interval_s": _seconds(group)}).update(cost)


def _seconds(group: dict[str, Any]) -> float:
    text = str(group.get("interval", "15s"))
    return float(text[:-1]) * {"s": 1, "m": 60, "h": 3600}[text[-1]]


def _timed(
    prometheus: Server, path: str, asked: dict[str, str], times: int, *, empty: bool = False
) -> dict[str, float]:
    body, pid = urllib.parse.urlencode(asked).encode(), prometheus.process.pid
    walls, cpus = [], []
    for _ in range(times):
        start, begin = time.perf_counter(), _cpu_s(pid)
        with urllib.request.urlopen(prometheus.url + path, body, timeout=600) as response:
            answer = json.load(response)
        walls.append(time.perf_counter() - start)
        cpus.append(_cpu_s(pid) - begin)
        assert empty or answer["data"]["result"], f"no answer costs nothing: {asked}"
    return {"wall_s": statistics.median(walls), "cpu_s": statistics.mean(cpus), "least_cpu_s": min(cpus)}


def _value(prometheus: Server, expr: str) -> float:
    found = get_json(prometheus.url + "/api/v1/query", 120, query=expr)["data"]["result"]
    return float(found[0]["value"][1]) if found else 0.0


def _own(prometheus: Server) -> dict[str, float]:
    """Return Prometheus' own metrics by series."""
    with urllib.request.urlopen(prometheus.url + "/metrics", timeout=120) as body:
        lines = [line for line in body.read().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def _sum(own: dict[str, float], name: str) -> float:
    return sum(value for series, value in own.items() if series.partition("{")[0] == name)


def _by_group(prometheus: Server, name: str) -> dict[str, float]:
    """Return one of its metrics by rule group; the label holds the file too, `/path/rules.yml;group`."""
    return {
        series.partition(";")[2].rstrip('"}'): value
        for series, value in _own(prometheus).items()
        if series.startswith(name + "{")
    }


def _version(prometheus: Server) -> str:
    found: str = get_json(prometheus.url + "/api/v1/status/buildinfo")["data"]["version"]
    return f"{found.partition('+')[0]}, Python {platform.python_version()}"


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
