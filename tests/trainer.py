"""A training whose truth is known: it keeps its own clock around everything that it makes slow.

Run as `python tests/trainer.py --seconds 20 --wait-ms 30 --compute-ms 20`; SIGUSR1 ends it sooner. Each line on stdout
is the truth up to then as JSON, with the time ("at", Unix): about one a second, and one at the end.
"""

from __future__ import annotations

import argparse
import json
import signal
import time

import torch
from torch.utils.data import DataLoader, Dataset

import gpuwatch
from gpuwatch.hook import publisher
from gpuwatch.wire import sockets

SPENT = {"input_wait": 0.0, "compute": 0.0}
# Neither its own thread nor the agent hangs at its end, though they may get no core for seconds.
publisher._CLOSE_S, publisher._CONNECT_TRIES, sockets._LINGER_MS = 30.0, 300, 5_000


def spend(state: str, seconds: float) -> None:
    begin = time.perf_counter()
    time.sleep(seconds)
    SPENT[state] += time.perf_counter() - begin


class Slow(Dataset):  # type: ignore[type-arg]
    """A dataset whose batches take a known time, in the training process."""

    def __init__(self, wait_s: float) -> None:
        self.wait_s = wait_s

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        spend("input_wait", self.wait_s)
        return torch.full((8,), float(index))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--wait-ms", type=float, default=30)
    parser.add_argument("--compute-ms", type=float, default=20)
    arguments = parser.parse_args()
    asked_to_end: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: asked_to_end.append(number))
    model = torch.nn.Linear(8, 1)
    begin, steps = time.perf_counter(), 0

    def publish() -> None:
        wall = time.perf_counter() - begin
        print(json.dumps({**SPENT, "wall": wall, "steps": steps, "at": time.time()}), flush=True)

    published = begin
    for batch in gpuwatch.watch(DataLoader(Slow(arguments.wait_ms / 1e3), batch_size=1)):
        model.zero_grad()
        model(batch).sum().backward()  # an optimizer would import torch._dynamo, for a second and a half of a processor
        spend("compute", arguments.compute_ms / 1e3)
        steps += 1
        if time.perf_counter() - published > 1:
            publish()
            published = time.perf_counter()
        if asked_to_end or time.perf_counter() - begin > arguments.seconds:
            break
    publish()


if __name__ == "__main__":
    main()
