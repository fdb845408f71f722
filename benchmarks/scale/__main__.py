"""Prometheus with gpuwatch's rules against simulated nodes: what it costs, and what recording rules save.

    python -m benchmarks.scale --nodes 100 --json scale-100.json
    python -m benchmarks.scale --nodes 1000 --json scale-1000.json
    python -m benchmarks.scale --page scale-100.json scale-1000.json > docs/evidence/scale.md

A run takes `--minutes` (an hour and a bit, so that there is an hour to ask for) and then some more to measure queries.
Prometheus and `python -m benchmarks.simulation` run on this machine with whatever else runs on it: CPU seconds and wall
time are both given, and the load.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from benchmarks.prose import wrapped
from benchmarks.scale.measure import Setup, measure
from benchmarks.scale.page import page


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scale", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=100)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument(
        "--minutes", type=float, default=63, help="how long Prometheus scrapes; the first ten are not measured"
    )
    parser.add_argument("--scrape", type=int, default=5, help="scrape interval in seconds; 5 is what deploy/ uses")
    parser.add_argument(
        "--evaluate", type=int, default=15, help="evaluation interval in seconds; 15 is what deploy/ uses"
    )
    parser.add_argument(
        "--nice", type=int, default=0, help="priority of Prometheus and the fleet on a machine with other work"
    )
    parser.add_argument("--json", type=Path, help="write what was measured here instead of printing it")
    parser.add_argument(
        "--page", type=Path, nargs="+", help="print docs/evidence/scale.md from these files; measure nothing"
    )
    options = parser.parse_args()
    if options.page:
        print(wrapped(page([json.loads(path.read_text()) for path in options.page])), end="")
        return
    setup = Setup(options.nodes, options.gpus, options.minutes, options.scrape, options.evaluate, options.nice)
    text = json.dumps(asdict(measure(setup)), indent=1)
    if options.json:
        options.json.write_text(text + "\n")
    else:
        print(text)


if __name__ == "__main__":
    main()
