"""The programs of the diagnosis benchmark. `python -m benchmarks.diagnosis.programs NUMBER STRETCH` runs one, here."""

from __future__ import annotations

import json
import os
import sys

import msgspec
import torch
from torch.utils.data import DataLoader

from gpuwatch.hook import watch as hook

from .cuda_programs import CUDA
from .gpu_programs import GPU, HEALTHY_GPU
from .input_programs import INPUT
from .loop_programs import HEALTHY_LOOPS, LOOP
from .mixed_programs import MIXED
from .program import Clock, Program

REALTIME = "GPUWATCH_BENCHMARK_REALTIME"
"""Environment variable, 1: programs that hardly compute are scheduled first (SCHED_FIFO, which root may), so that what
others do on the machine does not make a healthy one ill."""
PROGRAMS: tuple[Program, ...] = (*INPUT, *LOOP, *GPU, *HEALTHY_LOOPS, *HEALTHY_GPU, *MIXED, *CUDA)


def warm_up() -> None:
    """Import what torch imports at its first use, so that none of it falls into a program's time."""
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0).step()
    next(iter(DataLoader([0, 1])))


def run(number: int, stretch: float) -> None:
    """Run one program, `stretch` times as long as usual; its last line on stdout: what the hook alone found (JSON)."""
    program = PROGRAMS[number]
    watches = []
    warm_up()
    if os.environ.get(REALTIME) == "1" and not program.cpu_bound:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))

    close = hook.Watch.close

    def noted(watch: hook.Watch) -> None:
        if not watch.session.closed and not watch._disabled:
            watches.append(watch.report())
        close(watch)

    hook.Watch.close = noted  # type: ignore[method-assign]
    program.main(Clock(stretch * program.seconds))
    for watch in list(hook.open_watches):
        watch.close()
    found = [msgspec.to_builtins(finding) for report in watches for finding in report.findings]
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    run(int(sys.argv[1]), float(sys.argv[2]))
