"""The user's own function that a thread is in."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch

from gpuwatch.hook.publisher import Publisher, _fork_waits
from gpuwatch.hook.recorder import Recorder
from gpuwatch.hook.requests import Request, Requests
from gpuwatch.hook.torch.stream_waits import StreamWaits
from gpuwatch.hook.torch.transfers import TransferWatch
from gpuwatch.host.frames import (
    AROUND,
    OWN,
    RECEIVING,
    SPAWNED,
    SPAWNS,
    OwnFrames,
    Place,
    interrupting,
    is_users,
    may_be_users,
    stacks,
)
from gpuwatch.ledger.events import DATA_WAIT


def slow_read(done: threading.Event) -> None:
    done.wait(60)


def other(done: threading.Event) -> None:
    slow_read(done)


def test_the_deepest_function_of_the_user_s_is_named() -> None:
    done, frames = threading.Event(), OwnFrames()
    thread = threading.Thread(target=other, args=(done,))
    thread.start()
    try:
        while not any(frame.f_code is slow_read.__code__ for frame in stack(thread.ident)):
            time.sleep(0.01)
        while not frames.most_frequent("step") and time.monotonic():
            frames.sample(thread.ident, "step")
    finally:
        done.set()
        thread.join()
    place = frames.most_frequent("step")
    assert place is not None and place.function == "slow_read" and place.file == __file__
    assert place.ratio > 0.5 and str(place) == f"slow_read (test_frames.py:{place.line})"
    assert frames.most_frequent("data_wait") is None, "not sampled"
    frames.sample(thread.ident, "data_wait")
    frames.sample(None, "data_wait")
    assert frames.most_frequent("data_wait") is None, "a thread that has ended has no frame"


@pytest.mark.parametrize(
    ("file", "method", "named"),
    [
        ("/usr/lib/python3.11/multiprocessing/popen_spawn_posix.py", "spawn", SPAWNS),
        ("/usr/lib/python3.11/multiprocessing/connection.py", "spawn", SPAWNED),
        ("/usr/lib/python3.11/multiprocessing/connection.py", "fork", "the wait for the workers"),
        ("<frozen importlib._bootstrap>", "spawn", "imports"),
        ("/usr/lib/python3.11/queue.py", "fork", None),
    ],
)
def test_a_first_wait_that_is_in_no_function_of_the_user_s_is_named_by_what_it_does(
    file: str, method: str, named: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, done, frames = dict[str, Any](), threading.Event(), OwnFrames()
    exec(compile("def wait(done): done.wait(60)", file, "exec"), code)
    worker = SimpleNamespace(_popen=SimpleNamespace(method=method))
    monkeypatch.setattr("multiprocessing.process._children", [worker, SimpleNamespace(_popen=None)])
    thread = threading.Thread(target=code["wait"], args=(done,))
    thread.start()
    try:
        while sys._current_frames()[thread.ident or 0].f_code is not threading.Condition.wait.__code__:
            time.sleep(0.01)
        for _ in range(10):
            frames.sample(thread.ident, "first wait", is_start=True)
            frames.sample(thread.ident, "data_wait")
    finally:
        done.set()
        thread.join()
    place = frames.most_frequent("first wait")
    assert (None if place is None else (str(place), place.ratio)) == (named and (named, 1.0))
    assert frames.most_frequent("data_wait") is None


@pytest.mark.parametrize(("own", "named"), [("hook/torch/patches.py", "loading"), ("hook/loop.py", None)])
def test_what_gpuwatch_runs_in_place_of_torch_s_functions_is_its_caller_s(own: str, named: str | None) -> None:
    """A data set that spent its fetches in `torch.load`, which is replaced, was seen in 17% of them."""
    replaced, done, frames = dict[str, Any](), threading.Event(), OwnFrames()
    exec(compile("def load(done): done.wait(60)", f"{OWN}{own}", "exec"), replaced)

    def loading() -> None:
        replaced["load"](done)

    thread = threading.Thread(target=loading)
    thread.start()
    try:
        while not any(frame.f_code.co_name == "wait" for frame in stack(thread.ident)):
            time.sleep(0.01)
        for _ in range(20):
            frames.sample(thread.ident, "data_wait")
    finally:
        done.set()
        thread.join()
    place = frames.most_frequent("data_wait")
    assert (place and place.function.rpartition(".")[2]) == named


@pytest.mark.parametrize("way", ["reads", "synchronizes", "converts", "copies"])
def test_a_result_that_is_read_back_in_a_wait_is_no_place_of_it(way: str) -> None:
    """`loss.item()` after the optimizer's step was named for 62% of a wait whose data took a third of each step."""
    results, frames = queue.SimpleQueue[int](), OwnFrames()

    def train() -> None:
        if way == "synchronizes":
            StreamWaits(Recorder())._synchronizes(results.get)()
        elif way == "copies":
            recorder = Recorder()
            copy_to, now_usual = recorder.fast_copy(results.get, lambda tensor: False, pytest.fail)
            now_usual(None)
            recorder.thread, recorder.steady, recorder.batch_ready_ns = threading.get_ident(), results, 1
            copy_to(SimpleNamespace(is_cpu=True), None)
        else:
            watch, tensor = TransferWatch(recorder := Recorder()), SimpleNamespace(is_cpu=way == "converts")
            recorder.thread, watch.loops = threading.get_ident(), 1
            watch._timed(torch, "to", results.get)(tensor)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        while not stack(thread.ident)[0].f_code.co_filename.startswith(f"{OWN}hook/"):
            time.sleep(0.01)
        for _ in range(20):
            frames.sample(thread.ident, DATA_WAIT)
    finally:
        results.put(1)
        thread.join()
    place = frames.most_frequent(DATA_WAIT)
    assert (place and place.function.rpartition(".")[2]) == ("train" if way in ("converts", "copies") else None)


def stack(thread: int | None) -> list[FrameType]:
    frame, found = sys._current_frames().get(thread or 0), []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def test_whose_a_file_is() -> None:
    assert is_users("/home/me/data.py")
    assert not is_users("/usr/lib/python3.11/queue.py") and not is_users("<frozen importlib._bootstrap>")
    assert not is_users("/v/lib/python3.11/site-packages/mine/data.py")
    assert may_be_users("/v/lib/python3.11/site-packages/mine/data.py")
    assert not may_be_users("/v/lib/python3.11/site-packages/torch/nn/modules/module.py")
    assert not may_be_users(f"{OWN}hook/loop.py")
    assert str(Place("a.<locals>.b", "/x/y.py", 3, 1.0)) == "a.<locals>.b (y.py:3)"


def test_a_thread_is_seen_within_python_code_that_keeps_the_interpreters_lock() -> None:
    """Most of the time it computes, for less than 5 ms at a time.

    It was only seen where it then sleeps, which releases the lock.
    """
    done, frames = threading.Event(), OwnFrames()

    def compute() -> None:
        end_s = time.thread_time() + 0.004  # of its own, as others may have the core meanwhile
        while time.thread_time() < end_s:
            pass

    def pause() -> None:
        time.sleep(0.0005)

    def work() -> None:
        while not done.is_set():
            compute()
            pause()

    usual_s = sys.getswitchinterval()
    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(200):
            with interrupting():
                frames.sample(thread.ident, "step")
            time.sleep(0.002)
    finally:
        done.set()
        thread.join()
    place = frames.most_frequent("step")
    assert place is not None and place.function.endswith("compute") and place.ratio > 0.5
    assert sys.getswitchinterval() == usual_s


def sample_known(frames: OwnFrames, thread: threading.Thread, count: int) -> None:
    """Sample a thread until it is known so often what it ran: not where it waits for a core, on a busy machine."""
    deadline_s = time.monotonic() + 60
    while sum(frames._places.get("python", {}).values()) < count and time.monotonic() < deadline_s:
        with interrupting() as kept:
            frames.sample(thread.ident, "step", "python", kept)
        time.sleep(0.002)


def in_torch() -> None:
    matrix = torch.randn(600, 600)
    for _ in range(4):
        matrix @ matrix  # in this function's own frame


def in_python() -> None:
    sum(i * i for i in range(200_000))


def test_python_code_of_the_user_s_is_distinguished_from_operators_of_torch_by_the_interpreters_lock() -> None:
    done, frames = threading.Event(), OwnFrames()

    def work() -> None:
        while not done.is_set():
            in_torch()
            in_python()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        sample_known(frames, thread, 150)
    finally:
        done.set()
        thread.join()
    frames.sample(thread.ident, "step", "python")  # a thread that has ended
    place, all_samples = frames.most_frequent("python"), frames._places["step"]
    assert place is not None and "in_python" in place.function
    assert None in frames._places["python"], "its ratio is of all samples"
    seen, python = (
        sum(n for at, n in each.items() if at and at[1] == "in_torch")
        for each in (all_samples, frames._places["python"])
    )
    assert seen >= 10 and python <= 0.25 * seen, f"{python} of {seen}: that of matrices is not Python's"


def small_operators() -> None:
    state, weight = torch.zeros(4, 16), torch.randn(16, 16)
    for _ in range(200):
        gate = torch.sigmoid(state @ weight + state)
        state = (1 - gate) * torch.tanh(state @ weight) + gate * state


def values_to_a_tensor() -> None:
    torch.tensor(VALUES)


def values_sorted() -> None:
    for _ in range(5):
        sorted(VALUES, key=lambda value: -value)


VALUES = [float(i % 97) for i in range(60_000)]


@pytest.mark.alone
@pytest.mark.parametrize(
    ("work", "least", "most"), [(small_operators, 0.0, 0.2), (values_to_a_tensor, 0.4, 1.0), (values_sorted, 0.4, 1.0)]
)
def test_small_operators_of_torch_are_its_own_and_what_keeps_the_lock_is_not(
    work: Any, least: float, most: float
) -> None:
    """A recurrent cell written by hand was "Python code outside of torch" for 41% of its steps.

    The advice was to move it into the loader's workers.
    """
    done, frames = threading.Event(), OwnFrames()

    def works() -> None:
        while not done.is_set():
            work()

    torch.set_num_threads(1)
    thread = threading.Thread(target=works)
    thread.start()
    try:
        sample_known(frames, thread, 40)
    finally:
        done.set()
        thread.join()
    place = frames.most_frequent("python")
    assert least <= (place.ratio if place else 0.0) <= most
    if least:
        assert place is not None and place.function == work.__name__, "a lambda is a part of it"


def test_the_switch_interval_is_the_usual_one_afterwards_also_of_two_threads_and_of_a_child() -> None:
    usual_s, done = sys.getswitchinterval(), threading.Event()

    def interrupt() -> None:
        while not done.is_set():
            with _fork_waits, interrupting():
                pass

    threads = [threading.Thread(target=interrupt) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(10):
            child = os.fork()
            if not child:
                os._exit(sys.getswitchinterval() != usual_s)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert sys.getswitchinterval() == usual_s


def waiting(accounts: Any, failed: Callable[[str, BaseException], None] | None = None) -> Any:
    """What a publisher's wait needs of it."""
    waits = SimpleNamespace(accounts=accounts, _stop=queue.SimpleQueue(), failed=failed)
    waits.guard = partial(Publisher.guard, waits)
    return waits


def test_a_sample_that_fails_does_not_end_the_publishing() -> None:
    """Stacks are written to a temporary file: a container may have no place for one."""
    failures: list[str] = []

    def fails(late_s: float) -> None:
        raise FileNotFoundError("No usable temporary directory found")

    Publisher._wait(waiting(SimpleNamespace(sample_frames=fails), lambda doing, error: failures.append(doing)), 2)
    assert failures == ["sampling the training thread"] * 2


def test_a_call_that_keeps_the_lock_is_sampled_as_soon_as_it_ends() -> None:
    """It was sampled up to ten milliseconds later, in what followed.

    Of a corpus that was encoded for 84% of the time, 5 samples of 35 were seen.
    """
    done, lates = threading.Event(), []
    keep = ctypes.PyDLL(None).usleep  # it is called with the lock, as torch.tensor() of a list is

    def works() -> None:
        while not done.is_set():
            keep(150_000)

    thread = threading.Thread(target=works)
    thread.start()
    try:
        accounts = SimpleNamespace(sample_frames=lates.append)
        Publisher._wait(waiting(accounts), 5)
    finally:
        done.set()
        thread.join()
    assert len(lates) == 5 and max(lates) > 0.02, "seconds"

    usual_s, begin_s = sys.getswitchinterval(), time.thread_time()
    with interrupting(max(lates)) as kept:
        assert kept and sys.getswitchinterval() == usual_s and time.thread_time() - begin_s < 0.001
    with interrupting(usual_s / 2):
        assert sys.getswitchinterval() < usual_s, "a thread that computes in Python gives the lock up no earlier"


def augments(done: threading.Event) -> None:
    while not done.is_set():
        time.sleep(0.001)


@pytest.mark.parametrize("file", ["fetch.py", "dataloader.py"])
def test_what_a_fetch_does_around_torchs_own_is_known(file: str) -> None:
    done, frames = threading.Event(), OwnFrames()
    loader: dict[str, Any] = {"slow_read": augments, "done": done}
    name = f"/v/lib/python3.11/site-packages/torch/utils/data/_utils/{file}"
    exec(compile("def fetch():\n    slow_read(done)", name, "exec"), loader)
    thread = threading.Thread(target=loader["fetch"])
    thread.start()
    while not any(frame.f_code is augments.__code__ for frame in stack(thread.ident)):
        time.sleep(0.002)
    for _ in range(12):
        time.sleep(0.002)
        frames.sample(thread.ident, DATA_WAIT)
    done.set()
    thread.join()
    around = frames.most_frequent(AROUND)
    assert (around is None) == (file == "fetch.py")
    assert around is None or (around.function == "augments" and around.ratio > 0.7)


def puts(batches: Any, objects: int, wait_s: float) -> None:
    batch = [{"box": (i, i + 1), "name": str(i)} for i in range(objects)]
    while True:
        time.sleep(wait_s)
        batches.put(batch)


@pytest.mark.parametrize(("objects", "wait_s", "receives"), [(40_000, 0.0, True), (1, 0.05, False)])
def test_receiving_a_batch_from_another_process_is_no_wait_for_it(objects: int, wait_s: float, receives: bool) -> None:
    batches, done = multiprocessing.Queue(maxsize=4), threading.Event()
    found: bool | None = None
    worker = multiprocessing.Process(target=puts, args=(batches, objects, wait_s), daemon=True)
    worker.start()

    source = "def takes():\n    while not done.is_set():\n        batches.get(timeout=60)"
    loader: dict[str, Any] = {"done": done, "batches": batches}
    exec(compile(source, "/v/lib/python3.11/site-packages/torch/utils/data/dataloader.py", "exec"), loader)
    thread = threading.Thread(target=loader["takes"])
    try:
        batches.get(timeout=60)  # a worker that starts late is no wait either
        thread.start()
        end_s = time.monotonic() + 60
        while found != receives and time.monotonic() < end_s:  # again where the worker, or the thread, had no core
            frames = OwnFrames()
            for _ in range(40):
                time.sleep(0.01)
                with interrupting():
                    frames.sample(thread.ident, DATA_WAIT)
            place = frames.most_frequent(DATA_WAIT)
            found = place is not None and place.function == RECEIVING and place.ratio > 0.2
    finally:
        done.set()
        if thread.is_alive():
            thread.join()
        worker.kill()
        worker.join()
    assert found == receives


def test_a_fork_waits_for_a_sample() -> None:
    owned: list[bool] = []
    accounts = SimpleNamespace(sample_frames=lambda late_s: owned.append(_fork_waits._is_owned()))
    Publisher._wait(waiting(accounts), 2)
    assert owned == [True, True]


@pytest.mark.parametrize(("also", "named"), [("0", True), ("torch", False), ("monotonic()", False)])
def test_a_package_of_models_is_torchs_and_a_function_that_reads_a_clock_may_wait(also: str, named: bool) -> None:
    done, frames = threading.Event(), OwnFrames()
    package: dict[str, Any] = {"done": done, "monotonic": time.monotonic} | (
        {"torch": torch} if also == "torch" else {}
    )
    source = f"def forward():\n    while not done.is_set():\n        {also}\n        for i in range(1000): i * i"
    exec(compile(source, "/v/lib/python3.11/site-packages/models/net.py", "exec"), package)

    def train() -> None:
        package["forward"]()

    thread = threading.Thread(target=train)
    thread.start()
    try:
        sample_known(frames, thread, 40)
    finally:
        done.set()
        thread.join()
    assert frames.most_frequent("step") is not None
    place = frames.most_frequent("python")
    assert (place is not None and place.ratio > 0.5) == named, "the first sample may find its caller"


def render(done: threading.Event) -> bool:
    time.sleep(0.01)
    return not done.is_set()


def test_a_fetch_that_waits_for_another_thread_is_where_that_is() -> None:
    """By a queue and by a future; a thread that gives nothing to others is none of them."""
    for by_future in (False, True):
        done, frames, held = threading.Event(), OwnFrames(), queue.Queue[bool](2)

        def fill(done: threading.Event = done, held: queue.Queue[bool] = held) -> None:
            while render(done):
                held.put(True)

        def train(done: threading.Event = done, held: queue.Queue[bool] = held, by_future: bool = by_future) -> None:
            with ThreadPoolExecutor(1) as pool:
                while not done.is_set():
                    pool.submit(render, done).result() if by_future else held.get()

        def monitor(done: threading.Event = done) -> None:
            while not done.is_set():
                time.sleep(0.001)

        targets = [monitor, train] + [fill] * (not by_future)
        threads = {target: threading.Thread(target=target) for target in targets}
        for thread in threads.values():
            thread.start()
        while not any(frame.f_code is train.__code__ for frame in stack(threads[train].ident)):
            time.sleep(0.003)
        for _ in range(60):
            frames.sample(threads[train].ident, "data_wait")
            frames.sample(threads[train].ident, "step")
            time.sleep(0.003)
        place = frames.most_frequent("data_wait")
        done.set()
        with suppress(queue.Full):  # then there is something for the one that takes
            held.put_nowait(True)
        for thread in threads.values():
            thread.join()
        assert place is not None and place.function == "render, in another thread" and place.ratio > 0.3
        in_step = frames.most_frequent("step")
        assert in_step is not None and in_step.function.endswith("train"), "a step that waits is not explained so"


def test_stacks_are_of_all_other_threads_innermost_first() -> None:
    done = threading.Event()
    thread = threading.Thread(target=other, args=(done,))
    thread.start()
    try:
        while len(stack := stacks().get(thread.ident or 0, [])) < 6:
            pass
        found = stacks()
    finally:
        done.set()
        thread.join()
    assert threading.get_ident() not in found
    assert [name for name, file, _ in stack if file == __file__] == ["slow_read", "other"]
    line = next(line for name, _, line in stack if name == "other")
    assert Path(__file__).read_text().splitlines()[line - 1].strip() == "slow_read(done)"


class Tensor:
    """Something large."""


def test_the_main_thread_s_stack_is_there_among_more_than_a_hundred_threads() -> None:
    ended, found = threading.Event(), []
    threads = [threading.Thread(target=ended.wait, daemon=True) for _ in range(110)]
    for thread in threads:
        thread.start()
    asks = threading.Thread(target=lambda: found.append(stacks()))
    asks.start()
    asks.join()
    ended.set()
    for thread in threads:
        thread.join()
    names = [name for name, _, _ in found[0][threading.main_thread().ident or 0]]
    assert test_the_main_thread_s_stack_is_there_among_more_than_a_hundred_threads.__name__ in names


def test_samples_of_all_stacks_keep_nothing_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two samples the frames of the last one kept their variables: of a step, its activations."""
    sampled, freed = threading.Event(), threading.Event()

    def pause(_: float) -> None:
        sampled.set()
        freed.wait(60)

    def step() -> weakref.ref[Tensor]:
        large = Tensor()
        thread.start()
        assert sampled.wait(60)
        return weakref.ref(large)

    monkeypatch.setattr("gpuwatch.hook.requests.time", SimpleNamespace(sleep=pause, monotonic=time.monotonic))
    requests = Requests(Recorder(), False, lambda doing, error: None)
    request = Request(os.getpid(), seconds=0.05, rate_hz=50)
    thread = threading.Thread(target=requests._sample, args=(request, str(tmp_path / "answer")))
    alive = step()
    try:
        assert alive() is None
    finally:
        freed.set()
        thread.join()
    assert b"test_samples_of_all_stacks" in (tmp_path / "answer").read_bytes()
