"""One training whose truth is known: it keeps its own clock around everything that it makes slow."""

from __future__ import annotations

import importlib.util
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from gpuwatch import Report

ROOT = Path(__file__).parents[3]
_SOURCES = "".join(path.read_text() for path in sorted((ROOT / "gpuwatch/integrations").glob("*.py")))
INTEGRATIONS = dict(re.findall(r'raise MissingFramework\(\s*"(\w+)",\s*"(.+?)",?\s*\)', _SOURCES))
"""What pip installs of each framework, by the name of its integration, which is that of its package."""

EPOCHS, BATCHES, BATCH_SIZE, EVAL_BATCHES = 2, 6, 4, 2
STEPS, SAMPLES = EPOCHS * BATCHES, EPOCHS * BATCHES * BATCH_SIZE
SAMPLE_S, COMPUTE_S, EVAL_S, SAVE_S = 0.01, 0.03, 0.06, 0.08


def queued_s() -> float:
    """Return how many seconds this thread was ready but not running; 0 where the kernel does not count them."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


@dataclass
class Truth:
    """Seconds that were really spent, by the state that they belong to."""

    spent_s: dict[str, float] = field(
        default_factory=lambda: {"input_wait": 0.0, "compute": 0.0, "eval": 0.0, "checkpoint": 0.0}
    )
    queued_before_s: float = field(default_factory=queued_s)

    def bound_s(self, duration_s: float) -> float:
        """Return how far a state may be off, in s: 2% of the time, and what other programs made this thread wait."""
        return 0.02 * duration_s + queued_s() - self.queued_before_s

    def spend(self, state: str, seconds: float) -> None:
        begin = time.perf_counter()
        time.sleep(seconds)
        self.spent_s[state] += time.perf_counter() - begin


def near(report: Report, truth: Truth) -> None:
    """Compare the waits, evaluations and checkpoints of a run with the truth."""
    bound_s = truth.bound_s(report.duration_s)
    for state in ("input_wait", "eval", "checkpoint"):
        ours, true = report.states.get(state, 0.0), truth.spent_s[state]
        assert ours == pytest.approx(true, abs=bound_s), (state, report.states, truth)


class Samples(Dataset):  # type: ignore[type-arg]
    """Samples that take a known time to make, in the training process."""

    def __init__(self, truth: Truth, count: int, state: str = "input_wait", seconds: float = SAMPLE_S) -> None:
        self.truth, self.count, self.state, self.seconds = truth, count, state, seconds

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[dict[str, torch.Tensor]]:
        """Return a batch's samples: what DataLoader asks for where there is such a method."""
        self.truth.spend(self.state, self.seconds * len(indices))
        return [{"x": torch.full((8,), float(index)), "labels": torch.zeros(1)} for index in indices]


class Stream(IterableDataset):  # type: ignore[type-arg]
    """The same without a length."""

    def __init__(self, truth: Truth, count: int) -> None:
        self.samples = Samples(truth, count)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return (self.samples[index] for index in range(self.samples.count))


class Model(torch.nn.Module):
    """A model with a known time for a forward pass, and for giving its state to a checkpoint."""

    def __init__(self, truth: Truth) -> None:
        super().__init__()
        self.truth = truth
        self.layer = torch.nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        state, seconds = ("compute", COMPUTE_S) if self.training else ("eval", EVAL_S)
        self.truth.spend(state, seconds)
        out = self.layer(x)
        return {"loss": ((out - labels) ** 2).mean(), "logits": out}

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        self.truth.spend("checkpoint", SAVE_S)
        return super().state_dict(*arguments, **options)


def collating(truth: Truth, state: str) -> Callable[[Any], Any]:
    """Return a function that collates samples and books its time to the state: milliseconds on a busy machine."""

    def collate(samples: Any) -> Any:
        begin = time.perf_counter()
        batch = default_collate(samples)
        truth.spent_s[state] += time.perf_counter() - begin
        return batch

    return collate


def train_loader(truth: Truth, samples: int = BATCHES * BATCH_SIZE) -> DataLoader[Any]:
    return DataLoader(Samples(truth, samples), batch_size=BATCH_SIZE, collate_fn=collating(truth, "input_wait"))


def eval_loader(truth: Truth) -> DataLoader[Any]:
    samples = Samples(truth, EVAL_BATCHES * BATCH_SIZE, "eval", 0.001)
    return DataLoader(samples, batch_size=BATCH_SIZE, collate_fn=collating(truth, "eval"))


def warm_up() -> None:
    """Have torch import what its first step imports: seconds, which would be most of so short a training."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    model(torch.zeros(1)).sum().backward()
    optimizer.step()


def require(package: str) -> Any:
    """Return a framework's module; without it the test is skipped, but fails where CI=true."""
    if os.environ.get("CI") == "true":
        return importlib.import_module(package)
    return pytest.importorskip(package, reason=f"{package} is not installed")


def need(package: str) -> None:
    """The same for what runs in a process of its own: nothing is imported here, which takes seconds."""
    if importlib.util.find_spec(package) is None:
        require(package)


def table(states: dict[str, float], truth: Truth, wall_s: float) -> str:
    """Return ledger and truth side by side, in seconds, for people."""
    rows = [f"{state} {states.get(state, 0.0):.3f} (true {spent:.3f})" for state, spent in truth.spent_s.items()]
    rest = {state: round(seconds, 3) for state, seconds in states.items() if state not in truth.spent_s}
    return f"wall {wall_s:.3f}: " + ", ".join(rows) + f", {rest}"
