"""Habits of tutorials: what is evaluated now and then inside a pass, and what each step does without gradients.

The latter is no evaluation.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, grad
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset, TensorDataset, get_worker_info

from . import Clock, program, workers
from .habits import IN_MEMORY
from .loaders import conv_net, jpeg, made, mlp, step_of, train, train_pass
from .loops import Gpt, get_batch
from .rl import outside

IMAGES, LABELS = IN_MEMORY.tensors


def in_memory(size: int = 32) -> DataLoader[Any]:
    return DataLoader(IN_MEMORY, size, shuffle=True)


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)


class Trainer:
    """A class of one's own, with callbacks that are called after each step."""

    def __init__(self, net: nn.Module, clock: Clock, *callbacks: Callable[[Trainer, int], None]) -> None:
        self.net, self.clock, self.callbacks, self.optimizer = net, clock, callbacks, sgd(net)

    def training_step(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def fit(self, loader: Any) -> None:
        self.clock.begin()
        for number, batch in enumerate(itertools.chain.from_iterable(itertools.repeat(loader))):
            if self.clock.got():
                return
            self.net.train()
            self.optimizer.zero_grad()
            self.training_step(batch).backward()
            self.optimizer.step()
            for callback in self.callbacks:
                callback(self, number)
            self.clock.done()


def every(steps: int, call: Callable[[Trainer], Any]) -> Callable[[Trainer, int], None]:
    """Return a callback that calls this after each so many steps, timed by the program's clock."""

    def callback(trainer: Trainer, number: int) -> None:
        if number % steps == steps - 1:
            with outside(trainer.clock):
                call(trainer)

    return callback


# evaluations ----------------------------------------------------------------------------------------------------------


@program("eval_share", clocked=False, seconds=9)
def callbacks_that_evaluate(clock: Clock) -> None:
    """A callback evaluates every eight steps in `eval()` mode, without no_grad; the next step calls `train()`."""

    def evaluate(trainer: Trainer) -> None:
        trainer.net.eval()
        for some in range(0, 2048, 256):
            trainer.net(IMAGES[some : some + 256]).argmax(1)

    Trainer(conv_net(), clock, every(8, evaluate)).fit(in_memory())


@program("eval_share", clocked=False, seconds=9)
def loss_on_held_out_tensors(clock: Clock) -> None:
    """The loss of all held-out rows every ten steps under no_grad; the mode does not change."""

    def evaluate(trainer: Trainer) -> None:
        with torch.no_grad():
            F.cross_entropy(trainer.net(IMAGES[:2048]), LABELS[:2048]).item()

    Trainer(conv_net(), clock, every(10, evaluate)).fit(in_memory())


@program("eval_share", clocked=False, seconds=9)
def evaluate_is_given_a_loader(clock: Clock) -> None:
    """A function that is given a loader, every 25 steps; neither no_grad nor `train()` afterwards."""
    held_out = DataLoader(TensorDataset(IMAGES[:2048], LABELS[:2048]), 256)

    def evaluate(trainer: Trainer) -> None:
        trainer.net.eval()
        sum(int((trainer.net(x).argmax(1) == y).sum()) for x, y in held_out)

    Trainer(conv_net(), clock, every(25, evaluate)).fit(in_memory())


@program("eval_share", clocked=False, seconds=9)
def text_is_sampled_every_ten_steps(clock: Clock) -> None:
    """A language model on a loader of tokens; some text is sampled now and then, token by token, to look at it."""

    class Model(Trainer):
        def training_step(self, batch: Any) -> torch.Tensor:
            x, y = batch
            return F.cross_entropy(self.net(x).flatten(0, 1), y.flatten())

    @torch.inference_mode()
    def sample(trainer: Trainer) -> None:
        row = torch.zeros(1, 1, dtype=torch.long)
        for _ in range(200):
            found = trainer.net(row)[:, -1].softmax(-1)
            row = torch.cat([row, torch.multinomial(found, 1)], 1)

    rows = TensorDataset(*get_batch(512))
    Model(Gpt(), clock, every(10, sample)).fit(DataLoader(rows, 16))


@program("eval_share", clocked=False, seconds=9)
def early_stopping_on_tensors(clock: Clock) -> None:
    """Restarts of a training, each of which is left by a `break` after an evaluation that has not become better."""
    net = conv_net()
    optimizer = sgd(net)
    clock.start()
    while not clock.over:
        best, bad = float("inf"), 0
        for number, (x, y) in enumerate(in_memory()):
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
            if number % 10 == 9:
                with outside(clock):
                    net.eval()
                    with torch.no_grad():
                        loss = F.cross_entropy(net(IMAGES[:1024]), LABELS[:1024]).item()
                    best, bad = (loss, 0) if loss < best - 0.01 else (best, bad + 1)
                if bad > 3:
                    break
                net.train()
    clock.left()


@program("eval_share", clocked=False, seconds=9)
def tested_on_tensors_after_each_pass(clock: Clock) -> None:
    """Short passes; after each the accuracy on a whole tensor."""
    net = conv_net()
    step, loader = step_of(net), DataLoader(Subset(IN_MEMORY, range(640)), 32)
    clock.start()
    while not clock.over:
        for x, y in loader:
            step(x, y)
        with outside(clock), torch.no_grad():
            net.eval()
            (net(IMAGES[:2048]).argmax(1) == LABELS[:2048]).float().mean()
            net.train()
    clock.left()


@program("eval_share", clocked=False, seconds=9)
def nanogpt_evaluates_with_gradients(clock: Clock) -> None:
    """No loader; an evaluation in `eval()` mode that forgets no_grad."""
    net = Gpt()
    optimizer = sgd(net)
    clock.start()
    for number in range(10**9):
        if clock.over:
            break
        x, y = get_batch()
        optimizer.zero_grad()
        F.cross_entropy(net(x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()
        if number % 10 == 9:
            with outside(clock):
                net.eval()
                for _ in range(40):
                    x, y = get_batch()
                    F.cross_entropy(net(x).flatten(0, 1), y.flatten()).item()
                net.train()
    clock.left()


# none: what each step does --------------------------------------------------------------------------------------------


class Distilled(Trainer):
    def __init__(self, clock: Clock, teacher: nn.Module) -> None:
        super().__init__(conv_net(), clock)
        self.teacher = teacher.eval()

    def training_step(self, batch: Any) -> torch.Tensor:
        with torch.no_grad():
            wanted = self.teacher(batch[0]).softmax(1)
        return F.cross_entropy(self.net(batch[0]), wanted)


@program()
def teacher_in_each_step(clock: Clock) -> None:
    """A teacher that is larger than its student; training begins with ten steps without it."""
    train_pass(clock, DataLoader(Subset(IN_MEMORY, range(320)), 32), step_of(conv_net()))
    Distilled(clock, conv_net(64)).fit(in_memory())


class MeanTeacher(Distilled):
    """The teacher is an average of the student."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock, nn.Module())
        self.teacher = deepcopy(self.net).eval()
        self.callbacks = (lambda trainer, number: self.average(),)

    @torch.no_grad()
    def average(self) -> None:
        for mine, its in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            mine.lerp_(its, 0.01)


@program()
def mean_teacher(clock: Clock) -> None:
    """A pass without gradients and an average under no_grad in each step."""
    MeanTeacher(clock).fit(in_memory())


class Pseudo(Trainer):
    def training_step(self, batch: Any) -> torch.Tensor:
        self.net.eval()
        with torch.no_grad():
            guessed = self.net(batch[0] + 0.1).argmax(1)
        self.net.train()
        nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        return F.cross_entropy(self.net(batch[0]), guessed)


@program()
def pseudo_labels(clock: Clock) -> None:
    """The model labels each batch in `eval()` mode before it trains on it."""
    Pseudo(conv_net(), clock).fit(in_memory())


class Adversarial(Trainer):
    def training_step(self, batch: Any) -> torch.Tensor:
        x, y = batch
        self.net.eval()
        found = (x + 0.01).requires_grad_()
        for _ in range(3):
            (slope,) = torch.autograd.grad(F.cross_entropy(self.net(found), y), found)
            found = (found + 0.01 * slope.sign()).detach().requires_grad_()
        self.net.train()
        return F.cross_entropy(self.net(found), y)


@program()
def adversarial_examples(clock: Clock) -> None:
    """TRADES: three passes with gradients of the input in `eval()` mode, in each step."""
    Adversarial(conv_net(), clock).fit(in_memory())


@program()
def lookahead(clock: Clock) -> None:
    """Every five steps slow weights follow the fast ones under no_grad, and norms are logged: no module is called."""
    net = conv_net()
    slow = deepcopy(net)

    @torch.no_grad()
    def follow(trainer: Trainer) -> None:
        for _ in range(50):
            for mine, its in zip(slow.parameters(), net.parameters(), strict=True):
                its.copy_(mine.lerp_(its, 0.5))
            sum(its.norm() for its in net.parameters())

    Trainer(net, clock, every(5, follow)).fit(in_memory())


@program("input_single_process", says="jpeg|decode")
def gan_with_fixed_noise(clock: Clock) -> None:
    """DCGAN: two optimizers, decoded real images, and every twenty steps images from fixed noise, without no_grad."""
    maker = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 784), nn.Tanh())
    judge = nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.LeakyReLU(0.2), nn.Linear(256, 1))
    of_maker, of_judge = sgd(maker), sgd(judge)
    fixed, numbers = torch.randn(64, 64), itertools.count()

    def step(x: torch.Tensor, _: Any) -> None:
        made_up = maker(torch.randn(len(x), 64))
        of_judge.zero_grad()
        F.softplus(-judge(x)).mean().backward()
        F.softplus(judge(made_up.detach())).mean().backward()
        of_judge.step()
        of_maker.zero_grad()
        F.softplus(-judge(made_up)).mean().backward()
        of_maker.step()
        if next(numbers) % 20 == 19:
            maker(fixed).detach()

    train(clock, made(jpeg), step)


@program()
def critic_trains_seldom(clock: Clock) -> None:
    """The maker trains in each step, the critic every six, on images that are made up without gradients."""
    maker, critic = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 784)), mlp()
    of_maker, of_critic = sgd(maker), sgd(critic)
    clock.begin()
    for number, (x, _) in enumerate(itertools.chain.from_iterable(itertools.repeat(in_memory(128)))):
        if clock.got():
            return
        of_maker.zero_grad()
        (-critic(maker(torch.randn(128, 64))).mean()).backward()
        of_maker.step()
        if number % 6 == 5:
            with torch.no_grad():
                made_up = maker(torch.randn(128, 64))
            of_critic.zero_grad()
            (critic(made_up).mean() - critic(x).mean()).backward()
            of_critic.step()
        clock.done()


@program("input_single_process", says="jpeg|decode")
def accumulated_with_a_scaler(clock: Clock) -> None:
    """Mixed precision with a gradient scaler, and four batches a step."""
    net, numbers = conv_net(), itertools.count(1)
    optimizer, scaler = sgd(net), torch.amp.GradScaler("cpu")

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(net(x), y) / 4
        scaler.scale(loss).backward()
        if next(numbers) % 4 == 0:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)

    train(clock, made(jpeg, 64), step)


@program("input_single_process", says="jpeg|decode")
def a_harder_loader_each_pass(clock: Clock) -> None:
    """A curriculum: the loader is replaced for each pass by one with more data sets."""
    step, parts = step_of(mlp()), [made(jpeg, count=320).dataset for _ in range(40)]
    for number in itertools.count(1):
        if clock.over:
            return
        train_pass(clock, DataLoader(ConcatDataset(parts[:number]), 32, shuffle=True), step)


class Shards(IterableDataset[Any]):
    """A part for each worker."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        return map(jpeg, itertools.count(*((info.id, info.num_workers) if info else (0, 1))))


@program("input_cpu", "input_cpu_saturated", says="jpeg|decode")
def shards_of_two_workers(clock: Clock) -> None:
    """An endless IterableDataset that its two workers divide, inside `islice`."""
    loader = DataLoader(Shards(), 32, num_workers=workers(2), persistent_workers=True)
    train(clock, loader, step_of(mlp()))


@program()
def gradients_by_function(clock: Clock) -> None:
    """torch.func: a functional call and its gradient, and weights that are changed in a dictionary."""
    net = conv_net()
    weights = {name: each.detach() for name, each in net.named_parameters()}

    def loss_of(given: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        return F.cross_entropy(functional_call(net, given, (x,)), y)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        slopes = grad(loss_of)(weights, x, y)
        for name, slope in slopes.items():
            weights[name] = weights[name] - 1e-3 * slope

    train(clock, in_memory(), step)


@program()
def folds_in_memory(clock: Clock) -> None:
    """Five folds, each with a model of its own, and a test by a loader after each pass."""
    rows = list(range(len(IN_MEMORY)))
    random.shuffle(rows)
    for fold in itertools.cycle(range(5)):
        if clock.over:
            return
        net, part = conv_net(), len(rows) // 5
        step, held = step_of(net), rows[fold * part : fold * part + 64]
        kept = [row for row in rows if row not in set(held)]
        train_pass(clock, DataLoader(Subset(IN_MEMORY, kept), 32, shuffle=True), step)
        clock.left()
        net.eval()
        for x, _ in DataLoader(Subset(IN_MEMORY, held), 64):
            net(x)
        clock.begin()


@program()
def blocks_are_computed_again(clock: Clock) -> None:
    """A loader, and activations that are computed again in the backward pass."""
    blocks = nn.ModuleList([nn.Sequential(nn.Linear(784, 1024), nn.GELU(), nn.Linear(1024, 784)) for _ in range(4)])
    head = nn.Linear(784, 10)
    optimizer = sgd(nn.ModuleList([*blocks, head]))

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        x = x.flatten(1).requires_grad_()
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=True)
        optimizer.zero_grad()
        F.cross_entropy(head(x), y).backward()
        optimizer.step()

    train(clock, in_memory(), step)


@program(clocked=False)
def micro_batches_in_memory(clock: Clock) -> None:
    """nanoGPT with eight micro-batches a step that cost nothing, and clipped gradients."""
    net = Gpt()
    optimizer = sgd(net)
    clock.start()
    while not clock.over:
        for _ in range(8):
            x, y = get_batch()
            (F.cross_entropy(net(x).flatten(0, 1), y.flatten()) / 8).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
