"""Programs with a special loop: no loader, passes that do not train, evaluations, files, sleeps, sweeps, ranks."""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import gpuwatch

from . import Clock, decode, program
from .loaders import Items, cheap, conv_net, evaluate, image, jpeg, made, mlp, step_of, tokenize, train, train_pass

TOKENS = torch.randint(0, 128, (200_000,))


class Gpt(nn.Module):
    """A very small transformer."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(128, width), nn.Linear(width, 128)
        self.block = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.block(self.embed(x)))


def get_batch(size: int = 16, length: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """nanoGPT's: slices of one long row of tokens."""
    at = torch.randint(len(TOKENS) - length - 1, (size,))
    rows = torch.stack([TOKENS[i : i + length + 1] for i in at])
    return rows[:, :-1], rows[:, 1:]


def get_batch_from_text(size: int = 16, length: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, tokenized each time."""
    text = "the quick brown fox jumps over the lazy dog " * 150
    rows = torch.tensor([tokenize(text)[: length + 1] for _ in range(size)]) % 128
    return rows[:, :-1], rows[:, 1:]


def _gpt(clock: Clock, batch: Any, watch: Any = None) -> None:
    net = Gpt()
    optimizer = torch.optim.AdamW(net.parameters())
    clock.begin()
    while True:
        x, y = batch()
        if clock.got():
            return
        loss = F.cross_entropy(net(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if watch is not None:
            watch.step()
        clock.done()


@program()
def nanogpt(clock: Clock) -> None:
    """No loader; batches are cheap."""
    _gpt(clock, get_batch)


@program("outside_torch", says="tokenize|get_batch_from_text")
def nanogpt_tokenizing(clock: Clock) -> None:
    """No loader; batches are tokenized in Python."""
    _gpt(clock, get_batch_from_text)


@program("input_unexplained", run=False, says=r"fetch\s+is\s+in\s+(tokenize|get_batch_from_text)")
def nanogpt_declared(clock: Clock) -> None:
    """The same with two lines: where a step ends, and where it waits for data."""
    watch = gpuwatch.Watch()

    def batch() -> Any:
        with watch.data():
            return get_batch_from_text()

    _gpt(clock, batch, watch)


@program()
def makemore(clock: Clock) -> None:
    """Indices into tensors, and an evaluation of the loss on both splits now and then."""
    x, y = torch.randint(27, (20_000, 8)), torch.randint(27, (20_000,))
    net = nn.Sequential(nn.Embedding(27, 24), nn.Flatten(), nn.Linear(192, 512), nn.Tanh(), nn.Linear(512, 27))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    clock.begin()
    for number in range(10**9):
        rows = torch.randint(0, len(x), (256,))
        some, wanted = x[rows], y[rows]
        if clock.got():
            return
        loss = F.cross_entropy(net(some), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        clock.done()
        if number % 500 == 499:
            clock.left()
            net.eval()
            with torch.no_grad():
                F.cross_entropy(net(x), y)
            net.train()
            clock.resumed()


@program(says="no training step was seen|step", clocked=False)
def regression(clock: Clock) -> None:
    """pytorch/examples' regression: gradients are applied by hand, without an optimizer."""
    fc = nn.Linear(4, 1)
    while not clock.over:
        x = torch.randn(32)
        rows = torch.stack([x**i for i in range(1, 5)], 1)
        fc.zero_grad()
        F.smooth_l1_loss(fc(rows), rows.sum(1, keepdim=True)).backward()
        for each in fc.parameters():
            assert each.grad is not None
            each.data.add_(each.grad, alpha=-0.01)


@program(says="no training step was seen|step", clocked=False)
def word_language_model(clock: Clock) -> None:
    """pytorch/examples' word_language_model: an LSTM, its weights changed by hand."""
    embed, lstm, head = nn.Embedding(128, 64), nn.LSTM(64, 128), nn.Linear(128, 128)
    model = nn.ModuleList([embed, lstm, head])
    state = None
    while not clock.over:
        x, y = get_batch(16, 35)
        state = None if state is None else tuple(each.detach() for each in state)
        out, state = lstm(embed(x.T), state)
        model.zero_grad()
        F.cross_entropy(head(out).flatten(0, 1), y.T.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for each in model.parameters():
            assert each.grad is not None
            each.data.add_(each.grad, alpha=-1.0)


@program("outside_torch", clocked=False)
def reinforce(clock: Clock) -> None:
    """RL: an episode in Python, then one update."""
    policy = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.Adam(policy.parameters())
    while not clock.over:
        states = []
        state = [0.0] * 4
        for _ in range(30):
            decode(0.0005)
            state = [value + random.uniform(-0.1, 0.1) for value in state]
            states.append(state)
        found = torch.distributions.Categorical(logits=policy(torch.tensor(states)))
        loss = -(found.log_prob(found.sample()) * torch.randn(30)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program("input_single_process")
def statistics_first(clock: Clock) -> None:
    """A pass for mean and standard deviation before the training."""
    total, step = torch.zeros(()), step_of(conv_net())
    train_pass(clock, DataLoader(Items(cheap, 12_800), batch_size=32), lambda x, _: total.add_(x.mean()))
    clock.steps_s.clear()  # what the workers speed up is the training
    train(clock, made(lambda i: image(i, wait_s=0.0005), 32), step)


@program("eval_share")
def evaluation_with_gradients(clock: Clock) -> None:
    """An evaluation as long as the training, by `model.eval()` and torch.no_grad."""
    net = conv_net()
    step = step_of(net)
    data = TensorDataset(torch.randn(640, 1, 28, 28), torch.randint(10, (640,)))
    held = TensorDataset(torch.randn(2560, 1, 28, 28), torch.randint(10, (2560,)))
    while not clock.over:
        train_pass(clock, DataLoader(data, batch_size=32), step)
        evaluate(clock, net, DataLoader(held, batch_size=32))


@program("input_single_process")
def sweep(clock: Clock) -> None:
    """Five trainings in one process, all of them starved."""
    for _ in range(5):
        one, step = Clock(1.5), step_of(mlp())
        loader = made(jpeg, 32)
        clock.begin()
        for x, y in loader:
            if clock.got() or one.over:
                break
            step(x, y)
            clock.done()
        clock.left()


@program()
def healthy_sweep(clock: Clock) -> None:
    """Five short trainings that keep up."""
    data = TensorDataset(torch.randn(4096, 1, 28, 28), torch.randint(10, (4096,)))
    for _ in range(5):
        one, step = Clock(1.5), step_of(conv_net(32))
        clock.begin()
        for x, y in DataLoader(data, batch_size=64):
            if clock.got() or one.over:
                break
            step(x, y)
            clock.done()
        clock.left()


@program("checkpoint_stall")
def saves_often(clock: Clock) -> None:
    """torch.save of 60 MB every ten steps."""
    step, weights = step_of(conv_net()), torch.rand(15_000_000)
    data = TensorDataset(torch.randn(4096, 1, 28, 28), torch.randint(10, (4096,)))
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        while not clock.over:
            clock.begin()
            for number, (x, y) in enumerate(DataLoader(data, batch_size=32)):
                if clock.got():
                    return
                step(x, y)
                clock.done()
                if number % 10 == 9:
                    clock.left()
                    torch.save({"weights": weights}, Path(folder) / "last.pt")
                    clock.resumed()


@program("step_waits", says="sleepy_upload|sleeping_step")
def sleeping_step(clock: Clock) -> None:
    """A step that waits 60 ms for an upload."""
    step = step_of(mlp())

    def sleepy_upload(loss: float) -> None:
        time.sleep(0.06)

    data = TensorDataset(torch.randn(4096, 1, 28, 28), torch.randint(10, (4096,)))
    train(clock, DataLoader(data, batch_size=32), lambda x, y: sleepy_upload(step(x, y)))


@program("step_waits")
def logging_step(clock: Clock) -> None:
    """A step that writes and syncs a file each time."""
    step = step_of(mlp())
    data = TensorDataset(torch.randn(4096, 1, 28, 28), torch.randint(10, (4096,)))
    with tempfile.NamedTemporaryFile("w", dir="/var/tmp") as file:

        def log(loss: float) -> None:
            file.write(json.dumps({"loss": loss}) + "\n")
            file.flush()
            os.fsync(file.fileno())
            time.sleep(0.02)  # a request to a tracking server

        train(clock, DataLoader(data, batch_size=32), lambda x, y: log(step(x, y)))


@program("input_single_process", says="short", seconds=30)
def twenty_steps(clock: Clock) -> None:
    """Twenty steps: too few for a promise."""
    step = step_of(conv_net())
    clock.begin()
    for number, (x, y) in enumerate(made(jpeg, 32)):
        if clock.got() or number == 20:
            break
        step(x, y)
        clock.done()
    clock.left()


@program(says="too few", seconds=30, clocked=False)
def one_batch(clock: Clock) -> None:
    """`next(iter(loader))` to inspect a batch."""
    x, y = next(iter(made(jpeg, 32)))
    step_of(mlp())(x, y)


@program()
def accumulated_gradients(clock: Clock) -> None:
    """Four batches for each step of the optimizer."""
    net = conv_net(32)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    numbers = iter(range(10**9))

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        F.cross_entropy(net(x), y).backward()
        if next(numbers) % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()

    data = TensorDataset(torch.randn(4096, 1, 28, 28), torch.randint(10, (4096,)))
    train(clock, DataLoader(data, batch_size=32), step)


@program()
def a_tenth_of_waiting(clock: Clock) -> None:
    """A tenth of the time waits for data: that is not worth a change."""
    step = step_of(conv_net(48))
    train(clock, made(lambda i: image(i, wait_s=0.0001), 32), step)


@program(clocked=False)
def overfit_one_batch(clock: Clock) -> None:
    """One batch by `next(iter(loader))`, and a loop without a loader that trains on it alone."""
    x, y = next(iter(DataLoader(TensorDataset(torch.randn(512, 1, 28, 28), torch.randint(10, (512,))), 64)))
    step = step_of(conv_net())
    clock.begin()
    while not clock.got():
        step(x, y)
        clock.done()


@program("input_single_process")
def steps_of_two_batches(clock: Clock) -> None:
    """Mixed precision by hand: a gradient scaler, and the optimizer's step after two batches."""
    net = conv_net()
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=1e-3), torch.amp.GradScaler("cpu")
    numbers = iter(range(10**9))

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(net(x), y) / 2
        scaler.scale(loss).backward()
        if next(numbers) % 2:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    train(clock, made(lambda i: image(i, wait_s=0.002)), step)


def _ranks(clock: Clock, slow: int | None) -> None:
    """Two ranks over gloo; one of them computes more than the other."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    if "RANK" not in os.environ:
        import subprocess

        name = "ranks_one_slow" if slow is not None else "ranks_in_step"
        command = [sys.executable, "-m", "benchmarks.programs.child", name, str(clock.seconds)]
        port = str(29_500 + os.getpid() % 1000)
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
        ranks = [subprocess.Popen(command, env={**os.environ, **place, "RANK": str(n)}) for n in (1, 0)]
        os._exit(max(rank.wait() for rank in ranks))
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    net = DistributedDataParallel(mlp())
    step = step_of(net)
    data = TensorDataset(torch.randn(8192, 1, 28, 28), torch.randint(10, (8192,)))
    clock.begin()
    for _ in range(4):
        for x, y in DataLoader(data, batch_size=64):
            clock.got()
            time.sleep(0.03 if rank == slow else 0.01)
            step(x, y)
            clock.done()
    dist.barrier()
    dist.destroy_process_group()


@program("straggler", clocked=False, seconds=15)
def ranks_one_slow(clock: Clock) -> None:
    """Rank 1 does more in each step."""
    _ranks(clock, 1)


@program(clocked=False, seconds=15)
def ranks_in_step(clock: Clock) -> None:
    """Two equal ranks."""
    _ranks(clock, None)
