"""A recorded GPU timeline, and what its times say by arithmetic alone: the truth that a replay is compared with.

Nothing here is taken from gpuwatch. A file is gzipped JSON, times in ns: tests/fixtures/traces/README.md has the
format. What is wrong with a file raises `TraceError` with the file and the place in it.

Every instant from the first fetch to the last device work (or the last fetch's end, if later) has one state:

- `input_wait`: during a fetch, with nothing on the device that runs or was launched. The rest of a fetch is `hidden`.
- `transfer`: no kernel runs, and a copy on the home stream runs or is the next to run; or a copy on another stream runs
  outside of fetches, and no kernel runs until it has ended.
- `host_wait`: all that was launched in a step is done, and the host has not asked for the next batch yet.
- `compute`: the rest, with the gaps between kernels. Those are given too, as `compute_idle`.

An operation that was launched before the recording (launch -1) counts as launched when it begins.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

STATES = ("input_wait", "transfer", "compute", "host_wait")
COMPUTE, TRANSFER = "compute", "transfer"
Spans = list[tuple[int, int]]
"""Disjoint spans of time in order, none of them empty."""


class TraceError(Exception):
    """A file that is no recorded timeline: which file, what is wrong, where."""


EARLIER = -(2**62)
"""Launch time of an operation from before the recording: -1 in the file, where other times may be negative too."""


class Op(NamedTuple):
    """A kernel or copy on the device."""

    launch: int
    begin: int
    end: int
    stream: str
    kind: str


class Copy(NamedTuple):
    """A copy to the device as the training thread issued it."""

    begin: int
    end: int
    stream: str


@dataclass(frozen=True)
class Trace:
    """One recorded timeline. Fetches follow one another; all lists are in the order of time, operations by launch."""

    name: str
    gpu: str
    num_workers: int | None
    """Loader workers, None where not known."""
    home_stream: str
    fetches: Spans
    copies: list[Copy]
    optimizer_ends: list[int]
    ops: list[Op]

    @property
    def host_end_ns(self) -> int:
        """The last moment of the host in the window that the recording knows."""
        last = [self.fetches[-1][1], *self.optimizer_ends[-1:], *(op.launch for op in self.ops[-1:])]
        return min(self.window[1], max([*last, *(copy.end for copy in self.copies)]))

    @property
    def window(self) -> tuple[int, int]:
        """From the first fetch to the end of the last device work, or of the last fetch."""
        return self.fetches[0][0], max([self.fetches[-1][1], *(op.end for op in self.ops)])


@dataclass(frozen=True)
class Truth:
    """What a trace's times say. Times in ns."""

    window_ns: int
    states_ns: dict[str, int]
    busy_ns: int
    """Some kernel or copy ran, on any stream."""
    hidden_ns: int
    compute_idle_ns: int
    input_waits_ns: list[tuple[int, int]]
    """Of each step the least and the most: they differ where work that was launched before the recording ran during the
    fetch. Whether the device's queue was empty between two of these operations is not known; the states count it as
    empty."""

    def percent(self, ns: int) -> float:
        return 100 * ns / self.window_ns if self.window_ns else 0.0


def load(path: Path) -> Trace:
    """Return a file's timeline. Raises: TraceError."""
    try:
        data = path.read_bytes()
        text = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
        return parse(json.loads(text), path.name.partition(".json")[0])
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from error
    except (ValueError, EOFError, zlib.error) as error:  # bad JSON and bad UTF-8 are ValueErrors
        raise TraceError(f"{path}: not gzipped JSON: {error}") from error
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from error


def parse(raw: Any, name: str) -> Trace:
    """Return the timeline that a decoded file holds. Raises: TraceError, with the place in it."""
    if not isinstance(raw, dict):
        raise TraceError(f"the file is a {type(raw).__name__}, not an object with fetches, ops …")
    fetches = _rows(raw, "fetches", ("begin", "end"))
    copies = _rows(raw, "copies", ("begin", "end", "stream"))
    steps = _rows(raw, "optimizer_steps", ("begin", "end"))
    ops = [Op(*row) for row in _rows(raw, "ops", ("launch", "begin", "end", "stream", "kind"))]
    if not fetches:
        raise TraceError("fetches: empty, so that there is no step to measure")
    for index, op in enumerate(ops):
        if op.kind not in (COMPUTE, TRANSFER):
            raise TraceError(f"ops[{index}]: kind {op.kind!r} is neither {COMPUTE!r} nor {TRANSFER!r}")
    home, gpu = raw.get("home_stream"), raw.get("gpu") or "?"
    if not isinstance(home, str | int):
        raise TraceError(f"home_stream: {home!r} is no stream")
    waits, at = [], None
    for begin, end in sorted(fetches):  # fetches that overlap are one after the other
        begin = begin if at is None else max(begin, at)
        at = max(begin, end)
        waits.append((begin, at))
    return Trace(
        name=str(raw.get("name") or name),
        gpu=", ".join(map(str, gpu)) if isinstance(gpu, list) else str(gpu),
        num_workers=_num_workers(raw),
        home_stream=str(home),
        fetches=waits,
        copies=sorted(Copy(begin, end, str(stream)) for begin, end, stream in copies),
        optimizer_ends=sorted(end for _, end in steps),
        ops=sorted(op._replace(launch=EARLIER if op.launch == -1 else op.launch, stream=str(op.stream)) for op in ops),
    )


def _num_workers(raw: dict[str, Any]) -> int | None:
    """Return the loader's workers: the file's `num_workers`, else by its name or source ("resnet50_num_workers_4")."""
    stated = raw.get("num_workers")
    if isinstance(stated, int) or not raw.get("real_loader"):
        return stated if isinstance(stated, int) else None
    found = re.search(r"workers_?(\d+)", f"{raw.get('name')} {raw.get('source')}")
    return int(found[1]) if found else None


def _rows(raw: dict[str, Any], key: str, fields: tuple[str, ...]) -> list[list[Any]]:
    """Return a list of rows, each with these fields: times are integers and spans do not run backwards."""
    rows = raw.get(key, [])
    if not isinstance(rows, list):
        raise TraceError(f"{key}: {type(rows).__name__} instead of a list")
    for index, row in enumerate(rows):
        where = f"{key}[{index}]"
        if not isinstance(row, list) or len(row) != len(fields):
            raise TraceError(f"{where}: {row!r} is not [{', '.join(fields)}]")
        for field, value in zip(fields, row, strict=True):
            wanted = str | int if field in ("stream", "kind") else int
            if not isinstance(value, wanted) or isinstance(value, bool):
                raise TraceError(f"{where}: {field} is {value!r}")
        begin, end = row[fields.index("begin")], row[fields.index("end")]
        if end < begin:
            raise TraceError(f"{where}: ends at {end}, before it begins at {begin}")
    return rows


def true_times(trace: Trace) -> Truth:
    """Return what the trace's times say of every instant of its window."""
    begin, end = window = trace.window
    fetching = union(trace.fetches)
    ran = union((op.begin, op.end) for op in trace.ops)
    known = [op for op in trace.ops if op.launch != EARLIER]
    before = [op for op in trace.ops if op.launch == EARLIER]
    pending = union([*((op.launch, op.end) for op in known), *((op.begin, op.end) for op in before)])
    exposed = minus(fetching, pending)
    left = minus([window] if end > begin else [], exposed)
    copying = _transfers(trace, fetching)
    transfer = both(left, copying)
    left = minus(left, copying)
    waiting = _host_waits(trace)
    host_wait = both(left, waiting)
    compute = minus(left, waiting)
    # As the device may have been: busy with what was launched before the recording until the last of it was done.
    until = max([op.end for op in before], default=begin)
    least = minus(exposed, [(min(begin, until), until)])
    return Truth(
        window_ns=end - begin,
        states_ns=dict(zip(STATES, (length(each) for each in (exposed, transfer, compute, host_wait)), strict=True)),
        busy_ns=length(both(ran, [window])),
        hidden_ns=length(fetching) - length(exposed),
        compute_idle_ns=length(minus(compute, ran)),
        input_waits_ns=[
            (length(both(least, [fetch])), length(both(exposed, [fetch]))) if fetch[1] > fetch[0] else (0, 0)
            for fetch in trace.fetches
        ],
    )


def _transfers(trace: Trace, fetching: Spans) -> Spans:
    """Return when the device did nothing but copy, or waited for a copy to begin.

    On the home stream from the moment that the copy is the next one: a copy from pageable memory is launched long
    before it begins. On another stream only if no kernel ran when the copy ended: else the step did not wait for it.
    """
    home, aside, free_ns = [], [], None
    for op in trace.ops:
        if op.stream == trace.home_stream:
            if op.kind == TRANSFER:
                from_ns = op.begin if op.launch == EARLIER else op.launch
                home.append((from_ns if free_ns is None else min(op.begin, max(from_ns, free_ns)), op.end))
            free_ns = op.end if free_ns is None else max(free_ns, op.end)
        elif op.kind == TRANSFER:
            aside.append((op.begin, op.end))
    computing = union((op.begin, op.end) for op in trace.ops if op.kind == COMPUTE)
    ends = [end for _, end in computing]
    waited_for = []
    for begin, end in aside:
        before = bisect_right(ends, end)  # the kernels that are done by the copy's end
        if before == len(computing) or computing[before][0] >= end:  # and none runs then
            waited_for.append((max(begin, ends[before - 1]) if before else begin, end))
    return union([*minus(union(home), computing), *minus(union(waited_for), fetching)])


def _host_waits(trace: Trace) -> Spans:
    """Return when the host had let the device finish and had not asked for the next batch."""
    launches, ends = [op.launch for op in trace.ops], latest_ends(trace.ops)
    asked = [*(begin for begin, _ in trace.fetches[1:]), trace.host_end_ns]
    waits = []
    for (_, fed), at in zip(trace.fetches, asked, strict=True):
        launched = bisect_left(launches, at)
        waits.append((max(fed, ends[launched - 1]) if launched else fed, at))
    return union(waits)


def latest_ends(ops: Sequence[Op]) -> list[int]:
    """Return the latest end of each operation and all before it."""
    ends: list[int] = []
    for op in ops:
        ends.append(max(op.end, ends[-1]) if ends else op.end)
    return ends


def union(spans: Iterable[tuple[int, int]]) -> Spans:
    """Return the time that any of these spans covers."""
    covered: Spans = []
    for begin, end in sorted(spans):
        if covered and begin <= covered[-1][1]:
            covered[-1] = (covered[-1][0], max(end, covered[-1][1]))
        elif end > begin:
            covered.append((begin, end))
    return covered


def minus(spans: Spans, others: Spans) -> Spans:
    """Return the time of `spans` that `others` do not cover."""
    left, ends = [], [end for _, end in others]
    for begin, end in spans:
        at = bisect_right(ends, begin)
        while at < len(others) and others[at][0] < end:
            if others[at][0] > begin:
                left.append((begin, others[at][0]))
            begin = others[at][1]
            at += 1
        if begin < end:
            left.append((begin, end))
    return left


def both(spans: Spans, others: Spans) -> Spans:
    """Return the time that both cover."""
    return minus(spans, minus(spans, others))


def length(spans: Spans) -> int:
    """Return the sum of the spans' lengths."""
    return sum(end - begin for begin, end in spans)
