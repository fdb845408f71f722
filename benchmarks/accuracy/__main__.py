"""What gpuwatch reports next to what was injected: a table of scenarios, in real time, each in a process of its own.

    python -m benchmarks.accuracy [--seconds 3] [--only NAME] [--device asyncdev|cuda] [--json] [--write]

Each scenario trains on a torch device, twice: watched by the host's clock alone, then by the device's events. The
device is one without hardware whose work only takes time (`benchmarks/async_device`), or a real GPU with
`--device cuda`. The truth comes from clocks in the scenario's own code and from the device's account of its own work,
never from gpuwatch. Exit status 1 when a state is off by more than 2 points of the wall time, a ledger does not close
to 100 ± 0.2 %, or the device's events were not used. `--write` writes docs/evidence/accuracy.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from benchmarks import ROOT
from benchmarks.accuracy.measure import ASYNCDEV, BUDGET, DEVICES, HOST, LEDGERS, Row, in_a_process, measure
from benchmarks.accuracy.page import line, page
from benchmarks.prose import wrapped


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accuracy", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a run (default 3)")
    parser.add_argument("--only", metavar="NAME", help="one scenario")
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    parser.add_argument("--write", action="store_true", help="write docs/evidence/accuracy.md")
    parser.add_argument("--ledger", choices=LEDGERS, help="one ledger")
    parser.add_argument("--device", choices=DEVICES, default=ASYNCDEV, help="what to train on (default asyncdev)")
    parser.add_argument(
        "--budget", type=float, default=BUDGET, help="share of the step time for the hook (default 0.2)"
    )
    parser.add_argument("--here", action="store_true", help="in this process, as JSON")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    if options.here:
        print(
            json.dumps(
                asdict(measure(options.only, options.ledger or HOST, options.seconds, options.device, options.budget))
            )
        )
        return 0
    from benchmarks.accuracy.scenarios import SCENARIOS

    if options.device == ASYNCDEV:
        from benchmarks.async_device import build

        build()
    names = [scenario.name for scenario in SCENARIOS if options.only in (None, scenario.name)]
    if not names:
        sys.exit(f"no scenario is called {options.only!r}; there are: {', '.join(s.name for s in SCENARIOS)}")
    rows: list[Row] = []
    for name in names:
        for ledger in [options.ledger] if options.ledger else LEDGERS:
            row = in_a_process(name, ledger, options.seconds, options.device, options.budget)
            rows.append(row)
            print(json.dumps(asdict(row)) if options.json else f"{ledger:6} {line(row)}", flush=True)
    if options.write:
        (ROOT / "docs" / "evidence" / "accuracy.md").write_text(wrapped(page(rows, options.seconds)))
    broken = [row for row in rows if not row.holds]
    print(f"{len(rows) - len(broken)} of {len(rows)} rows hold", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
