"""docs/evidence/diagnosis.md: what the programs are, the diagnosis of each, and the confusion matrix."""

from __future__ import annotations

from collections.abc import Sequence

from gpuwatch.diagnosis.rules import CAUSES

from .judge import Judged

_HEAD = """# Does gpuwatch name the cause?

For every cause there is a real program that has it. Some more programs have nothing wrong, and some have two things wrong. Each
runs in a separate process with its own agent; the agent's last answer while the program runs is evaluated. This
page is written by

    python -m benchmarks.diagnosis --write

whose exit status is 1 when a cause is missed, when another one is named instead, or when a healthy program raises an alarm (a warning at any
moment, not only at the end).

- Loaders are torch's DataLoader; what they do is real: unpacking, reading past the page cache, a TCP server, locks, a small tmpfs, checkpoints
  that are synced, ranks over gloo. The device's step is a sleep where there is no GPU.
- Node *alone*: of the node's CPUs the agent sees 16 cores on which only the program runs. They are computed from the program's CPU time and its
  time in the run queue (`--procfs`), because a machine with two busy cores cannot show idle ones.
- GPU *fake*: a device that is only time (`benchmarks.fakes.FakeDevice`) and a fake NVML whose utilisation and power follow from what that
  device did. The GPU causes have not been run on a GPU.
- Some programs set thresholds of time in the agent's configuration file, so that evidence that needs ten minutes takes 15 seconds.
- It needs a machine with an idle core. On two cores at a load of 50 to 90, `slow_worker` and `memory_creep` were missed once each before they were found, and
  three healthy programs that were not scheduled first (`GPUWATCH_BENCHMARK_REALTIME=1`) waited for cores and so for data, and were reported as such.
"""


def page(judged: Sequence[Judged], load: str) -> str:
    """Return the page."""
    found = [each for each in judged if each.outcome.program.causes and each.outcome.skipped is None]
    healthy = [each for each in judged if not each.outcome.program.causes and each.outcome.skipped is None]
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
    lines += [each.row() for each in judged]
    lines += [
        "",
        "*after s*: seconds from the program's start, Python and torch's own included, to the agent's finding.",
    ]
    lines += ["", "## Confusion matrix", "", *_matrix(judged)]
    return "\n".join(lines) + "\n"


def _matrix(judged: Sequence[Judged]) -> list[str]:
    """Return programs by their strongest true cause (rows) and by the cause that was named first (columns)."""
    cells: dict[tuple[str, str], int] = {}
    for each in judged:
        if each.outcome.skipped is None:
            key = each.true_cause, each.first or "nothing"
            cells[key] = cells.get(key, 0) + 1
    names = [*CAUSES, "nothing"]
    shown = [name for name in names if any(name in key for key in cells)]
    lines = [
        "Rows: what is wrong. Columns: what was named first, by the row's number. Nothing off the diagonal is right.",
        "",
    ]
    lines += ["| | | " + " | ".join(str(number) for number in range(1, len(shown) + 1)) + " |"]
    lines += ["|---|---|" + "---|" * len(shown)]
    for number, row in enumerate(shown, 1):
        counts = " | ".join(str(cells.get((row, column), "")) for column in shown)
        lines.append(f"| {number} | `{row}` | {counts} |" if row != "nothing" else f"| {number} | nothing | {counts} |")
    return lines
