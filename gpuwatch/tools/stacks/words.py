"""Stacks in words: a line a process, and the evidence that a finding gets from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

from gpuwatch.diagnosis.diagnose import Evidence
from gpuwatch.tools.stacks.records import TRAINING, WORKER, HotLine, ProcessStacks, Stacks

_MOST = 3


def process_name(process: ProcessStacks, ranks: int = 1) -> str:
    """Return e.g. "worker 0", "rank 1 worker 0", "training", "rank 1"."""
    own = "training" if process.kind == TRAINING else f"{process.kind} {process.index}"
    if ranks < 2:
        return own
    return f"rank {process.rank}" if process.kind == TRAINING else f"rank {process.rank} {own}"


def place(line: HotLine) -> str:
    """Return e.g. "dataset.py:88 Photos.decode"."""
    return f"{PurePosixPath(line.file).name}:{line.line} {line.function}"


def share(line: HotLine) -> str:
    """Return e.g. "71% of samples", with the function's own share where that is notably more."""
    more = f" ({line.function_ratio:.0%} in all of {line.function})" if line.function_ratio - line.ratio >= 0.05 else ""
    return f"{line.ratio:.0%} of samples{more}"


def hottest(process: ProcessStacks) -> str:
    """Return a process's hottest line in words, or where it stood when that was never in the user's code."""
    if process.lines:
        return f"{place(process.lines[0])}: {share(process.lines[0])}"
    if not process.looks:
        return "was not seen"
    return f"never in your code; {process.elsewhere or 'not in Python'}"


def rows(stacks: Stacks) -> list[tuple[str, str]]:
    """Return (process, its hottest line) of every process."""
    ranks = len({process.rank for process in stacks.processes})
    return [(process_name(process, ranks), hottest(process)) for process in stacks.processes]


def lines(stacks: Stacks) -> Iterator[str]:
    """Yield one line a process, for a terminal."""
    width = max((len(name) for name, _ in rows(stacks)), default=0)
    for name, text in rows(stacks):
        yield f"{name:<{width}}  {text}"


def evidence(stacks: Stacks, of_training: bool) -> tuple[Evidence, ...]:
    """Return the hottest lines as a finding's evidence: of the workers, or of the training processes (all ranks).

    Processes that stand at the same line are one item. Without workers it is the training process that fetches.
    """
    chosen = [] if of_training else [each for each in stacks.processes if each.kind == WORKER]
    chosen = chosen or [each for each in stacks.processes if each.kind == TRAINING]
    by_place: dict[str, list[ProcessStacks]] = {}
    for process in chosen:
        by_place.setdefault(place(process.lines[0]) if process.lines else hottest(process), []).append(process)
    ranks = len({process.rank for process in chosen})
    largest = sorted(by_place.items(), key=lambda item: -len(item[1]))
    return tuple(_evidence(where, group, len(chosen), ranks) for where, group in largest[:_MOST])


def _evidence(where: str, group: Sequence[ProcessStacks], of: int, ranks: int) -> Evidence:
    with_lines = [process.lines[0] for process in group if process.lines]
    who = process_name(group[0], ranks) if len(group) == 1 else f"{len(group)} of {of} {_plural(group)}"
    if not with_lines:
        return Evidence("stack", 1.0, "ratio", f"{who}: {where}")
    ratio = sum(line.ratio for line in with_lines) / len(with_lines)
    mean = HotLine(
        with_lines[0].file, with_lines[0].line, with_lines[0].function, ratio,
        sum(line.function_ratio for line in with_lines) / len(with_lines),
    )  # fmt: skip
    return Evidence("hottest line", ratio, "ratio", f"{where}: {share(mean)} ({who})")


def _plural(group: Sequence[ProcessStacks]) -> str:
    return "ranks" if group[0].kind == TRAINING else f"{group[0].kind}s"
