"""One scenario seen by one ledger, in a process of its own: a `Row` of the table."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass

from benchmarks import ROOT

BOUND_POINTS = 2.0
BOUND_CLOSURE = 0.2
BUDGET = 0.2
"""The share of a step for the hook, so that every step is measured: past the default 1 % some are estimated."""
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
    from benchmarks.accuracy.lab import AsyncDevice, Lab, cuda_device
    from benchmarks.accuracy.scenarios import named

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
    """Run a scenario in a process of its own: a fork, which has torch already, or a fresh one where CUDA is set up.

    Raises: RuntimeError or CalledProcessError with the scenario's own error.
    """
    if device != CUDA:
        from benchmarks.async_device import in_a_fork

        row = in_a_fork(lambda: asdict(measure(name, ledger, seconds, device, budget)), 120 + round(10 * seconds))
        return Row(**row)
    command = [sys.executable, "-m", "benchmarks.accuracy", "--only", name, "--ledger", ledger, "--device", device]
    command += ["--here", "--seconds", str(seconds), "--budget", str(budget)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=300 + 10 * seconds, cwd=ROOT)
    return Row(**json.loads(done.stdout.splitlines()[-1]))
