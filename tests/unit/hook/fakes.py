"""A `Watch` on a clock that tests set, with no background thread, no network and a node that says nothing."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.fakes import MemorySender
from gpuwatch import wire
from gpuwatch.diagnosis.window import HostFacts
from gpuwatch.hook.account import Accounts
from gpuwatch.hook.evidence import HostWatcher
from gpuwatch.hook.publisher import Publisher
from gpuwatch.hook.watch import Watch

MS = 1_000_000
S = 1_000_000_000


class Clock:
    """Monotonic ns that stand still until somebody says so."""

    def __init__(self, now_ns: int = 1_000 * S) -> None:
        self.now_ns = now_ns

    def __call__(self) -> int:
        return self.now_ns

    def sleep_ms(self, milliseconds: float) -> None:
        self.now_ns += round(milliseconds * MS)


def in_autograds_thread(call: Callable[[], object], logs: bool = False) -> None:
    """Call it in a backward pass in such a thread, and wait. `logs`: something in it has asked for its name."""
    import torch

    def run() -> None:
        leaf = torch.ones(1, requires_grad=True)
        leaf.register_hook(lambda _: (call(), None)[1])
        (2 * leaf).backward()

    in_thread_of_c(run, logs)


def in_thread_of_c(call: Callable[[], object], logs: bool = False) -> None:
    """Call it in a thread that Python has not started, and wait. `logs`: something in it has asked for its name."""
    done = _thread.allocate_lock()
    done.acquire()

    def run() -> None:
        try:
            if logs:
                threading.current_thread()  # what `logging` does for each record, and any new `Thread` or thread pool
            call()
        finally:
            threading._active.pop(_thread.get_ident(), None)  # type: ignore[attr-defined]
            done.release()

    _thread.start_new_thread(run, ())
    assert done.acquire(timeout=60)


class BlindWatcher(HostWatcher):
    """Sees nothing of this node, so that findings depend on the test alone."""

    def sample(self, at_s: float, worker_pids: Sequence[int]) -> None:
        pass

    def facts(self) -> HostFacts:
        return HostFacts()


class QuietPublisher(Publisher):
    """Its thread never starts: tests turn it by hand."""

    def start(self) -> None:
        pass


def fake_watch(clock: Clock, monkeypatch: Any, **options: Any) -> Watch:
    """Return a Watch whose every second comes from `clock`. `turn(watch)` does what its thread would."""
    monkeypatch.setattr("gpuwatch.hook.session.Publisher", QuietPublisher)
    monkeypatch.setattr("gpuwatch.hook.session.Session.trained_nothing", False)  # as if each pass trained
    options.setdefault("quiet", True)
    watch = Watch(**options)
    watch._recorder.clock = clock
    watch._publisher.accounts = Accounts(watch._recorder, BlindWatcher())
    return watch


def turn(watch: Watch, hello: bool = False) -> None:
    """Do one turn of the background thread."""
    publisher = watch._publisher
    with publisher.accounts.lock:
        publisher.accounts.apply(watch._recorder.clock())
    publisher._publish(hello)


def connect(watch: Watch) -> MemorySender:
    """Give the watch an agent that keeps what it receives."""
    sender = MemorySender()
    watch._publisher.send_buffer.sender = sender
    return sender


def reported(sender: MemorySender) -> list[wire.Message]:
    return [wire.decode(frame) for frame in sender.frames]


def states_ms(watch: Watch) -> dict[str, float]:
    """Return the milliseconds of each state that has any, to the microsecond."""
    return {state: round(seconds * 1e3, 3) for state, seconds in watch.report().states.items() if seconds}
