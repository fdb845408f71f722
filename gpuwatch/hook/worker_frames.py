"""Which of the user's functions a loader's forked workers spend their fetches in: each samples itself, and the training process reads that.

A worker that was spawned is not sampled: it need not import this.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from mmap import mmap
from traceback import walk_stack

from gpuwatch.host.frames import OwnFrames, Place

_EVERY_S, _WRITE_EVERY = 0.05, 8
_SLOTS, _SLOT_BYTES = 64, 512
_FETCH = "/torch/utils/data/_utils/fetch.py"
_shared = mmap(-1, _SLOTS * _SLOT_BYTES)
"""Memory that forked processes share: a worker writes (pid, samples in fetches, place) as JSON into the slot of its pid."""


def sample_worker() -> None:
    """Sample this process from now on, if it was forked just now to be a worker of a torch loader. Raises: RuntimeError."""
    codes = (frame.f_code for frame, _ in walk_stack(sys._getframe()))
    if any(code.co_name == "__init__" and code.co_filename.endswith("dataloader.py") for code in codes):
        threading.Thread(target=_sample, args=(threading.get_ident(),), daemon=True).start()


def _sample(worker: int) -> None:
    frames, at, samples = OwnFrames(), os.getpid() % _SLOTS * _SLOT_BYTES, 0
    with suppress(Exception):  # the worker goes on without
        for number in count(1):
            time.sleep(_EVERY_S * (0.5 + 0.618 * number % 1))  # in no rhythm that a fetch could have
            if any(_FETCH in each.f_code.co_filename for each, _ in walk_stack(sys._current_frames()[worker])):
                frames.sample(worker, _FETCH)
                samples += 1
            if number % _WRITE_EVERY == 0 and (place := frames.most_frequent(_FETCH)) is not None:
                text = json.dumps((os.getpid(), samples, place)).encode()
                _shared[at : at + _SLOT_BYTES] = text.ljust(_SLOT_BYTES)[:_SLOT_BYTES]


def worker_place(pids: Sequence[int]) -> Place | None:
    """Return the function that the fetches are most often in of the worker, of these, that fetches most; None where that is not known."""
    found: list[tuple[int, list[object]]] = [(0, [])]
    for at in range(0, len(_shared), _SLOT_BYTES):
        with suppress(ValueError):  # empty, or being written
            pid, samples, place = json.loads(_shared[at : at + _SLOT_BYTES].rstrip(b"\0"))
            found += [(samples, place)] if pid in pids else []
    return Place(*most) if (most := max(found)[1]) else None  # type: ignore[arg-type]
