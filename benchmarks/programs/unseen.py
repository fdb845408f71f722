"""Programs written in one go by a second reader, with their labels, before gpuwatch saw any of them.

They have habits of neither the first ninety nor the held-out ones.
"""

from __future__ import annotations

import itertools
import os
import queue
import random
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler

from . import Clock, decode, program, workers
from .habits import IN_MEMORY
from .loaders import Items, conv_net, image, jpeg, made, mlp, step_of, tokenize, train, train_pass, train_without_loader

TEXT = "the quick brown fox jumps over the lazy dog " * 60


def tokens_of(lines: int, length: int, times: int = 1) -> torch.Tensor:
    return torch.tensor([tokenize(TEXT * times)[:length] for _ in range(lines)]) % 128


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell, self.head = nn.Embedding(128, 64), nn.Linear(64, 256), nn.Linear(256, 128)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(F.gelu(self.cell(self.embed(x))))


@program("outside_torch", says="tokens_of|tokenize", seconds=9)
def compiled_loss_of_any_length(clock: Clock) -> None:
    """No loader; a compiled function that calls the model, on texts of several lengths, with a graph break."""
    net, lengths = Language(), itertools.cycle((64, 64, 96, 96, 128))
    optimizer = torch.optim.AdamW(net.parameters())

    @torch.compile(backend="aot_eager", dynamic=False)
    def loss_of(x: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(net(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        if loss.item() > 1e6:
            raise FloatingPointError
        return loss * 2

    clock.begin()
    while True:
        x = tokens_of(24, next(lengths), times=4)
        optimizer.zero_grad()
        if clock.got():
            return
        loss_of(x).backward()
        optimizer.step()
        clock.done()


@program("input_single_process", says="jpeg|decode", seconds=9)
def compiled_step_of_short_passes(clock: Clock) -> None:
    """A compiled function without a graph break that calls the model, and passes of 30 batches."""
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(net(x), y)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss_of(x, y).backward()
        optimizer.step()

    train(clock, made(jpeg, 16, count=480), step)


@program("eval_share", seconds=9)
def evaluated_by_a_compiled_function(clock: Clock) -> None:
    """A loader that keeps up; every ten steps the compiled loss of held-out rows, without gradients or `eval()`."""
    net, (images, labels) = mlp(), IN_MEMORY.tensors
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    @torch.compile(backend="aot_eager")
    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(net(x), y)

    clock.begin()
    for number, (x, y) in enumerate(itertools.chain.from_iterable(itertools.repeat(DataLoader(IN_MEMORY, 32)))):
        if clock.got():
            return
        optimizer.zero_grad()
        loss_of(x, y).backward()
        optimizer.step()
        clock.done()
        if number % 10 == 9:
            clock.left()
            with torch.no_grad():
                for _ in range(20):
                    loss_of(images[:512], labels[:512])
            clock.resumed()


class _Repeat:
    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from iter(self.sampler)


class InfiniteDataLoader(DataLoader[Any]):
    """YOLOv5's: one iterator for all passes, whose workers live on."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        object.__setattr__(self, "batch_sampler", _Repeat(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self) -> int:
        return len(self.batch_sampler.sampler)  # type: ignore[union-attr]

    def __iter__(self) -> Any:
        for _ in range(len(self)):
            yield next(self.iterator)


@program("input_cpu", "input_cpu_saturated", says="jpeg|decode")
def one_iterator_for_all_passes(clock: Clock) -> None:
    """YOLO's loader: its iterator is made with it, and each pass takes a part of it."""
    train(clock, InfiniteDataLoader(Items(jpeg, 1600), batch_size=32, num_workers=workers(1)), step_of(mlp()))


@program("input_single_process", says="jpeg|decode")
def warmed_up_on_noise(clock: Clock) -> None:
    """Five steps on random tensors, so that memory is allocated, then passes over a loader that decodes."""
    step = step_of(conv_net())
    for _ in range(5):
        step(torch.randn(32, 1, 28, 28), torch.randint(10, (32,)))
    train(clock, made(jpeg, count=1600), step)


@program("outside_torch", "input_single_process", says=r"num_workers=0|jpeg|decode")
def one_future_ahead(clock: Clock) -> None:
    """The next batch is requested from a pool's thread while the step runs; the loader has no workers."""
    step, batches = step_of(mlp()), iter(made(lambda i: image(i, wait_s=0.003), 16))
    with ThreadPoolExecutor(1) as pool:
        clock.begin()
        ahead = pool.submit(next, batches)
        while True:
            x, y = ahead.result()
            if clock.got():
                return
            ahead = pool.submit(next, batches)
            step(x, y)
            clock.done()


def render_scene(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    for _ in range(size):
        time.sleep(0.0015)
    return torch.randn(size, 784), torch.randint(10, (size,))


def train_from(held: queue.Queue[Any], clock: Clock) -> None:
    train_without_loader(clock, iter(held.get, None), mlp())


@program("outside_torch", says="render_scene")
def queue_of_rendered_scenes(clock: Clock) -> None:
    """No loader: a thread renders batches into a queue."""
    held: queue.Queue[Any] = queue.Queue(4)

    def render_all() -> None:
        while True:
            held.put(render_scene(16))

    threading.Thread(target=render_all, daemon=True).start()
    train_from(held, clock)


@program("input_single_process", "outside_torch", says="jpeg|decode|num_workers=0")
def trained_in_a_thread(clock: Clock) -> None:
    """A window's program: the model and its optimizer are made by the main thread, another one trains."""
    step = step_of(conv_net())
    trainer = threading.Thread(target=train, args=(clock, made(jpeg, count=1600), step))
    trainer.start()
    trainer.join()


def _rank(number: int, place: dict[str, str], name: str, seconds: float) -> None:
    from . import child

    os.environ |= {**place, "PROGRAM_RANK": str(number)}
    sys.argv[1:] = [name, str(seconds)]
    child.main()


@program("straggler", "input_single_process", says=r"rank 1 is late", clocked=False, seconds=15)
def ranks_by_spawn(clock: Clock) -> None:
    """torch.multiprocessing.spawn of two ranks, whose number is an argument; the images of rank 1 cost more."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    if "PROGRAM_RANK" not in os.environ:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29_500 + os.getpid() % 1000)}
        torch.multiprocessing.spawn(_rank, (place, "ranks_by_spawn", clock.seconds), nprocs=2)  # type: ignore[no-untyped-call]
        os._exit(0)
    rank = int(os.environ["PROGRAM_RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=2)
    step = step_of(DistributedDataParallel(mlp()))
    clock.begin()
    for x, y in made(lambda i: image(i, wait_s=0.002 if rank else 0.0), 16, count=3200):
        clock.got()
        step(x, y)
        clock.done()
    dist.barrier()
    dist.destroy_process_group()


def draw_real(size: int) -> torch.Tensor:
    decode(0.008)
    return torch.randn(size, 784)


@program("outside_torch", says="draw_real|decode")
def critic_five_times_as_often(clock: Clock) -> None:
    """WGAN without a loader: the critic makes five steps, each on new samples drawn in Python, the generator one."""
    maker = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 784))
    critic = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 1))
    first, second = torch.optim.RMSprop(critic.parameters(), 5e-5), torch.optim.RMSprop(maker.parameters(), 5e-5)
    clock.begin()
    for number in itertools.count(1):
        x, noise = draw_real(64), torch.randn(64, 64)
        first.zero_grad()
        if clock.got():
            return
        (critic(maker(noise).detach()).mean() - critic(x).mean()).backward()
        first.step()
        clock.done()
        for each in critic.parameters():
            each.data.clamp_(-0.01, 0.01)
        if number % 5 == 0:
            second.zero_grad()
            noise = torch.randn(64, 64)
            clock.got()
            (-critic(maker(noise)).mean()).backward()
            second.step()
            clock.done()


def micro_batch() -> torch.Tensor:
    time.sleep(0.004)
    return torch.randint(128, (8, 64))


@program("outside_torch", "step_waits", says="micro_batch")
def micro_batches_without_loader(clock: Clock) -> None:
    """nanoGPT with eight micro-batches a step, each of which comes from storage; no loader."""
    net = Language()
    optimizer = torch.optim.AdamW(net.parameters())
    clock.begin()
    while True:
        for _ in range(8):
            x = micro_batch()
            if clock.got():
                return
            (F.cross_entropy(net(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten()) / 8).backward()
            clock.done()
        optimizer.step()
        clock.resumed()  # the next micro-batch is asked for
        optimizer.zero_grad()


@program("input_single_process", says="jpeg|decode")
def gradients_applied_by_hand(clock: Clock) -> None:
    """A loader, several passes, and no optimizer: `p.data -= rate * p.grad`."""
    net = conv_net()

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        net.zero_grad()
        F.cross_entropy(net(x), y).backward()
        for each in net.parameters():
            assert each.grad is not None
            each.data -= 1e-3 * each.grad

    train(clock, made(jpeg, count=1600), step)


class Unsharded(IterableDataset[Any]):
    """Each worker yields all of it: a bug that many have."""

    def __len__(self) -> int:
        return 640

    def __iter__(self) -> Iterator[Any]:
        return map(jpeg, range(640))


@program("input_cpu_saturated", says="jpeg|decode")
def every_worker_yields_all(clock: Clock) -> None:
    """An IterableDataset that does not divide its data between its two workers."""
    train(clock, DataLoader(Unsharded(), batch_size=32, num_workers=workers(2)), step_of(mlp()))


@program("input_single_process", says="jpeg|decode")
def federated_clients(clock: Clock) -> None:
    """Eight clients in turn, each with its own copy of the model, optimizer and loader; then weights are averaged."""
    shared = mlp()
    loaders = [made(jpeg, 16, count=160) for _ in range(8)]
    while not clock.over:
        copies = []
        for loader in loaders:
            local = deepcopy(shared)
            train_pass(clock, loader, step_of(local))
            copies.append(local.state_dict())
        shared.load_state_dict({name: sum(each[name] for each in copies) / 8 for name in copies[0]})


class LazyRows(Dataset[Any]):
    """Hugging Face's datasets with a lazy transform: torch asks for all rows of a batch at once."""

    def __len__(self) -> int:
        return 1_000_000

    def encode_rows(self, texts: list[str]) -> list[torch.Tensor]:
        return [torch.tensor(tokenize(text)[:784]).float() for text in texts]

    def __getitems__(self, rows: list[int]) -> list[Any]:
        return [(x, i % 10) for i, x in zip(rows, self.encode_rows([TEXT] * len(rows)), strict=True)]

    def __getitem__(self, row: int) -> Any:
        return self.__getitems__([row])[0]


@program("input_single_process", says="tokenize|encode_rows")
def rows_transformed_lazily(clock: Clock) -> None:
    """Rows that a lazy transform tokenizes, a batch at a time."""
    train(clock, DataLoader(LazyRows(), batch_size=32, num_workers=workers(0)), step_of(conv_net_of_rows()))


def conv_net_of_rows() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 28, 28)), conv_net())


class Table(Dataset[Any]):
    """Rows by a list of indices, normalised one by one."""

    rows = torch.randn(20_000, 784)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, rows: list[int]) -> Any:
        return torch.stack([self.normalised(self.rows[i]) for i in rows]), torch.tensor(rows) % 10

    def normalised(self, row: torch.Tensor) -> torch.Tensor:
        return (row - row.mean()) / (row.std() + 1e-6)


@program("input_single_process", says="normalised|Table")
def batches_by_their_sampler(clock: Clock) -> None:
    """A BatchSampler as the sampler, and no batch size."""
    data = Table()
    sampler: Any = BatchSampler(RandomSampler(data), 128, drop_last=True)
    train(clock, DataLoader(data, sampler=sampler, batch_size=None, num_workers=workers(0)), step_of(mlp()))


@program("eval_share", seconds=9)
def tested_every_ten_steps(clock: Clock) -> None:
    """A loader that keeps up; every ten steps accuracy on held-out tensors, no loader, takes as long as the steps."""
    net = conv_net()
    step, (images, labels) = step_of(net), IN_MEMORY.tensors

    @torch.no_grad()
    def accuracy() -> float:
        net.eval()
        hits = sum(
            int((net(x).argmax(1) == y).sum()) for x, y in zip(images.split(512), labels.split(512), strict=True)
        )
        net.train()
        return hits / len(images)

    clock.begin()
    for number, (x, y) in enumerate(itertools.chain.from_iterable(itertools.repeat(DataLoader(IN_MEMORY, 32)))):
        if clock.got():
            return
        step(x, y)
        clock.done()
        if number % 10 == 9:
            clock.left()
            accuracy()
            clock.resumed()


@program(clocked=False)
def checkpointed_blocks(clock: Clock) -> None:
    """Activations are recomputed, block by block; the blocks are called by a function, and there is no loader."""
    embed, head = nn.Linear(784, 256), nn.Linear(256, 10)
    blocks = nn.ModuleList([nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(6)])
    optimizer = torch.optim.AdamW([*embed.parameters(), *blocks.parameters(), *head.parameters()])
    x, y = torch.randn(4096, 784), torch.randint(10, (4096,))
    clock.start()
    while not clock.over:
        rows = torch.randint(4096, (64,))
        hidden = x[rows].requires_grad_()
        hidden = checkpoint(embed, hidden, use_reentrant=True)
        for block in blocks:
            hidden = checkpoint(block, hidden, use_reentrant=True)
        loss = F.cross_entropy(head(hidden), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program("input_single_process", "epoch_start_pause", says="jpeg|decode|iterator")
def a_loader_for_each_step(clock: Clock) -> None:
    """Continual learning: a loader over the buffer is made for each step, and gives one batch."""
    step, buffer = step_of(mlp()), list(range(500))
    clock.begin()
    while True:
        buffer[random.randrange(500)] = random.randrange(10_000)
        loader = DataLoader(torch.utils.data.Subset(Items(jpeg), random.sample(buffer, 16)), batch_size=16)
        clock.resumed()  # to make a loader is no wait for it
        for x, y in loader:
            if clock.got():
                return
            step(x, y)
            clock.done()
        clock.exhausted()


@program("input_single_process", says=r"loader\s+over\s+Items")
def tasks_take_turns(clock: Clock) -> None:
    """Three loaders, one of which is drawn for each step; one of them decodes."""
    step = step_of(mlp())
    pick = random.Random(3)
    loaders: list[Any] = [DataLoader(IN_MEMORY, 32), DataLoader(IN_MEMORY, 32), made(jpeg, 32)]
    sources = [itertools.chain.from_iterable(itertools.repeat(each)) for each in loaders]
    clock.begin()
    while True:
        x, y = next(pick.choice(sources))
        if clock.got():
            return
        step(x, y)
        clock.done()


@program("input_single_process", says="jpeg|decode")
def epochs_of_one_iterator(clock: Clock) -> None:
    """`islice` of one iterator for each epoch of 40 steps; in between a test on tensors, and the weights are saved."""
    import io

    net, batches = conv_net(), iter(made(jpeg, 16))
    step = step_of(net)
    while True:
        clock.begin()
        for x, y in itertools.islice(batches, 40):
            if clock.got():
                return
            step(x, y)
            clock.done()
        clock.left()
        with torch.no_grad():
            net(IN_MEMORY.tensors[0][:64])
        torch.save(net.state_dict(), io.BytesIO())


@program("input_single_process", says="jpeg|decode", clocked=False)
def main_thread_feeds_the_trainer(clock: Clock) -> None:
    """The main thread iterates the loader; a thread that made the optimizer trains on what comes through a queue."""
    held: queue.Queue[Any] = queue.Queue(2)

    thread = threading.Thread(target=train_from, args=(held, clock), daemon=True)
    thread.start()
    for batch in made(jpeg, 32):
        held.put(batch)
        if clock.over:
            return
