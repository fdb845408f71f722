"""A training whose loader gets into trouble: batches too large for /dev/shm ("none"), or a signal to a worker.

The worker gets it in batch 40. It sends it to itself ("SIGKILL"), or the kernel does: for taking memory without end
("eat"), for writing into a full /dev/shm ("fill"), or for reading a mapped file that was shortened ("shorten").
"""

from __future__ import annotations

import mmap
import os
import signal
import sys
import tempfile
import time
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory

import torch
from torch.utils.data import DataLoader, Dataset

import gpuwatch
from gpuwatch.hook import publisher
from gpuwatch.wire import sockets

KILL, NUMBERS, STEP_S = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
# Neither its own thread nor the agent hangs at its end, though they may get no core for a while.
publisher._CLOSE_S, publisher._CONNECT_TRIES, sockets._LINGER_MS = 30.0, 300, 5_000


def kill() -> None:
    os.kill(os.getpid(), getattr(signal, KILL))


def eat() -> None:
    """Take memory until the kernel says no; at most 4 GiB, should no limit hold."""
    kept = []
    for _ in range(64):
        kept.append(bytearray(os.urandom(1 << 20)) * 64)
    raise SystemExit("no limit held")


def fill() -> None:
    """Write 64 MiB of shared memory, without asking for room first, as a data set that caches decoded data does."""
    shared = SharedMemory(create=True, size=64 << 20)
    resource_tracker.unregister(shared._name, "shared_memory")  # it would make room as soon as this process is dead
    for at in range(0, shared.size, 4096):
        shared.buf[at] = 1
    raise SystemExit("there was room")


def shorten() -> None:
    with tempfile.TemporaryFile() as file:
        file.truncate(1 << 20)
        mapped = mmap.mmap(file.fileno(), 1 << 20)
        file.truncate(0)
        raise SystemExit(f"read {mapped[4096]} of nothing")


TROUBLE = {"eat": eat, "fill": fill, "shorten": shorten}


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 800

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.002)
        if KILL != "none" and index == 320:
            TROUBLE.get(KILL, kill)()
        return torch.zeros(NUMBERS)


if __name__ == "__main__":
    workers = 1 if KILL == "fill" else 2  # another worker would find no room for its batch before this one is dead
    for _ in gpuwatch.watch(DataLoader(Numbers(), batch_size=8, num_workers=workers)):
        time.sleep(STEP_S)
