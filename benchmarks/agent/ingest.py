"""How many step records a core takes in: received, accounted, stored. Each stage is measured apart, in CPU time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from itertools import count as count_up
from pathlib import Path

from benchmarks.agent.load import Rank
from gpuwatch import wire
from gpuwatch_agent.history import History, StepBatch, Tick
from gpuwatch_agent.receiver import Arrival, Receiver
from gpuwatch_agent.runs import RunRegistry

BATCHES = (1, 64, 200, 1024)
_STEPS = 400_000
_TURNS = 3
_RANKS = 64


class NoSocket:
    """A receiver's end that nothing comes from."""

    endpoints = ()


def step_batches(arrivals: Iterable[Arrival]) -> list[StepBatch]:
    """Return the step records of messages, as the sampler keeps them."""
    return [
        StepBatch(
            arrival.message.run,
            arrival.message.rank,
            arrival.message.first_step,
            arrival.time_s,
            arrival.message.origin.time_ns - arrival.message.origin.monotonic_ns,
            arrival.message.columns,
        )
        for arrival in arrivals
        if isinstance(arrival.message, wire.Steps)
    ]


def cpu(function: Callable[[], None]) -> float:
    """Return the CPU seconds that a function takes."""
    begin = time.process_time()
    function()
    return time.process_time() - begin


def frames(batch: int, count: int) -> list[bytes]:
    """Return `count` messages of `batch` steps each, as 64 ranks send them in turns."""
    hooks = [Rank(rank, 1, 1, (), "boot") for rank in range(_RANKS)]
    return [hooks[number % _RANKS].steps_message(batch, time.monotonic_ns()) for number in range(count)]


def stages(batch: int, count: int, directory: Path) -> tuple[float, float, float]:
    """Return each stage's CPU seconds for `count` messages of `batch` steps. Raises: AssertionError for a lost step."""
    sent = frames(batch, count)
    seconds = count_up(0.0)  # each message comes a second later: within a process's quota
    receiver, book = Receiver(NoSocket(), lambda: next(seconds)), RunRegistry("boot")  # type: ignore[arg-type]

    def receive() -> None:
        for frame in sent:
            receiver.take(frame)

    received = cpu(receive)
    arrivals = receiver.drain()
    assert len(arrivals) == count and not receiver.rejected

    def account() -> None:
        for arrival in arrivals:
            assert book.apply(arrival.message, arrival.monotonic_ns, arrival.time_s)

    accounted = cpu(account)
    assert sum(run.counts.steps for run in book.runs.values()) == batch * count
    directory.mkdir()
    history = History(directory / "history.db")
    a_second = max(1, 16_000 // batch)

    def store() -> None:
        for second, begin in enumerate(range(0, count, a_second)):
            batches = step_batches(arrivals[begin : begin + a_second])
            assert history.commit(Tick(1_790_000_000.0 + second, [], {}, [], batches, []))

    stored = cpu(store)
    history.close()
    return received, accounted, stored


def ingest_part(directory: Path) -> list[str]:
    """Return million steps a second and core by size of message: of each stage, and what 16,000 steps/s cost."""
    lines = [
        "| steps a message | received: decoded and checked | received and accounted | stored | cost of 16,000 steps/s |",
        "|---|---|---|---|---|",
    ]
    for batch in BATCHES:
        count = max(1, _STEPS // max(batch, 20))
        best = min((stages(batch, count, directory / f"{batch}-{turn}") for turn in range(_TURNS)), key=sum)
        million = batch * count / 1e6
        received, accounted, stored = best
        share = 16_000 * sum(best) / (batch * count)
        cells = (million / received, million / (received + accounted), million / stored)
        lines.append(
            f"| {batch:,} | " + " | ".join(f"{cell:.1f} M/s" for cell in cells) + f" | {100 * share:.2f}% of a core |"
        )
    return lines
