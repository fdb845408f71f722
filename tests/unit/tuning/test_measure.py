"""The end of a trial's processes."""

from __future__ import annotations

import multiprocessing
import subprocess

import pytest

from gpuwatch.tools.tuning.measure import _end


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
        assert worker.wait(5) == -9
    finally:
        worker.kill()
        worker.wait()
