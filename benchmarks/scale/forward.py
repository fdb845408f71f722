"""What it costs to forward a fleet's series to another store: the middle layer of ten thousand nodes.

    python -m benchmarks.scale.forward --nodes 1000 --minutes 2 --scrape 15

For each number of nodes and each way, `python -m benchmarks.simulation` is scraped for `--minutes` and written to a
real VictoriaMetrics:

- `vmagent` and Prometheus in agent mode forward every series;
- Prometheus with the shipped rules forwards only what it records by owner and for the fleet, and its alerts: what
  aggregation leaves.

CPU seconds are those of each process; a table is printed, per node where something grows with the nodes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.scale.measure import _cpu_s, _rss_bytes, _sum
from gpuwatch.alerting.render import render
from gpuwatch.alerting.thresholds import Prices
from tests.servers import free_port, stop, wait_for

WARM_UP_S = 90
KEPT = "(owner_kind|kind):.*|ALERTS"
"""What is forwarded by the third way: docs/deploy/past-one-machine.md."""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scale.forward",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[1000])
    parser.add_argument("--minutes", type=float, default=4, help="how long is measured, after a minute and a half")
    parser.add_argument("--scrape", type=int, default=30, help="scrape interval in seconds")
    parser.add_argument("--ways", nargs="+", default=["vmagent", "agent", "rules"])
    options = parser.parse_args()
    print(
        "| nodes | forwarded by | samples/s | its CPU | its memory | sent | the store's CPU | its memory | its disk |"
    )
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    loads = []
    for nodes in options.nodes:
        for way in options.ways:
            print(row(way, nodes, options.scrape, 60 * options.minutes, loads), flush=True)
    print(
        f"\n*Each node scraped every {options.scrape} s, {options.minutes:g} minutes, {os.cpu_count()} cores, load average "
        f"{statistics.median(loads):.0f} (median), {time.strftime('%Y-%m-%d')}.*"
    )


def row(way: str, nodes: int, scrape_s: int, seconds: float, loads: list[float]) -> str:
    with tempfile.TemporaryDirectory(prefix="gpuwatch-forward-") as name, ExitStack() as stack:
        folder = Path(name)
        run = lambda *command, port, ready: stack.enter_context(_running(folder, command, port, ready))  # noqa: E731
        fleet, store, own = free_port(), free_port(), free_port()
        simulation = [sys.executable, "-m", "benchmarks.simulation", "--nodes", str(nodes), "--port", str(fleet)]
        run(*simulation, port=fleet, ready="/sd")
        store_pid = run(
            "victoria-metrics", f"-storageDataPath={folder / 'store'}", f"-httpListenAddr=127.0.0.1:{store}",
            port=store, ready="/health",
        )  # fmt: skip
        url = f"http://127.0.0.1:{store}/api/v1/write"
        pid = run(
            *_command(way, folder, own, fleet, url, scrape_s),
            port=own,
            ready="/-/ready" if way != "vmagent" else "/health",
        )
        time.sleep(WARM_UP_S)
        begin, begin_s, sizes = _seen(own, store, pid, store_pid, way), time.monotonic(), []
        while time.monotonic() < begin_s + seconds:
            loads.append(os.getloadavg()[0])
            sizes.append((_rss_bytes(pid), _rss_bytes(store_pid)))
            time.sleep(5)
        end, wall_s = _seen(own, store, pid, store_pid, way), time.monotonic() - begin_s
        disk = sum(each.stat().st_size for each in (folder / "store").rglob("*") if each.is_file())
        rows = _own(store, "vm_rows_inserted_total")
    samples, cpu, sent, store_cpu = ((after - before) / wall_s for before, after in zip(begin, end, strict=True))
    memory, store_memory = (statistics.median(each) / 1e6 for each in zip(*sizes, strict=True))
    return (
        f"| {nodes:,} | {NAMES[way]} | {samples:,.0f} | {cpu:.2f} cores, {1e6 * cpu / nodes:.0f} µs/s a node | {memory:,.0f} MB | "
        f"{sent / 1e3:,.0f} kB/s, {sent / max(samples, 1):.1f} B a sample | {store_cpu:.2f} cores | {store_memory:,.0f} MB | "
        f"{disk / max(rows, 1):.1f} B a sample |"
    )


NAMES = {
    "vmagent": "vmagent, all series",
    "agent": "Prometheus in agent mode, all series",
    "rules": "Prometheus with rules, recorded series and alerts",
}


def _command(way: str, folder: Path, port: int, fleet: int, url: str, scrape_s: int) -> list[str]:
    job = {"job_name": "gpuwatch", "http_sd_configs": [{"url": f"http://127.0.0.1:{fleet}/sd"}]}
    config: dict[str, object] = {"global": {"scrape_interval": f"{scrape_s}s"}, "scrape_configs": [job]}
    path = folder / "config.yml"
    listen = f"127.0.0.1:{port}"
    if way == "vmagent":
        path.write_text(json.dumps(config))
        return [
            "vmagent", f"-promscrape.config={path}", f"-remoteWrite.url={url}", f"-httpListenAddr={listen}",
            f"-remoteWrite.tmpDataPath={folder / 'queue'}",
        ]  # fmt: skip
    write: dict[str, object] = {"url": url}
    options = [f"--config.file={path}", f"--web.listen-address={listen}"]
    if way == "agent":
        options += ["--enable-feature=agent", f"--storage.agent.path={folder / 'wal'}"]
    else:
        (folder / "rules.yml").write_text(render(prices=Prices(2.5)))
        config |= {"rule_files": ["rules.yml"]}
        config["global"] = {"scrape_interval": f"{scrape_s}s", "evaluation_interval": f"{2 * scrape_s}s"}
        write |= {"write_relabel_configs": [{"source_labels": ["__name__"], "regex": KEPT, "action": "keep"}]}
        options += [f"--storage.tsdb.path={folder / 'data'}"]
    path.write_text(json.dumps({**config, "remote_write": [write]}))
    return ["prometheus", *options]


@contextmanager
def _running(folder: Path, command: tuple[str, ...], port: int, ready: str) -> Iterator[int]:
    path = shutil.which(command[0]) or sys.exit(f"{command[0]} is not installed: scripts/install-test-tools.sh")
    with (folder / f"{Path(path).name}-{port}.log").open("wb") as log:
        process = subprocess.Popen([path, *command[1:]], stdout=log, stderr=log)
    try:
        wait_for(f"{command[0]} answers", lambda: bool(_text(port, ready) or True), 60)
        yield process.pid
    finally:
        stop(process, 30)


def _seen(own: int, store: int, pid: int, store_pid: int, way: str) -> tuple[float, float, float, float]:
    """Return samples that the store got, the forwarder's CPU seconds and bytes sent, and the store's CPU seconds."""
    if way == "vmagent":
        sent = _own(own, "vmagent_remotewrite_conn_bytes_written_total")
    else:
        sent = _own(own, "prometheus_remote_storage_bytes_total")
    return _own(store, "vm_rows_inserted_total"), _cpu_s(pid), sent, _cpu_s(store_pid)


def _own(port: int, name: str) -> float:
    lines = [line for line in _text(port, "/metrics").splitlines() if line and not line.startswith("#")]
    return _sum({key: float(value) for key, _, value in (line.rpartition(" ") for line in lines)}, name)


def _text(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
        return str(answer.read().decode())


if __name__ == "__main__":
    main()
