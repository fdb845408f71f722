"""Programs for a GPU: `python -m benchmarks.programs --cuda`.

Their shares are compared with the profiler's in `benchmarks/gpu/models.py`, only their causes here.
"""

from __future__ import annotations

import functools
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from . import Clock, decode, program
from .frameworks import QUIET, lightning_module, trainer_callback
from .loaders import Items
from .rl import VectorEnv

DEVICE = os.environ.get("PROGRAM_DEVICE", "cuda")
"""`cpu` only shows that the programs run."""
gpu_program = functools.partial(program, cuda=True, clocked=False, seconds=5.0)
SIZE = (16, 64, 64) if DEVICE == "cpu" else (256, 8, 256)
"""Width, batch and length."""


class Gpt(nn.Module):
    """A transformer of the usual kind, of about 10 ms a step on a large GPU."""

    def __init__(self, width: int = 4 * SIZE[0], layers: int = 6) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(512, width), nn.Linear(width, 512)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.blocks(self.embed(x)))


def convs(width: int = 64) -> nn.Module:
    """A network of convolutions for images of 64 x 64."""
    parts: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1), nn.ReLU()]
    for _ in range(2 if DEVICE == "cpu" else 8):
        parts += [nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)).to(DEVICE)


def picture(index: int, cpu_s: float = 0.0) -> tuple[torch.Tensor, int]:
    if cpu_s:
        decode(cpu_s)
    return torch.full((3, 64, 64), float(index % 5)), index % 10


slow_picture = functools.partial(picture, cpu_s=0.001)


def made(make: Any = slow_picture, batch: int = 64, workers: int = 0) -> DataLoader[Any]:
    return DataLoader(Items(make), batch_size=batch, num_workers=workers, pin_memory=DEVICE != "cpu")


def moved(*parts: torch.Tensor) -> list[torch.Tensor]:
    return [part.to(DEVICE, non_blocking=True) for part in parts]


def _train(clock: Clock, loader: Any, net: nn.Module, after: Callable[[int, Any], Any] = lambda *_: None) -> None:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    clock.begin()
    for number, batch in enumerate(loader):
        if clock.got():
            return
        x, y = moved(*batch)
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            out = net(x)
        loss = F.cross_entropy(out.flatten(0, -2).float(), y.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        after(number, loss)
        clock.done()


def tokens(cost_s: float = 0.0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """nanoGPT's batches: slices of one long row, pinned."""
    data = torch.randint(0, 512, (1_000_000,))
    while True:
        at = torch.randint(len(data) - SIZE[2] - 1, (4 * SIZE[1],))
        rows = torch.stack([data[i : i + SIZE[2] + 1] for i in at])
        if cost_s:
            tokenize(cost_s)
        yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def tokenize(cost_s: float) -> None:
    decode(cost_s)


@gpu_program()
def gpu_nanogpt(clock: Clock) -> None:
    """No loader; batches are cheap."""
    _train(clock, tokens(), Gpt().to(DEVICE), lambda number, loss: loss.item() if number % 10 == 0 else None)


@gpu_program("outside_torch", says="tokenize|decode")
def gpu_nanogpt_tokenizing(clock: Clock) -> None:
    """No loader; batches are tokenized for 40 ms in Python, and the loss is read at each step."""
    _train(clock, tokens(0.04), Gpt().to(DEVICE), lambda _, loss: loss.item())


@gpu_program("input_single_process")
def gpu_decoding(clock: Clock) -> None:
    """Images that are decoded in the training process."""
    _train(clock, made(), convs())


@gpu_program()
def gpu_workers(clock: Clock) -> None:
    """Eight workers, which are in time."""
    _train(clock, made(picture, 256, 8), convs(128))


@gpu_program("input_cpu", "input_cpu_saturated")
def gpu_two_workers(clock: Clock) -> None:
    """Two workers, which are not."""
    _train(clock, made(workers=2), convs())


@gpu_program()
def gpu_compiled(clock: Clock) -> None:
    """torch.compile, and a loader of two workers."""
    _train(clock, _token_loader(), torch.compile(Gpt().to(DEVICE)))  # type: ignore[arg-type]


def _token_loader(cost_s: float = 0.0) -> DataLoader[Any]:
    def item(_: int) -> tuple[torch.Tensor, torch.Tensor]:
        if cost_s:
            decode(cost_s)
        row = torch.randint(0, 512, (SIZE[2] + 1,))
        return row[:-1], row[1:]

    return DataLoader(Items(item), batch_size=4 * SIZE[1], num_workers=0 if cost_s else 2, pin_memory=DEVICE != "cpu")


@gpu_program("input_single_process")
def gpu_graphs(clock: Clock) -> None:
    """CUDA graphs by torch.compile, and sequences that are made in the training process."""
    _train(clock, _token_loader(0.002), torch.compile(Gpt().to(DEVICE), mode="reduce-overhead"))  # type: ignore[arg-type]


@gpu_program()
def gpu_compiled_loss(clock: Clock) -> None:
    """nanoGPT with its loss in a compiled function, without a loader."""
    net = Gpt().to(DEVICE)
    optimizer = torch.optim.AdamW(net.parameters(), fused=DEVICE == "cuda")

    @torch.compile
    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(net(x).flatten(0, 1), y.flatten())

    clock.begin()
    for batch in tokens():
        if clock.got():
            return
        loss = loss_of(*moved(*batch))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        clock.done()


@gpu_program("host_bound")
def gpu_tiny_steps(clock: Clock) -> None:
    """A deep network of tiny layers: Python and launches take the time."""
    net = nn.Sequential(*(part for _ in range(40) for part in (nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU())))
    optimizer = torch.optim.AdamW(net.to(DEVICE).parameters(), lr=1e-4, foreach=False)
    clock.begin()
    x = torch.randn(32, 64)
    while not clock.got():
        net(x.to(DEVICE)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        clock.done()


@gpu_program("eval_share")
def gpu_evaluating(clock: Clock) -> None:
    """An accuracy on held-out batches after every 20 steps, which takes 100 steps' time."""
    net = convs(128)
    held_out = [(torch.randn(256, 3, 64, 64), torch.randint(10, (256,))) for _ in range(8)]

    def evaluate(number: int, _: Any) -> None:
        if number % 20 == 19:
            clock.left()
            net.eval()
            right = 0
            with torch.no_grad():
                for _ in range(6):
                    for batch in held_out:
                        x, y = moved(*batch)
                        right += (net(x).argmax(1) == y).sum().item()
            net.train()
            clock.resumed()

    _train(clock, made(picture, 64, 4), net, evaluate)


@gpu_program("input_single_process")
def gpu_gan(clock: Clock) -> None:
    """Two networks, two optimizers, mixed precision with a scaler."""
    one, two = convs(32), nn.Sequential(nn.Linear(64, 3 * 64 * 64), nn.Unflatten(1, (3, 64, 64))).to(DEVICE)
    optimizers = [torch.optim.Adam(net.parameters()) for net in (one, two)]
    scaler = torch.amp.GradScaler(DEVICE)  # type: ignore[attr-defined]
    clock.begin()
    for x, _ in made():
        if clock.got():
            return
        x = x.to(DEVICE, non_blocking=True)
        noise = torch.randn(len(x), 64, device=DEVICE)
        for turn, optimizer in enumerate(optimizers):
            with torch.autocast(DEVICE, dtype=torch.float16 if DEVICE == "cuda" else torch.bfloat16):
                fake = two(noise) if turn else two(noise).detach()
                loss = one(fake).mean() if turn else one(x).mean() - one(fake).mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        clock.done()


@gpu_program("outside_torch", says="step|_physics")
def gpu_ppo(clock: Clock) -> None:
    """A policy on the GPU, and environments in Python."""
    policy = nn.Sequential(nn.Linear(4, 256), nn.Tanh(), nn.Linear(256, 2)).to(DEVICE)
    optimizer = torch.optim.Adam(policy.parameters())
    env = VectorEnv(8, 0.0005)
    state = torch.zeros(8, 4)
    clock.start()
    while not clock.over:
        states, actions = [], []
        for _ in range(32):
            with torch.no_grad():
                action = torch.distributions.Categorical(logits=policy(state.to(DEVICE))).sample()
            states.append(state)
            actions.append(action)
            state, _ = env.step(action.cpu())
        for _ in range(4):
            logits = policy(torch.stack(states).to(DEVICE))
            loss = F.cross_entropy(logits.flatten(0, 1), torch.stack(actions).flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        clock.done()


@gpu_program("input_single_process")
def gpu_hf_trainer(clock: Clock) -> None:
    """transformers' Trainer in bfloat16."""
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    def item(index: int) -> Any:
        decode(0.002)
        return {"input_ids": torch.randint(0, 1000, (128,)), "labels": index % 2}

    net = BertForSequenceClassification(BertConfig(vocab_size=1000, hidden_size=512, num_hidden_layers=6, num_attention_heads=8))  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(folder, max_steps=100_000, per_device_train_batch_size=32, report_to=[], save_strategy="no", disable_tqdm=True, logging_strategy="no", bf16=DEVICE != "cpu", use_cpu=DEVICE == "cpu")  # fmt: skip
        Trainer(net, arguments, train_dataset=Items(item), callbacks=[trainer_callback(clock)]).train()


@gpu_program("input_single_process")
def gpu_lightning(clock: Clock) -> None:
    """Lightning's Trainer in bfloat16."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    from lightning.pytorch import Trainer

    module = lightning_module(clock)()
    module.net = convs()
    kind = "cpu" if DEVICE == "cpu" else "gpu"
    Trainer(accelerator=kind, devices=1, precision="bf16-mixed", max_epochs=1, **QUIET).fit(module, made())  # type: ignore[arg-type]


@gpu_program("input_single_process")
def gpu_accelerate(clock: Clock) -> None:
    """Accelerate's own loop, which moves batches itself."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=DEVICE == "cpu", mixed_precision="bf16")
    net = convs()
    net, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=1e-3), made())
    clock.begin()
    for x, y in loader:
        if clock.got():
            return
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(net(x), y))
        optimizer.step()
        clock.done()


@gpu_program("input_single_process")
def gpu_ddp(clock: Clock) -> None:
    """DistributedDataParallel over NCCL, alone."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29512", RANK="0", WORLD_SIZE="1")
    torch.distributed.init_process_group("gloo" if DEVICE == "cpu" else "nccl")
    _train(clock, made(), nn.parallel.DistributedDataParallel(convs()))
    torch.distributed.destroy_process_group()


@gpu_program("input_single_process")
def gpu_micro_batches(clock: Clock) -> None:
    """Four batches a step, clipped gradients, an average of the weights after it."""
    net = convs()
    average = torch.optim.swa_utils.AveragedModel(net)
    optimizer = torch.optim.AdamW(net.parameters())
    clock.begin()
    for number, (x, y) in enumerate(made()):
        if clock.got():
            return
        x, y = moved(x, y)
        (F.cross_entropy(net(x), y) / 4).backward()
        if number % 4 == 3:
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(net)
        clock.done()


@gpu_program(says="no training step was seen")
def gpu_inference(clock: Clock) -> None:
    """A server's loop."""
    net = Gpt().to(DEVICE).eval()
    clock.start()
    with torch.inference_mode():
        for x, _ in tokens():
            net(x.to(DEVICE)).argmax(-1).cpu()
            if clock.over:
                return


@gpu_program(run=False, says="runs\\s+asynchronously")
def gpu_jax(clock: Clock) -> None:
    """JAX, which shows no device events: the host waits for data, and no cause is named."""
    import jax
    import jax.numpy as jnp

    import gpuwatch

    @jax.jit
    def step(weights: Any, x: Any) -> Any:
        return weights - 1e-6 * jax.grad(lambda w: jnp.square(jnp.tanh(x @ w) @ w).mean())(weights)

    weights = jnp.ones((2048, 2048))
    clock.begin()
    for x in gpuwatch.watch(DataLoader(Items(lambda _: decode(0.002) or torch.ones(2048)), batch_size=16)):
        if clock.got():
            break
        weights = step(weights, x.numpy())
        clock.done()
    weights.block_until_ready()
