"""Ranks exchange summaries through a real TCPStore; nothing waits for a store that hangs."""

from __future__ import annotations

import datetime
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch.distributed

from gpuwatch.diagnosis.finding import Finding, RankSummary, Verdict
from gpuwatch.diagnosis.window import MeanStep, RankFacts
from gpuwatch.hook import ranks
from gpuwatch.hook.ranks import RankExchange
from tests.unit.hook.fakes import Clock, fake_watch

STORE = """
import datetime, time, torch.distributed as d
store = d.TCPStore("127.0.0.1", 0, None, True, datetime.timedelta(seconds=30), wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""


@pytest.fixture
def server() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", STORE], stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


@pytest.fixture
def store(server: subprocess.Popen[str]) -> Any:
    assert server.stdout is not None
    wait = datetime.timedelta(seconds=30)
    return torch.distributed.TCPStore("127.0.0.1", int(server.stdout.readline()), None, False, wait)


def summary(rank: int) -> RankSummary:
    finding = Finding("input_cpu", "warning", "too few workers", 0.4, (), "num_workers=8", predicted_range=(1.2, 1.4))
    facts = RankFacts(rank, MeanStep(100, 0.01, 0.0, 0.03))
    return RankSummary(facts, Verdict("input", 0.4, "input-bound"), {"input": finding})


def exchange(rank: int, world_size: int = 3) -> RankExchange:
    identity = SimpleNamespace(run="a/b c", rank=rank, world_size=world_size)
    return RankExchange(SimpleNamespace(identity=identity), lambda: summary(rank), lambda: True, lambda *_: None)  # type: ignore[arg-type]


def test_rank_0_has_the_others_and_the_others_know_that_it_speaks(store: Any) -> None:
    zero, one, two = map(exchange, range(3))
    one.exchange(store)
    assert not one.joined, "rank 0 does not take part yet"
    zero.exchange(store)
    assert zero.others == {1: summary(1)}
    two.exchange(store)
    one.exchange(store)
    zero.exchange(store)
    assert one.joined and two.joined and not zero.joined
    assert zero.others == {1: summary(1), 2: summary(2)}


def test_a_store_that_hangs_delays_no_thread(
    server: subprocess.Popen[str], store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    c10d = sys.modules["torch.distributed.distributed_c10d"]
    monkeypatch.setattr(c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(ranks, "torch_world", lambda: (0, 3))
    monkeypatch.setattr(ranks, "_OFTEN_S", 0.05)
    monkeypatch.setattr(ranks, "_LATER_S", 0.05)  # it goes on so, however late the store is stopped
    store.set("there", "1")
    zero = exchange(0)
    begin = time.monotonic()
    zero.start_if_distributed()
    thread = zero._thread
    assert thread is not None
    while not store.check(["gpuwatch/a/b c/rank0"]):
        assert time.monotonic() < begin + 60
    os.kill(server.pid, signal.SIGSTOP)

    def place() -> tuple[str, int]:
        frame = sys._current_frames()[thread.ident or 0]
        return frame.f_code.co_name, frame.f_lasti

    def hangs() -> bool:
        before = place()
        time.sleep(0.3)
        return before[0] == "exchange" and place() == before

    while not hangs():  # in a call of the store's
        assert time.monotonic() < begin + 120
    begin = time.monotonic()
    zero.start_if_distributed()
    zero.stop(0.05)
    assert time.monotonic() - begin < 20 and thread.is_alive() and thread.daemon  # the store itself waits for 30 s
    os.kill(server.pid, signal.SIGKILL)
    thread.join(60)
    assert not thread.is_alive()


ENDS = """
import sys, time, torch.distributed as d
from types import SimpleNamespace
from gpuwatch.hook import ranks

ranks._OFTEN_S = ranks._LATER_S = 0.0
ranks._RANKS_PER_S = 1e9
d.init_process_group("gloo", store=d.TCPStore("127.0.0.1", 0, 1, True), rank=0, world_size=1)
ranks.torch_world = lambda: (0, 2)
membership = SimpleNamespace(identity=SimpleNamespace(run="a", rank=0, world_size=2))
all_of_them = ranks.RankExchange(membership, lambda: None, lambda: True, print)
all_of_them.start_if_distributed()
time.sleep(0.3)
if "stop" in sys.argv:
    all_of_them.stop(60)
"""


def test_an_interpreter_that_ends_waits_for_a_call_of_the_store_s() -> None:
    """Else pthread_exit() unwinds torch's C++, and the program is aborted at its end: "terminate called"."""

    def end(*options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", ENDS, *options], capture_output=True, text=True)

    assert any("terminate called" in end().stderr for _ in range(8)), "nearly each time, if it is not stopped"
    stopped = end("stop")
    assert (stopped.returncode, stopped.stdout) == (0, ""), stopped.stderr


def test_who_stops_does_not_wait_for_the_next_exchange(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["torch.distributed.distributed_c10d"], "_get_default_store", lambda: store)
    monkeypatch.setattr(ranks, "torch_world", lambda: (0, 3))
    monkeypatch.setattr(ranks, "_OFTEN_S", 60.0)
    zero = exchange(0)
    zero.start_if_distributed()
    while not store.check(["gpuwatch/a/b c/rank0"]):
        time.sleep(0.01)
    begin = time.monotonic()
    zero.stop(30)
    assert zero._thread is not None and not zero._thread.is_alive() and time.monotonic() - begin < 25


def test_the_end_of_a_run_ends_the_exchange_and_waits_for_that(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["torch.distributed.distributed_c10d"], "_get_default_store", lambda: store)
    monkeypatch.setattr(ranks, "torch_world", lambda: (0, 3))
    monkeypatch.setattr(ranks, "_OFTEN_S", 60.0)
    monkeypatch.setattr("gpuwatch.hook.publisher._CLOSE_S", 50.0)  # not 0.8: the thread may get no core for seconds
    watch = fake_watch(Clock(), monkeypatch)
    own = watch._publisher.ranks = exchange(0)
    own.start_if_distributed()
    thread = own._thread
    watch.close()
    assert thread is not None and not thread.is_alive()


def test_without_several_ranks_there_is_no_thread() -> None:
    alone = exchange(0, world_size=1)
    alone.start_if_distributed()
    several = exchange(0)
    several.start_if_distributed()  # torch.distributed is not initialized
    assert alone._thread is None and several._thread is None


def test_torch_distributed_that_is_being_imported_is_not_there_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed", ModuleType("torch.distributed"))
    several = exchange(0)
    several.start_if_distributed()
    assert several._thread is None


def test_the_search_for_models_fails_no_tuple_that_the_program_is_making() -> None:
    """By gc.get_objects() it did, in DDP's import of torch._dynamo: SystemError, bad argument to internal function."""
    done, errors = threading.Event(), []

    def make() -> None:
        while not done.is_set() and not errors:
            try:
                tuple(number for number in range(300))
            except SystemError as error:
                errors.append(error)

    thread, usual_s = threading.Thread(target=make), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread.start()
    try:
        for _ in range(20):
            ranks.distributed_models()
    finally:
        sys.setswitchinterval(usual_s)
        done.set()
        thread.join()
    assert not errors


def test_ddp_models_are_found_unless_something_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    class Model(torch.nn.parallel.DistributedDataParallel):
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)

    model = Model()
    monkeypatch.delitem(sys.modules, "torch._dynamo.utils", raising=False)
    assert [each for each in ranks.distributed_models() or () if each is model] == [model]
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", SimpleNamespace(counters={"frames": {"total": 1}}))
    assert ranks.distributed_models() == []
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", SimpleNamespace())
    assert ranks.distributed_models() is None, "it is being imported"
