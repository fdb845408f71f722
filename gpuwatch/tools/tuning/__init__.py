"""Find a loader's settings by trying them: `gpuwatch.tune(make_loader, step_s=0.040)`.

The loader runs alone, each setting in a separate process, within the available cores, memory and /dev/shm.
"""

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from gpuwatch.errors import ConfigError
from gpuwatch.hook.evidence import usable_cores
from gpuwatch.tools.tuning.measure import measure, room
from gpuwatch.tools.tuning.result import Row, TuneResult
from gpuwatch.tools.tuning.sweep import Sweep
from gpuwatch.tools.tuning.target import target


def tune(
    make_loader: Any,
    step_s: float | None = None,
    *,
    budget_s: float = 60.0,
    max_workers: int | None = None,
    ranks: int = 1,
    progress: Callable[[Row], None] = lambda row: None,
    name: str | None = None,
) -> TuneResult:
    """Return the loader settings that feed a training step, and the result of each setting tried.

    Args:
        make_loader: a function of num_workers, and of any of prefetch_factor, pin_memory, persistent_workers, that
            returns an iterable of batches; or a DataLoader, or a function without arguments that returns one.
        step_s: a training step without any wait for data, in seconds; None: find the fastest setting.
        budget_s: time budget for all trials, in seconds.
        max_workers: maximum number of workers to try; None: derived from the cores and the CPU use of a fetch.
        ranks: training processes that share this node's cores, memory and /dev/shm equally.
        progress: called with each setting's result.
        name: the loader's name in messages.

    Raises:
        ConfigError: make_loader is none of these, or none of its loaders gives a batch.
        Interrupted: a KeyboardInterrupt with the `result` so far.
    """
    if step_s is not None and not step_s > 0:
        raise ConfigError(f"step_s={step_s}: must be positive, in seconds, e.g. 0.040")
    if not budget_s > 0 or ranks < 1 or (max_workers is not None and max_workers < 0):
        raise ConfigError(
            f"budget_s={budget_s}, ranks={ranks}, max_workers={max_workers}: the first two are positive, the last is at least 0"
        )
    if sys.platform != "linux":
        raise ConfigError("tuning needs Linux: it reads /proc to stay within the machine")
    wanted = target(make_loader, name)
    torch = sys.modules.get("torch")
    cuda_in_use = torch is not None and torch.cuda.is_initialized()  # a child could not use it
    takes = wanted.varies - {"pin_memory"} if cuda_in_use else wanted.varies
    own = len(os.sched_getaffinity(0))  # in which the trials run: a task of Slurm's may be bound to cores of its own
    cores = max(1, min((usable_cores() or 1) // ranks, own))
    measured = partial(measure, wanted, cores=cores)
    return Sweep(measured, room, progress, cores, step_s, budget_s, max_workers, ranks, wanted.name, takes).run()
