"""Programs written in one go, as somebody else would, with their labels, before gpuwatch saw any of them.

They have other habits than the first ninety.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import re
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from . import Clock, decode, program, workers
from .habits import IN_MEMORY
from .loaders import Items, cheap, conv_net, image, made, mlp, step_of, train, train_pass


def pad_and_mask(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(map(len, rows))
    padded = [[float(token) for token in row] + [0.0] * (longest - len(row)) for row in rows]
    mask = [[1] * len(row) + [0] * (longest - len(row)) for row in rows]
    return torch.tensor([row[:784] for row in padded]), torch.tensor([sum(row) % 10 for row in mask])


def text(i: int) -> list[int]:
    return [i % 97] * (1000 + i % 500)


@program("input_cpu", "input_cpu_saturated", says="pad_and_mask")
def padded_by_a_worker(clock: Clock) -> None:
    """Tokens are padded and masked in Python, by the collate function of one worker."""
    train(clock, made(text, 64, given=1, collate_fn=pad_and_mask), step_of(mlp()))


def jitter(x: torch.Tensor) -> torch.Tensor:
    decode(0.0006 * len(x))
    return x * 0.9


class Augmented(DataLoader[Any]):
    def __iter__(self) -> Any:
        for x, y in super().__iter__():
            yield jitter(x), y


@program("input_single_process", says="jitter|decode")
def loader_of_its_own_class(clock: Clock) -> None:
    """A subclass of DataLoader whose `__iter__` augments each batch."""
    train(clock, Augmented(IN_MEMORY, batch_size=32), step_of(mlp()))


@program("input_handover", says="jitter|decode")
def own_class_with_workers(clock: Clock) -> None:
    """The same with a worker, which does none of that."""
    train(clock, Augmented(IN_MEMORY, batch_size=32, num_workers=1), step_of(mlp()))


class Miner(torch.utils.data.Sampler[Any]):
    """Sorts all scores for each batch."""

    scores = tuple(random.random() for _ in range(20_000))

    def __len__(self) -> int:
        return 2_000

    def mine_hard(self) -> list[int]:
        return sorted(range(len(self.scores)), key=lambda i: self.scores[i] + random.random() / 10)[:32]

    def __iter__(self) -> Iterator[Any]:
        return (self.mine_hard() for _ in range(len(self)))


@program("input_handover", says=r"in\s+Miner.mine_hard")
def slow_sampler(clock: Clock) -> None:
    """A batch sampler that draws hard examples in Python, in front of two workers."""
    train(clock, DataLoader(Items(cheap, 20_000), batch_sampler=Miner(), num_workers=workers(2)), step_of(mlp()))


def from_remote(i: int) -> Any:
    return image(i, wait_s=0.004)


@program("input_unexplained", says=r"worker's\s+fetch\s+is\s+in\s+(image|from_remote)")
def stateful_loader_waits(clock: Clock) -> None:
    """torchdata's StatefulDataLoader: two workers that wait, and its state every 50 batches."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader, step = StatefulDataLoader(Items(from_remote), batch_size=16, num_workers=workers(2)), step_of(mlp())
    clock.begin()
    for number, (x, y) in enumerate(loader):
        if clock.got():
            return
        step(x, y)
        clock.done()
        if number % 50 == 49:
            clock.left()
            loader.state_dict()
            clock.resumed()


class Shuffled(IterableDataset[Any]):
    """A stream of 3,000 items through a shuffle buffer of 2,600, which is filled at each pass."""

    def __iter__(self) -> Iterator[Any]:
        held: list[Any] = []
        for i in range(3_000):
            held.append(image(i, wait_s=0.0005))
            if len(held) > 2_600:
                yield held.pop(random.randrange(len(held)))
        yield from held


@program("epoch_start_pause", seconds=9)
def shuffle_buffer(clock: Clock) -> None:
    """webdataset's shuffle buffer, which must be filled before the first batch of a pass."""
    train(clock, DataLoader(Shuffled(), batch_size=64), step_of(conv_net()))


@program(says=r"torch\.compile takes")
def compiled_again_and_again(clock: Clock) -> None:
    """Another shape for each pass, and a model compiled for each."""
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def step(x: torch.Tensor, compiled: Any) -> None:
        optimizer.zero_grad()
        compiled(x).square().mean().backward()
        optimizer.step()

    for size in itertools.count(1):
        torch._dynamo.reset()
        compiled = torch.compile(net, backend="aot_eager", dynamic=False)
        clock.begin()
        for (x,) in DataLoader(TensorDataset(torch.randn(4 * size, 64)), batch_size=size):
            if clock.got():
                return
            step(x, compiled)
            clock.done()
        clock.exhausted()


class Pooled(Dataset[Any]):
    """s3fs's habit: a worker's own threads download."""

    pool: Any = None

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, i: int) -> Any:
        self.pool = self.pool or ThreadPoolExecutor(2)
        return torch.stack([x for x, _ in self.pool.map(lambda at: image(at, wait_s=0.03), (i, i + 1))]).mean(0), i % 10


@program("input_unexplained", says="Pooled.__getitem__")
def pool_in_each_worker(clock: Clock) -> None:
    """Two workers, each of which waits for two threads of its own, which wait for storage."""
    train(clock, DataLoader(Pooled(), batch_size=4, num_workers=workers(2)), step_of(mlp()))


@program("input_single_process", says="row_of")
def rows_of_a_database(clock: Clock) -> None:
    """SQLite without an index: each item scans a table."""
    base = sqlite3.connect(":memory:")
    base.execute("create table samples (name text, value real)")
    base.executemany("insert into samples values (?, ?)", [(f"n{i}", i / 1e4) for i in range(10_000)])

    def row_of(i: int) -> Any:
        ((value,),) = base.execute("select value from samples where name = ?", (f"n{i % 10_000}",)).fetchall()
        return torch.full((1, 28, 28), value), i % 10

    train(clock, made(row_of), step_of(conv_net()))


def encode_corpus(length: int) -> TensorDataset:
    rows = [[(at * 31 + line) % 256 for at in range(length)] for line in range(900)]
    return TensorDataset(torch.tensor([(row * 20)[:784] for row in rows]).float(), torch.arange(900) % 10)


@program("outside_torch", says="encode_corpus")
def curriculum(clock: Clock) -> None:
    """Longer texts from pass to pass, all encoded again in between."""
    step = step_of(mlp())
    for length in itertools.cycle(range(100, 784, 20)):
        train_pass(clock, DataLoader(encode_corpus(length), batch_size=30), step)
        if clock.over:
            return
        clock.left()


@program("step_waits", says="push_metrics|on_step_end", seconds=9)
def callback_that_waits(clock: Clock) -> None:
    """HF Trainer, and a callback that sends each step's metrics."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": F.cross_entropy(self.net(x), labels)}

    def push_metrics() -> None:
        time.sleep(0.04)

    class Push(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            clock.begin()

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            clock.got()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            push_metrics()
            clock.done()
            control.should_training_stop = clock.over

    def item(i: int) -> Any:
        return {"x": torch.randn(1, 28, 28), "labels": i % 10}

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=100_000, per_device_train_batch_size=8, report_to=[], save_strategy="no", disable_tqdm=True,
            logging_strategy="no", use_cpu=True,
        )  # fmt: skip
        Trainer(Model(), arguments, train_dataset=Items(item), callbacks=[Push()]).train()


@program("eval_share", says="waits for data")
def validation_that_waits(clock: Clock) -> None:
    """A validation every 20 steps, by a loader that decodes in the training process: most of it waits for that."""
    net = conv_net()
    step, held_out = step_of(net), DataLoader(Items(lambda i: image(i, cpu_s=0.004), 160), batch_size=32)
    clock.begin()
    for number, (x, y) in enumerate(itertools.chain.from_iterable(itertools.repeat(DataLoader(IN_MEMORY, 32)))):
        if clock.got():
            return
        step(x, y)
        clock.done()
        if number % 20 == 19:
            clock.left()
            net.eval()
            with torch.no_grad():
                sum(int((net(x).argmax(1) == y).sum()) for x, y in held_out)
            net.train()
            clock.resumed()


@program(
    "straggler",
    says=r"rank 0[^:]*: (move what waits|make it cheaper)|on rank 0: (move|make)",
    clocked=False,
    seconds=15,
)
def rank_0_logs(clock: Clock) -> None:
    """Two ranks over gloo; rank 0 alone sends each step's loss somewhere, and waits for the answer."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    if "RANK" not in os.environ:
        command = [sys.executable, "-m", "benchmarks.programs.child", "rank_0_logs", str(clock.seconds)]
        port = str(29_500 + os.getpid() % 1000)
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
        ranks = [subprocess.Popen(command, env={**os.environ, **place, "RANK": str(n)}) for n in (1, 0)]
        os._exit(max(rank.wait() for rank in ranks))
    dist.init_process_group("gloo")
    step = step_of(DistributedDataParallel(mlp()))

    def send_loss(loss: float) -> None:
        if dist.get_rank() == 0:
            time.sleep(0.03)

    clock.begin()
    for x, y in DataLoader(TensorDataset(torch.randn(6400, 1, 28, 28), torch.randint(10, (6400,))), batch_size=32):
        clock.got()
        send_loss(step(x, y))
        clock.done()
    dist.barrier()
    dist.destroy_process_group()


@program()
def saved_by_a_thread(clock: Clock) -> None:
    """A copy of the weights every ten steps, which a thread writes."""
    net = conv_net(32)
    step, numbers = step_of(net), itertools.count()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:

        def step_and_save(x: torch.Tensor, y: torch.Tensor) -> None:
            step(x, y)
            if next(numbers) % 10 == 9:
                weights = {name: each.clone() for name, each in net.state_dict().items()}
                threading.Thread(target=torch.save, args=(weights, Path(folder) / "last.pt")).start()

        train(clock, DataLoader(IN_MEMORY, batch_size=64), step_and_save)
        time.sleep(0.5)


def reward(tokens: list[int]) -> float:
    decode(0.006)
    return float(re.search("[0-4]{3}", "".join(chr(48 + token) for token in tokens)) is not None)


@program("outside_torch", says="reward|decode", clocked=False)
def rewards_in_python(clock: Clock) -> None:
    """GRPO: tokens are sampled one by one, then a function in Python judges each answer."""
    embed, cell, head = nn.Embedding(64, 32), nn.GRU(32, 64, batch_first=True), nn.Linear(64, 64)
    policy = nn.ModuleList([embed, cell, head])
    optimizer = torch.optim.AdamW(policy.parameters())

    def logits(x: torch.Tensor) -> Any:
        return head(cell(embed(x))[0])

    clock.start()
    while not clock.over:
        x = torch.randint(64, (16, 1))
        with torch.no_grad():
            for _ in range(16):
                x = torch.cat([x, torch.distributions.Categorical(logits=logits(x)[:, -1]).sample()[:, None]], 1)
            rewards = torch.tensor([reward(row) for row in x.tolist()])
        for _ in range(2):
            chosen = logits(x[:, :-1]).log_softmax(-1).gather(-1, x[:, 1:, None])[..., 0]
            loss = -(chosen.mean(1) * (rewards - rewards.mean())).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@program("outside_torch", says="fetch_batch")
def fetched_by_asyncio(clock: Clock) -> None:
    """No loader: a batch is gathered by an event loop in another thread."""
    loop, step = asyncio.new_event_loop(), step_of(mlp())
    threading.Thread(target=loop.run_forever, daemon=True).start()

    async def one(i: int) -> torch.Tensor:
        await asyncio.sleep(0.03)
        return torch.randn(784)

    async def many() -> list[torch.Tensor]:
        return await asyncio.gather(*(one(i) for i in range(16)))

    def fetch_batch() -> torch.Tensor:
        return torch.stack(asyncio.run_coroutine_threadsafe(many(), loop).result())

    clock.begin()
    while True:
        x = fetch_batch()
        if clock.got():
            return
        step(x, torch.arange(16) % 10)
        clock.done()


@program("outside_torch", says="dump_weights")
def histograms_each_step(clock: Clock) -> None:
    """All weights as JSON after each step, for a dashboard."""
    net = mlp()
    step = step_of(net)

    def dump_weights() -> str:
        return json.dumps({name: each.flatten().tolist() for name, each in net.named_parameters()})

    def step_and_dump(x: torch.Tensor, y: torch.Tensor) -> None:
        step(x, y)
        dump_weights()

    train(clock, DataLoader(IN_MEMORY, batch_size=64), step_and_dump)


@program("eval_share", says="waits for data", seconds=9)
def lightning_validation_waits(clock: Clock) -> None:
    """Lightning's validation, whose loader decodes in the training process: most of it waits for that."""
    from lightning.pytorch import Trainer

    from .frameworks import QUIET, lightning_module

    class Module(lightning_module(clock)):  # type: ignore[misc]
        def on_validation_start(self) -> None:
            clock.left()

        def on_validation_end(self) -> None:
            clock.resumed()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.net(batch[0])

    held_out = DataLoader(Items(lambda i: image(i, cpu_s=0.004), 160), batch_size=32)
    trainer = Trainer(accelerator="cpu", max_epochs=50, val_check_interval=20, num_sanity_val_steps=0, **QUIET)  # type: ignore[arg-type]
    trainer.fit(Module(), DataLoader(IN_MEMORY, batch_size=32), held_out)
