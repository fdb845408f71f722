"""How many step records a core takes in: decoded, accounted, stored. Each stage measured apart, in CPU time of this process."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.agent_load import Rank
from gpuwatch import wire
from gpuwatch_agent.history import History, Tick
from gpuwatch_agent.receiver import Arrival, Receiver
from gpuwatch_agent.run_book import RunBook
from gpuwatch_agent.sampler import _step_batches

SECONDS = 2.0


class NoSocket:
    """A receiver's end that nothing comes from."""

    endpoints = ()


def cpu(function: Callable[[], None]) -> float:
    begin = time.process_time()
    function()
    return time.process_time() - begin


def frames(batch: int, count: int) -> list[bytes]:
    """Return `count` messages of `batch` steps each, as 64 ranks send them in turns."""
    hooks = [Rank(rank, 1, 1, (), "boot") for rank in range(64)]
    made = []
    for number in range(count):
        hook = hooks[number % len(hooks)]
        time.sleep(0)
        made.append(hook._steps(batch, time.monotonic_ns()))
    return made


def stages(batch: int, count: int, directory: Path) -> dict[str, float]:
    """Return the CPU seconds of each stage for `count` messages of `batch` steps."""
    sent = frames(batch, count)
    receiver, book = Receiver(NoSocket()), RunBook("boot")  # type: ignore[arg-type]
    spent = {"received": cpu(lambda: [receiver.take(frame) for frame in sent] and None)}
    arrivals: list[Arrival] = receiver.drain()
    assert len(arrivals) == count and not receiver.rejected

    def account() -> None:
        for arrival in arrivals:
            assert book.apply(arrival.message, arrival.monotonic_ns, arrival.time_s)

    spent["accounted"] = cpu(account)
    assert sum(run.counts.steps for run in book.runs.values()) == batch * count
    history = History(directory / f"{batch}.db")
    a_second = max(1, 16_000 // batch)

    def store() -> None:
        for second, begin in enumerate(range(0, count, a_second)):
            steps = _step_batches(arrivals[begin : begin + a_second])
            assert history.commit(Tick(1_790_000_000.0 + second, [], [], [], steps, []))

    spent["stored"] = cpu(store)
    history.close()
    return spent


def ingest_table(directory: Path) -> None:
    """Print steps a second and core by size of message."""
    print("\n## Ingest: million steps a second on one core\n")
    print("| steps a message | received | accounted | both | stored | 16,000 steps/s cost |")
    print("|---|---|---|---|---|---|")
    for batch in (1, 64, 200, 1024):
        count = 400_000 // max(batch, 20)
        spent = min(
            (stages(batch, count, Path(directory, str(n)).absolute()) for n in _dirs(directory)),
            key=lambda s: sum(s.values()),
        )
        steps = batch * count
        both = spent["received"] + spent["accounted"]
        cells = [
            steps / spent["received"] / 1e6,
            steps / spent["accounted"] / 1e6,
            steps / both / 1e6,
            steps / spent["stored"] / 1e6,
        ]
        share = 16_000 * sum(spent.values()) / steps
        print(f"| {batch} | " + " | ".join(f"{cell:.2f}" for cell in cells) + f" | {100 * share:.2f}% of a core |")
    assert wire.PROTOCOL_VERSION


def _dirs(directory: Path) -> list[int]:
    made = []
    for number in range(3):
        path = directory / f"{time.monotonic_ns()}"
        path.mkdir(parents=True)
        (directory / str(number)).unlink(missing_ok=True)
        (directory / str(number)).symlink_to(path)
        made.append(number)
    return made
