"""A training whose two loader workers spend nearly all of their time in one known function: `decode`."""

from __future__ import annotations

import sys
import threading
import time

import torch
from torch.utils.data import DataLoader, Dataset

import gpuwatch


class Photos(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((16,), float(self.decode(index) % 7))

    def decode(self, index: int) -> int:
        total = 0
        for pixel in range(200_000):
            total += pixel * index
        return total


def main() -> None:
    threading.current_thread().name = "trainer"
    end = time.monotonic() + float(sys.argv[1])
    with gpuwatch.Watch(quiet=True) as w:
        for _ in w.steps(DataLoader(Photos(), batch_size=8, num_workers=2)):
            time.sleep(0.001)
            if time.monotonic() > end:
                break


if __name__ == "__main__":
    main()
