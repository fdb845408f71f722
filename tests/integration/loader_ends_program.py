"""A training whose loader gets into trouble: a worker kills itself by a signal in batch 40, or batches are too large for /dev/shm."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
from torch.utils.data import DataLoader, Dataset

import gpuwatch

KILL, NUMBERS, STEP_S = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 800

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.002)
        if KILL != "none" and index == 320:
            os.kill(os.getpid(), getattr(signal, KILL))
        return torch.zeros(NUMBERS)


if __name__ == "__main__":
    for _ in gpuwatch.watch(DataLoader(Numbers(), batch_size=8, num_workers=2)):
        time.sleep(STEP_S)
