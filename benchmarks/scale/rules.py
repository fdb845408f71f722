"""Two rules files, compared: what they cost on the same series, and whether they record the same.

    git show main:deploy/prometheus/rules/gpuwatch.yml > old.yml
    python -m benchmarks.scale.rules old.yml deploy/prometheus/rules/gpuwatch.yml --nodes 300 --minutes 25
    python -m benchmarks.scale.rules old.yml deploy/prometheus/rules/gpuwatch.yml --nodes 40 --minutes 70 --results

The first scrapes simulated nodes into one Prometheus, which evaluates the old rules and those whose records only the
new file has. Then nothing is scraped, and the expressions of each group are evaluated in turn, old, new, old …: the
least CPU seconds, and the bytes that Prometheus allocates, which hardly vary from one evaluation to the next.

With --results, `promtool test rules` evaluates both files on the same simulated series, all groups at the same times.
What differs is listed.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import yaml

from benchmarks.scale.measure import Setup, _config, _cpu_s, _fleet, _own, _stop_scraping, _sum
from benchmarks.simulation.page import NodePages
from benchmarks.simulation.story import Node
from tests.servers import Server, start_prometheus

Groups = list[dict[str, Any]]
ROUNDS = 5
SCRAPE_S, EVALUATE_S = 15, 30
STEP_S = 30  # between the samples of --results; all groups are evaluated once a minute
_SERIES = re.compile(r"^(\w+)\{(.*)\} (\S+)$")
_GOT = re.compile(r'(?:^|, )((?:[\w:]+)?\{(?:[^{}"]|"(?:[^"\\]|\\.)*")*\}) (\S+?)(?=, |$)')


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scale.rules",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--nodes", type=int, default=300)
    parser.add_argument("--minutes", type=int, default=25)
    parser.add_argument("--results", action="store_true", help="compare what they record, not what they cost")
    options = parser.parse_args()
    old, new = (yaml.safe_load(path.read_text())["groups"] for path in (options.old, options.new))
    (results if options.results else costs)(old, new, options.nodes, options.minutes)


def costs(old: Groups, new: Groups, nodes: int, minutes: int) -> None:
    """Print a table of the groups: CPU seconds of an evaluation and megabytes allocated in a minute, old and new."""
    setup = Setup(nodes, 8, minutes, SCRAPE_S, EVALUATE_S)
    only_new = [
        {**group, "name": f"new-{group['name']}", "rules": rules}
        for group in new
        if (rules := [rule for rule in group["rules"] if rule.get("record", "") in _records(new) - _records(old)])
    ]
    with tempfile.TemporaryDirectory(prefix="gpuwatch-rules-") as folder, _fleet(setup) as (_, address):
        directory = Path(folder) / "prometheus"
        text = json.dumps({"groups": old + only_new})
        with start_prometheus(directory, _config(setup, address), text) as prometheus:
            time.sleep(60 * minutes)
            now = time.time() - 2 * SCRAPE_S
            _stop_scraping(prometheus, directory)
            names = list(dict.fromkeys(group["name"] for group in [*old, *new]))
            print("| group | every | CPU, ms | MB a minute |\n|---|---|---|---|")
            totals = [[0.0, 0.0], [0.0, 0.0]]
            for name in names:
                pair = [[group for group in groups if group["name"] == name] for groups in (old, new)]
                spent = _spent(prometheus, pair, now)
                every = [_interval_s(group[0]) if group else 0 for group in pair]
                a_minute = [60 / seconds if seconds else 0.0 for seconds in every]
                for which, (cpu_s, megabytes) in enumerate(spent):
                    totals[which][0] += cpu_s * a_minute[which]
                    totals[which][1] += megabytes * a_minute[which]
                in_megabytes = [each[1] * times for each, times in zip(spent, a_minute, strict=True)]
                print(
                    f"| {name} | {every[0]} → {every[1]} s | {1000 * spent[0][0]:.0f} → {1000 * spent[1][0]:.0f} "
                    f"| {in_megabytes[0]:.0f} → {in_megabytes[1]:.0f} |"
                )
    (old_cpu, old_mb), (new_cpu, new_mb) = totals
    print(f"\nA minute: CPU {old_cpu:.2f} → {new_cpu:.2f} s ({new_cpu / old_cpu:.2f} of it), ", end="")
    print(f"allocated {old_mb:.0f} → {new_mb:.0f} MB ({new_mb / old_mb:.2f} of it).")


def results(old: Groups, new: Groups, nodes: int, minutes: int) -> None:
    """Print the names of records and alerts whose series differ at the middle or the end, with how many do."""
    series = _simulated(nodes, minutes)
    names = [*sorted(_records(old) & _records(new)), "ALERTS"]
    with tempfile.TemporaryDirectory(prefix="gpuwatch-rules-") as folder:
        before, after = (_recorded(Path(folder), groups, series, names, minutes) for groups in (old, new))
    print(
        f"{len(series)} series of {nodes} nodes, {minutes} minutes; {sum(map(len, before.values()))} recorded samples"
    )
    for name in sorted(before.keys() | after.keys()):
        was, now = before.get(name, {}), after.get(name, {})
        gone, more = was.keys() - now.keys(), now.keys() - was.keys()
        differ = sum(
            not math.isclose(was[key], now[key], rel_tol=1e-9, abs_tol=1e-9) for key in was.keys() & now.keys()
        )
        if gone or more or differ:
            zeros = sum(was[key] == 0 for key in gone)
            print(
                f"{name}: {len(gone)} are gone ({zeros} of them were 0), {len(more)} new, {differ} have another value"
            )


def _records(groups: Groups) -> set[str]:
    return {rule["record"] for group in groups for rule in group["rules"] if "record" in rule}


def _interval_s(group: dict[str, Any]) -> int:
    minutes, seconds = re.fullmatch(r"(?:(\d+)m)?(?:(\d+)s)?", group.get("interval", f"{EVALUATE_S}s")).groups("0")  # type: ignore[union-attr]
    return 60 * int(minutes) + int(seconds)


def _spent(prometheus: Server, pair: list[Groups], now: float) -> list[tuple[float, float]]:
    """Return the least CPU seconds and megabytes of an evaluation of each of the two."""
    least = [(math.inf, math.inf), (math.inf, math.inf)]
    for _ in range(ROUNDS):
        for which, groups in enumerate(pair):
            cpu_s, begin = _cpu_s(prometheus.process.pid), _allocated(prometheus)
            for rule in (rule for group in groups for rule in group["rules"]):
                body = urllib.parse.urlencode({"query": f"count(\n{rule['expr']}\n)", "time": str(now)}).encode()
                with urllib.request.urlopen(prometheus.url + "/api/v1/query", body, timeout=600) as response:
                    response.read()
            spent = _cpu_s(prometheus.process.pid) - cpu_s, (_allocated(prometheus) - begin) / 1e6
            least[which] = min(least[which][0], spent[0]), min(least[which][1], spent[1])
    return least


def _allocated(prometheus: Server) -> float:
    return _sum(_own(prometheus), "go_memstats_alloc_bytes_total")


def _simulated(nodes: int, minutes: int) -> list[dict[str, str]]:
    """Return the nodes' series as promtool takes them."""
    count, values = 60 * minutes // STEP_S + 1, dict[str, dict[int, str]]()
    for number in range(nodes):
        pages, instance = NodePages(Node(0, number, 8), 0.0), f'job="gpuwatch",instance="sim-{number:05d}:9478"'
        for place in range(count):
            body = pages.body(place * STEP_S)
            values.setdefault(f"up{{{instance}}}", {})[place] = str(int(body is not None))
            for name, labels, value in filter(None, map(_parts, (body or b"").decode().splitlines())):
                values.setdefault(f"{name}{{{','.join(filter(None, (instance, labels)))}}}", {})[place] = value
    return [
        {
            "series": series,
            "values": " ".join(seen.get(at, "stale" if at - 1 in seen else "_") for at in range(count)),
        }
        for series, seen in values.items()
    ]


def _parts(line: str) -> tuple[str | Any, ...] | None:
    found = _SERIES.match(line)
    return found.groups() if found else None


def _recorded(
    folder: Path, groups: Groups, series: list[dict[str, str]], names: list[str], minutes: int
) -> dict[str, dict[str, float]]:
    """Return by name what is recorded, by labels and time: what promtool reports instead of what it should expect."""
    asked = [
        {
            "expr": f'label_replace({{__name__="{name}"}}, "asked", "{name} {at}", "", "")',
            "eval_time": f"{at}m",
            "exp_samples": [{"labels": '{expected="nothing"}', "value": 1}],
        }
        for name in names
        for at in (minutes // 2, minutes)
    ]
    test = {"interval": f"{STEP_S}s", "input_series": series, "promql_expr_test": asked}
    order = sorted(
        (group["name"] for group in groups), key=["gpuwatch-gpus", "gpuwatch-states"].__contains__, reverse=True
    )
    files = {"rule_files": ["rules.yml"], "evaluation_interval": "1m", "group_eval_order": order, "tests": [test]}
    (folder / "rules.yml").write_text(json.dumps({"groups": groups}))
    (folder / "test.yml").write_text(json.dumps(files))
    done = subprocess.run(["promtool", "test", "rules", str(folder / "test.yml")], capture_output=True, text=True)
    found: dict[str, dict[str, float]] = {}
    for line in (done.stdout + done.stderr).splitlines():
        for labels, value in _GOT.findall(line.strip().removeprefix("got: ")) if "got: " in line else ():
            name = re.search(r'asked="(\S+) ', labels)
            assert name is not None
            found.setdefault(name[1], {})[labels] = float(value)
    return found


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    main()
