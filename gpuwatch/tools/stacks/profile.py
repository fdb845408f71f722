"""Read what py-spy wrote in speedscope's format: the user's line that each process stood at. Pure.

A user's line is the deepest frame that is neither Python's own nor an installed package's nor gpuwatch's. A forked worker carries its parent's
stack below its own: what lies below multiprocessing's `_bootstrap` is not the worker's doing.
Source: https://www.speedscope.app/file-format-schema.json; frames are listed from the outermost on.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

import msgspec

import gpuwatch
from gpuwatch.errors import GpuwatchError
from gpuwatch.tools.stacks.records import CHILD, TRAINING, WORKER, HotLine, ProcessStacks

_LINES = 5
_INSTALLED = re.compile(r"/(?:site|dist)-packages/")
_STANDARD = re.compile(r"/lib(?:64)?/python\d+\.\d+/|/python\d+\.zip/|^<frozen ")
_OWN = f"{PurePosixPath(gpuwatch.__file__).parent}/"
_PROFILE = re.compile(r'^Process (\d+) Thread \S+ "(.*)"$')
_FRAMEWORKS = re.compile(
    r"/(?:site|dist)-packages/"
    r"(?:torch|torchdata|lightning|pytorch_lightning|lightning_fabric|transformers|accelerate|ignite|gpuwatch)/"
)
"""Never a user's own package, even where the user's code is an installed package itself."""


class _Frame(msgspec.Struct):
    name: str
    file: str | None = None
    line: int | None = None


class _Shared(msgspec.Struct):
    frames: list[_Frame]


class _Profile(msgspec.Struct):
    name: str
    samples: list[list[int]]


class _File(msgspec.Struct):
    shared: _Shared
    profiles: list[_Profile]


@dataclass(frozen=True)
class _Stack:
    """One sample, cut to what the process itself does."""

    frames: Sequence[_Frame]

    def has(self, function: str, file: str) -> bool:
        return any(frame.name.endswith(function) and (frame.file or "").endswith(file) for frame in self.frames)


def read_profile(text: bytes, pid: int, rank: int = 0) -> tuple[ProcessStacks, ...]:
    """Return the main threads in a profile: the training process `pid` first, then its workers, then other children.

    Raises: GpuwatchError for anything that is no profile.
    """
    try:
        found = msgspec.json.decode(text, type=_File)
    except (msgspec.MsgspecError, ValueError) as error:
        raise GpuwatchError(
            f"py-spy wrote something that is no profile: {error}; is it py-spy 0.4 or later?"
        ) from error
    by_pid: dict[int, list[_Stack]] = {}
    for profile in found.profiles:
        named = _PROFILE.match(profile.name)
        if named is None or named[2] != "MainThread":
            continue
        frames = found.shared.frames
        stacks = [_Stack(_own([frames[index] for index in sample])) for sample in profile.samples]
        by_pid.setdefault(int(named[1]), []).extend(stacks)
    result: list[ProcessStacks] = []
    counted: Counter[str] = Counter()
    order = {TRAINING: 0, WORKER: 1, CHILD: 2}
    kinds = {each: _kind(each, pid, stacks) for each, stacks in by_pid.items()}
    for each in sorted(by_pid, key=lambda each: (order[kinds[each]], each)):
        kind = kinds[each]
        told = _process(rank, each, kind, counted[kind], by_pid[each])
        if kind != CHILD or told.lines:  # multiprocessing's own helpers say nothing
            counted[kind] += 1
            result.append(told)
    return tuple(result)


def _own(frames: list[_Frame]) -> list[_Frame]:
    """Return the frames that are the process's own; py-spy's headings of processes and threads have no file."""
    start = 0
    for index, frame in enumerate(frames):
        if not frame.file or (frame.name.endswith("_bootstrap") and frame.file.endswith("/multiprocessing/process.py")):
            start = index + 1
    return frames[start:]


def _kind(pid: int, training: int, stacks: Sequence[_Stack]) -> str:
    if pid == training:
        return TRAINING
    return WORKER if any(stack.has("_worker_loop", "/worker.py") for stack in stacks) else CHILD


def _process(rank: int, pid: int, kind: str, index: int, stacks: Sequence[_Stack]) -> ProcessStacks:
    deepest = [_deepest(stack, _is_users) for stack in stacks]
    if not any(deepest):  # an installed package may be the user's own
        deepest = [_deepest(stack, _may_be_users) for stack in stacks]
    whole = max(1, len(stacks))
    users = [frame for frame in deepest if frame is not None]
    lines = Counter((frame.file or "", frame.line or 0, frame.name) for frame in users)
    functions = Counter((frame.file or "", frame.name) for frame in users)
    hottest = sorted(lines, key=lambda at: (-functions[at[0], at[2]], -lines[at], at))
    others = [stack.frames[-1] for stack, frame in zip(stacks, deepest, strict=True) if frame is None and stack.frames]
    elsewhere = Counter(f"{PurePosixPath(frame.file or '').name}:{frame.line or 0} {frame.name}" for frame in others)
    return ProcessStacks(
        rank=rank,
        pid=pid,
        kind=kind,
        index=index,
        looks=len(stacks),
        lines=tuple(
            HotLine(file, line, name, lines[file, line, name] / whole, functions[file, name] / whole)
            for file, line, name in hottest[:_LINES]
        ),
        elsewhere_ratio=1 - len(users) / whole,
        elsewhere=elsewhere.most_common(1)[0][0] if elsewhere else "",
    )


def _deepest(stack: _Stack, wanted: Callable[[str], bool]) -> _Frame | None:
    return next((frame for frame in reversed(stack.frames) if wanted(frame.file or "")), None)


def _is_users(file: str) -> bool:
    return _may_be_users(file) and not _INSTALLED.search(file)


def _may_be_users(file: str) -> bool:
    if not file or file.startswith(_OWN) or _FRAMEWORKS.search(file):
        return False
    return bool(_INSTALLED.search(file)) or not _STANDARD.search(file)
