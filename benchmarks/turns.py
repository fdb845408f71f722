"""One process at a time has the GPU, so that the next one can import torch meanwhile."""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path

AT_ONCE = 2
"""How many may be started: one has the GPU, one gets ready for it."""


def take_the_gpu() -> None:
    """Wait until no other process of this user's benchmarks has the GPU; it is given back when this process ends."""
    descriptor = os.open(Path(tempfile.gettempdir()) / f"gpuwatch-benchmark-gpu-{os.getuid()}", os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
