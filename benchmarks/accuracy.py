"""What gpuwatch reports next to what was injected: a table of scenarios, in real time, each in a process of its own.

python benchmarks/accuracy.py [--seconds 3] [--only NAME] [--device asyncdev|cuda] [--json] [--write]

Each scenario trains on a torch device, twice: watched by the host's clock alone, then by the device's events. The device is one without
hardware whose work only takes time (`benchmarks/async_device`), or a real GPU with `--device cuda`. The truth comes from clocks in the
scenario's own code and from the device's account of its own work, never from gpuwatch. Exit status 1 when a state is off by more than 2
points of the wall time, a ledger does not close to 100 ± 0.2 %, or the device's events were not used. `--write` writes docs/evidence/accuracy.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from prose import wrapped

sys.path.insert(0, str(Path(__file__).parents[1]))

BOUND_POINTS = 2.0
BOUND_CLOSURE = 0.2
BUDGET = 0.2
"""Of the step's time the hook may take so much, so that every step is measured: past the default 1 % some are estimated."""
PAGE = Path(__file__).parents[1] / "docs" / "evidence" / "accuracy.md"
HOST, DEVICE = LEDGERS = ("host", "device")
ASYNCDEV, CUDA = DEVICES = ("asyncdev", "cuda")


@dataclass(frozen=True)
class Row:
    """One scenario seen by one ledger. Shares in percent of the wall time."""

    scenario: str
    injected: str
    ledger: str
    truth: dict[str, float]
    reported: dict[str, float]
    closure: float
    """Sum of the reported states in percent of the wall time on the scenario's own clock."""
    steps: int
    wall_s: float
    device: str = ASYNCDEV
    timeline: str = HOST
    """Which one gpuwatch has used."""

    @property
    def worst(self) -> tuple[str, float]:
        """The state that is most off, and by how many points."""
        states = {*self.truth, *self.reported}
        errors = {state: self.reported.get(state, 0.0) - self.truth.get(state, 0.0) for state in states}
        return max(errors.items(), key=lambda item: abs(item[1]))

    @property
    def holds(self) -> bool:
        is_right = abs(self.worst[1]) <= BOUND_POINTS and abs(self.closure - 100) <= BOUND_CLOSURE
        return is_right and self.timeline == self.ledger


def measure(name: str, ledger: str, seconds: float, device: str = ASYNCDEV, budget: float = BUDGET) -> Row:
    """Run a scenario in this process, which has the device from then on."""
    from accuracy_lab import AsyncDevice, Lab, cuda_device
    from accuracy_scenarios import named

    scenario = named(name)
    if device == CUDA:
        from benchmarks.turns import take_the_gpu

        take_the_gpu()
    lab = Lab(seconds, cuda_device() if device == CUDA else AsyncDevice(), ledger == DEVICE, budget)
    scenario.run(lab)
    report = lab.finish()
    truth, wall_ns = lab.true_ns(), lab.truth.wall_ns
    assert sum(truth.values()) == wall_ns
    return Row(
        scenario=name,
        injected=scenario.injected,
        ledger=ledger,
        truth={state: 100 * ns / wall_ns for state, ns in truth.items() if ns},
        reported={state: 100 * s / report.duration_s for state, s in report.states.items() if s},
        closure=100 * sum(report.states.values()) / (wall_ns / 1e9),
        steps=report.steps,
        wall_s=wall_ns / 1e9,
        device=device,
        timeline=str(report.timeline),
    )


def in_a_process(name: str, ledger: str, seconds: float, device: str = ASYNCDEV, budget: float = BUDGET) -> Row:
    """Run a scenario in a process of its own: a fork, which has torch already, or a fresh one where CUDA is to be set up.

    Raises: RuntimeError or CalledProcessError with the scenario's own error.
    """
    if device != CUDA:
        from benchmarks.async_device import in_a_fork

        row = in_a_fork(lambda: asdict(measure(name, ledger, seconds, device, budget)), 120 + round(10 * seconds))
        return Row(**row)
    command = [sys.executable, __file__, "--only", name, "--ledger", ledger, "--device", device, "--here"]
    command += ["--seconds", str(seconds), "--budget", str(budget)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=300 + 10 * seconds)
    return Row(**json.loads(done.stdout.splitlines()[-1]))


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
python benchmarks/accuracy.py --write
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
    """Return the section on replayed timelines of real GPUs; empty where `recorded.py` has none."""
    try:
        from recorded import accuracy_section
    except ImportError:
        return ""
    return f"\n{accuracy_section()}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
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
    from accuracy_scenarios import SCENARIOS

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
        PAGE.write_text(wrapped(page(rows, options.seconds)))
    broken = [row for row in rows if not row.holds]
    print(f"{len(rows) - len(broken)} of {len(rows)} rows hold", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
