"""Sampled stacks as records, in the API, in reports and in `gpuwatch stacks --json`; and as text. Ratios 0–1."""

from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

import msgspec

from gpuwatch.diagnosis.finding import Evidence

TRAINING, WORKER, CHILD = "training", "worker", "child"
_MOST = 3


class HotLine(msgspec.Struct, frozen=True):
    """A line of the user's code that was the deepest such line on the stack."""

    file: str
    line: int
    function: str
    ratio: float
    function_ratio: float

    @property
    def place(self) -> str:
        """E.g. "dataset.py:88 Photos.decode"."""
        return f"{PurePosixPath(self.file).name}:{self.line} {self.function}"

    @property
    def share(self) -> str:
        """E.g. "71% of samples", with the function's own share where that is notably more."""
        has_more = self.function_ratio - self.ratio >= 0.05
        more = f" ({self.function_ratio:.0%} in all of {self.function})" if has_more else ""
        return f"{self.ratio:.0%} of samples{more}"


class ProcessStacks(msgspec.Struct, frozen=True):
    """The main thread of one process."""

    rank: int
    pid: int
    kind: str  # training, worker (of a DataLoader) or child
    index: int  # workers are counted from 0 in the order of their pids
    samples: int = msgspec.field(name="looks")  # the name is that of a report's JSON, whose fields never change
    lines: tuple[HotLine, ...]  # the hottest first, at most five; empty where no sample had a line of the user's code
    elsewhere_ratio: float  # share of samples without a line of the user's code: in libraries only, or waiting for work
    elsewhere: str = ""  # the most frequent place in those, e.g. "selectors.py:415 PollSelector.select".

    def name(self, ranks: int = 1) -> str:
        """Return e.g. "worker 0", "rank 1 worker 0", "training", "rank 1"."""
        own = "training" if self.kind == TRAINING else f"{self.kind} {self.index}"
        if ranks < 2:
            return own
        return f"rank {self.rank}" if self.kind == TRAINING else f"rank {self.rank} {own}"

    @property
    def hottest(self) -> str:
        """The hottest line and its share, or the most frequent place where no line was the user's."""
        if self.lines:
            return f"{self.lines[0].place}: {self.lines[0].share}"
        if not self.samples:
            return self.elsewhere or "was not sampled"
        return f"never in your code; {self.elsewhere or 'not in Python'}"


class Stacks(msgspec.Struct, frozen=True):
    """Samples of a run's processes on one node."""

    time_s: float
    seconds: float
    rate_hz: float
    processes: tuple[ProcessStacks, ...]
    flame_graphs: tuple[str, ...]  # files on the node where they were taken, one per rank: speedscope's format


def rows(stacks: Stacks) -> list[tuple[str, str]]:
    """Return (process, its hottest line) of every process."""
    ranks = len({process.rank for process in stacks.processes})
    return [(process.name(ranks), process.hottest) for process in stacks.processes]


def lines(stacks: Stacks) -> Iterator[str]:
    width = max((len(name) for name, _ in rows(stacks)), default=0)
    return (f"{name:<{width}}  {text}" for name, text in rows(stacks))


def evidence(stacks: Stacks, of_training: bool) -> tuple[Evidence, ...]:
    """Return the hottest lines as a finding's evidence: of the workers, or of the training processes (all ranks).

    Processes with the same hottest line are one item. Without workers it is the training process that fetches.
    """
    has_workers = any(each.kind == WORKER for each in stacks.processes)
    kind = WORKER if has_workers and not of_training else TRAINING
    chosen = [each for each in stacks.processes if each.kind == kind]
    by_place: dict[str, list[ProcessStacks]] = {}
    for process in chosen:
        by_place.setdefault(process.lines[0].place if process.lines else process.hottest, []).append(process)
    ranks = len({process.rank for process in chosen})
    largest = sorted(by_place.items(), key=lambda item: -len(item[1]))
    return tuple(_evidence(where, group, len(chosen), ranks) for where, group in largest[:_MOST])


def _evidence(where: str, group: Sequence[ProcessStacks], of: int, ranks: int) -> Evidence:
    hot = [process.lines[0] for process in group if process.lines]
    plural = "ranks" if group[0].kind == TRAINING else f"{group[0].kind}s"
    who = group[0].name(ranks) if len(group) == 1 else f"{len(group)} of {of} {plural}"
    if not hot:
        return Evidence("stack", 1.0, "ratio", f"{who}: {where}")
    ratio = sum(line.ratio for line in hot) / len(hot)
    function_ratio = sum(line.function_ratio for line in hot) / len(hot)
    mean = msgspec.structs.replace(hot[0], ratio=ratio, function_ratio=function_ratio)
    return Evidence("hottest line", ratio, "ratio", f"{where}: {mean.share} ({who})")
