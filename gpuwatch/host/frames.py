"""Which function of the user's own a thread is in. Used on py-spy's samples of other processes, by the hook on its own
process, and by loader workers of that on themselves."""

import faulthandler
import json
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dis import opname
from functools import cache, partial
from itertools import product
from mmap import mmap
from pathlib import Path, PurePosixPath
from random import Random
from traceback import walk_stack
from types import BuiltinFunctionType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple

from gpuwatch.errors import NoData
from gpuwatch.host.proc import run_queue_s, stat
from gpuwatch.ledger.events import DATA_WAIT
from gpuwatch.startup.instrumented import MODULES

_INSTALLED = re.compile(r"/(?:site|dist)-packages/")
_STANDARD = re.compile(r"/lib(?:64)?/python\d+\.\d+/|/python\d+\.zip/|^<frozen ")
OWN = f"{Path(__file__).parents[1].as_posix()}/"
_WORKER = "/torch/utils/data/_utils/worker.py"
_REPLACED = f"{OWN}hook/torch/"  # called in place of torch's functions, by whoever calls these
_COPIES = "copy_to"  # so is this function of the recorder
_FOR_DEVICE = "_reads_back", "synchronizes"  # those of them that wait for the device
_PACKAGES = {name.partition(".")[0] for name in MODULES} | {"lightning_fabric", "gpuwatch"}
_FRAMEWORKS = re.compile(rf"/(?:site|dist)-packages/(?:{'|'.join(sorted(_PACKAGES))})/")
"""Never a user's own package, even where the user's code is an installed package itself."""
_FETCH, _EVERY_S, _WRITE_EVERY = "/torch/utils/data/_utils/fetch.py", 0.05, 8  # of a loader worker that samples itself
_SLOTS, _SLOT_BYTES = 64, 512  # a worker's (pid, samples in fetches, place) as JSON, in the slot of its pid
_shared: list[Any] = [mmap(-1, _SLOTS * _SLOT_BYTES)]  # that of spawned workers is the second
_LEAST = 8  # fewer samples than this name no place
random = Random().random  # the program's own numbers stay as without
_SWITCH_S = 2e-5
_LATE_S = 3e-4  # a thread that keeps the interpreter's lock for longer is in one call, which does not give it up
_HELD_NS, _GIVEN_UP_S = 30_000, 5e-5
_INTERRUPTED = {"RESUME", "JUMP_BACKWARD"}  # instructions at which a thread is interrupted, and calls nothing
_OPERATORS = ("BINARY", "INPLACE", "UNARY", "COMPARE", "STORE")
"""Instructions at which no thread is interrupted: one found there is in an operator that gave the lock up (torch's)."""
_GIVES = {"put", "put_nowait", "send", "set_result"}
"""A function that names one of these gives results to other threads."""
ELSEWHERE, _LOCKS = ", in another thread", "/threading.py"
_THREAD = re.compile(r"^(?:Current t|T)hread 0x(\w+)", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_CLOCKS = {"perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns"}  # a function that asks these may wait

SPAWNS, SPAWNED = "the start of the workers (pickling)", "the wait for spawned workers (imports, unpickling)"
AROUND = "around"  # samples of fetches, with places only where not within torch's own fetch, which workers would run
RECEIVING = "receiving and unpickling the batch"
_WAITS = "the wait for the workers"
_STARTING = {"/popen_spawn": SPAWNS, "/multiprocessing/": _WAITS, "<frozen importlib": "imports"}
"""What a thread does in Python's own files, by a part of their names, while it waits for the first batch."""


@cache
def is_users(file: str) -> bool:
    """Whether a file is the user's: neither Python's own nor an installed package's nor gpuwatch's."""
    return may_be_users(file) and not _INSTALLED.search(file)


def may_be_users(file: str) -> bool:
    """The same, but an installed package may be the user's own."""
    if not file or file.startswith(OWN) or _FRAMEWORKS.search(file):
        return False
    return bool(_INSTALLED.search(file)) or not _STANDARD.search(file)


class Place(NamedTuple):
    """The function in which a thread was found most often."""

    function: str
    file: str
    line: int  # its hottest line
    ratio: float  # share of the samples in which the thread was in this function, 0–1

    @property
    def has_most(self) -> bool:
        """Whether it may be called the place of the time that was sampled: half of the samples."""
        return self.ratio >= 0.5

    def __str__(self) -> str:
        return f"{self.function} ({PurePosixPath(self.file).name}:{self.line})" if self.file else self.function


@contextmanager
def interrupting(late_s: float = 0.0) -> Iterator[bool]:
    """Interrupt the other threads anywhere, at a random moment of the next 10 ms; yield whether one kept the lock.

    A thread that computes in Python keeps the interpreter's lock for 5 ms by default, so until it gives it up itself:
    it would be seen at the same few calls only. For one thread at a time, and not during a fork, whose child would keep
    the interval. `late_s`: how much later than it wanted this thread got the lock. If that is longer, one call has kept
    it until just now: the others are where they were at the right time, and would have left that place 10 ms later.
    """
    usual_s = sys.getswitchinterval()
    if late_s > usual_s + _LATE_S:
        yield True
        return
    sys.setswitchinterval(_SWITCH_S)
    try:
        due_s = time.perf_counter() + (sleep_s := random() / 100)
        time.sleep(sleep_s)
        yield time.perf_counter() - due_s > _LATE_S
    finally:
        sys.setswitchinterval(usual_s)


class OwnFrames:
    """Samples of this process's training thread, by what that did: the deepest of the user's functions on its stack."""

    def __init__(self) -> None:
        self._places: dict[str, Counter[tuple[str, str, int] | None]] = {}
        """(file, function, line); None where no function of the user's is on the stack."""

    def sample(
        self, thread: int | None, doing: str, in_python: str = "", kept: bool = False, is_start: bool = False
    ) -> None:
        """Sample a thread that has a Python frame, in another one. A fetch that waits for a thread is where that is.

        `in_python`: a name for the same samples with places only where it runs Python code that is not torch's. Such a
        thread waits for the interpreter's lock, which operators of torch give up. `kept`: what `interrupting` yielded.
        """
        frame = sys._current_frames().get(thread or 0)
        if frame is None:
            return
        place, deepest, names, is_fetch = _place(frame), frame.f_code.co_filename, frame.f_globals, doing is DATA_WAIT
        if is_fetch and deepest.startswith(_REPLACED) and frame.f_code.co_name in _FOR_DEVICE:
            return  # which is no wait for data
        if is_start and place is None:
            place = _starting(frame)
        if is_fetch:
            codes = [each.f_code for each, _ in walk_stack(frame)]
            gets = any(code.co_name == "get" and code.co_filename.endswith("/queues.py") for code in codes)
            if place is None and gets and not any(code.co_name == "_poll" for code in codes):  # what it takes is there
                place = ("", RECEIVING, 0)
            is_made = any(code.co_filename.endswith(_FETCH) for code in codes)
            self._places.setdefault(AROUND, Counter())[None if is_made or deepest.endswith(_LOCKS) else place] += 1
        if in_python:
            is_torch = _FRAMEWORKS.search(deepest) or ("torch" in names and _INSTALLED.search(deepest))
            is_other = is_torch or deepest.startswith(OWN) or not _CLOCKS.isdisjoint(frame.f_code.co_names)
            calls_none = not is_other and not is_users(deepest)  # a package, such as numpy, that does not know torch
            is_python = False if is_other else None if calls_none else _is_python(frame, kept)
            runs_python = _runs_python(thread, calls_none or kept) if is_python is None else is_python
            if runs_python is not None:
                self._places.setdefault(in_python, Counter())[place if runs_python else None] += 1
        del frame  # what it holds is not to live longer
        if (is_start or is_fetch) and deepest.endswith(_LOCKS):
            place = _place_of_producer() or place
        self._places.setdefault(doing, Counter())[place] += 1

    def most_frequent(self, doing: str) -> Place | None:
        """Return the function that most samples are in; None with too few, or where none was in the user's code."""
        places = dict(self._places.get(doing, {}))  # another thread may be sampling
        known = {place: count for place, count in places.items() if place is not None}
        if not known or (samples := sum(places.values())) < _LEAST:
            return None
        functions: Counter[tuple[str, str]] = Counter()
        for (file, function, _), count in known.items():
            functions[file, function] += count
        ((file, function), most), *_ = functions.most_common(1)
        _, line = max((count, place[2]) for place, count in known.items() if place[:2] == (file, function))
        return Place(function, file, line, most / samples)


def _is_python(frame: FrameType, kept: bool) -> bool | None:
    """Whether a thread runs Python code there; None where the current instruction does not show it.

    False also where a short operator of torch may run, called by operators of Python's, or in a function naming torch.
    """
    code = frame.f_code
    instruction = opname[code.co_code[frame.f_lasti]]
    if instruction in _INTERRUPTED:
        return True
    may_call = instruction.startswith(("CALL", "PRECALL")) and not kept
    names_torch = may_call and any(_is_torchs(frame.f_globals.get(name)) for name in code.co_names)
    return False if names_torch or instruction.startswith(_OPERATORS) else None


def _is_torchs(value: object) -> bool:
    is_defined = isinstance(value, (FunctionType, BuiltinFunctionType, type))
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "") if is_defined else ""
    return str(name).partition(".")[0] == "torch"


def _runs_python(thread: int | None, calls_none: bool) -> bool | None:
    """Whether a thread computes, but not while this one holds the interpreter's lock: operators of torch give that up.

    `calls_none`: nor does it call any of them. None if unknown: the thread waited for a core meanwhile, or has ended.
    """
    native_id = next((each.native_id for each in threading.enumerate() if each.ident == thread), None) or 0
    try:
        clock, waited_s = (~native_id << 3) | 6, run_queue_s(native_id)  # its CPU time on Linux, clock_getcpuclockid(3)
        before_ns, end_ns = time.clock_gettime_ns(clock), time.perf_counter_ns() + _HELD_NS
        while time.perf_counter_ns() < end_ns:
            pass
        held_ns = time.clock_gettime_ns(clock)
        time.sleep(_GIVEN_UP_S)  # gives it up
        ran_ns, waited_s = time.clock_gettime_ns(clock) - held_ns, run_queue_s(native_id) - waited_s
        waits = waited_s * 1e9 >= _HELD_NS / 2 or (ran_ns < _HELD_NS / 2 and stat(native_id).state == "R")
    except (OSError, NoData):
        return None
    if calls_none:
        return waits or ran_ns >= _HELD_NS / 2
    return None if waits else held_ns - before_ns < _HELD_NS / 2 <= ran_ns


def place_of(thread: int | None) -> str:
    """Return the deepest of the user's functions that a thread is in now, with file and line; "" if it is in none."""
    place = _place(sys._current_frames().get(thread or 0))
    return "" if place is None else f"{place[1]} ({PurePosixPath(place[0]).name}:{place[2]})"


def _starting(frame: FrameType) -> tuple[str, str, int] | None:
    """Return what a thread that waits for a first batch does, as a function without file; None in no known place."""
    names = [each.f_code.co_filename for each, _ in walk_stack(frame)]
    text = next((text for name in names for part, text in _STARTING.items() if part in name), None)
    made = list(getattr(sys.modules.get("multiprocessing.process"), "_children", ()))
    is_spawned = any(getattr(getattr(each, "_popen", None), "method", "fork") != "fork" for each in made)
    return None if text is None else ("", SPAWNED if is_spawned and text == _WAITS else text, 0)


def _place(frame: FrameType | None) -> tuple[str, str, int] | None:
    while frame is not None:
        code = frame.f_code
        file = code.co_filename
        is_own = file.startswith(OWN) and not file.startswith(_REPLACED) and code.co_name != _COPIES
        if is_own or file.endswith(_WORKER):
            return None  # what is above is the loop that asked for a batch, or what has forked the worker
        if is_users(file):
            name: str = getattr(code, "co_qualname", code.co_name)
            function = name.partition(".<locals>.<")[0]  # a lambda is part of its function
            return file, function, frame.f_lineno
        frame = frame.f_back
    return None


def stacks() -> dict[int, list[tuple[str, str, int]]]:
    """Return (function, file, line) of other threads' frames, innermost first: newest 100 and main thread, 100 each.

    No frame object is made: it would keep its contents alive, and in a forked child belong to a thread that is gone.
    """
    from tempfile import TemporaryFile

    with TemporaryFile() as file:
        faulthandler.dump_traceback(file)  # one call, which keeps the interpreter's lock
        file.seek(0)
        _, *parts = _THREAD.split(file.read().decode())
    found = {int(thread, 16): _FRAME.findall(text) for thread, text in zip(parts[::2], parts[1::2], strict=True)}
    if len(found) >= 100 and (frame := sys._current_frames().get(main := threading.main_thread().ident or 0)):
        found[main] = [(at.f_code.co_filename, str(line), at.f_code.co_name) for at, line in walk_stack(frame)]
    found.pop(threading.get_ident(), None)
    return {thread: [(name, file, int(line)) for file, line, name in each] for thread, each in found.items() if each}


def _place_of_producer() -> tuple[str, str, int] | None:
    """Return where in the user's code a thread prepares what others wait for; None if each waits, or gives nothing."""
    runs = {each.ident: getattr(each, "_target", None) or type(each).run for each in threading.enumerate()}
    for thread, stack in stacks().items():
        names = getattr(getattr(runs.get(thread), "__code__", None), "co_names", ())
        if not _GIVES.isdisjoint(names) and not stack[0][1].endswith(_LOCKS):
            return next(((file, name + ELSEWHERE, line) for name, file, line in stack if is_users(file)), None)
    return None


@contextmanager
def spawned_workers_sampled(loader: Any) -> Iterator[None]:
    """Have workers that a torch loader spawns meanwhile sample themselves: its `worker_init_fn` starts that."""
    then = unchanged = object()
    with suppress(Exception):  # it is another iterable
        if not loader.num_workers:
            raise NoData("it has no workers")
        import multiprocessing

        context = loader.multiprocessing_context or multiprocessing
        method = context.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
        if method != "fork":
            from multiprocessing.sharedctypes import RawArray

            if len(_shared) == 1:
                _shared.append(RawArray("c", _SLOTS * _SLOT_BYTES))
            then = loader.worker_init_fn
            loader.worker_init_fn = partial(_init_sampled, then, _shared[1])
    try:
        yield
    finally:
        if then is not unchanged:
            loader.worker_init_fn = then


def _init_sampled(then: Callable[[int], None] | None, shared: Any, worker_id: int) -> None:
    with suppress(RuntimeError):  # no more threads
        threading.Thread(target=_sample, args=(threading.get_ident(), shared), daemon=True).start()
    if then is not None:
        then(worker_id)


def sample_worker() -> None:
    """Sample this process from now on, if it was just forked to be a worker of a torch loader. Raises: RuntimeError."""
    codes = (frame.f_code for frame, _ in walk_stack(sys._getframe()))
    if any(code.co_name == "__init__" and code.co_filename.endswith("dataloader.py") for code in codes):
        threading.Thread(target=_sample, args=(threading.get_ident(), _shared[0]), daemon=True).start()


def _sample(worker: int, shared: Any) -> None:
    frames, at, samples, number, never = OwnFrames(), os.getpid() % _SLOTS * _SLOT_BYTES, 0, 0, threading.Event()
    with suppress(Exception):  # the worker goes on without
        while True:
            number += 1
            # In no rhythm of fetches, and for `blocked_on` no sleep.
            never.wait(_EVERY_S * (0.5 + 0.618 * number % 1))
            if any(_FETCH in each.f_code.co_filename for each, _ in walk_stack(sys._current_frames()[worker])):
                frames.sample(worker, _FETCH)
                samples += 1
            if number % _WRITE_EVERY == 0 and (place := frames.most_frequent(_FETCH)) is not None:
                text = json.dumps((os.getpid(), samples, place)).encode().ljust(_SLOT_BYTES)
                shared[at : at + _SLOT_BYTES] = text[:_SLOT_BYTES]


def worker_place(pids: Sequence[int]) -> Place | None:
    """Return the most frequent function in fetches, of the one of these workers that fetches most; None: unknown."""
    found: list[tuple[int, list[Any]]] = [(0, [])]
    for shared, at in product(_shared, range(0, _SLOTS * _SLOT_BYTES, _SLOT_BYTES)):
        with suppress(ValueError):  # empty, or being written
            pid, samples, place = json.loads(shared[at : at + _SLOT_BYTES].rstrip(b"\0"))
            found += [(samples, place)] if pid in pids else []
    return Place(*most) if (most := max(found)[1]) else None
