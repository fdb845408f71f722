"""What gpuwatch reports beside what was injected: a table of scenarios, in real time, each in a process of its own.

python benchmarks/accuracy.py [--seconds 3] [--only NAME] [--json] [--write]

Each scenario runs twice: watched by the host's clock alone, then by the device's events. The truth comes from clocks in the scenario's own
code and from the device's account of its own work, never from gpuwatch. Exit status 1 when a state is off by more than 2 points of the wall
time, or a ledger does not close to 100 ± 0.2 %. `--write` puts the table into docs/accuracy.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

BOUND_POINTS = 2.0
BOUND_CLOSURE = 0.2
PAGE = Path(__file__).parents[1] / "docs" / "accuracy.md"
HOST, DEVICE, CUDA = "host", "device", "cuda"
LEDGERS = {HOST: "host clock", DEVICE: "device (model)", CUDA: "device (CUDA)"}


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

    @property
    def worst(self) -> tuple[str, float]:
        """The state that is most off, and by how many points."""
        states = {*self.truth, *self.reported}
        errors = {state: self.reported.get(state, 0.0) - self.truth.get(state, 0.0) for state in states}
        return max(errors.items(), key=lambda item: abs(item[1]))

    @property
    def holds(self) -> bool:
        return abs(self.worst[1]) <= BOUND_POINTS and abs(self.closure - 100) <= BOUND_CLOSURE


def measure(name: str, ledger: str, seconds: float) -> Row:
    """Run a scenario in this process."""
    from accuracy_lab import CudaDevice, Lab, ModelDevice
    from accuracy_scenarios import named

    scenario = named(name)
    lab = Lab(seconds, CudaDevice() if ledger == CUDA else ModelDevice(), by_device=ledger != HOST)
    scenario.run(lab)
    report = lab.finish()
    truth, wall_ns = lab.true_ns(), lab.truth.wall_ns
    assert sum(truth.values()) == wall_ns
    assert report.timeline == ("host" if ledger == HOST else "device"), "the device's events were not used"
    return Row(
        scenario=name,
        injected=scenario.injected,
        ledger=ledger,
        truth={state: 100 * ns / wall_ns for state, ns in truth.items() if ns},
        reported={state: 100 * s / report.duration_s for state, s in report.states.items() if s},
        closure=100 * sum(report.states.values()) / (wall_ns / 1e9),
        steps=report.steps,
        wall_s=wall_ns / 1e9,
    )


def in_a_process(name: str, ledger: str, seconds: float) -> Row:
    """Run a scenario in a process of its own: a fork, which has torch already, or a fresh one where CUDA is to be set up.

    Raises: CalledProcessError, with the scenario's own error on stderr.
    """
    if ledger != CUDA:
        return Row(**json.loads(forked(lambda: json.dumps(asdict(measure(name, ledger, seconds))))))
    command = [sys.executable, __file__, "--only", name, "--ledger", ledger, "--seconds", str(seconds), "--here"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=300 + 10 * seconds)
    return Row(**json.loads(done.stdout.splitlines()[-1]))


def forked(work: Callable[[], str]) -> str:
    """Return what `work` returns in a forked process. Raises: CalledProcessError if it failed there."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.write(writing, work().encode())
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status:
        raise subprocess.CalledProcessError(status, "a forked scenario")
    return said


def shares(states: dict[str, float]) -> str:
    """Return shares as text, largest first; what is under half a point is left out."""
    ordered = sorted(states.items(), key=lambda item: -item[1])
    return " · ".join(f"{state} {share:.1f}" for state, share in ordered if share >= 0.5)


def table(rows: list[Row], with_cuda: bool) -> list[str]:
    """Return the rows as a Markdown table."""
    lines = [
        "| scenario | injected | ledger | must show, % of wall time | showed | worst error, points | closes, % |",
        "|---|---|---|---|---|---:|---:|",
    ]
    last = None
    for row in rows:
        state, error = row.worst
        head = ("", "") if row.scenario == last else (row.scenario, row.injected)
        last = row.scenario
        lines.append(
            f"| {head[0]} | {head[1]} | {LEDGERS[row.ledger]} | {shares(row.truth)} | {shares(row.reported)} "
            f"| {error:+.2f} {state}{'' if row.holds else ' **over**'} | {row.closure:.2f} |"
        )
    if not with_cuda:
        lines.append(f"| all of them | | {LEDGERS[CUDA]} | not run here: no GPU | | | |")
    return lines


def page(rows: list[Row], seconds: float, with_cuda: bool) -> str:
    """Return docs/accuracy.md."""
    import torch

    worst = max(rows, key=lambda row: abs(row.worst[1]))
    off = max(abs(row.closure - 100) for row in rows)
    broken = [f"{row.scenario} ({LEDGERS[row.ledger]})" for row in rows if not row.holds]
    machine = f"{os.cpu_count()} cores, " + (torch.cuda.get_device_name() if with_cuda else "no GPU")
    text = f"""# Accuracy: injected and reported

```
python benchmarks/accuracy.py --write
```

Written by that command on {platform.system()}, {machine}, Python {platform.python_version()}, torch {torch.__version__}, {seconds:g} s a run, every run in a process of its own.

The bound is {BOUND_POINTS:g} points of the wall time in each state, and a ledger that closes to 100 ± {BOUND_CLOSURE} %. {"**Broken by: " + ", ".join(broken) + ".**" if broken else "Every row holds."}
The worst error of all is {abs(worst.worst[1]):.2f} points ({worst.scenario}, {LEDGERS[worst.ledger]}, `{worst.worst[0]}`); the worst closure is {off:.3f} % off.

Each scenario runs twice. The **host clock** row is the ledger where there are no device events: it must say what the host's thread did. The **device** row must say
what the device felt: a wait behind queued work is not starvation, and the same loop shows less `input_wait`. The truth is never gpuwatch's own: it comes from clocks in the scenario's
dataset and body, and from the device's account of its own work and idleness. The model device is a stream that is only time (`gpuwatch.testing.FakeDevice`), beside a real DataLoader, real
clocks and a real optimizer; on a machine with CUDA the same scenarios run on the GPU too, with events of their own as the truth.

`compute` in the device's ledger includes idle moments between the launches of one step, which events cannot see, and where no optimizer steps the time until the host asks for the next batch.
The hook's budget is 20 % here: the model device's own Python is in the hook's cost, and past the default 1 % device events would rest on some steps, which are estimated then.

"""
    return text + "\n".join(table(rows, with_cuda)) + "\n"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a run (default 3)")
    parser.add_argument("--only", metavar="NAME", help="one scenario")
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    parser.add_argument("--write", action="store_true", help="write docs/accuracy.md")
    parser.add_argument("--ledger", choices=LEDGERS, help="one ledger")
    parser.add_argument("--here", action="store_true", help="in this process, as JSON")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    if options.here:
        print(json.dumps(asdict(measure(options.only, options.ledger or HOST, options.seconds))))
        return 0
    import torch
    from accuracy_scenarios import SCENARIOS

    with_cuda = torch.cuda.is_available()
    ledgers = [options.ledger] if options.ledger else [HOST, DEVICE, *([CUDA] if with_cuda else [])]
    names = [scenario.name for scenario in SCENARIOS if options.only in (None, scenario.name)]
    if not names:
        sys.exit(f"no scenario is called {options.only!r}; there are: {', '.join(s.name for s in SCENARIOS)}")
    rows: list[Row] = []
    for name in names:
        for ledger in ledgers:
            row = in_a_process(name, ledger, options.seconds)
            rows.append(row)
            told: Any = json.dumps(asdict(row)) if options.json else "\n".join(table([row], True)[2:])
            print(told, flush=True)
    if options.write:
        PAGE.write_text(page(rows, options.seconds, with_cuda))
    broken = [row for row in rows if not row.holds]
    print(f"{len(rows) - len(broken)} of {len(rows)} rows hold", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
