"""Train real networks on a GPU under torch.profiler; compare gpuwatch's states with the profiler's kernels and copies.

    pip install -e . torchvision
    python -m benchmarks.gpu.models [--only NAME,NAME] [--traces FOLDER] > models.md

The truth of a run is the arithmetic of `benchmarks/recorded/trace.py` on the profiler's timeline: none of it is
gpuwatch's. `--traces` keeps each timeline in the format of tests/fixtures/traces, for `benchmarks.recorded`. A profiled
step is slower than a bare one, for both alike. Exit status: 0 when all states are within 2 points, 1 when one is not, 2
without a GPU.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("GPUWATCH_QUIET", "1")

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.data import DataLoader, Dataset

import gpuwatch
from benchmarks.recorded.trace import STATES, parse, true_times

Program = tuple[Iterable[Any], Callable[[Any], None]]
"""A loader, and what is done with each batch."""
STEPS = 40
BOUND_POINTS = 2.0
FETCH = "##fetch"
"""The mark of a wait for a batch in the profiler's timeline."""


class Images(Dataset[Any]):
    """Images that take so much CPU time each."""

    def __init__(self, cpu_s: float) -> None:
        self.cpu_s = cpu_s

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> Any:
        until = time.thread_time() + self.cpu_s
        image = torch.full((3, 224, 224), float(index % 7))
        while time.thread_time() < until:
            pass
        return image, index % 1000


class Tokens(Dataset[Any]):
    """Sequences of 256 tokens that are waited for so long each."""

    def __init__(self, wait_s: float) -> None:
        self.wait_s = wait_s

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> Any:
        if self.wait_s:
            time.sleep(self.wait_s)
        return torch.randint(0, 1000, (256,))


class Transformer(torch.nn.Module):
    """A language model of the usual kind, with random weights."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(1000, width)
        layer = torch.nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True, norm_first=True, dropout=0.0)
        self.body = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = torch.nn.Linear(width, 1000)

    def forward(self, tokens: Any) -> Any:
        return self.head(self.body(self.embed(tokens)))


def resnet(
    cpu_s: float, workers: int, batch: int = 96, pin: bool = True, model: str = "resnet50", aside: bool = False
) -> Program:
    """Return a ResNet in bfloat16; `aside`: batches are copied on another stream, one ahead."""
    import torchvision

    network = getattr(torchvision.models, model)().to("cuda", memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)

    def step(batch: Any) -> None:
        images = batch[0].to("cuda", non_blocking=True, memory_format=torch.channels_last)
        labels = batch[1].to("cuda", non_blocking=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(network(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    loader = DataLoader(Images(cpu_s), batch_size=batch, num_workers=workers, pin_memory=pin)
    return (Prefetcher(loader) if aside else loader), step


class Prefetcher:
    """Copies the next batch on a stream of its own while this one is trained on."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        stream, ahead = torch.cuda.Stream(), None
        for batch in self.loader:
            with torch.cuda.stream(stream):
                copied = [part.to("cuda", non_blocking=True) for part in batch]
            if ahead is not None:
                yield ahead
            torch.cuda.current_stream().wait_stream(stream)
            for part in copied:
                part.record_stream(torch.cuda.current_stream())
            ahead = copied
        yield ahead


def transformer(
    wait_s: float = 0.0,
    workers: int = 2,
    reads: bool = False,
    accumulate: int = 1,
    compiled: str | None = None,
    is_ddp: bool = False,
    size: tuple[int, int, int] = (512, 6, 16),
) -> Program:
    """Return a transformer of (width, layers, batch); `reads`: `.item()` every step."""
    width, layers, batch_size = size
    network: Any = Transformer(width, layers).to("cuda")
    if is_ddp:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", RANK="0", WORLD_SIZE="1")
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("nccl", device_id=torch.device("cuda:0"))
        network = torch.nn.parallel.DistributedDataParallel(network, device_ids=[0])
    run = torch.compile(network, mode=compiled) if compiled else network
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cuda", enabled=accumulate > 1)
    done = 0

    def step(tokens: Any) -> None:
        nonlocal done
        tokens = tokens.to("cuda", non_blocking=True)
        with torch.autocast("cuda", dtype=torch.float16 if accumulate > 1 else torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(run(tokens).flatten(0, 1).float(), tokens.flatten())
        scaler.scale(loss / accumulate).backward()
        done += 1
        if done % accumulate == 0:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        if reads:
            loss.item()

    return DataLoader(Tokens(wait_s), batch_size=batch_size, num_workers=workers, pin_memory=True), step


def perceptron(wait_s: float = 0.0) -> Program:
    """Return a step of 1 ms, in which the GPU computes for 30 µs."""
    network = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(3))).to("cuda")
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    batch = torch.randn(64, 256).pin_memory()

    def batches() -> Iterator[Any]:
        while True:
            time.sleep(wait_s)
            yield batch

    def step(batch: Any) -> None:
        network(batch.to("cuda", non_blocking=True)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return batches(), step


PROGRAMS: dict[str, Callable[[], Program]] = {
    "ResNet-50, no workers": lambda: resnet(1e-3, 0, batch=32),
    "ResNet-50, 8 workers": lambda: resnet(1e-4, 8),
    "ResNet-50, pageable copies": lambda: resnet(0.0, 4, pin=False),
    "ResNet-18, 12 workers": lambda: resnet(0.0, 12, model="resnet18"),
    "ResNet-50, prefetched on a stream": lambda: resnet(0.0, 8, aside=True),
    "ResNet-50, prefetched, starved": lambda: resnet(3e-3, 3, aside=True),
    "transformer": lambda: transformer(),
    "transformer, 2 ms a sample, .item()": lambda: transformer(0.002, 1, reads=True),
    "transformer, .item()": lambda: transformer(reads=True),
    "transformer, accumulation, GradScaler": lambda: transformer(0.001, accumulate=4),
    "transformer, torch.compile": lambda: transformer(0.002, compiled="default"),
    "transformer, CUDA graphs": lambda: transformer(0.002, compiled="reduce-overhead"),
    "transformer, DDP over NCCL": lambda: transformer(0.001, is_ddp=True),
    "transformer, 12 layers of 1024": lambda: transformer(size=(1024, 12, 32)),
    "perceptron": perceptron,
    "perceptron, 2 ms waits": lambda: perceptron(0.002),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.models", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--only", help="names of programs, with commas between them")
    parser.add_argument("--traces", type=Path, help="keep the timelines in this folder")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks.gpu.models: torch sees no CUDA device here", file=sys.stderr)
        return 2
    torch.backends.cudnn.benchmark = True
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {STEPS} steps; truth / reported in % of the time\n"
    )
    print("| program | " + " | ".join(STATES) + " | GPU busy | worst, points |\n|---|---:|---:|---:|---:|---:|---:|")
    over = 0
    for name, program in PROGRAMS.items():
        if options.only is None or name in options.only.split(","):
            trace, reported_s = measured(name, *program())
            if options.traces is not None:
                options.traces.mkdir(parents=True, exist_ok=True)
                with gzip.open(options.traces / f"{name.replace(' ', '-')}.json.gz", "wt") as file:
                    json.dump(trace, file, separators=(",", ":"))
            over += print_row(name, trace, reported_s)
    return 1 if over else 0


def measured(name: str, loader: Iterable[Any], step: Callable[[Any], None]) -> tuple[dict[str, Any], dict[str, float]]:
    """Train for 12 steps, then for 40 under the profiler. Return the timeline, and gpuwatch's seconds by state."""
    for number, batch in enumerate(loader):
        step(batch)
        if number == 11:
            break
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            torch.cuda.synchronize()
            with gpuwatch.Watch(quiet=True) as watch:
                iterator, batch = None, None
                for _ in range(STEPS):
                    with record_function(FETCH):
                        iterator = iterator or iter(watch.steps(loader))
                        fetched = next(iterator)
                    batch = fetched  # what the last batch held is freed here, outside of the wait
                    step(batch)
                torch.cuda.synchronize()
                watch.close()
                report = watch.report()
        profiler.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    workers = getattr(getattr(loader, "loader", loader), "num_workers", 0)
    return timeline(events, name, workers), dict(report.states)


def timeline(events: Iterable[dict[str, Any]], name: str, workers: int) -> dict[str, Any]:
    """Return the profiler's events in the format of tests/fixtures/traces."""
    launches: dict[Any, tuple[int, int]] = {}
    work, fetches, optimizer_steps = [], [], []
    for event in events:
        if event.get("ph") != "X":
            continue
        span = round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000)
        category = event.get("cat")
        if category in ("cuda_runtime", "cuda_driver"):
            launches[event["args"].get("correlation")] = span
        elif category in ("kernel", "gpu_memcpy", "gpu_memset"):
            work.append((event, span))
        elif category == "user_annotation" and event["name"] == FETCH:
            fetches.append(span)
        elif category == "user_annotation" and event["name"].startswith("Optimizer.step"):
            optimizer_steps.append(span)
    base = min(begin for begin, _ in fetches)
    ops, copies, kernels = [], [], Counter[int]()
    for event, (begin, end) in work:
        launch, stream = launches.get(event["args"].get("correlation")), event["args"]["stream"]
        is_copy = event["cat"] == "gpu_memcpy" and "HtoD" in event["name"]
        ops.append(
            [launch[0] - base if launch else -1, begin - base, end - base, stream, "transfer" if is_copy else "compute"]
        )
        if is_copy and launch:
            copies.append([launch[0] - base, launch[1] - base, stream])
        kernels[stream] += event["cat"] == "kernel"
    return {
        "name": name,
        "gpu": torch.cuda.get_device_name(),
        "real_loader": True,
        "num_workers": workers,
        "fetches": sorted([begin - base, end - base] for begin, end in fetches),
        "optimizer_steps": sorted([begin - base, end - base] for begin, end in optimizer_steps),
        "copies": sorted(copies),
        "ops": sorted(ops),
        "home_stream": kernels.most_common(1)[0][0],
        "ops_launched_before": sum(op[0] == -1 for op in ops),
    }


def print_row(name: str, trace: dict[str, Any], reported_s: dict[str, float]) -> bool:
    """Print the program's row; return whether a state is off by more than the bound."""
    truth = true_times(parse(trace, name))
    pairs = {
        state: (truth.percent(ns), truth.percent(round(reported_s.get(state, 0.0) * 1e9)))
        for state, ns in truth.states_ns.items()
    }
    worst = max((ours - true for true, ours in pairs.values()), key=abs)
    cells = " | ".join(f"{true:.1f} / {ours:.1f}" for true, ours in pairs.values())
    print(f"| {name} | {cells} | {truth.percent(truth.busy_ns):.0f}% | {worst:+.2f} |", flush=True)
    return abs(worst) > BOUND_POINTS


if __name__ == "__main__":
    sys.exit(main())
