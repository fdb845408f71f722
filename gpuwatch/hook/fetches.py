"""Why fetches take as long as they do: counted by the training thread, read by others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpuwatch.hook.interrupts import pass_on
from gpuwatch.host.proc import ThreadTime


class FetchEvidence:
    """Cumulative counts of one recorder's fetches. One thread writes; any other reads single numbers.

    Without workers the training thread makes the batches itself: its time on a CPU, of some fetches, tells work from waiting. With
    workers the batches that were ready when one was asked for tell whether the workers keep up.
    """

    __slots__ = ("busy_ns", "empty", "looked", "ready", "sampled", "thread_time", "wall_ns")

    def __init__(self) -> None:
        self.busy_ns = 0
        self.wall_ns = 0
        """Time on a CPU or in the queue for one, and wall time, of the training thread in the fetches that were sampled."""
        self.sampled = 0
        self.looked = 0
        """Fetches from workers, all of them."""
        self.ready = 0
        """Batches that were ready at these, summed."""
        self.empty = 0
        """Those at which none was."""
        self.thread_time: ThreadTime | None = None
        """The training thread's."""

    def begin_in_this_thread(self) -> None:
        """The calling thread is the training thread from now on."""
        self.thread_time = ThreadTime()

    def count(self, busy_ns: int, wall_ns: int) -> None:
        """Add a fetch that was sampled."""
        self.busy_ns += busy_ns
        self.wall_ns += wall_ns
        self.sampled += 1

    @property
    def cpu_ratio(self) -> float | None:
        """Share of the sampled fetches in which the thread was on a CPU or in the queue for one; None without any."""
        return self.busy_ns / self.wall_ns if self.wall_ns else None

    def looking(self, iterator: Any) -> Callable[[], Any]:
        """Return what fetches the iterator's next batch; from workers it also counts the batches that are ready by then.

        A look takes 0.4 µs, beside the 50 µs and more that a batch from another process takes.
        """
        fetch: Callable[[], Any] = iterator.__next__
        ready = ready_batches(iterator)
        if ready is None:
            return fetch
        look = ready

        def counted() -> Any:
            try:
                count = look()
            except Exception as error:  # a queue that was closed meanwhile, or that cannot tell
                pass_on(error)
                return fetch()
            self.looked += 1
            if count > 0:
                self.ready += count
            else:
                self.empty += 1
            return fetch()

        return counted


def ready_batches(iterator: Any) -> Callable[[], int] | None:
    """Return what counts the batches that workers have ready; None for an iterator without workers or of another make.

    Those in torch's queue of results (of pinned results, where memory is pinned), and the next one where it came out of its turn.
    Source: _MultiProcessingDataLoaderIter in torch.utils.data.dataloader, whose names are not public.
    """
    if not getattr(iterator, "_workers", None):
        return None
    try:
        size, early = iterator._data_queue.qsize, iterator._task_info
        size()
        early.get(iterator._rcvd_idx)
    except (AttributeError, NotImplementedError, OSError):  # macOS has no size of a queue between processes
        return None

    def count() -> int:
        came_early = len(early.get(iterator._rcvd_idx, ())) > 1
        return int(size()) + came_early

    return count
