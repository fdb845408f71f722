"""Replay recorded GPU timelines through the real `Watch`, and compare its ledger with the recordings' own times.

    python -m benchmarks.recorded FILE...           # a table for each file
    python -m benchmarks.recorded FILE... --json    # one JSON object: files, and a summary
    python -m benchmarks.recorded tests/fixtures/traces/*.json.gz

A fake clock walks through the host's fetches, copies and optimizer steps. An event that is recorded at time t on a
stream is reached at the later of t and the end of what was launched on that stream before t. Recorder, device timeline,
booking, ledger and diagnosis are the real ones. The truth is computed by `trace.py`. A copy that overlaps another one
on the host, or a fetch's edge, is cut there: one thread does one thing at a time.

Exit status: 0 when all bounds hold (1 point of the window in each state, 0.05 ms in each step's input wait, a closed
ledger), 1 when one is exceeded, 2 when a file cannot be read. The other files are replayed all the same.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.recorded.replay import compare
from benchmarks.recorded.trace import TraceError, load


def as_text(row: dict[str, Any]) -> str:
    """Return one file's comparison for people."""
    lines = [
        f"{row['name']} · {row['gpu']} · {row['window_s']:.3f} s, {row['steps']} steps",
        f"  {row['verdict']}  ({row['timeline']} timeline, {row['coverage']:.0%} of the steps)",
        f"  {'':<12} {'truth':>8} {'ours':>8} {'points':>8}",
    ]
    lines += [
        f"  {state:<12} {row['truth'].get(state, 0.0):8.2f} {row['ours'][state]:8.2f} {by:+8.2f}"
        for state, by in row["difference"].items()
    ]
    hidden = row["hidden"]
    lines.append(
        f"  {'hidden':<12} {hidden['truth']:8.2f} {hidden['ours']:8.2f} {hidden['ours'] - hidden['truth']:+8.2f}"
    )
    lines.append(
        f"  device busy {row['busy']:.2f}%, idle inside compute {row['compute_idle']:.2f}%; "
        f"input wait of a step off by {row['input_wait_error_ms']:.3f} ms at most"
    )
    for finding in row["findings"]:
        low, high = finding["predicted_range"] or (None, finding["predicted_speedup"])
        gain = "" if high is None else f": up to {high}×" if low is None else f": {low}–{high}×"
        lines.append(f"  finding {finding['cause']}{gain}")
    lines += [f"  EXCEEDED {each}" for each in row["exceeded"]]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recorded", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    options = parser.parse_args(arguments)
    rows, unread = [], []
    for path in options.files:
        try:
            row = {"file": str(path), **compare(load(path))}
        except TraceError as error:
            unread.append(str(error))
            print(error, file=sys.stderr)
            continue
        rows.append(row)
        if not options.json:
            print(as_text(row), end="\n\n")
    exceeded = sum(bool(row["exceeded"]) for row in rows)
    points = max((abs(by) for row in rows for by in row["difference"].values()), default=0.0)
    wait_ms = max((row["input_wait_error_ms"] for row in rows), default=0.0)
    summary = {
        "files": len(options.files),
        "exceeded": exceeded,
        "unread": len(unread),
        "largest_difference_points": points,
        "largest_input_wait_error_ms": wait_ms,
    }
    if options.json:
        print(json.dumps({"files": rows, "unread": unread, "summary": summary}, indent=1))
    else:
        print(
            f"{len(rows)} replayed, {exceeded} beyond a bound, {len(unread)} not read; "
            f"states off by {points:.2f} points at most, a step's input wait by {wait_ms:.3f} ms"
        )
    return 2 if unread else 1 if exceeded else 0


if __name__ == "__main__":
    sys.exit(main())
