"""Loops over one small torch step, bare and measured by somebody: what `python -m benchmarks.overhead` compares.

Every loop takes a number of steps and returns when the work of each step began and ended, in ns. A pair's two loops
differ by the measuring alone: what is added by a Lightning profiler is distinguished from Lightning's own loop, not
from a bare one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

import torch

from benchmarks.fakes import FakeDevice
from gpuwatch import Watch

Times = list[tuple[int, int]]
Loop = Callable[[int], Times]
NO_AGENT = "ipc:///no/listener/here.sock"


@dataclass(frozen=True)
class Pair:
    """Two loops over the same step."""

    bare: Loop
    measured: Loop
    close: Callable[[], None] = lambda: None


class Work:
    """A training step of a small model: forward, backward, optimizer; about 80 µs on a 2020s core."""

    def __init__(self, device: str = "cpu") -> None:
        torch.set_num_threads(1)
        self.model = torch.nn.Linear(16, 16, device=device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-9)
        self.batch = [torch.randn(32, 16), torch.zeros(32)]
        self.x = self.batch[0].to(device)

    def step(self) -> tuple[int, int]:
        """Train one step; return when it began and ended, in ns."""
        begin = perf_counter_ns()
        self.optimizer.zero_grad()
        self.model(self.x).sum().backward()
        self.optimizer.step()
        return begin, perf_counter_ns()

    def bare(self, watch: Watch, copies: bool = False) -> Loop:
        """Return the bare loop while a Watch is open, without what that adds to steps that no loader bounds."""
        plain = self.loop(copies=copies)
        by_optimizer = watch.session.torch_hooks.optimizer

        def loop(count: int) -> Times:
            by_optimizer.give_way()
            by_optimizer.remove()
            return plain(count)

        return loop

    def batches(self, count: int) -> Iterator[list[torch.Tensor]]:
        batch = self.batch
        return (batch for _ in range(count))

    def loop(self, watch: Watch | None = None, copies: bool = False) -> Loop:
        """Return the usual loop, watched or bare. `copies`: it moves two tensors to a device (one without memory)."""

        def loop(count: int) -> Times:
            times: Times = []
            step = self.step
            batches: Any = self.batches(count)
            for x, y in batches if watch is None else watch.steps(batches):
                if copies:
                    x.to("meta")
                    y.to("meta")
                times.append(step())
            return times

        return loop


def clocks_and_queue() -> Pair:
    """The host's timeline alone: no transfers, no evidence, batches without samples to count."""
    work = Work()
    watch = Watch(quiet=True, endpoint=NO_AGENT, transfers=False, device_events=False)
    watch._recorder.countdown = 1 << 60

    def measured(count: int) -> Times:
        times: Times = []
        step = work.step
        for _ in watch.steps(range(count)):
            times.append(step())
        return times

    return Pair(work.bare(watch), measured, watch.close)


def by_optimizer() -> Pair:
    """No loader is watched, as under `gpuwatch run`: each step lasts from one optimizer step to the next."""
    work = Work()
    watch = Watch(quiet=True, endpoint=NO_AGENT, device_events=False)
    plain = work.loop()

    def measured(count: int) -> Times:
        watch.session.torch_hooks.optimizer.install()
        return plain(count)

    return Pair(work.bare(watch), measured, watch.close)


def whole_host_timeline(endpoint: str = NO_AGENT) -> Pair:
    work = Work()
    watch = Watch(quiet=True, endpoint=endpoint, device_events=False)
    return Pair(work.bare(watch), work.loop(watch), watch.close)


def with_an_agent() -> Pair:
    """The same with an agent that listens where the environment says."""
    return whole_host_timeline(os.environ["BENCHMARK_ENDPOINT"])


def breakdown() -> Pair:
    """The host timeline with compute by section.

    Its Watch is open in the measured blocks alone, as what it replaces stays until it is closed.
    """
    work = Work()

    def measured(count: int) -> Times:
        with Watch(quiet=True, endpoint=NO_AGENT, device_events=False, breakdown=True) as watch:
            return work.loop(watch)(count)

    return Pair(work.loop(), measured)


def with_copies() -> Pair:
    work = Work()
    watch = Watch(quiet=True, endpoint=NO_AGENT, device_events=False)
    return Pair(work.bare(watch, copies=True), work.loop(watch, copies=True), watch.close)


def contexts() -> Pair:
    work = Work()
    watch = Watch(quiet=True, endpoint=NO_AGENT, device_events=False)

    def measured(count: int) -> Times:
        times: Times = []
        step, batches = work.step, work.batches(count)
        for _ in range(count):
            with watch.step():
                with watch.data():
                    next(batches)
                times.append(step())
        return times

    return Pair(work.bare(watch), measured, watch.close)


def model_device_events() -> Pair:
    work = Work()
    watch = Watch(quiet=True, endpoint=NO_AGENT)
    watch.session.torch_hooks.attach(FakeDevice())
    return Pair(work.bare(watch), work.loop(watch), watch.close)


def cuda_events() -> Pair:
    work = Work("cuda")
    watch = Watch(quiet=True, endpoint=NO_AGENT)
    return Pair(work.bare(watch), work.loop(watch), watch.close)


class SlowWork(Work):
    """A step of about 5 ms, which leaves the caches cold."""

    def step(self) -> tuple[int, int]:
        begin = perf_counter_ns()
        while perf_counter_ns() - begin < 5_000_000:
            super().step()
        return begin, perf_counter_ns()


def at_5_ms() -> Pair:
    work = SlowWork()
    watch = Watch(quiet=True, endpoint=NO_AGENT, device_events=False)
    return Pair(work.bare(watch), work.loop(watch), watch.close)


def five_clocks() -> Pair:
    work = Work()
    log: deque[tuple[int, ...]] = deque(maxlen=10_000)

    def measured(count: int) -> Times:
        times: Times = []
        step, batches = work.step, work.batches(count)
        for _ in range(count):
            a = perf_counter_ns()
            next(batches)
            b = perf_counter_ns()
            c = perf_counter_ns()
            times.append(step())
            d = perf_counter_ns()
            log.append((a, b, c, d, perf_counter_ns()))
        return times

    return Pair(work.loop(), measured)


def record_functions() -> Pair:
    work = Work()
    record_function = torch.profiler.record_function

    def measured(count: int) -> Times:
        times: Times = []
        for _ in work.batches(count):
            begin = perf_counter_ns()
            with record_function("zero"):
                work.optimizer.zero_grad()
            with record_function("model"):
                work.model(work.x).sum().backward()
            with record_function("optimizer"):
                work.optimizer.step()
            times.append((begin, perf_counter_ns()))
        return times

    return Pair(work.loop(), measured)


def torch_profiler() -> Pair:
    work = Work()
    plain = work.loop()

    def measured(count: int) -> Times:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            return plain(count)

    return Pair(plain, measured)


def ignite_profiler() -> Pair:
    from ignite.engine import Engine
    from ignite.handlers import BasicTimeProfiler

    work = Work()

    def run(count: int, profiler: Any) -> Times:
        times: Times = []

        def update(engine: Any, batch: Any) -> None:
            times.append(work.step())

        engine = Engine(update)
        if profiler is not None:
            profiler.attach(engine)
        engine.run([work.batch] * count, max_epochs=1)
        return times

    return Pair(lambda count: run(count, None), lambda count: run(count, BasicTimeProfiler()))


class Repeated:
    """A loader of one batch, again and again. (A list of batches would be a list of loaders to Lightning.)"""

    def __init__(self, batch: Any, count: int) -> None:
        self._batch, self._count = batch, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        return (self._batch for _ in range(self._count))


def _lightning(work: Work, **options: Callable[[], Any]) -> Loop:
    import lightning

    for name in ("lightning.pytorch", "lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        def __init__(self, times: Times) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.model = work.model
            self.times = times

        def training_step(self, batch: Any, index: int) -> None:
            self.times.append(work.step())

        def configure_optimizers(self) -> None:
            return None

    def loop(count: int) -> Times:
        times: Times = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = lightning.Trainer(
                max_epochs=1,
                accelerator="cpu",
                enable_progress_bar=False,
                enable_model_summary=False,
                enable_checkpointing=False,
                log_every_n_steps=1,
                default_root_dir=tempfile.gettempdir(),
                **{"logger": False, **{name: make() for name, make in options.items()}},
            )
            with contextlib.redirect_stdout(None):
                trainer.fit(Module(times), Repeated(work.batch, count))
        return times

    return loop


def _no_logger() -> Any:
    from lightning.pytorch.loggers.logger import DummyLogger

    return DummyLogger()


def lightning_itself() -> Pair:
    work = Work()
    return Pair(work.loop(), _lightning(work))


def lightning_simple_profiler() -> Pair:
    from lightning.pytorch.profilers import SimpleProfiler

    work = Work()
    return Pair(_lightning(work), _lightning(work, profiler=SimpleProfiler))


def lightning_device_stats() -> Pair:
    from lightning.pytorch.callbacks import DeviceStatsMonitor

    work = Work()
    return Pair(
        _lightning(work, logger=_no_logger),
        _lightning(work, logger=_no_logger, callbacks=lambda: [DeviceStatsMonitor(cpu_stats=True)]),
    )


def lightning_gpuwatch() -> Pair:
    """With a Watch for each `fit`: what it adds to steps without a loader, and replaces, stays until it is closed."""
    from gpuwatch.integrations.lightning import GpuWatchCallback

    work = Work()
    return Pair(_lightning(work), _lightning(work, callbacks=lambda: [GpuWatchCallback(quiet=True, endpoint=NO_AGENT)]))


def traceml() -> Pair:
    """Only under `traceml run`. What it has patched stays so in the bare loop: its cost is at least what is shown."""
    import traceml_ai

    work = Work()
    traceml_ai.init(mode="auto")

    def measured(count: int) -> Times:
        times: Times = []
        for _ in work.batches(count):
            with traceml_ai.trace_step(work.model):
                times.append(work.step())
        return times

    return Pair(work.loop(), measured)


@dataclass(frozen=True)
class Variant:
    key: str
    """The function's name."""
    title: str
    against: str
    needs: str | None = None
    """A module without which it cannot be run."""
    ours: bool = False
    blocks: int = 60
    steps: int = 150


BARE, TRAINER = "bare loop", "bare Trainer"
VARIANTS = (
    Variant("clocks_and_queue", "gpuwatch: clocks and queue", BARE, ours=True),
    Variant("whole_host_timeline", "gpuwatch: `watch(loader)`, evidence, samples", BARE, ours=True),
    Variant("with_an_agent", "gpuwatch: the same, an agent listening", BARE, ours=True),
    Variant("with_copies", "gpuwatch: and two `.to(device)` a step timed", "bare loop, the same copies", ours=True),
    Variant("contexts", "gpuwatch: `step()` and `data()`", BARE, ours=True),
    Variant("by_optimizer", "gpuwatch: no watched loader, steps by the optimizer", BARE, ours=True),
    Variant("model_device_events", "gpuwatch: events of a model device (a lower bound)", BARE, ours=True),
    Variant("cuda_events", "gpuwatch: CUDA events", BARE, ours=True),
    Variant("breakdown", "gpuwatch: `watch(loader)` with `breakdown=True`", BARE, ours=True),
    Variant("at_5_ms", "gpuwatch: `watch(loader)` at a step of 5 ms", BARE, ours=True, blocks=12, steps=30),
    Variant("five_clocks", "five clock reads and a deque", BARE),
    Variant("record_functions", "three `record_function`, no profiler", BARE),
    Variant("torch_profiler", "torch.profiler, active", BARE, blocks=16, steps=100),
    Variant("ignite_profiler", "Ignite BasicTimeProfiler", "bare Engine", needs="ignite"),
    Variant("lightning_itself", "Lightning Trainer itself", BARE, needs="lightning", blocks=10, steps=300),
    Variant("lightning_gpuwatch", "gpuwatch in Lightning", TRAINER, needs="lightning", ours=True, blocks=10, steps=300),
    Variant("lightning_simple_profiler", "Lightning SimpleProfiler", TRAINER, needs="lightning", blocks=10, steps=300),
    Variant(
        "lightning_device_stats",
        "Lightning DeviceStatsMonitor",
        "Trainer, logger",
        needs="lightning",
        blocks=8,
        steps=200,
    ),
    Variant("traceml", "TraceML", BARE, needs="traceml_ai"),
)


def pair(variant: Variant) -> Pair:
    """Return a variant's loops. Raises: ImportError."""
    loops: Pair = globals()[variant.key]()
    return loops
