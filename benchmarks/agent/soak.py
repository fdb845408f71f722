"""An hour of an agent while runs come and go, 64 ranks × 100 steps/s: it must not grow. Goes to docs/evidence/agent.md.

    python -m benchmarks.agent.soak [--minutes 60]

Eight jobs of eight ranks. Each lasts one to four minutes, ends with a good-bye or without a word, and another run
follows it. The history may take 0.2 GiB, so that its oldest part is deleted all the time. A process sends for the ranks
of its run, and waits when the agent is slow.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import tempfile
import time
from multiprocessing import get_context
from multiprocessing.context import ForkProcess
from multiprocessing.queues import Queue
from pathlib import Path

from benchmarks.agent.load import EVERY_S, Rank
from benchmarks.agent.page import write_part
from benchmarks.agent.processes import agent, cpu_s, resident_mb, series_on, write_gpus
from gpuwatch import wire
from gpuwatch.hook.identity import identify
from gpuwatch.host.proc import stat
from gpuwatch.wire.sockets import ZmqSender
from tests.nvml.fake import FakeNvml

_JOBS, _RANKS, _RATE = 8, 8, 100
_KEEP_GIB = 0.2
_FORK = get_context("fork")


def job(endpoint: str, name: str, seconds: float, says_bye: bool, done: Queue[int]) -> None:
    """Be the ranks of one run for some time; put how many steps were sent."""
    pid, boot, sender = os.getpid(), identify().boot_id, ZmqSender(endpoint)
    ranks = [Rank(rank, pid, stat(pid).start_ticks, (), boot, name) for rank in range(_RANKS)]

    def put(frame: bytes) -> None:
        while not sender.send(frame):
            time.sleep(0.002)  # the socket takes 64 at a time

    begin_s = time.monotonic()
    for half in range(1, int(seconds / EVERY_S) + 1):
        time.sleep(max(0.0, begin_s + half * EVERY_S - time.monotonic()))
        for rank in ranks:
            for frame in rank.frames(int(_RATE * EVERY_S), half % 2 == 1):
                put(frame)
    for rank in ranks if says_bye else ():
        last = wire.decode(rank.steps_message(0, time.monotonic_ns()))
        assert isinstance(last, wire.Steps)
        put(wire.encode(wire.Bye(last.origin, last.run, last.rank, last.totals)))
    time.sleep(1)
    sender.close()
    done.put(sum(rank.steps for rank in ranks))


def jobs(endpoint: str, seconds: float, done: Queue[tuple[int, int]]) -> None:
    """Keep as many jobs running as there are to be, each a process; put (runs, steps) in the end."""
    chance, end_s, sent = random.Random(7), time.monotonic() + seconds, _FORK.Queue()
    running: list[ForkProcess] = []
    runs = 0
    while (left_s := end_s - time.monotonic()) > 0 or running:
        running = [each for each in running if each.is_alive()]
        while left_s > 0 and len(running) < _JOBS:
            runs += 1
            lasts_s = min(left_s, chance.uniform(60, 240))
            running.append(
                _FORK.Process(target=job, args=(endpoint, f"soak-{runs}", lasts_s, chance.random() < 0.5, sent))
            )
            running[-1].start()
        time.sleep(0.5)
    done.put((runs, sum(sent.get() for _ in range(runs))))


def scrape(url: str) -> list[tuple[str, float]]:
    """Return the page's series; a machine that is busy with other things may take a while."""
    for _ in range(12):
        with contextlib.suppress(OSError):
            return series_on(f"{url}/metrics")
    raise SystemExit(f"{url} does not answer")


def soak(directory: Path, minutes: int) -> list[str]:
    """Return the table, a line every five minutes."""
    nvml = FakeNvml(directory)
    write_gpus(nvml, [])
    lines = [
        "| minute | resident MB | descriptors | threads | series | history MB | CPU of a core |",
        "|---|---|---|---|---|---|---|",
    ]
    done: Queue[tuple[int, int]] = _FORK.Queue()
    with agent(directory, nvml, "--keep-gib", str(_KEEP_GIB)) as (pid, url, endpoint):
        load = _FORK.Process(target=jobs, args=(endpoint, 60.0 * minutes, done))
        load.start()
        begin_s, cpu = time.monotonic(), cpu_s(pid)
        for minute in range(5, minutes + 1, 5):
            time.sleep(max(0.0, begin_s + 60 * minute - time.monotonic()))
            page, now = scrape(url), cpu_s(pid)
            size = sum(each.stat().st_size for each in directory.glob("history.db*")) / 1e6
            held = [len(list(Path(f"/proc/{pid}/{kind}").iterdir())) for kind in ("fd", "task")]
            shown = f"{resident_mb(pid):.0f} | {held[0]} | {held[1]} | {len(page)} | {size:.0f}"
            lines.append(f"| {minute} | {shown} | {100 * (now - cpu) / 300:.1f}% |")
            print(lines[-1], flush=True)
            cpu = now
        runs, steps = done.get()
        time.sleep(15)
        page = scrape(url)
    load.join()
    counts = {name: 0 for name in ("step_records_lost", "messages_rejected", "run_failures", "history_failures")}
    for name, value in page:
        for each in counts:
            counts[each] += round(value) if name.startswith(f"gpuwatch_{each}_total") else 0
    output = ", ".join(f"{each.replace('_', ' ')} {count}" for each, count in counts.items())
    return [*lines, "", f"{minutes} minutes: {runs} runs of {_RANKS} ranks, {steps:,} steps sent; {output}."]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.agent.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=int, default=60)
    minutes = parser.parse_args().minutes
    with tempfile.TemporaryDirectory() as name:
        write_part("soak", soak(Path(name), minutes), os.getloadavg()[0])


if __name__ == "__main__":
    main()
