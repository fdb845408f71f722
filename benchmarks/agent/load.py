"""Ranks that send what a hook sends at a fixed rate, without training: each a process with worker processes of its own.

python -m benchmarks.agent.load ENDPOINT RANKS STEPS_PER_S WORKERS SECONDS: prints the ranks' pids, and at the end what
was sent.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.queues import Queue

from gpuwatch import wire
from gpuwatch.hook.identity import identify
from gpuwatch.host.proc import stat
from gpuwatch.ledger.states import Ledger
from gpuwatch.wire.sockets import ZmqSender

EVERY_S = 0.5
_HELLO_EVERY = 2
_SLEEPER = ["sleep", "100000"]


@dataclass
class Rank:
    """One hook: what it has done so far, and the next messages."""

    rank: int
    pid: int
    ticks: int
    workers: tuple[int, ...]
    boot_id: str
    run: str = "bench"

    def __post_init__(self) -> None:
        self.ledger = Ledger(time.monotonic_ns())
        self.steps = 0
        self.phases_ns = dict.fromkeys(("data_wait", "transfer", "compute"), 0)

    def frames(self, count: int, hello: bool) -> Iterator[bytes]:
        """Yield the messages of half a second in which `count` steps were done."""
        now_ns = time.monotonic_ns()
        yield self.steps_message(count, now_ns)
        if hello:
            yield wire.encode(self._hello(now_ns))

    def steps_message(self, count: int, now_ns: int) -> bytes:
        """Return a message with so many steps since the last one."""
        begin_ns = self.ledger.watermark_ns
        each_ns = (now_ns - begin_ns) // max(1, count)
        wait_ns = each_ns * 3 // 10
        self.ledger.book_mixture({"input_wait": 3, "compute": 7}, now_ns)
        starts = [begin_ns + each_ns * number for number in range(count)]
        columns = {
            "start_ns": starts,
            "data_wait_ns": [wait_ns] * count,
            "transfer_ns": [0] * count,
            "compute_ns": [each_ns - wait_ns] * count,
            "samples": [32] * count,
        }
        first, self.steps = self.steps, self.steps + count
        self.phases_ns["data_wait"] += wait_ns * count
        self.phases_ns["compute"] += (each_ns - wait_ns) * count
        totals = wire.Totals(
            start_ns=self.ledger.start_ns,
            watermark_ns=self.ledger.watermark_ns,
            states_ns={state: ns for state, ns in self.ledger.totals_ns.items() if ns},
            phases_ns=dict(self.phases_ns),
            steps=self.steps,
            samples=32 * self.steps,
            records_dropped=0,
            overhead_ns=0,
        )
        packed = {name: wire.pack(column) for name, column in columns.items()} if count else {}
        return wire.encode(wire.Steps(self._origin(now_ns), self.run, self.rank, totals, "step", first, packed))

    def _hello(self, now_ns: int) -> wire.Hello:
        return wire.Hello(
            origin=self._origin(now_ns),
            run=self.run,
            name=self.run,
            job=self.run,
            rank=self.rank,
            world_size=8,
            pid=self.pid,
            process_start_ticks=self.ticks,
            pid_namespace=0,
            host="node",
            timeline="host",
            device="cuda",
            loader=wire.Loader(num_workers=len(self.workers), batch_size=32, worker_pids=self.workers),
            versions={"gpuwatch": "bench"},
            tags={},
        )

    def _origin(self, now_ns: int) -> wire.Origin:
        sender = f"{self.run}-{self.rank}"
        return wire.Origin(wire.PROTOCOL_VERSION, sender, self.boot_id, now_ns, time.time_ns())


@contextmanager
def sleepers(count: int) -> Iterator[list[int]]:
    """Start processes that do nothing; give their pids."""
    processes = [subprocess.Popen(_SLEEPER) for _ in range(count)]
    try:
        yield [process.pid for process in processes]
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def send(
    endpoint: str, rank: int, rate: float, workers: int, seconds: float, begin: float, done: Queue[tuple[int, int]]
) -> None:
    """Be one rank: send twice a second from this process, which the agent verifies.

    Put (steps, refused messages) into `done` at the end.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))  # so that the workers end with it
    with sleepers(workers) as pids:
        identity = identify()
        hook = Rank(rank, os.getpid(), stat(os.getpid()).start_ticks, tuple(pids), identity.boot_id)
        sender, refused = ZmqSender(endpoint), 0
        for tick in range(1, int(seconds / EVERY_S) + 1):
            time.sleep(max(0.0, begin + tick * EVERY_S - time.monotonic()))
            for frame in hook.frames(int(rate * EVERY_S), tick % _HELLO_EVERY == 1):
                for _ in range(200):
                    if sender.send(frame):
                        break
                    time.sleep(0.002)  # the socket takes 64 at a time
                else:
                    refused += 1
        done.put((hook.steps, refused))
        time.sleep(2)
        sender.close()


def main() -> None:
    endpoint, (ranks, rate, workers), seconds = sys.argv[1], map(int, sys.argv[2:5]), float(sys.argv[5])
    context = multiprocessing.get_context("fork")
    done = context.Queue()
    begin = time.monotonic()
    processes = [
        context.Process(target=send, args=(endpoint, each, rate, workers, seconds, begin, done), daemon=True)
        for each in range(ranks)
    ]
    for process in processes:
        process.start()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))  # ends the ranks, which are daemons
    print(json.dumps([process.pid for process in processes]), flush=True)
    sent = [done.get() for _ in processes]
    print(json.dumps({"steps": sum(each[0] for each in sent), "refused": sum(each[1] for each in sent)}), flush=True)
    for process in processes:
        process.join()


if __name__ == "__main__":
    main()
