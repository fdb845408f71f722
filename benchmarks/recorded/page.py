"""The section of docs/evidence/accuracy.md on recorded GPUs."""

from __future__ import annotations

from pathlib import Path

from benchmarks.recorded.replay import compare
from benchmarks.recorded.trace import load

FIXTURES = Path(__file__).parents[2] / "tests" / "fixtures" / "traces"


def accuracy_section() -> str:
    """Return the section of docs/evidence/accuracy.md on the timelines in the repository."""
    rows = [compare(load(path)) for path in sorted(FIXTURES.glob("*.json.gz"))]
    lines = [
        "| timeline | GPU | steps | device busy, % | truth / reported / points: input_wait | transfer | compute | host_wait | input wait of a step off by, ms | verdict |",
        "|---|---|---:|---:|---|---|---|---|---:|---|",
    ]
    for row in rows:
        states = [
            "in compute: no optimizer"
            if state not in row["difference"]
            else f"{row['truth'].get(state, 0.0):.2f} / {row['ours'][state]:.2f} / {row['difference'][state]:+.2f}"
            for state in ("input_wait", "transfer", "compute", "host_wait")
        ]
        cells = [row["name"], row["gpu"], row["steps"], f"{row['busy']:.1f}", *states]
        lines.append(
            f"| {' | '.join(map(str, cells))} | {row['input_wait_error_ms']:.3f} | {row['verdict'].split(':')[0]} |"
        )
    table = "\n".join(lines)
    return f"""## Recorded GPUs

```
python -m benchmarks.recorded tests/fixtures/traces/*.json.gz
```

Times of public profiler traces of real GPUs (sources in `tests/fixtures/traces/README.md`), replayed through the real `Watch`, recorder, timeline and ledger: an event is reached when what
was launched before it on its stream is done. The truth is computed from the kernels by separate code. Bounds: 1 point in each state, 0.05 ms in each step's input wait.

{table}
"""
