"""Reinforcement learning: an environment is stepped in the training thread, the policy is trained now and then.

Each step of the environment takes a forward pass.
"""

from __future__ import annotations

import functools
import multiprocessing
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import gpuwatch

from . import Clock, decode, program
from .loops import Gpt, get_batch


class CartPole:
    """An environment in plain Python."""

    clock: Clock | None = None  # the program's own, to which it reports how long its physics take

    def __init__(self, cost_s: float = 0.0) -> None:
        self.cost_s, self.state = cost_s, [0.0] * 4

    def reset(self) -> list[float]:
        self.state = [random.uniform(-0.05, 0.05) for _ in range(4)]
        return self.state

    def step(self, action: int) -> tuple[list[float], float, bool]:
        begin = time.perf_counter()
        self._physics()
        if self.clock is not None:
            self.clock.outside_s += time.perf_counter() - begin
        self.state = [value + (0.1 if action else -0.1) * random.random() for value in self.state]
        return self.state, 1.0, random.random() < 0.02

    def _physics(self) -> None:
        """Compute in Python alone: the interpreter's lock is held."""
        end, x = time.thread_time() + self.cost_s, 0.0
        while time.thread_time() < end:
            for number in range(50):
                x += number * 0.5


class VectorEnv:
    """Several environments, one after the other."""

    def __init__(self, count: int, cost_s: float) -> None:
        self.envs = [CartPole(cost_s) for _ in range(count)]

    def step(self, actions: Any) -> tuple[torch.Tensor, torch.Tensor]:
        stepped = [env.step(int(action)) for env, action in zip(self.envs, actions, strict=True)]
        return torch.tensor([state for state, _, _ in stepped]), torch.tensor([reward for _, reward, _ in stepped])


@contextmanager
def outside(clock: Clock) -> Iterator[None]:
    """The program's own clock of an evaluation, for example."""
    begin = time.perf_counter()
    yield
    clock.outside_s += time.perf_counter() - begin


def between_passes(clock: Clock, *models: nn.Module) -> list[Callable[[Any], Any]]:
    """Return functions that call these models.

    The program's own clock counts from each call without gradients to the next call of any.
    """
    since: list[float] = []

    def call(model: nn.Module, x: Any) -> Any:
        gap_s = time.perf_counter() - since.pop() if since else 0.0
        clock.outside_s += gap_s if clock.begun else 0.0
        found = model(x)
        if not torch.is_grad_enabled():
            since.append(time.perf_counter())
        return found

    return [functools.partial(call, model) for model in models]


def _begin(clock: Clock) -> None:
    """The optimizer's first step, before which nothing is watched: no loader is there."""
    if not clock.begun:
        clock.start()


def mlp(outputs: int, width: int = 64) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, outputs))


def _ppo(clock: Clock, env: Any, size: int, width: int = 64, steps: int = 64, watch: Any = None) -> None:
    """CleanRL's PPO: a rollout, then four epochs of minibatches."""
    actor, critic = mlp(2, width), mlp(1, width)
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=1e-3)
    seen = torch.zeros(size, 4)
    # With a Watch the finding is about one function; else about all that passes between forward passes.
    act, value = between_passes(clock, actor, critic) if watch is None else (actor, critic)
    if watch is not None:
        for each in env.envs:
            each.clock = clock
        watch.step()
    while not clock.over:
        rows = []
        for _ in range(steps):
            with torch.no_grad():
                found = torch.distributions.Categorical(logits=act(seen))
                action = found.sample()
                rows.append((seen, action, found.log_prob(action), value(seen).flatten()))
            seen, _ = env.step(action.tolist())
        states, actions, before, values = (torch.cat(column) for column in zip(*rows, strict=True))
        gains = torch.randn(len(states)) - values
        for _ in range(4):
            for some in torch.randperm(len(states)).split(64):
                found = torch.distributions.Categorical(logits=act(states[some]))
                ratio = (found.log_prob(actions[some]) - before[some]).exp()
                loss = -(ratio * gains[some]).mean() + (value(states[some]).flatten() - values[some]).square().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(actor.parameters(), 0.5)
                optimizer.step()
                _begin(clock)
        if watch is not None:
            watch.step()
    clock.left()


@program("outside_torch", says="VectorEnv|CartPole", clocked=False)
def ppo_vectorised(clock: Clock) -> None:
    """CleanRL's PPO: four environments, one after the other in this process, then four epochs of minibatches."""
    _ppo(clock, VectorEnv(4, 0.0005), 4)


@program("outside_torch", says="VectorEnv|CartPole", clocked=False, run=False, seconds=14)
def ppo_marked(clock: Clock) -> None:
    """The same with a Watch, and `w.step()` after each update."""
    clock.start()  # with the start-up, in which torch imports much, as the Watch
    _ppo(clock, VectorEnv(4, 0.0005), 4, watch=gpuwatch.Watch())


class Remote:
    """Environments in another process: this one waits for its answers."""

    def __init__(self, count: int, wait_s: float) -> None:
        self.pipe, there = multiprocessing.Pipe()
        serve = multiprocessing.get_context("fork").Process(target=_serve, args=(there, count, wait_s), daemon=True)
        serve.start()

    def step(self, actions: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.pipe.send(actions)
        states, rewards = self.pipe.recv()
        return torch.tensor(states), torch.tensor(rewards)


def _serve(pipe: Any, count: int, wait_s: float) -> None:
    while True:
        pipe.recv()
        time.sleep(wait_s)
        pipe.send(([[random.random()] * 4] * count, [1.0] * count))


@program("outside_torch", says="Remote", clocked=False)
def ppo_in_another_process(clock: Clock) -> None:
    """Environments in another process, which answers after 3 ms."""
    _ppo(clock, Remote(8, 0.003), 8)


@program(clocked=False)
def ppo_large_policy(clock: Clock) -> None:
    """The same with a network that takes most of the time, and an environment that costs little."""
    _ppo(clock, VectorEnv(16, 0.00001), 16, width=1024, steps=16)


@program("outside_torch", says="CartPole", clocked=False)
def dqn_replay(clock: Clock) -> None:
    """DQN: one step of the environment, one batch from the replay buffer, a target network."""
    net, target, env = mlp(2), mlp(2), CartPole(0.003)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    replay: deque[Any] = deque(maxlen=10_000)
    state = env.reset()
    value, wanted_of = between_passes(clock, net, target)
    for number in range(10**9):
        with torch.no_grad():
            action = int(value(torch.tensor(state)).argmax())
        after, reward, done = env.step(action)
        replay.append((state, action, reward, after))
        state = env.reset() if done else after
        if clock.over:
            break
        if len(replay) < 64:
            continue
        states, actions, rewards, following = zip(*random.sample(replay, 64), strict=True)
        with torch.no_grad():
            wanted = torch.tensor(rewards) + 0.99 * wanted_of(torch.tensor(following)).max(1).values
        found = value(torch.tensor(states)).gather(1, torch.tensor(actions)[:, None]).flatten()
        optimizer.zero_grad()
        F.smooth_l1_loss(found, wanted).backward()
        optimizer.step()
        _begin(clock)
        if number % 200 == 0:
            target.load_state_dict(net.state_dict())
    clock.left()


@program("outside_torch", says="CartPole", clocked=False)
def actor_critic(clock: Clock) -> None:
    """pytorch/examples' actor_critic: a forward pass with gradients per environment step, one update per episode."""
    body, actor, critic = nn.Linear(4, 128), nn.Linear(128, 2), nn.Linear(128, 1)
    model = nn.ModuleList([body, actor, critic])
    optimizer, env = torch.optim.Adam(model.parameters(), lr=3e-3), CartPole(0.002)
    while not clock.over:
        state, terms = env.reset(), []
        for _ in range(50):
            hidden = F.relu(body(torch.tensor(state)))
            found = torch.distributions.Categorical(logits=actor(hidden))
            action = found.sample()
            state, reward, _ = env.step(int(action))
            terms.append(-found.log_prob(action) * reward + (critic(hidden) - reward).square())
        optimizer.zero_grad()
        torch.stack(terms).sum().backward()
        optimizer.step()
        _begin(clock)
        env.clock = clock
    clock.left()


@program("outside_torch", says="CartPole", clocked=False)
def rollout_then_loader(clock: Clock) -> None:
    """A rollout, then two epochs over it by a DataLoader."""
    net, env = mlp(2), CartPole(0.002)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    clock.start()
    while not clock.over:
        states, actions, state = [], [], env.reset()
        for _ in range(200):
            with torch.no_grad():
                action = int(net(torch.tensor(state)).argmax())
            states.append(state)
            actions.append(action)
            state, _, _ = env.step(action)
        data = TensorDataset(torch.tensor(states), torch.tensor(actions))
        for _ in range(2):
            for x, y in DataLoader(data, batch_size=32, shuffle=True):
                optimizer.zero_grad()
                F.cross_entropy(net(x), y).backward()
                optimizer.step()
    clock.left()


def _evaluated(clock: Clock, evaluate: Any, is_timed: bool = False) -> None:
    """nanoGPT: the loss on held-out batches now and then, in `eval()` mode without gradients."""
    net = Gpt()
    optimizer = torch.optim.AdamW(net.parameters())
    (call,) = between_passes(clock, net) if is_timed else (net,)
    clock.start()
    for number in range(10**9):
        if clock.over:
            break
        x, y = get_batch()
        loss = F.cross_entropy(call(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if number % 20 == 19:
            net.eval()
            evaluate(call)
            net.train()
    clock.left()


@torch.no_grad()
def estimate_loss(net: Any) -> float:
    return sum(F.cross_entropy(net(x).flatten(0, 1), y.flatten()).item() for x, y in (get_batch() for _ in range(60)))


@program("eval_share", clocked=False)
def long_evaluation(clock: Clock) -> None:
    """nanoGPT with evaluations that take a third of the time: these are no rollouts."""
    _evaluated(clock, estimate_loss)


@program("outside_torch", says="decode", clocked=False)
def evaluation_by_answers(clock: Clock) -> None:
    """Evaluations whose answers are checked in Python for most of the time."""

    def generate(net: Any) -> None:
        with torch.no_grad():
            for _ in range(30):
                net(get_batch()[0])
                decode(0.02)

    _evaluated(clock, generate, is_timed=True)
