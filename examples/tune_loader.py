"""A loader to tune: each image costs 2 ms of waiting (storage) and 1 ms of computing (decoding), 32 to a batch.

gpuwatch tune examples/tune_loader.py:make_loader --step-ms 40
"""

from __future__ import annotations

import time

import torch
from torch.utils.data import DataLoader, Dataset


class Images(Dataset[torch.Tensor]):
    """Images that are read and decoded."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.002)
        computed_until = time.thread_time() + 0.001
        while time.thread_time() < computed_until:
            pass
        return torch.full((3, 64, 64), float(index))


def make_loader(
    num_workers: int, prefetch_factor: int | None, pin_memory: bool, persistent_workers: bool
) -> DataLoader[torch.Tensor]:
    """Return the loader as training starts it, with the settings that it is given."""
    return DataLoader(
        Images(),
        batch_size=32,
        shuffle=True,
        num_workers=num_workers,
        prefetch_factor=prefetch_factor,
        pin_memory=pin_memory,
        persistent_workers=persistent_workers,
    )


if __name__ == "__main__":
    from gpuwatch.tools.tuning import tune

    print(tune(make_loader, step_s=0.040))
