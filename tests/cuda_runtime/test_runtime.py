"""The simulated CUDA runtime answers torch's own CUDA code as the documentation says that a GPU does."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator

import pytest

from tests.cuda_runtime.runtime import (
    CAPTURE_INVALIDATED,
    CAPTURE_UNSUPPORTED,
    CAPTURED_EVENT,
    GLOBAL,
    ILLEGAL_ADDRESS,
    INVALID_CONFIGURATION,
    INVALID_HANDLE,
    NOT_READY,
    QUERY,
    RELAXED,
    THREAD_LOCAL,
    Runtime,
    loaded,
    pinned_batch,
)

loaded()  # skips all of them
torch = pytest.importorskip("torch")
pytestmark = pytest.mark.cuda_runtime
MS = 1_000_000


@pytest.fixture(autouse=True)
def by_hand(runtime: Runtime) -> Iterator[None]:
    with runtime.manual_clock():
        yield


def timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def in_thread(do: Callable[[], object]) -> None:
    thread = threading.Thread(target=do)
    thread.start()
    thread.join()


def raw(event: torch.cuda.Event) -> ctypes.c_void_p:
    return ctypes.c_void_p(event.cuda_event)


def test_an_event_is_reached_when_the_work_before_it_is_done(runtime: Runtime) -> None:
    begin, end = timing_event(), timing_event()
    begin.record()
    runtime.launch(5 * MS)
    end.record()
    assert begin.query() and not end.query()
    runtime.advance(5 * MS - 1)
    assert not end.query()
    runtime.advance(1)
    assert end.query()
    assert begin.elapsed_time(end) == pytest.approx(5.0)
    assert runtime.synchronising_calls == 0


def test_idle_time_of_the_stream_lies_between_two_events(runtime: Runtime) -> None:
    runtime.launch(2 * MS)
    end = timing_event()
    end.record()
    runtime.advance(9 * MS)  # 7 ms with nothing to do
    begin = timing_event()
    begin.record()
    assert end.elapsed_time(begin) == pytest.approx(7.0)


def test_the_time_between_events_that_are_not_reached_is_an_error(runtime: Runtime) -> None:
    begin, end = timing_event(), timing_event()
    begin.record()
    runtime.launch(1 * MS)
    end.record()
    with pytest.raises(RuntimeError, match="must be completed"):
        begin.elapsed_time(end)
    assert runtime.cuda.cudaEventElapsedTime(ctypes.byref(ctypes.c_float()), raw(begin), raw(end)) == NOT_READY


def test_an_event_without_timing_has_no_time(runtime: Runtime) -> None:
    begin, end = torch.cuda.Event(), torch.cuda.Event()
    begin.record()
    end.record()
    with pytest.raises(ValueError, match="enable_timing"):
        begin.elapsed_time(end)
    assert runtime.cuda.cudaEventElapsedTime(ctypes.byref(ctypes.c_float()), raw(begin), raw(end)) == INVALID_HANDLE


def test_an_unready_query_of_torchs_clears_the_threads_last_error(runtime: Runtime) -> None:
    """So a query can take away the error of a launch that its author did not check at once."""
    runtime.launch(1 * MS)
    event = timing_event()
    event.record()
    runtime.fail("cudaLaunchKernel", 1, INVALID_CONFIGURATION)
    nothing = (ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_uint32(), ctypes.c_uint64(), ctypes.c_uint32())
    assert runtime.cuda.cudaLaunchKernel(*nothing, None, ctypes.c_size_t(), None) == INVALID_CONFIGURATION
    assert runtime.cuda.cudaPeekAtLastError() == INVALID_CONFIGURATION
    assert not event.query()
    assert runtime.cuda.cudaPeekAtLastError() == 0


def test_another_stream_waits_for_an_event(runtime: Runtime) -> None:
    side = torch.cuda.Stream()
    runtime.launch(4 * MS)
    torch.cuda.current_stream().record_event(done := timing_event())
    side.wait_event(done)
    runtime.launch(3 * MS, side.cuda_stream)
    assert runtime.end_ns(side.cuda_stream) - runtime.now_ns() == 7 * MS
    assert runtime.end_ns() - runtime.now_ns() == 4 * MS


def test_a_copy_takes_time_by_its_size_and_does_not_wait_from_pinned_memory(runtime: Runtime) -> None:
    runtime.copy_rate(0.004)  # 4 MB/s: 4 KB take 1 ms
    (batch,) = pinned_batch((4000,))
    batch.fill_(7)
    before = runtime.now_ns()
    copied = batch.to("cuda", non_blocking=True)
    runtime.copy_rate(12)
    assert runtime.now_ns() == before and runtime.end_ns() - before == 1 * MS
    assert runtime.synchronising_calls == 0
    assert copied.cpu().tolist() == [7] * 4000
    assert runtime.synchronising_calls > 0 and runtime.now_ns() >= before + 1 * MS


@pytest.mark.parametrize("wait", [torch.cuda.synchronize, lambda: torch.empty(1, device="cuda").item()])
def test_what_waits_for_the_device_is_counted(runtime: Runtime, wait: Callable[[], object]) -> None:
    runtime.launch(6 * MS)
    end = runtime.end_ns()
    wait()
    assert runtime.synchronising_calls >= 1
    assert runtime.now_ns() >= end


def test_an_error_that_is_not_sticky_is_returned_once(runtime: Runtime) -> None:
    event = timing_event()
    event.record()
    runtime.fail(QUERY, 2, INVALID_HANDLE)
    assert event.query()
    with pytest.raises(torch.AcceleratorError, match="invalid resource handle"):
        event.query()
    assert event.query()


def test_a_sticky_error_is_returned_by_every_call_from_then_on(runtime: Runtime) -> None:
    event = timing_event()
    event.record()
    runtime.launch(1 * MS, fails_with=ILLEGAL_ADDRESS)
    event.query()
    runtime.advance(1 * MS)
    for call in (event.query, event.record, torch.cuda.synchronize, torch.cuda.is_current_stream_capturing):
        with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
            call()
    assert runtime.cuda.cudaGetLastError() == runtime.cuda.cudaGetLastError() == ILLEGAL_ADDRESS


CAPTURE_RULES = [
    # the capture's mode, in the same thread, the thread's own mode: may an event be queried?
    (GLOBAL, True, GLOBAL, False),
    (GLOBAL, False, GLOBAL, False),
    (GLOBAL, False, THREAD_LOCAL, True),
    (GLOBAL, True, THREAD_LOCAL, False),
    (GLOBAL, True, RELAXED, True),
    (THREAD_LOCAL, True, GLOBAL, False),
    (THREAD_LOCAL, False, GLOBAL, True),
    (RELAXED, True, GLOBAL, True),
    (RELAXED, False, GLOBAL, True),
]


@pytest.mark.parametrize(("mode", "same_thread", "own_mode", "is_allowed"), CAPTURE_RULES)
def test_a_capture_forbids_queries_by_its_mode_and_the_threads(
    runtime: Runtime, mode: int, same_thread: bool, own_mode: int, is_allowed: bool
) -> None:
    event, stream = timing_event(), runtime.stream()
    event.record()
    answers = []

    def query() -> None:
        exchanged = ctypes.c_int(own_mode)
        runtime.cuda.cudaThreadExchangeStreamCaptureMode(ctypes.byref(exchanged))
        answers.append(runtime.cuda.cudaEventQuery(raw(event)))
        runtime.cuda.cudaThreadExchangeStreamCaptureMode(ctypes.byref(exchanged))

    assert runtime.begin_capture(stream, mode) == 0
    (query if same_thread else lambda: in_thread(query))()
    ended = runtime.end_capture(stream)
    assert (answers, ended) == (([0], 0) if is_allowed else ([CAPTURE_UNSUPPORTED], CAPTURE_INVALIDATED))


def test_an_event_recorded_in_a_capture_cannot_be_queried(runtime: Runtime) -> None:
    event, stream = timing_event(), torch.cuda.Stream()
    assert runtime.begin_capture(stream.cuda_stream, RELAXED) == 0
    event.record(stream)
    assert runtime.cuda.cudaEventQuery(raw(event)) == CAPTURED_EVENT
    assert runtime.end_capture(stream.cuda_stream) == CAPTURE_INVALIDATED


def test_a_graph_takes_the_time_of_what_was_captured_when_it_runs(runtime: Runtime) -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert torch.cuda.is_current_stream_capturing()
        runtime.launch(8 * MS)
    assert not torch.cuda.is_current_stream_capturing()
    torch.cuda.synchronize()
    before = runtime.now_ns()
    graph.replay()
    assert runtime.end_ns() - before == pytest.approx(8 * MS, abs=0.1 * MS)


def test_true_autograd_and_a_true_optimizer_run_as_kernels_without_maths(runtime: Runtime) -> None:
    weight = torch.nn.Parameter(torch.ones(8, device="cuda"))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    runtime.reset()
    (weight * 2).sum().backward()
    optimizer.step()
    assert weight.grad is not None and weight.grad.shape == (8,)
    assert runtime.calls()["cudaLaunchKernel"] >= 4  # multiply, sum, their gradients, the update
