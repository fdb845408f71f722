"""The thread for calls that may hang, driven by events: nothing here waits for time to pass but the deadline itself."""

from __future__ import annotations

import threading

import pytest

from gpuwatch_agent.deadline import DeadlineThread


def test_results_and_errors_pass_through_from_one_thread():
    thread = DeadlineThread("NVML", deadline_s=60)
    first, second = thread.call(threading.get_ident), thread.call(threading.get_ident)
    assert first == second != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        thread.call(lambda: 1 / 0)
    assert thread.call(lambda: 7) == 7


def test_past_the_deadline_no_second_call_is_started_until_the_first_is_back():
    thread = DeadlineThread("NVML", deadline_s=0.01)
    release, started = threading.Event(), []

    def hang() -> str:
        started.append("first")
        release.wait(60)
        return "late"

    with pytest.raises(TimeoutError, match=r"^NVML did not answer within 0.01 s$"):
        thread.call(hang)
    overdue = thread.pending
    with pytest.raises(TimeoutError, match=r"^NVML did not answer within 0.01 s$"):
        thread.call(lambda: started.append("second"))
    assert started == ["first"]
    release.set()
    assert overdue is not None
    assert overdue.result(60) == "late"
    thread._deadline_s = 60
    assert thread.call(lambda: "fresh") == "fresh"
    assert started == ["first"]


def test_the_thread_ends_with_its_object():
    """Every OTLP pusher of a test left one behind, 1,500 in all."""
    thread = DeadlineThread("NVML", deadline_s=60)
    began = thread.call(threading.current_thread)
    del thread
    began.join(60)
    assert not began.is_alive()
