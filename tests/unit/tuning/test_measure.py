"""The end of a trial's processes."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import time

import pytest

from gpuwatch.tools.tuning.measure import _end, _failure_of, measure
from gpuwatch.tools.tuning.result import Measured, Setting
from gpuwatch.tools.tuning.target import target
from gpuwatch.tools.tuning.trial import Plan


class Lingering(multiprocessing.Process):
    """A trial in an uninterruptible read: a signal does not end it, and who waits for it presses Ctrl-C."""

    def __init__(self, pid: int) -> None:
        self._of = pid

    @property
    def pid(self) -> int:
        return self._of

    def kill(self) -> None:
        pass

    def join(self, timeout: float | None = None) -> None:
        raise KeyboardInterrupt


def test_workers_are_killed_before_the_end_of_their_process_is_awaited() -> None:
    worker = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        with pytest.raises(KeyboardInterrupt):
            _end(Lingering(worker.pid), at_once=True)
        assert worker.wait(60) == -9
    finally:
        worker.kill()
        worker.wait()


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("the server answered with a status error"),  # "us error" was taken for "Bus error"
        ValueError("17.jpg: skipped after the previous error"),
        OSError(28, "No space left on device", "/data/cache/17.npy"),  # the data set's own cache
        RuntimeError(
            "Caught OSError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
            '  File "/home/alice/dataset.py", line 88, in __getitem__\n'
            "OSError: [Errno 28] No space left on device: '/data/cache/17.npy'"
        ),
    ],
)
def test_an_error_of_the_user_s_is_reported_in_its_words(error: Exception) -> None:
    kind, text = _failure_of(error)
    assert kind == "error" and "/dev/shm" not in text, text


@pytest.mark.parametrize(
    "text",
    [
        "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory.",
        "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).",
        "unable to write to file </torch_7_1>: No space left on device (28)",
        "unable to allocate shared memory(shm) for file </torch_7_1>: No space left on device (28)",
    ],
)
def test_torch_s_words_for_a_full_dev_shm_are_known(text: str) -> None:
    assert _failure_of(RuntimeError(text)) == ("bus_error", "a worker was killed by a bus error: /dev/shm was full")


@pytest.mark.parametrize("more", [0, 60])
def test_what_other_programs_use_is_known_where_all_of_the_node_s_cores_are_the_trial_s(
    monkeypatch: pytest.MonkeyPatch, more: int
) -> None:
    """It was "all 4 cores are busy, 28.9 of them with other processes", which were on the node's 60 others."""
    cores = os.cpu_count() or 1
    monkeypatch.setattr(os, "cpu_count", lambda: cores + more)
    found = measure(
        target(lambda num_workers: iter(lambda: time.sleep(0.01), 1), "own"), Setting(0), Plan(0.3, 60.0), cores
    )
    assert isinstance(found, Measured), found
    assert (found.others_cores is None) == bool(more)
