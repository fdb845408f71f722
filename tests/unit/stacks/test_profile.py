"""What is read from py-spy's profiles: whose line it is, and where a worker's own stack begins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import gpuwatch
from gpuwatch.errors import GpuwatchError
from gpuwatch.tools.stacks.spy import read_profile

HEAD = ("process 100", "", 0)
MAIN = ("main", "/home/alice/train.py", 20)
NEXT = ("_next_data", "/opt/venv/lib/python3.11/site-packages/torch/utils/data/dataloader.py", 700)
SELECT = ("select", "/usr/lib/python3.11/selectors.py", 415)
HOOK = ("ask", f"{Path(gpuwatch.__file__).parent}/watched_iterator.py", 60)
BOOTSTRAP = ("BaseProcess._bootstrap", "/usr/lib/python3.11/multiprocessing/process.py", 314)
LOOP = ("_worker_loop", "/opt/venv/lib/python3.11/site-packages/torch/utils/data/_utils/worker.py", 374)
ITEM = ("Photos.__getitem__", "/home/alice/dataset.py", 80)
DECODE = ("Photos.decode", "/home/alice/dataset.py", 88)
DECODE_LATER = ("Photos.decode", "/home/alice/dataset.py", 91)
PILLOW = ("Image.resize", "/opt/venv/lib/python3.11/site-packages/PIL/Image.py", 2300)
OWN_PACKAGE = ("load", "/opt/venv/lib/python3.11/site-packages/alicelib/data.py", 7)
Frame = tuple[str, str, int]


def profile(*threads: tuple[int, str, list[list[Frame]]]) -> bytes:
    """Return a file of (pid, thread name, samples), frames from the outermost on."""
    frames = sorted({frame for _, _, samples in threads for sample in samples for frame in sample})
    found: dict[str, Any] = {
        "shared": {"frames": [{"name": n, "file": f, "line": at, "col": None} for n, f, at in frames]},
        "profiles": [
            {
                "name": f'Process {pid} Thread {thread} "{name}"',
                "samples": [[frames.index(f) for f in s] for s in samples],
            }
            for pid, name, samples in threads
            for thread in [pid + 5000 if name.endswith(("gpuwatch", "FeederThread")) else pid]
        ],
    }
    return json.dumps(found).encode()


def worker(*own: Frame) -> list[Frame]:
    """Return a forked worker's stack: its parent's, then its own."""
    return [HEAD, MAIN, HOOK, BOOTSTRAP, LOOP, *own]


def test_the_deepest_line_of_the_users_code_counts_and_a_fork_is_not_charged_with_its_parents() -> None:
    busy = [worker(ITEM, DECODE)] * 6 + [worker(ITEM, DECODE_LATER)] * 2 + [worker(ITEM, PILLOW)] + [worker(SELECT)]
    text = profile(
        (100, "MainThread", [[HEAD, MAIN, HOOK, NEXT, SELECT]] * 4),
        (100, "gpuwatch", [[HEAD, MAIN]] * 4),
        (102, "MainThread", [worker(SELECT)] * 10),
        (101, "MainThread", busy),
        (101, "QueueFeederThread", [[HEAD, DECODE]] * 10),
    )
    training, first, second = read_profile(text, 100, rank=3)
    assert (training.kind, training.pid, training.rank, training.samples) == ("training", 100, 3, 4)
    assert [(line.line, line.ratio) for line in training.lines] == [(20, 1.0)]
    assert (first.kind, first.pid, first.index) == ("worker", 101, 0)
    assert [(line.function, line.line, line.ratio, line.function_ratio) for line in first.lines] == [
        ("Photos.decode", 88, 0.6, 0.8),
        ("Photos.decode", 91, 0.2, 0.8),
        ("Photos.__getitem__", 80, 0.1, 0.1),
    ]
    assert first.elsewhere_ratio == pytest.approx(0.1) and first.elsewhere == "selectors.py:415 select"
    assert (second.pid, second.index, second.lines, second.elsewhere_ratio) == (102, 1, (), 1.0)


def test_the_main_thread_is_known_by_whatever_name() -> None:
    samples = [[HEAD, MAIN]]
    text = profile((100, "trainer", samples), (100, "gpuwatch", samples * 2))
    assert [process.samples for process in read_profile(text, 100)] == [1]
    unknown_number = profile((100, "MainThread", samples)).replace(b"Thread 100 ", b"Thread 0x7F0012 ")
    assert [process.samples for process in read_profile(unknown_number, 100)] == [1]


def test_a_users_installed_package_is_the_users_where_there_is_nothing_else_but_a_framework_never() -> None:
    text = profile((100, "MainThread", [[HEAD, BOOTSTRAP, LOOP, OWN_PACKAGE, SELECT], [HEAD, BOOTSTRAP, LOOP, SELECT]]))
    (process,) = read_profile(text, 100)
    assert [(line.function, line.ratio) for line in process.lines] == [("load", 0.5)]


def test_a_child_that_never_runs_the_users_code_is_left_out() -> None:
    tracker = [[HEAD, ("main", "/usr/lib/python3.11/multiprocessing/resource_tracker.py", 240)]]
    text = profile((100, "MainThread", [[HEAD, MAIN]]), (105, "MainThread", tracker))
    assert [process.pid for process in read_profile(text, 100)] == [100]


def test_what_is_no_profile_is_refused() -> None:
    with pytest.raises(GpuwatchError, match="not a profile"):
        read_profile(b"<svg/>", 1)
