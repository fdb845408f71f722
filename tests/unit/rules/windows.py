"""Windows for the rules' tests: a healthy one, from which each test changes what it is about."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from gpuwatch.diagnosis.window import HostFacts, StepColumns, Window
from gpuwatch.wire import Loader


def steps(
    count: int, wait_s: float, compute_s: float, transfer_s: float = 0.0, firsts: tuple[int, ...] = ()
) -> StepColumns:
    """Return equal steps; `firsts` are the indices of first batches."""
    return StepColumns(
        data_wait_s=(wait_s,) * count,
        transfer_s=(transfer_s,) * count,
        compute_s=(compute_s,) * count,
        epoch_start=tuple(index in firsts for index in range(count)),
    )


def states(columns: StepColumns, **others: float) -> dict[str, float]:
    """Return the ledger that the steps make, with other states added."""
    return {
        "input_wait": sum(columns.data_wait_s),
        "transfer": sum(columns.transfer_s),
        "compute": sum(columns.compute_s),
        **others,
    }


def window(columns: StepColumns, **changes: Any) -> Window:
    """Return a window of these steps on a node with 16 cores, half of them idle, fed by 4 workers."""
    booked = changes.pop("states_s", None) or states(columns)
    plain = Window(
        duration_s=sum(booked.values()),
        states_s=booked,
        steps=columns,
        loader=Loader(num_workers=4, prefetch_factor=2, batch_size=32, pin_memory=False, batch_bytes=6 << 20),
        worker_cpu_ratios=(0.3, 0.3, 0.3, 0.3),
        host=HostFacts(cpu_cores=16, cpu_busy_ratio=0.5, shm_size_bytes=8 << 30, shm_used_bytes=1 << 20),
    )
    return replace(plain, **changes)


HEALTHY = window(steps(100, 0.001, 0.099))
STARVED = window(steps(100, 0.060, 0.040))
