"""Programs with a DataLoader, or something like one."""

from __future__ import annotations

import io
import itertools
import multiprocessing
import os
import queue
import random
import socket
import socketserver
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info

import gpuwatch

from . import Clock, decode, program, workers

MANY = 1_000_000


class Items(Dataset[Any]):
    """Items that are made by a function of the index."""

    def __init__(self, make: Callable[[int], Any], count: int = MANY) -> None:
        self.make, self.count = make, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def image(index: int, cpu_s: float = 0.0, wait_s: float = 0.0, side: int = 28) -> tuple[torch.Tensor, int]:
    """Return an image that costs so much CPU time, or takes so long to arrive."""
    if cpu_s:
        decode(cpu_s)
    if wait_s:
        time.sleep(wait_s)
    return torch.randn(1, side, side), index % 10


def conv_net(width: int = 16) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, width, 3), nn.ReLU(), nn.Conv2d(width, 2 * width, 3), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2 * width * 144, 10),
    )  # fmt: skip


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


def step_of(model: nn.Module) -> Callable[[torch.Tensor, torch.Tensor], float]:
    """Return a function that trains the model on a batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def train(clock: Clock, loader: Any, step: Callable[..., Any]) -> None:
    """Train passes over the loader until the time is over."""
    while not clock.over:
        train_pass(clock, loader, step)


def train_pass(clock: Clock, loader: Any, step: Callable[..., Any]) -> None:
    """Train one pass, or until the time is over."""
    clock.begin()
    for x, y in loader:
        if clock.got():
            return
        step(x, y)
        del x, y  # to give a large batch's memory back takes time, too
        clock.done()
    clock.exhausted()


def train_without_loader(clock: Clock, batches: Iterable[Any], model: nn.Module) -> None:
    """Train on batches of no loader until the time is over.

    The clock reads what gpuwatch speaks of then: from the optimizer to the forward pass.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    clock.begin()
    for x, y in batches:
        optimizer.zero_grad()
        if clock.got():
            return
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        clock.done()
        loss.item()


def evaluate(clock: Clock, net: nn.Module, held_out: Any) -> None:
    """Test the model, which is no step."""
    clock.left()
    net.eval()
    with torch.no_grad():
        for x, y in held_out:
            F.cross_entropy(net(x), y)
    net.train()


def made(
    make: Callable[[int], Any], batch: int = 32, given: int = 0, count: int = MANY, **more: Any
) -> DataLoader[Any]:
    """Return a loader of such items, with the number of workers that was advised, if one was."""
    used = workers(given)
    return DataLoader(Items(make, count), batch_size=batch, num_workers=used, persistent_workers=used > 0, **more)


def jpeg(i: int) -> Any:
    return image(i, cpu_s=0.001)


def cheap(i: int) -> Any:
    return image(i)


def remote(i: int) -> Any:
    return image(i, wait_s=0.003)


# decoding -------------------------------------------------------------------------------------------------------------


@program("input_single_process")
def mnist_decoding(clock: Clock) -> None:
    """pytorch/examples' mnist: transforms in the training process, a test after each pass."""
    net = conv_net()
    step, loader, test = step_of(net), made(jpeg, count=1600), DataLoader(Items(cheap, 256), batch_size=64)
    while not clock.over:
        train_pass(clock, loader, step)
        evaluate(clock, net, test)


@program()
def mnist_in_memory(clock: Clock) -> None:
    """The same with its data in memory: the network takes the time."""
    data = TensorDataset(torch.randn(4096, 1, 28, 28), torch.randint(10, (4096,)))
    train(clock, DataLoader(data, batch_size=64, shuffle=True), step_of(conv_net()))


@program("input_single_process", threads=2)
def vae(clock: Clock) -> None:
    """pytorch/examples' vae: a small network, and items that are decoded."""
    encoder, decoder = nn.Linear(784, 400), nn.Linear(20, 784)
    mean, spread = nn.Linear(400, 20), nn.Linear(400, 20)
    parts = nn.ModuleList([encoder, mean, spread, decoder])
    optimizer = torch.optim.Adam(parts.parameters(), lr=1e-3)

    def step(x: torch.Tensor, _: Any) -> None:
        optimizer.zero_grad()
        hidden = F.relu(encoder(x.flatten(1)))
        mu, log = mean(hidden), spread(hidden)
        z = mu + torch.randn_like(mu) * (log / 2).exp()
        loss = F.mse_loss(torch.sigmoid(decoder(z)), x.flatten(1)) - 1e-3 * (1 + log - mu**2 - log.exp()).mean()
        loss.backward()
        optimizer.step()

    train(clock, made(lambda i: image(i, cpu_s=0.0004), 128), step)


@program("input_single_process", run=False)
def dcgan(clock: Clock) -> None:
    """pytorch/examples' dcgan: two optimizers a step."""
    maker = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 784))
    judge = nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 1))
    first, second = torch.optim.Adam(judge.parameters()), torch.optim.Adam(maker.parameters())

    def step(x: torch.Tensor, _: Any) -> None:
        fake = maker(torch.randn(len(x), 64))
        first.zero_grad()
        (F.softplus(-judge(x)).mean() + F.softplus(judge(fake.detach())).mean()).backward()
        first.step()
        second.zero_grad()
        F.softplus(-judge(fake)).mean().backward()
        second.step()

    train(clock, gpuwatch.watch(made(lambda i: image(i, cpu_s=0.0008))), step)


@program("input_cpu", "input_cpu_saturated")
def one_worker_decodes(clock: Clock) -> None:
    """One worker for a step that is shorter than its fetch."""
    train(clock, made(jpeg, given=1), step_of(mlp()))


@program("input_cpu_saturated")
def four_workers_decode(clock: Clock) -> None:
    """More workers than this machine has cores, all of them decoding."""
    train(clock, made(jpeg, given=4), step_of(mlp()))


@program("input_single_process", threads=2)
def mild_decoding(clock: Clock) -> None:
    """A network that keeps both cores busy, and decoding for a third of the time: a worker competes with the step."""
    train(clock, made(lambda i: image(i, cpu_s=0.001), 64), step_of(conv_net(32)))


def graphs(items: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """PyG's way: a batch of graphs is one graph, whose edges are shifted."""
    offset, edges, nodes = 0, [], []
    for x, links in items:
        nodes.append(x)
        edges.append([(a + offset, b + offset) for a, b in links])
        offset += len(x)
    return torch.cat(nodes), torch.tensor([pair for each in edges for pair in each])


def graph(i: int) -> Any:
    pick = random.Random(i)
    return torch.randn(30, 16), [(pick.randrange(30), pick.randrange(30)) for _ in range(200)]


@program("input_single_process")
def graph_collate(clock: Clock) -> None:
    """A collate function in Python, in the training process."""
    first, second = nn.Linear(16, 64), nn.Linear(64, 1)
    optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()])

    def step(x: torch.Tensor, edges: torch.Tensor) -> None:
        optimizer.zero_grad()
        hidden = F.relu(first(x))
        hidden = hidden.index_add(0, edges[:, 1], hidden[edges[:, 0]])
        second(hidden).square().mean().backward()
        optimizer.step()

    train(clock, made(graph, 64, collate_fn=graphs), step)


# waiting --------------------------------------------------------------------------------------------------------------


@program("input_single_process", run=False)
def remote_items(clock: Clock) -> None:
    """Items that wait for storage, in the training process."""
    train(clock, gpuwatch.watch(made(remote, 8)), step_of(conv_net()))


@program("input_unexplained", agent=True, says="sleep")
def remote_items_two_workers(clock: Clock) -> None:
    """The same with two workers, which sleep."""
    train(clock, made(lambda i: image(i, wait_s=0.01), 16, given=2), step_of(conv_net()))


class _Slow(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        while self.rfile.readline():
            time.sleep(0.004)
            self.wfile.write(bytes(8192))


class _Store(socketserver.ThreadingTCPServer):
    daemon_threads = allow_reuse_address = True


def store() -> _Store:
    """Return a server of bytes, 4 ms a request."""
    return _Store(("127.0.0.1", 0), _Slow)


_ADDRESS = [("", 0)]
_open: dict[int, socket.socket] = {}


def downloaded(index: int) -> Any:
    """One request of the process's own connection."""
    if os.getpid() not in _open:
        _open[os.getpid()] = socket.create_connection(_ADDRESS[0])
    connection, left = _open[os.getpid()], 8192
    connection.sendall(b"get\n")
    while left:
        if not (received := len(connection.recv(left))):
            raise ConnectionError("the server ended")
        left -= received
    return image(index)


@program("input_network")
def object_store(clock: Clock) -> None:
    """Two workers that ask a server for each item."""
    _ADDRESS[0] = ("127.0.0.1", int(os.environ["PROGRAM_PORT"]))
    train(clock, made(downloaded, 16, given=2), step_of(mlp()))


_LOCK = multiprocessing.Lock()


def locked(index: int) -> Any:
    with _LOCK:
        time.sleep(0.004)
    return image(index)


@program("artificial_limit", seconds=11)
def one_lock(clock: Clock) -> None:
    """Three workers that share one connection, and so a lock."""
    train(clock, made(locked, 8, given=3), step_of(mlp()))


def same_order(i: int) -> Any:
    """One item in 97 is slow."""
    return image(i, wait_s=0.3 if i % 97 == 0 else 0.0)


@program("input_single_process")
def rare_slow_items(clock: Clock) -> None:
    """Most items are there at once; one in a hundred takes 300 ms."""
    train(clock, made(same_order, 16), step_of(conv_net()))


class Shards(IterableDataset[Any]):
    """A stream for each worker; one of them is slow."""

    def __init__(self, cpu_s: float, wait_s: float, slow: int = 0) -> None:
        self.cpu_s, self.wait_s, self.slow = cpu_s, wait_s, slow

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        is_slow = info is None or info.id == self.slow
        for index in itertools.count():
            yield image(index, self.cpu_s if is_slow else 0.0, self.wait_s if is_slow else 0.0)


@program("slow_worker", seconds=10)
def one_slow_shard_cpu(clock: Clock) -> None:
    """Three shards, one of them compressed."""
    loader = DataLoader(Shards(0.004, 0), batch_size=16, num_workers=3)
    train(clock, loader, step_of(mlp()))


@program("slow_worker", seconds=10)
def one_slow_shard_waits(clock: Clock) -> None:
    """Three shards, one of them far away."""
    loader = DataLoader(Shards(0, 0.005), batch_size=16, num_workers=3)
    train(clock, loader, step_of(mlp()))


# streams, generators, iterators ---------------------------------------------------------------------------------------


class Endless(IterableDataset[Any]):
    def __init__(self, cpu_s: float = 0.0, wait_s: float = 0.0) -> None:
        self.cpu_s, self.wait_s = cpu_s, wait_s

    def __iter__(self) -> Iterator[Any]:
        for index in itertools.count():
            yield image(index, self.cpu_s, self.wait_s)


@program("input_single_process")
def endless_stream(clock: Clock) -> None:
    """An endless IterableDataset, and a number of steps."""
    step, used = step_of(conv_net()), workers(0)
    loader = DataLoader(Endless(wait_s=0.004), batch_size=8, num_workers=used)
    clock.begin()
    for _, (x, y) in zip(range(MANY), loader, strict=False):
        if clock.got():
            return
        step(x, y)
        clock.done()


@program("input_single_process")
def cycled_iterator(clock: Clock) -> None:
    """minGPT's trainer: `next` on an iterator that is made again at its end."""
    step, loader = step_of(conv_net()), made(jpeg, count=800)
    clock.begin()
    batches = iter(loader)
    while True:
        try:
            x, y = next(batches)
        except StopIteration:
            batches = iter(loader)
            x, y = next(batches)
        if clock.got():
            return
        step(x, y)
        clock.done()


@program("epoch_start_pause", says="new iterator")
def next_iter_each_step(clock: Clock) -> None:
    """`next(iter(loader))` at each step, which makes an iterator and a permutation of all indices."""
    step = step_of(conv_net())
    loader = DataLoader(Items(lambda i: image(i, wait_s=0.001), 200_000), batch_size=16, shuffle=True)
    clock.begin()
    while True:
        x, y = next(iter(loader))
        if clock.got():
            return
        step(x, y)
        clock.done()


def tokenize(text: str) -> list[int]:
    out: list[int] = []
    for word in text.split():
        out += [ord(letter) * 31 % 512 for letter in word]
    return out


def lines() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of tokens, from a generator over files."""
    text = "the quick brown fox jumps over the lazy dog " * 30
    while True:
        rows = torch.tensor([tokenize(text)[:784] for _ in range(32)])
        yield rows.float().view(32, 1, 28, 28), rows[:, 0] % 10


@program("input_unexplained", run=False, says=r"fetch\s+is\s+in\s+(tokenize|lines)")
def generator_of_batches(clock: Clock) -> None:
    """No DataLoader: a generator makes batches in the training thread."""
    train(clock, gpuwatch.watch(lines()), step_of(conv_net()))


@program("outside_torch", says=r"in\s+(tokenize|lines)")
def generator_under_run(clock: Clock) -> None:
    """The same, unchanged."""
    train_without_loader(clock, lines(), conv_net())


def shards_of(folder: Path) -> Iterator[tuple[torch.Tensor, int]]:
    """webdataset's way: samples out of tar files, through a chain of generators."""
    while True:
        for path in sorted(folder.glob("*.tar")):
            with tarfile.open(path) as tar:
                for member in tar:
                    data = tar.extractfile(member)
                    assert data is not None
                    yield torch.load(io.BytesIO(data.read())), hash(member.name) % 10


class Tars(IterableDataset[Any]):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __iter__(self) -> Iterator[Any]:
        return shards_of(self.folder)


@program("input_single_process")
def tar_shards(clock: Clock) -> None:
    """Samples out of tar files."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for shard in range(4):
            with tarfile.open(folder / f"{shard}.tar", "w") as tar:
                for index in range(64):
                    held = io.BytesIO()
                    torch.save(torch.randn(1, 28, 28), held)
                    member = tarfile.TarInfo(f"{shard}-{index}.pt")
                    member.size = held.tell()
                    held.seek(0)
                    tar.addfile(member, held)
        train(clock, DataLoader(Tars(folder), batch_size=32, num_workers=workers(0)), step_of(mlp()))


@program("input_single_process", says=r"loader\s+over\s+Items")
def zip_fast_and_slow(clock: Clock) -> None:
    """Two loaders, of labelled and unlabelled images: the second one waits."""
    step = step_of(conv_net())
    fast = DataLoader(TensorDataset(torch.randn(4096, 1, 28, 28), torch.randint(10, (4096,))), batch_size=16)
    slow = made(lambda i: image(i, wait_s=0.002), 16)
    while not clock.over:
        clock.begin()
        for (x, y), (more, _) in zip(fast, slow, strict=False):
            if clock.got():
                return
            step(torch.cat([x, more]), torch.cat([y, y]))
            clock.done()


@program("input_single_process")
def unet_with_tqdm(clock: Clock) -> None:
    """U-Net's loop: tqdm, and a validation in the middle of a pass."""
    from tqdm import tqdm

    net = conv_net()
    step, loader, held_out = step_of(net), made(jpeg, count=3200), DataLoader(Items(cheap, 128), batch_size=32)
    while not clock.over:
        clock.begin()
        for number, (x, y) in enumerate(tqdm(loader, disable=True)):
            if clock.got():
                return
            step(x, y)
            clock.done()
            if number % 40 == 39:
                clock.left()
                net.eval()
                with torch.inference_mode():
                    for held, _ in held_out:
                        net(held)
                net.train()
                clock.resumed()


class Prefetcher:
    """timm's way: a generator that is one batch ahead of the loop."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        last = None
        for x, y in self.loader:
            ready = (x.sub(0.5).div(0.5), y)
            if last is not None:
                yield last
            last = ready

    def __len__(self) -> int:
        return len(self.loader)


@program("input_cpu", "input_cpu_saturated", run=False)
def prefetcher(clock: Clock) -> None:
    """A wrapper around a loader with a worker."""
    train(clock, gpuwatch.watch(Prefetcher(made(jpeg, given=1))), step_of(mlp()))


def in_thread(loader: Any, size: int = 4) -> Iterator[Any]:
    """Batches that a thread takes from the loader ahead of the loop."""
    held: queue.Queue[Any] = queue.Queue(size)

    def fill() -> None:
        for batch in loader:
            held.put(batch)

    threading.Thread(target=fill, daemon=True).start()
    while True:
        yield held.get()


@program()
def prefetch_thread_healthy(clock: Clock) -> None:
    """A thread that fetches ahead and keeps up: its waits are no starvation."""
    train_without_loader(clock, in_thread(made(lambda i: image(i, wait_s=0.0002), 16)), conv_net(48))


@program("outside_torch", clocked=False, says="num_workers=0")
def prefetch_thread_slow(clock: Clock) -> None:
    """The same, too slow."""
    train(clock, in_thread(made(lambda i: image(i, wait_s=0.003), 16)), step_of(mlp()))


@program("input_unexplained", run=False, says=r"fetch\s+is\s+in\s+(decode|jpeg|image|graphs_of_images)")
def torchdata_nodes(clock: Clock) -> None:
    """torchdata's nodes, in this process."""
    from torchdata.nodes import Batcher, IterableWrapper, Loader, Mapper

    node = Mapper(Batcher(IterableWrapper(range(MANY)), 16), lambda some: graphs_of_images(some))
    train(clock, gpuwatch.watch(Loader(node)), step_of(conv_net()))


def graphs_of_images(some: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    found = [jpeg(index) for index in some]
    return torch.stack([x for x, _ in found]), torch.tensor([y for _, y in found])


# workers --------------------------------------------------------------------------------------------------------------


@program("epoch_start_pause", seconds=14)
def spawned_workers(clock: Clock) -> None:
    """Workers that are spawned for each pass, and passes that are short."""
    while not clock.over:
        loader = DataLoader(Items(cheap, 512), batch_size=32, num_workers=1, multiprocessing_context="spawn")
        train_pass(clock, loader, step_of(mlp()))


class Opening(Items):
    """Reads its index in the first item of each worker."""

    def __getitem__(self, index: int) -> Any:
        if not hasattr(self, "_index"):
            time.sleep(0.8)
            self._index = True
        return cheap(index)


@program("epoch_start_pause")
def index_at_each_pass(clock: Clock) -> None:
    """Workers without persistence, which open an index first."""
    while not clock.over:
        train_pass(clock, DataLoader(Opening(cheap, 1600), batch_size=32, num_workers=2), step_of(conv_net()))


@program("epoch_start_pause", says="the first batch takes a long time")
def slow_first_batch(clock: Clock) -> None:
    """One pass; its first batch takes three seconds (an index is built), all others nothing."""
    built: list[int] = []

    def make(index: int) -> Any:
        if not built:
            decode(3.0)
            built.append(1)
        return cheap(index)

    train(clock, made(make, 32), step_of(conv_net()))


def records(items: list[Any]) -> Any:
    """A batch as many small Python objects, which go through a pipe."""
    rows = [
        {"box": (i, i + 1, j), "name": f"{i}-{j}", "score": i / (j + 1)}
        for i, (_, _) in enumerate(items)
        for j in range(1500)
    ]
    return torch.stack([x for x, _ in items]), rows


@program("input_handover", says="unpickl")
def unpickling(clock: Clock) -> None:
    """Batches of 48,000 small objects: the training thread is busy with unpickling them."""
    step = step_of(mlp())
    loader = made(cheap, 32, given=2, collate_fn=records)
    clock.begin()
    for x, rows in loader:
        if clock.got():
            return
        step(x, torch.tensor([len(rows) % 10] * len(x)))
        del x, rows
        clock.done()


def _train_on_photos(clock: Clock, given: int) -> None:
    net = nn.Conv2d(3, 4, 7, stride=4)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def step(x: torch.Tensor, _: Any) -> None:
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()

    train(clock, made(lambda i: (torch.rand(3, 416, 416), i % 10), 16, given=given), step)


@program("input_cpu_saturated")
def big_batches(clock: Clock) -> None:
    """Batches of 33 MB, made by two workers."""
    _train_on_photos(clock, given=2)


@program("input_single_process")
def big_batches_no_workers(clock: Clock) -> None:
    """The same without workers."""
    _train_on_photos(clock, given=0)


@program("input_single_process", threads=2)
def tiny_steps(clock: Clock) -> None:
    """Steps of a millisecond, for which a worker is slower than none."""
    train(clock, made(cheap, 16), step_of(mlp()))


@program()
def ready_workers(clock: Clock) -> None:
    """A worker that keeps up."""
    train(clock, made(lambda i: image(i, wait_s=0.0002), 32, given=1), step_of(conv_net(32)))


@program("input_single_process")
def tensors_one_by_one(clock: Clock) -> None:
    """Items in memory, collated one by one: cheap, but not against so small a step."""
    x, y = torch.randn(20_000, 784), torch.randint(10, (20_000,))
    train(clock, made(lambda i: (x[i % 20_000], y[i % 20_000]), 256), step_of(mlp()))
