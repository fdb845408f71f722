"""Trainings whose loader is too slow: real DataLoaders. The device's step is a sleep, like a thread's that waits."""

from __future__ import annotations

import http.client
import mmap
import multiprocessing
import os
import random
import socketserver
import tempfile
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import gpuwatch

from .program import Clock, Program, decode


class Items(Dataset):  # type: ignore[type-arg]
    """A data set each of whose items is made by a function of its index."""

    def __init__(
        self, make: Callable[[int], Any], count: int = 1_000_000, shape: tuple[int, ...] = (3, 32, 32)
    ) -> None:
        self._make = make
        self._count = count
        self._item = torch.zeros(shape)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        self._make(index)
        return self._item


def train(clock: Clock, loader: Any, step_s: float) -> None:
    """Take batches until time is over."""
    for _ in gpuwatch.watch(loader):
        time.sleep(step_s)
        if clock.over:
            break


def single_process(clock: Clock) -> None:
    train(clock, DataLoader(Items(lambda _: decode(0.010)), batch_size=2), 0.012)


def single_process_io(clock: Clock) -> None:
    train(clock, DataLoader(Items(lambda _: time.sleep(0.02)), batch_size=2), 0.030)


def too_few_workers(clock: Clock) -> None:
    train(clock, DataLoader(Items(lambda _: decode(0.010)), batch_size=4, num_workers=2), 0.006)


def no_cores_left(clock: Clock) -> None:
    workers = os.cpu_count() or 2
    train(clock, DataLoader(Items(lambda _: decode(0.010)), batch_size=4, num_workers=workers), 0.005)


def far_too_many_workers(clock: Clock) -> None:
    workers = 4 * (os.cpu_count() or 2)
    train(clock, DataLoader(Items(lambda _: decode(0.010)), batch_size=4, num_workers=workers), 0.005)


_FILE_MIB, _READ_MIB = 256, 32


def disk(clock: Clock) -> None:
    """Workers read past the page cache, from a file of random bytes on the disk that holds the temporary folder."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("GPUWATCH_BENCHMARK_DISK", "/var/tmp")) as folder:
        path = Path(folder) / "records"
        with path.open("wb") as file:
            for _ in range(_FILE_MIB):
                file.write(os.urandom(1 << 20))
            file.flush()
            os.fsync(file.fileno())
        buffers: list[mmap.mmap] = []

        def read(_: int) -> None:
            if not buffers:
                buffers.append(mmap.mmap(-1, _READ_MIB << 20))
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
            os.preadv(descriptor, buffers, random.randrange(_FILE_MIB - _READ_MIB) << 20)
            os.close(descriptor)

        train(clock, DataLoader(Items(read), batch_size=2, num_workers=3), 0.002)


class _Store(BaseHTTPRequestHandler):
    """An object store: a first byte after 60 ms, then 256 KiB."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        time.sleep(0.06)
        self.send_response(200)
        self.send_header("Content-Length", str(256 << 10))
        self.end_headers()
        self.wfile.write(bytes(256 << 10))

    def log_message(self, *_: Any) -> None:
        pass


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True


def network(clock: Clock) -> None:
    server = _Server(("127.0.0.1", 0), _Store)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    port = server.server_address[1]
    connections: dict[int, http.client.HTTPConnection] = {}

    def get(_: int) -> None:
        connection = connections.setdefault(os.getpid(), http.client.HTTPConnection("127.0.0.1", port))
        connection.request("GET", "/")
        connection.getresponse().read()

    train(clock, DataLoader(Items(get), batch_size=2, num_workers=2), 0.008)
    server.shutdown()


def one_connection(clock: Clock) -> None:
    """Four workers share one connection to the data."""
    lock = multiprocessing.Lock()

    def get(_: int) -> None:
        with lock:
            time.sleep(0.03)

    train(clock, DataLoader(Items(get), batch_size=2, num_workers=4), 0.01)


def sleeping_store(clock: Clock) -> None:
    """A store that is throttled by pauses in its client: nothing shows what is waited for."""
    train(clock, DataLoader(Items(lambda _: time.sleep(0.06)), batch_size=2, num_workers=2), 0.015)


def one_slow_shard(clock: Clock) -> None:
    """The third worker's items cost ten times the others'."""
    batch, workers = 4, 4

    def make(index: int) -> None:
        decode(0.04 if (index // batch) % workers == 2 else 0.0005)

    train(clock, DataLoader(Items(make), batch_size=batch, num_workers=workers), 0.008)


def in_step(clock: Clock) -> None:
    """A store that answers four requests at once: four workers deliver together."""
    together = multiprocessing.Barrier(4)

    def get(index: int) -> None:
        time.sleep(0.11)
        if index % 2:
            together.wait()

    train(clock, DataLoader(Items(get), batch_size=2, num_workers=4), 0.012)


def small_shm(clock: Clock) -> None:
    """Queues that fill nine tenths of /dev/shm."""
    status = os.statvfs("/dev/shm")
    batch = int(0.86 * status.f_blocks * status.f_frsize / 16 / (3 * 64 * 64 * 4))
    items = Items(lambda _: None, shape=(3, 64, 64))
    for images in gpuwatch.watch(DataLoader(items, batch_size=batch, num_workers=2, prefetch_factor=8)):
        del images
        time.sleep(0.3)
        if clock.over:
            break


INPUT = (
    Program("batches prepared in the training process", single_process, ("input_single_process",), cpu_bound=True),
    Program("the same, waiting for storage", single_process_io, ("input_single_process",)),
    Program("2 workers decode, cores are free", too_few_workers, ("input_cpu",), node="alone", cpu_bound=True, hook_sees=False),
    Program("a worker on every core", no_cores_left, ("input_cpu_saturated",), cpu_bound=True, also=("burst_every_n",)),
    Program("four workers on every core", far_too_many_workers, ("input_cpu_saturated", "too_many_workers"), cpu_bound=True, also=("burst_every_n",)),
    Program("reads past the page cache", disk, ("input_disk",), also=("burst_every_n",)),
    Program("an object store, 2 requests at a time", network, ("input_network",), also=("burst_every_n",)),
    Program("one connection for 4 workers", one_connection, ("artificial_limit",), node="alone", hook_sees=False),
    Program("workers asleep", sleeping_store, ("input_unexplained",), also=("burst_every_n",)),
    Program("one worker's items cost 80 times as much", one_slow_shard, ("slow_worker",), node="alone", cpu_bound=True, also=("burst_every_n", "input_unexplained"), hook_sees=False),
    Program("4 workers deliver at once", in_step, ("input_unexplained", "burst_every_n")),
    Program("queues for a /dev/shm of 64 MiB", small_shm, ("shm_exhaustion",), shm_mib=64, also=("input_cpu_saturated", "input_cpu", "input_unexplained", "burst_every_n")),
)  # fmt: skip
