"""docs/evidence/diagnosis.md: what the programs are, the diagnosis of each, and the confusion matrix."""

from __future__ import annotations

from collections.abc import Sequence

from gpuwatch.diagnosis.rules import CAUSES

from .evaluation import Evaluated

_HEAD = """# Does gpuwatch name the cause?

For every cause there is a real program that has it. Some programs have nothing wrong, and some have two things wrong. Each program runs in a separate process with its own agent; the agent's last answer while the program runs is evaluated. This page is written by

    python -m benchmarks.diagnosis --write

which exits with status 1 if a cause is missed, if another cause is named instead, or if a healthy program raises an alarm (a warning at any time, not only at the end).

- Loaders are torch's DataLoader with real work: unpacking, reading past the page cache, a TCP server, locks, a small tmpfs, checkpoints that are synced, ranks over gloo. Without a GPU, the device's step is a sleep, which the hook alone names `step_waits`: no driver lists a device.
- Node *alone*: the agent sees a node with 16 cores on which only the program runs. Its CPU times are computed from the program's CPU time and its time in the run queue (`--procfs`), because a machine with two busy cores cannot show idle ones.
- GPU *fake*: a simulated device that only takes time (`benchmarks.fakes.FakeDevice`), and a fake NVML with the utilisation and power of this device. `--cuda` runs such programs on a GPU instead: [some were](gpu-checklist.md#an-h200-26-november-2026).
- Some programs set time thresholds in the agent's configuration file, so that evidence that needs ten minutes takes 15 seconds.
- The benchmark needs a machine with an idle core. On two cores at a load of 50 to 90, `slow_worker` and `memory_creep` were each missed once before they were found, and three healthy programs without scheduling priority (`GPUWATCH_BENCHMARK_REALTIME=1`) waited for cores and therefore for data, and were reported as waiting for data.
"""


def page(evaluated: Sequence[Evaluated], load: str) -> str:
    """Return the page."""
    found = [each for each in evaluated if each.outcome.program.causes and each.outcome.skipped is None]
    healthy = [each for each in evaluated if not each.outcome.program.causes and each.outcome.skipped is None]
    mixed = [each for each in found if each.is_mixture]
    lines = [_HEAD, f"Last run: {load}.", ""]
    lines += [
        f"**{sum(each.ok for each in found)} of {len(found)} programs with something wrong were understood "
        f"({sum(each.ok for each in mixed)} of {len(mixed)} mixtures, both causes named), {sum(not each.ok for each in healthy)} of {len(healthy)} "
        "healthy ones alarmed.**",
        "",
        "| program | what is wrong | node | named first | also named | after s | the hook alone | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [each.row() for each in evaluated]
    lines += [
        "",
        "*after s*: seconds from the start of the program, including the start of Python and torch, to the agent's finding.",
    ]
    lines += ["", "## Confusion matrix", "", *_matrix(evaluated)]
    return "\n".join(lines) + "\n"


def _matrix(evaluated: Sequence[Evaluated]) -> list[str]:
    """Return programs by their strongest true cause (rows) and by the cause that was named first (columns)."""
    cells: dict[tuple[str, str], int] = {}
    for each in evaluated:
        if each.outcome.skipped is None:
            key = each.true_cause, each.first or "nothing"
            cells[key] = cells.get(key, 0) + 1
    names = [*CAUSES, "nothing"]
    shown = [name for name in names if any(name in key for key in cells)]
    lines = [
        "Rows: what is wrong. Columns: what was named first, by the row's number. Only the diagonal is right.",
        "",
    ]
    lines += ["| | | " + " | ".join(str(number) for number in range(1, len(shown) + 1)) + " |"]
    lines += ["|---|---|" + "---|" * len(shown)]
    for number, row in enumerate(shown, 1):
        counts = " | ".join(str(cells.get((row, column), "")) for column in shown)
        lines.append(f"| {number} | `{row}` | {counts} |" if row != "nothing" else f"| {number} | nothing | {counts} |")
    return lines
