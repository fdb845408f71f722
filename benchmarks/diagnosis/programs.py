"""All programs of the diagnosis benchmark. `python -m benchmarks.diagnosis.programs NUMBER` runs one of them in this process."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from .gpu_programs import GPU, HEALTHY_GPU
from .input_programs import INPUT
from .loop_programs import HEALTHY_LOOPS, LOOP
from .mixed_programs import MIXED
from .program import Clock, Program

PROGRAMS: tuple[Program, ...] = (*INPUT, *LOOP, *GPU, *HEALTHY_LOOPS, *HEALTHY_GPU, *MIXED)


def run(number: int) -> None:
    """Run one program; its last line on stdout is what the hook alone found, as JSON."""
    program = PROGRAMS[number]
    watches = []
    from gpuwatch import hook, this_process

    close = hook.Watch.close

    def noted(watch: hook.Watch) -> None:
        if not watch._closed and not watch._disabled:
            watches.append(watch.report())
        close(watch)

    hook.Watch.close = noted  # type: ignore[method-assign]
    program.main(Clock(program.seconds))
    for watch in list(this_process.open_watches):
        watch.close()
    found = [asdict(finding) for report in watches for finding in report.findings]
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    run(int(sys.argv[1]))
