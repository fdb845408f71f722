"""The demo's training: a small network on synthetic images, with one bottleneck. `gpuwatch demo` runs it.

All of it is real work: the loader decodes and augments, the model learns, batches pass through /dev/shm. The bottleneck
comes from how the loop is written, as in a user's script.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpuwatch

_ATTEMPTS = 3  # of the training that crashes


class Training:
    checkpoint: Path | None = None  # where to resume from; the training is killed before its end where `is_killed`
    is_killed = False

    def __init__(self, seconds: float, width: int) -> None:
        import torch
        from torch import nn

        torch.set_num_threads(1)  # several wait for each other where other programs compute
        torch.manual_seed(0)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = nn.Sequential(
            nn.Conv2d(3, width, 5, stride=4), nn.ReLU(), nn.Conv2d(width, 2 * width, 3, stride=2), nn.ReLU(),
            nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(32 * width, 10),
        ).to(self.device)  # fmt: skip
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.loss = nn.CrossEntropyLoss()
        self.seconds, self._ends = seconds, time.monotonic() + seconds

    def over(self) -> bool:
        return time.monotonic() >= self._ends

    def step(self, images: Any, labels: Any) -> None:
        images, labels = images.to(self.device), labels.to(self.device)
        self.optimizer.zero_grad()
        self.loss(self.model(images), labels).backward()
        self.optimizer.step()

    def run(self, loader: Any) -> None:
        for images, labels in gpuwatch.watch(loader):
            self.step(images, labels)
            del images  # frees its place in /dev/shm before the next is taken
            if self.over():
                break


def _loader(count: int, make: Callable[[int], Any], **options: Any) -> Any:
    """Return a loader of what `make` returns for an index, in batches of 32."""
    from torch.utils.data import DataLoader, default_collate

    def collate(indices: list[int]) -> Any:
        return default_collate([make(index) for index in indices])

    return DataLoader(range(count), batch_size=32, collate_fn=collate, **options)


def _batches() -> Any:
    """Return a loader of ready-made batches: nothing to decode, nothing to collate."""
    import torch
    from torch.utils.data import DataLoader

    batch = (torch.rand(32, 3, 128, 128), torch.arange(32) % 10)
    return DataLoader(range(10_000_000), batch_size=None, collate_fn=lambda index: batch)


def _decoded(index: int) -> Any:
    """Return an image made from noise the way a JPEG is: blocks through an inverse cosine transform, then augmented."""
    import torch
    from torch.nn import functional

    side = 128
    noise = torch.Generator().manual_seed(index)
    blocks = torch.randn(3 * (side // 8) ** 2, 8, 8, generator=noise)
    frequencies = torch.arange(8).float()
    basis = torch.cos(torch.outer(2 * frequencies + 1, frequencies) * torch.pi / 16)
    for _ in range(3):
        blocks = (basis @ blocks @ basis.T).tanh()
    image = blocks.reshape(1, 3, side, side)
    image = functional.interpolate(image, scale_factor=1.4, mode="bicubic")[..., :side, :side].flip(-1)
    return ((image - image.mean()) / (image.std() + 1e-6))[0], index % 10


def train_epoch_start(training: Training) -> None:
    """Short passes over ready-made images, each of which starts new workers."""
    import torch

    image = torch.rand(3, 128, 128)
    # A worker opens an archive, and reads its index.
    loader = _loader(640, lambda index: (image, index % 10), num_workers=2, worker_init_fn=lambda _: time.sleep(1.5))
    while not training.over():
        training.run(loader)


def train_eval(training: Training) -> None:
    import torch

    with gpuwatch.Watch() as watch:
        held_out = torch.rand(64, 3, 128, 128, device=training.device)
        for number, (images, labels) in enumerate(watch.steps(_batches())):
            training.step(images, labels)
            if number % 10 == 9:
                with watch.phase("eval"), torch.no_grad():
                    for _ in range(10):
                        training.model(held_out)
            if training.over():
                break


def fork_attempts() -> bool:
    """Import torch, fork a process per attempt of a training, and return True in it. All but the last are killed."""
    import torch  # noqa: F401  # it would take most of a restart

    for left in reversed(range(_ATTEMPTS)):
        pid = os.fork()
        if not pid:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with this one
            Training.is_killed = left > 0
            return True
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code != (-signal.SIGKILL if left else 0):
            raise SystemExit(abs(code) or 1)
        if left:
            print("          killed; it is started again, from its checkpoint", flush=True)
    return False


def train_crash(training: Training) -> None:
    """A training that saves its 20 MB too rarely, and resumes from them after it was killed."""
    import torch

    path, first, weights = training.checkpoint, 0, torch.zeros(5_000_000)
    assert path is not None
    with gpuwatch.Watch() as watch:
        if path.exists():
            kept = torch.load(path)
            training.model.load_state_dict(kept["model"])
            first = kept["step"]
        save_s = time.monotonic() + 0.6 * training.seconds
        for step, (images, labels) in enumerate(watch.steps(_batches(), start=first), start=first):
            training.step(images, labels)
            if time.monotonic() >= save_s:
                kept = {"model": training.model.state_dict(), "step": step + 1, "weights": weights}
                torch.save(kept, path.with_suffix(".new"))
                path.with_suffix(".new").replace(path)
                save_s = time.monotonic() + 0.6 * training.seconds
            if training.over():
                if training.is_killed:
                    os.kill(os.getpid(), signal.SIGKILL)
                break


BOTTLENECKS: dict[str, tuple[Callable[[Training], None], int]] = {
    "input": (lambda training: training.run(_loader(100_000, _decoded)), 32),
    "epoch-start": (train_epoch_start, 32),
    "eval": (train_eval, 32),
    "crash": (train_crash, 16),
    "none": (lambda training: training.run(_batches()), 64),
}
"""Training loop and width of the network, by bottleneck; `input` decodes in the training process: num_workers is 0."""


if __name__ == "__main__":
    bottleneck, seconds, *checkpoint = sys.argv[1:]
    train, network_width = BOTTLENECKS[bottleneck]
    if not checkpoint:
        train(Training(float(seconds), network_width))
    elif fork_attempts():
        Training.checkpoint = Path(checkpoint[0])
        train(Training(float(seconds) / _ATTEMPTS, network_width))
