"""docs/evidence/accuracy.md: rows of its tables, and what stands around them."""

from __future__ import annotations

import os
import platform

from benchmarks.accuracy.measure import BOUND_CLOSURE, BOUND_POINTS, BUDGET, CUDA, DEVICE, HOST, Row


def shares(states: dict[str, float]) -> str:
    """Return shares as text, largest first; what is under half a point is left out."""
    ordered = sorted(states.items(), key=lambda item: -item[1])
    return " · ".join(f"{state} {share:.1f}" for state, share in ordered if share >= 0.5)


HEAD = """| scenario | injected | truth, % of wall time | reported | worst error, points | closes, % |
|---|---|---|---|---:|---:|"""


def line(row: Row) -> str:
    """Return a row of a Markdown table."""
    state, error = row.worst
    over = "" if row.holds else " **over**" if row.timeline == row.ledger else f" **by the {row.timeline}'s clock**"
    cells = (row.scenario, row.injected, shares(row.truth), shares(row.reported), f"{error:+.2f} {state}{over}")
    return f"| {' | '.join(cells)} | {row.closure:.2f} |"


def page(rows: list[Row], seconds: float) -> str:
    """Return docs/evidence/accuracy.md."""
    import torch

    machine = f"{os.cpu_count()} cores, " + (torch.cuda.get_device_name() if rows[0].device == CUDA else "no GPU")
    text = f"""# Accuracy: injected and reported

```
python -m benchmarks.accuracy --write
```

Written by that command on {platform.system()}, {machine}, Python {platform.python_version()}, torch {torch.__version__}, {seconds:g} s a run, every run in a separate process.
`--device cuda` runs the same scenarios on a GPU.

The bound is {BOUND_POINTS:g} points of the wall time in each state, and a ledger that closes to 100 ± {BOUND_CLOSURE} %. Each scenario trains on a torch device and runs twice. The truth is
never gpuwatch's own: it comes from clocks in the scenario's dataset and body, and from the device's own record of its work and idle time.

## Host clock

The ledger without device events must show what the host's thread did. {summary([row for row in rows if row.ledger == HOST])}

{section([row for row in rows if row.ledger == HOST])}

## Real torch device

The ledger from device events must show the time in which the device itself was idle. A wait behind queued work is not starvation, so the same loop shows less `input_wait`.
{summary([row for row in rows if row.ledger == DEVICE])}

{"The device is the GPU; events around each launch and copy give the truth." if rows[0].device == CUDA else ASYNCDEV_IS}
gpuwatch detects the device like a GPU: by `torch.accelerator`, the optimizers' hook and `Tensor.to`. The hook's budget is {BUDGET:.0%} here, so that every step is measured:
with the default of 1 %, device events are omitted on some steps, which are then estimated (`--budget 0.01`).

Idle time of the device between the launches of one step counts as `compute`, in the truth too, because events cannot detect it. So does the time until the host requests the next batch if there is no optimizer step.

{section([row for row in rows if row.ledger == DEVICE])}
"""
    return text + recorded_gpus()


ASYNCDEV_IS = """The device has no hardware but is a real device for torch (`benchmarks/async_device`, a PrivateUse1 backend in C++): tensors, autograd, optimizers, `torch.Event` and several streams. Its results are real and computed by the CPU immediately; its work only takes time on its streams, and reading a result waits for this work."""


def summary(rows: list[Row]) -> str:
    """Return in a sentence whether all rows hold, and how far off the worst is."""
    worst = max(rows, key=lambda row: abs(row.worst[1]))
    off = max(abs(row.closure - 100) for row in rows)
    broken = ", ".join(row.scenario for row in rows if not row.holds)
    return (
        f"{f'**Broken by: {broken}.**' if broken else 'Every row holds.'} The worst error is {abs(worst.worst[1]):.2f} points "
        f"({worst.scenario}, `{worst.worst[0]}`); the worst closure is {off:.3f} % off."
    )


def section(rows: list[Row]) -> str:
    return "\n".join([HEAD, *map(line, rows)])


def recorded_gpus() -> str:
    """Return the section on replayed timelines of real GPUs; empty without pytest, which the replay needs."""
    try:
        from benchmarks.recorded.page import accuracy_section
    except ImportError:
        return ""
    return f"\n{accuracy_section()}"
