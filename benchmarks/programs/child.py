"""`python -m benchmarks.programs.child NAME SECONDS`: run one program in this process.

Its last line on stdout is what its clock and the hook measured, as JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import msgspec
import torch

from benchmarks.programs import Clock
from benchmarks.programs.registry import PROGRAMS
from benchmarks.turns import take_the_gpu
from gpuwatch.hook import watch as hook

_BEFORE_STEP = (
    "input_wait",
    "transfer",
)  # Accelerate's move to the device, which is the CPU here, is a part of its fetch


def main() -> None:
    reports: list[Any] = []
    close = hook.Watch.close

    def noted(watch: hook.Watch) -> None:
        if watch.session.closed or watch._disabled:
            return
        close(watch)
        reports.append(watch.report())

    hook.Watch.close = noted  # type: ignore[method-assign]
    clock = Clock(float(sys.argv[2]))
    torch.set_num_threads(PROGRAMS[sys.argv[1]].threads)
    if PROGRAMS[sys.argv[1]].cuda:
        take_the_gpu()
    PROGRAMS[sys.argv[1]].main(clock)
    watches = list(hook.open_watches)
    for watch in watches:
        watch.close()
    bounded = any(watch.session.publisher.accounts.bounded_by_optimizer for watch in watches)
    longest = max(reports, key=lambda report: report.duration_s, default=None)
    settled = clock.steps_s[len(clock.steps_s) // 4 :]
    # Without a loader the first step has no beginning: its wait is start-up.
    starting_s = clock.first_s if bounded else 0.0
    outcome = {
        "wait_s": clock.wait_s - starting_s,
        "wall_s": clock.ended - clock.begun,
        "outside_s": clock.outside_s,
        "steps": len(clock.steps_s),
        "step_s": sum(settled) / len(settled) if settled else None,
        "input_wait_s": None if longest is None else sum(longest.states.get(each, 0.0) for each in _BEFORE_STEP),
        "verdict": None if longest is None else longest.verdict.sentence,
        "findings": [] if longest is None else [msgspec.to_builtins(each) for each in longest.findings],
    }
    print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    main()
