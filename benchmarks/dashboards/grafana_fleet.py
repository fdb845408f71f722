"""How long Prometheus takes for each query of Grafana's "GPU fleet", over a day of a thousand nodes.

    python -m benchmarks.dashboards.grafana_fleet [--nodes 1000] [--hours 24]

The store is written by promtool (tests/integration/recorded_fleet.py), with the levels' series at the rules' five
minutes. What has a series for each GPU (the table of the worst ones) or needs a scrape is not in such a store, and is
left out by name.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import urllib.parse
from pathlib import Path

from tests.grafana_variables import Asked, Variables, load
from tests.integration.recorded_fleet import Share, recorded, write_blocks
from tests.servers import get_json, start_prometheus

LEFT_OUT = {"Agents down", "Alerts"}
TIMES = 5


def fleet(nodes: int) -> list[Share]:
    """Return eight GPUs a node, two nodes a run, four a job, fifty users."""
    return [
        Share(f"node-{n}:9478", f"user-{n % 50}", str(n // 4), f"run-{n // 2}", 8.0, 0.2, 0.05 * (n % 3), 0.01)
        for n in range(nodes)
    ]


def seconds(url: str, asked: Asked, hours: float) -> tuple[float, int]:
    """Return the median time of an answer and its number of series."""
    now = time.time()
    query = {"query": asked.expr, "time": str(now)}
    path = "query"
    if not asked.instant:
        path = "query_range"
        query = {
            "query": asked.expr,
            "start": str(now - 3600 * hours),
            "end": str(now),
            "step": str(hours * 3600 / 1000),
        }
    took, series = [], 0
    for _ in range(TIMES):
        begin = time.perf_counter()
        series = len(get_json(f"{url}/api/v1/{path}?{urllib.parse.urlencode(query)}", 60)["data"]["result"])
        took.append(time.perf_counter() - begin)
    return statistics.median(took), series


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.dashboards.grafana_fleet",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--hours", type=float, default=24)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "prometheus/data"
        store.parent.mkdir()
        write_blocks(recorded(fleet(options.nodes), 2.5), options.hours, store, ahead_s=900)
        with start_prometheus(Path(folder) / "prometheus", "global: {scrape_interval: 15s}") as server:
            resolved = Variables(load("gpuwatch-fleet"), server.url)
            resolved.texts["__range"] = f"{options.hours * 3600:.0f}s"
            print(f"{options.nodes} nodes of 8 GPUs, {options.hours:g} hours; median of {TIMES}")
            print("| panel | query | ms | series |\n|---|---|---|---|")
            whole = 0.0
            for asked in resolved.asked():
                if asked.panel not in LEFT_OUT:
                    took_s, series = seconds(server.url, asked, options.hours)
                    whole += took_s
                    print(f"| {asked.panel} | {asked.ref_id} | {took_s * 1e3:.0f} | {series} |", flush=True)
            print(f"all of them, one after the other: {whole:.2f} s")


if __name__ == "__main__":
    main()
