"""Who asks for a trace gets an answer, or the reason why there is none: `ask` waits for it without a limit."""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec
import pytest

from gpuwatch.hook.recorder import Recorder
from gpuwatch.hook.requests import Request, Requests
from tests.unit.hook.fakes import Clock, fake_watch


def requests_in(folder: Path) -> Requests:
    found = Requests(Recorder(), True, lambda doing, error: None)
    found._files = str(folder / "7")
    return found


def error_in(answer: Path) -> str:
    assert answer.exists(), "who asks would wait for ever"
    return str(msgspec.json.decode(answer.read_bytes())["error"])


def test_an_answer_that_cannot_be_written_is_an_error_and_leaves_no_part_of_it(tmp_path: Path) -> None:
    """The disk was full: `gpuwatch trace` and `gpuwatch stacks` waited for ever, and a part of the answer stayed."""

    def half(path: str) -> None:
        Path(path).write_bytes(b"x" * 1000)
        raise OSError(28, "No space left on device")

    requests_in(tmp_path)._answer(half)
    assert "No space left on device" in error_in(tmp_path / "7.answer")
    assert not (tmp_path / "7.writing").exists()


def test_a_run_that_ends_before_its_next_step_refuses_the_trace(tmp_path: Path) -> None:
    """The process lives on, as a notebook's does: `gpuwatch trace` waited until its end."""
    requests = requests_in(tmp_path)
    (tmp_path / "7.request").write_bytes(msgspec.json.encode(Request(7, steps=5)))
    requests.check()
    assert not (tmp_path / "7.request").exists()
    requests.end_trace(at_end=True)
    assert "ended" in error_in(tmp_path / "7.answer")


def test_a_watch_that_was_left_open_takes_no_request_from_the_one_that_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notebook's cell is run again: one of two requests was taken by the first run, which makes no more steps."""
    earlier, later = watches = [fake_watch(Clock(), monkeypatch, trace=True) for _ in range(2)]
    request = tmp_path / "7.request"
    try:
        for each in watches:
            each.session.requests._files = str(tmp_path / "7")
            each._publisher._thread = threading.current_thread()  # as if it ran
        request.write_bytes(msgspec.json.encode(Request(7, steps=2)))
        earlier._publisher.on_tick()
        assert request.exists() and not earlier.session.requests._steps_left
        later._publisher.on_tick()
        assert not request.exists() and later.session.requests._steps_left == 2
    finally:
        for each in watches:
            each._publisher._thread = None
            each.session.requests._steps_left = 0
            each.close()


def test_a_run_that_ends_without_any_step_refuses_the_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook's cell whose data could not be loaded: the request had been taken, and no thread had trained."""
    watch = fake_watch(Clock(), monkeypatch, trace=True)
    watch.session.requests._files = str(tmp_path / "7")
    (tmp_path / "7.request").write_bytes(msgspec.json.encode(Request(7, steps=5)))
    watch._publisher.on_tick()
    assert not (tmp_path / "7.request").exists()
    watch.close()
    assert "ended" in error_in(tmp_path / "7.answer")


def test_of_two_watches_the_one_that_trains_answers_though_the_other_was_opened_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    earlier, later = watches = [fake_watch(clock, monkeypatch, trace=True) for _ in range(2)]
    try:
        for each in watches:
            each.session.requests._files = str(tmp_path / "7")
        for _ in earlier.steps(range(3)):
            clock.sleep_ms(10)
        earlier.report()
        for each in watches:
            each._publisher._thread = threading.current_thread()  # as if it ran
        (tmp_path / "7.request").write_bytes(msgspec.json.encode(Request(7, steps=2)))
        later._publisher.on_tick()
        assert not later.session.requests._steps_left
        earlier._publisher.on_tick()
        assert earlier.session.requests._steps_left == 2
    finally:
        for each in watches:
            each._publisher._thread = None
            each.session.requests._steps_left = 0
            each.close()
