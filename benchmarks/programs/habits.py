"""Habits of public training scripts: closures, teachers, averaged weights, folds, caches, pools, recreated loaders."""

from __future__ import annotations

import functools
import multiprocessing
import random
import time
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info

from . import Clock, decode, program, workers
from .loaders import Items, cheap, conv_net, evaluate, image, jpeg, made, mlp, step_of, tokenize, train, train_pass
from .loops import TOKENS

IN_MEMORY = TensorDataset(torch.randn(4096, 1, 28, 28), torch.randint(10, (4096,)))


@program("input_single_process")
def lbfgs_closure(clock: Clock) -> None:
    """LBFGS, whose closure is called several times a step, with clipped gradients."""
    net = mlp()
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.01, max_iter=4)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        def closure() -> Any:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            return loss

        optimizer.step(closure)

    train(clock, made(jpeg, 32), step)


def two_views(i: int) -> Any:
    return torch.stack([image(i, cpu_s=0.0006)[0] for _ in range(2)]), i % 10


@program("input_single_process")
def contrastive_views(clock: Clock) -> None:
    """SimCLR: two augmented views of each image."""
    net = conv_net()
    optimizer = torch.optim.Adam(net.parameters())

    def step(x: torch.Tensor, _: Any) -> None:
        first, second = (F.normalize(net(x[:, view]), dim=1) for view in (0, 1))
        loss = F.cross_entropy(first @ second.T / 0.5, torch.arange(len(x)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    train(clock, made(two_views, 32), step)


@program(clocked=False)
def bptt_batchify(clock: Clock) -> None:
    """A language model on one long row of tokens in columns, which are sliced; no loader."""
    embed, lstm, head = nn.Embedding(128, 64), nn.LSTM(64, 128), nn.Linear(128, 128)
    optimizer = torch.optim.SGD(nn.ModuleList([embed, lstm, head]).parameters(), lr=1.0)
    columns, state, at = TOKENS[: len(TOKENS) // 20 * 20].view(20, -1).t(), None, 0
    clock.start()
    while not clock.over:
        at = (at + 35) % (len(columns) - 36)
        state = None if state is None else tuple(each.detach() for each in state)
        out, state = lstm(embed(columns[at : at + 35]), state)
        loss = F.cross_entropy(head(out).flatten(0, 1), columns[at + 1 : at + 36].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program("outside_torch", says="sample_neighbours|neighbour_sampling")
def neighbour_sampling(clock: Clock) -> None:
    """GraphSAGE: neighbours are drawn in Python for each batch, and their features gathered; no loader."""
    links = [[random.randrange(5_000) for _ in range(20)] for _ in range(5_000)]
    features = torch.randn(5_000, 64)
    first, second = nn.Linear(128, 128), nn.Linear(128, 10)
    optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()])

    def sample_neighbours() -> list[list[int]]:
        return [[node, *random.sample(links[node], 10)] for node in random.sample(range(5_000), 512)]

    clock.begin()
    while True:
        rows = torch.tensor(sample_neighbours())
        near = features[rows]
        joined = torch.cat([near[:, 0], near[:, 1:].mean(1)], 1)
        if clock.got():
            return
        hidden = F.relu(first(joined))
        loss = F.cross_entropy(second(hidden), rows[:, 0] % 10)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        clock.done()


class Lazy(Dataset[Any]):
    """h5py's habit: each process opens the file when it needs it, and a lock guards it."""

    def __init__(self) -> None:
        self.lock, self.file = multiprocessing.Lock(), None

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, i: int) -> Any:
        with self.lock:
            if self.file is None:
                time.sleep(0.1)
                self.file = object()
            time.sleep(0.003)
        return image(i)


@program("artificial_limit", seconds=11)
def locked_file(clock: Clock) -> None:
    """A file that each worker opens lazily, behind one lock for all."""
    train(clock, DataLoader(Lazy(), batch_size=8, num_workers=workers(2)), step_of(mlp()))


class Sharded(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        for index in range(info.id if info else 0, 1_000_000, info.num_workers if info else 1):
            yield jpeg(index)


@program("input_cpu_saturated")
def sharded_by_worker(clock: Clock) -> None:
    """An IterableDataset that each of two workers reads a part of."""
    train(clock, DataLoader(Sharded(), batch_size=32, num_workers=workers(2)), step_of(mlp()))


@program()
def tiny_epochs(clock: Clock) -> None:
    """Persistent workers, and passes of twelve batches."""
    train(clock, made(cheap, 32, given=1, count=384), step_of(conv_net(48)))


@program()
def averaged_weights(clock: Clock) -> None:
    """Diffusion: noise, a time step, and a moving average of the weights by hand."""
    net = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.SiLU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.SiLU(),
        nn.Conv2d(32, 1, 3, padding=1),
    )
    average, optimizer = deepcopy(net), torch.optim.AdamW(net.parameters())

    def step(x: torch.Tensor, _: Any) -> None:
        noise, at = torch.randn_like(x), torch.rand(len(x), 1, 1, 1)
        loss = F.mse_loss(net(x * (1 - at) + noise * at), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for mean, each in zip(average.parameters(), net.parameters(), strict=True):
                mean.lerp_(each, 0.001)

    train(clock, DataLoader(IN_MEMORY, batch_size=32, shuffle=True), step)


def _distil(teacher: nn.Module, student: nn.Module) -> Any:
    optimizer = torch.optim.SGD(student.parameters(), lr=1e-3)

    def step(x: torch.Tensor, _: Any = None) -> None:
        with torch.no_grad():
            wanted = teacher(x).softmax(1)
        loss = F.kl_div(student(x).log_softmax(1), wanted, reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


@program()
def distillation(clock: Clock) -> None:
    """A teacher's forward pass in each step."""
    train(clock, DataLoader(IN_MEMORY, batch_size=32), _distil(conv_net(32).eval(), conv_net()))


@program(clocked=False)
def distillation_without_loader(clock: Clock) -> None:
    """The same on slices of a tensor: no evaluation, although a pass without gradients comes first."""
    step, images = _distil(conv_net(32).eval(), conv_net()), IN_MEMORY.tensors[0]
    clock.start()
    while not clock.over:
        step(images[torch.randint(4096, (32,))])


@program("input_single_process")
def early_stopping(clock: Clock) -> None:
    """A validation every 50 steps, by a loader of its own."""
    net = conv_net()
    step, held_out = step_of(net), DataLoader(Items(cheap, 128), batch_size=64)
    clock.begin()
    for number, (x, y) in enumerate(made(lambda i: image(i, cpu_s=0.0005), 32)):
        if clock.got():
            return
        step(x, y)
        clock.done()
        if number % 50 == 49:
            evaluate(clock, net, held_out)
            clock.resumed()


@program("input_single_process")
def folds(clock: Clock) -> None:
    """Four folds in one process, each with a model and loaders of its own."""
    for fold in range(4):
        net, one = conv_net(), Clock(1.7)
        step = step_of(net)
        train_items = torch.utils.data.Subset(Items(jpeg, 4096), [i for i in range(4096) if i % 4 != fold])
        loader = DataLoader(train_items, 32, shuffle=True, num_workers=workers(0))
        clock.begin()
        for x, y in loader:
            if clock.got() or one.over:
                break
            step(x, y)
            clock.done()
        evaluate(clock, net, DataLoader(Items(cheap, 64), batch_size=64))


def _tokenized(text: str) -> list[int]:
    decode(0.01)
    return tokenize(text)[:784]


@program("outside_torch", says="tokenize_in_pool")
def pool_of_tokenizers(clock: Clock) -> None:
    """A pool of processes tokenizes each batch, and the training thread waits for it; no loader."""
    text, step = "the quick brown fox jumps over the lazy dog " * 30, step_of(mlp())
    with multiprocessing.get_context("fork").Pool(2) as pool:

        def tokenize_in_pool() -> torch.Tensor:
            return torch.tensor(pool.map(_tokenized, [text] * 16)).float()

        clock.begin()
        while True:
            x = tokenize_in_pool()
            if clock.got():
                return
            step(x, torch.zeros(16, dtype=torch.long))
            clock.done()


@program("input_single_process")
def cache_that_warms_up(clock: Clock) -> None:
    """Items that are decoded once: the first pass is slow, later ones are not."""
    cached = functools.lru_cache(None)(lambda i: image(i, cpu_s=0.001))
    train(clock, made(cached, 32, count=1600), step_of(conv_net(32)))


@program("epoch_start_pause")
def loader_for_each_epoch(clock: Clock) -> None:
    """A function that makes a loader with workers for each pass."""

    def one_epoch(step: Any) -> None:
        train_pass(clock, DataLoader(Opening(), batch_size=32, num_workers=2), step)

    step = step_of(conv_net())
    while not clock.over:
        one_epoch(step)


class Opening(Dataset[Any]):
    """Opens an archive in each worker."""

    def __init__(self) -> None:
        self.archive: Any = None

    def __len__(self) -> int:
        return 960

    def __getitem__(self, i: int) -> Any:
        if self.archive is None:
            decode(0.3)
            self.archive = object()
        return cheap(i)


@program("input_single_process")
def infinite_generator(clock: Clock) -> None:
    """`while True` and `next` on a generator that goes round a loader."""

    def cycle(loader: Any) -> Iterator[Any]:
        while True:
            yield from loader

    batches, step = cycle(made(jpeg, 32, count=960)), step_of(conv_net())
    clock.begin()
    while True:
        x, y = next(batches)
        if clock.got():
            return
        step(x, y)
        clock.done()


@program("outside_torch", says="augment|decode", clocked=False)
def augmented_in_the_loop(clock: Clock) -> None:
    """A loader that keeps up, and augmentation on the CPU after it, in the training thread."""
    step = step_of(conv_net())

    def augment(x: torch.Tensor) -> torch.Tensor:
        for _ in range(len(x)):
            decode(0.001)
        return x

    clock.start()
    while not clock.over:
        for x, y in DataLoader(IN_MEMORY, batch_size=32):
            if clock.over:
                break
            step(augment(x), y)
