"""`Watch` and `watch`: what they promise, and that nothing inside them ever reaches training."""

from __future__ import annotations

import gc
import itertools
import logging
import multiprocessing.util
import os
import sys
import threading
import time
from typing import Any

import msgspec
import pytest
from tqdm import tqdm  # type: ignore[import-untyped]

import gpuwatch
from benchmarks.fakes import FakeDevice
from gpuwatch import wire
from gpuwatch.diagnosis.finding import Conclusion
from gpuwatch.hook import watch as hook_watch
from gpuwatch.hook.watch import Watch
from gpuwatch.ledger.events import CLOSED
from tests.unit.hook.fakes import MS, Clock, connect, fake_watch, reported, states_ms, turn


def loop(watch: Watch, clock: Clock, steps: int = 3, **options: Any) -> None:
    for _ in watch.steps(range(steps), **options):
        clock.sleep_ms(7)


class Batch:
    """As much of a tensor as anybody here looks at."""

    def __init__(self, samples: int, nbytes: int = 100) -> None:
        self.shape, self.nbytes = (samples, 3), nbytes


# What it promises ---------------------------------------------------------------------------------------------------


def test_the_public_names() -> None:
    assert sorted(gpuwatch.__all__) == [
        "ConfigError", "GpuwatchError", "MissingExtra", "NoData", "ProtocolError", "Report", "TuneResult", "Watch", "__version__",
        "tune", "watch",
    ]  # fmt: skip
    assert all(hasattr(gpuwatch, name) for name in gpuwatch.__all__)


def test_tags_that_are_no_mapping_are_named() -> None:
    with pytest.raises(TypeError, match=r"^tags='a': give names and values, e.g. \{'team': 'vision'\}$"):
        Watch(tags="a")  # type: ignore[arg-type]


def test_a_report_covers_all_time_since_the_watch_was_opened(watch: Watch, clock: Clock) -> None:
    clock.sleep_ms(100)
    loop(watch, clock)
    clock.sleep_ms(50)
    report = watch.report()
    assert report.duration_s == sum(report.states.values()) == pytest.approx(0.171)
    assert states_ms(watch) == {"startup": 100, "compute": 21, "other": 50}
    assert report.provisional == pytest.approx({"other": 0.05})


def test_a_report_inside_a_step_adds_the_open_part_and_says_so(watch: Watch, clock: Clock) -> None:
    with watch.step():
        with watch.data():
            clock.sleep_ms(3)
            assert watch.report().provisional == pytest.approx({"input_wait": 0.003})
        with watch.transfer():
            clock.sleep_ms(2)
        clock.sleep_ms(5)
        report = watch.report()
    assert report.provisional == pytest.approx({"input_wait": 0.003, "transfer": 0.002, "compute": 0.005})
    assert report.steps == 0
    assert watch.report().provisional == {}


def test_samples_are_counted_from_the_batch_or_as_declared(watch: Watch, clock: Clock) -> None:
    for _ in watch.steps([[Batch(32), Batch(1)], {"x": Batch(32)}, (Batch(7),)]):
        clock.sleep_ms(1)
    assert watch.report().samples == 71
    loop(watch, clock, samples=lambda batch: 10)
    assert watch.report().samples == 101


def test_unknown_samples_are_none(watch: Watch, clock: Clock) -> None:
    loop(watch, clock)
    assert watch.report().samples is None


def test_watch_uses_the_open_watch_else_opens_one(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook_watch, "open_watches", [])
    mine = fake_watch(clock, monkeypatch)
    for _ in gpuwatch.watch([1, 2]):
        clock.sleep_ms(1)
    assert mine.report().steps == 2
    mine.close()
    monkeypatch.setenv("GPUWATCH_QUIET", "1")
    assert list(gpuwatch.watch([1, 2])) == [1, 2]
    [opened] = hook_watch.open_watches
    assert opened is not mine and opened.report().steps == 2
    assert list(gpuwatch.watch([1])) == [1]
    assert hook_watch.open_watches == [opened]
    opened.close()


def test_two_threads_that_begin_at_once_start_one_background_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    class SlowThread:
        def __init__(self, target: Any, name: str, daemon: bool) -> None:
            self.name = name

        def start(self) -> None:
            started.append(self.name)
            time.sleep(0)  # lets the others in

    watch = Watch(quiet=True)
    threads = [threading.Thread(target=watch.session.start) for _ in range(8)]
    monkeypatch.setattr("gpuwatch.hook.publisher.threading.Thread", SlowThread)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert started == ["gpuwatch"]
    watch._publisher._thread = None
    watch.close()


def test_two_watches_of_one_process_are_two_runs(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = fake_watch(clock, monkeypatch), fake_watch(clock, monkeypatch)
    assert first.run != second.run
    loop(first, clock)
    loop(second, clock, steps=2)
    assert (first.report().steps, second.report().steps) == (3, 2)
    for each in (first, second):
        each.close()


# Verdicts -----------------------------------------------------------------------------------------------------------


def test_the_verdict_is_printed_when_the_first_loop_ends_and_at_the_end_but_not_twice_the_same(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    watch = fake_watch(clock, monkeypatch, quiet=False, run="mine")
    loop(watch, clock, 100)
    assert capsys.readouterr().err.count("gpuwatch · mine · 700 ms, 100 steps") == 1
    loop(watch, clock, 100)
    assert capsys.readouterr().err == ""
    watch.close()
    assert capsys.readouterr().err.count("gpuwatch · mine · 1.4 s, 200 steps") == 1
    watch.close()
    assert capsys.readouterr().err == ""


def test_the_verdict_begins_a_line_below_a_progress_bar_that_is_drawn(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    watch = fake_watch(clock, monkeypatch, quiet=False, run="mine")
    for _ in tqdm(watch.steps(range(100)), file=sys.stderr):
        clock.sleep_ms(7)
    before, _, after = capsys.readouterr().err.partition("gpuwatch · mine")
    assert before.endswith("it/s]\n"), before
    assert "100/100" in after.splitlines()[-1]
    for _ in watch.steps(range(100)):
        clock.sleep_ms(7)
    watch.close()
    assert capsys.readouterr().err.startswith("gpuwatch · mine"), "no bar is drawn: no empty line"


def test_a_run_of_one_loop_gets_one_verdict(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    watch = fake_watch(clock, monkeypatch, quiet=False)
    loop(watch, clock, 100)
    clock.sleep_ms(500)
    watch.close()
    captured = capsys.readouterr()
    assert captured.err.count("gpuwatch ·") == 1 and captured.out == ""


def test_steps_that_the_device_had_not_finished_are_no_reason_for_a_second_verdict(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a GPU a loop that was left by `break` got two, of 93 steps and of 98."""
    watch = fake_watch(clock, monkeypatch, quiet=False)
    device = FakeDevice(clock, lambda seconds: clock.sleep_ms(seconds * 1e3))
    watch.session.torch_hooks.attach(device)
    for number, _ in enumerate(watch.steps(range(100))):
        device.launch(0.010)
        clock.sleep_ms(5 + 5 * (number > 20))
        if number == 50:
            break
    assert watch._publisher.printed.steps < 50 < watch._publisher.printed.unread_steps + watch._publisher.printed.steps
    watch.close()
    assert watch.report().steps > watch._publisher.printed.steps
    assert capsys.readouterr().err.count("gpuwatch ·") == 1


@pytest.mark.parametrize(("after_ms", "printed"), [(500, "700 ms"), (2000, "2.7 s")])
def test_the_agent_is_sent_the_verdict_that_was_printed(
    after_ms: int, printed: str, clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the time after the last pass, too short for another verdict, has changed the shares."""
    watch = fake_watch(clock, monkeypatch, quiet=False)
    sender = connect(watch)
    loop(watch, clock, 100)
    clock.sleep_ms(after_ms)
    watch.close()
    watch._publisher._publish(hello=True, bye=True)
    bye = reported(sender)[-1]
    assert isinstance(bye, wire.Bye)
    verdict = msgspec.msgpack.decode(bye.conclusion, type=Conclusion).verdict
    last = capsys.readouterr().err.split("gpuwatch ·")[-1]
    assert printed in last and verdict.sentence in " ".join(last.split())
    assert verdict.ratio == pytest.approx(1.0 if after_ms == 500 else 2.0 / 2.7)


def test_the_end_of_an_evaluation_inside_the_first_pass_prints_nothing(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    watch = fake_watch(clock, monkeypatch, quiet=False)
    for _ in watch.steps(range(3)):
        clock.sleep_ms(1)
        list(watch.steps(range(2)))
        assert capsys.readouterr().err == ""
    assert capsys.readouterr().err.count("gpuwatch ·") == 1
    watch.close()


@pytest.mark.parametrize("how", ["option", "environment"])
def test_quiet_prints_nothing(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    monkeypatch.setenv("GPUWATCH_QUIET", "1" if how == "environment" else "0")
    watch = fake_watch(clock, monkeypatch, quiet=True if how == "option" else None)
    loop(watch, clock)
    clock.sleep_ms(61_000)
    loop(watch, clock)
    watch.close()
    assert capsys.readouterr() == ("", "")


def test_a_stderr_that_is_gone_does_no_harm(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    watch = fake_watch(clock, monkeypatch, quiet=False)

    def broken(_: object) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("sys.stderr.write", broken)
    loop(watch, clock)
    loop(watch, clock)
    watch.close()
    assert [record.getMessage().partition(" failed")[0] for record in caplog.records] == [
        "gpuwatch: printing the verdict"
    ]


# Nothing reaches training -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [RuntimeError("no"), None, "many", [1]])
def test_a_samples_function_that_fails_is_said_once_and_left_out(
    watch: Watch, clock: Clock, caplog: pytest.LogCaptureFixture, answer: Any
) -> None:
    calls = []

    def samples(batch: Any) -> Any:
        calls.append(batch)
        if isinstance(answer, Exception):
            raise answer
        return answer

    loader = watch.steps(range(5), samples=samples)
    for _ in range(2):
        for _ in loader:
            clock.sleep_ms(7)
    assert watch.report().steps == 10 and watch.report().samples is None
    assert len(calls) == 2, "asked once a pass"
    assert len(caplog.records) == 1 and "counting a batch's samples failed" in caplog.text


def test_batches_and_loaders_that_fail_when_looked_at_are_trained_on(
    watch: Watch, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    class Hostile:
        @property
        def shape(self) -> Any:
            raise RuntimeError("do not look")

        def __contains__(self, item: Any) -> bool:
            raise RuntimeError("do not look")

    class HostileDict(dict[str, Any]):
        def items(self) -> Any:
            raise RuntimeError("do not look")

    class Loader(list[Any]):
        @property
        def num_workers(self) -> int:
            raise RuntimeError("do not look")

    for _ in range(2):
        for _ in watch.steps(Loader([Hostile(), Hostile()])):
            clock.sleep_ms(7)
    for _ in watch.steps([HostileDict(), HostileDict()]):
        clock.sleep_ms(7)
    assert watch.report().steps == 6
    assert sorted(record.getMessage().partition(" failed")[0] for record in caplog.records) == [
        "gpuwatch: reading a batch",
        "gpuwatch: reading the loader's settings",
    ]
    assert watch._publisher.accounts.failures == 4


def test_an_agent_that_cannot_be_reached_does_not_stop_the_ledger(
    watch: Watch, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = watch._publisher

    def tell(hello: bool, bye: bool = False) -> None:
        publisher._stopping = next(turns) >= 5
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(publisher, "_publish", tell)
    monkeypatch.setattr("gpuwatch.hook.publisher.INTERVAL_S", 0)
    turns = itertools.count()
    publisher._run()
    assert next(turns) == 6
    loop(watch, clock)
    assert watch.report().steps == 3
    assert [r.getMessage() for r in caplog.records if "publishing to the agent failed" in r.getMessage()] == [
        "gpuwatch: publishing to the agent failed; training continues without it: OSError(24, 'Too many open files')"
    ]


def test_a_hook_that_breaks_stops_recording_says_so_and_books_the_rest_as_unknown(
    watch: Watch, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loop(watch, clock)
    watch.report()

    def broken(now_ns: int) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(watch._publisher.accounts, "apply", broken)
        watch._publisher._run()
    assert watch._recorder.thread == CLOSED
    assert caplog.text.count("the hook has stopped after an internal error and records nothing more") == 1
    for _ in range(2):
        loop(watch, clock)
        with watch.step(), watch.data(), watch.phase("eval"):
            clock.sleep_ms(1)
    assert states_ms(watch) == {"compute": 21, "unknown": 44}
    assert len(watch._recorder.log) == 0, "nothing grows"
    watch.close()
    assert states_ms(watch) == {"compute": 21, "unknown": 44}


def test_a_loop_that_is_collected_during_a_report_does_not_lock_up(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    watch = fake_watch(clock, monkeypatch, quiet=False)
    iterator: Any = iter(watch.steps(range(9)))
    next(iterator)
    clock.sleep_ms(7)
    iterator.cycle = iterator
    del iterator  # only the garbage collector finds it
    accounts = watch._publisher.accounts
    window = accounts.window

    def collecting(now_ns: int, settled: bool) -> Any:
        gc.collect()
        return window(now_ns, settled)

    monkeypatch.setattr(accounts, "window", collecting)
    assert sum(watch.report().states.values()) == pytest.approx(0.007)
    assert not watch._recorder.in_step
    watch.close()


def test_disabled_it_is_the_loader_itself(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUWATCH_DISABLE", "1")
    monkeypatch.setattr(hook_watch, "open_watches", [])
    loader = [1, 2, 3]
    assert gpuwatch.watch(loader) is loader
    with Watch() as watch:
        assert watch.steps(loader) is loader
        with watch.step(samples=3), watch.data(), watch.transfer(), watch.phase("eval"):
            pass
        assert watch._publisher._thread is None, "no thread"
        assert watch.report().steps == 0
    assert hook_watch.open_watches == []


def test_disabled_it_still_moves_batches_and_is_otherwise_the_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUWATCH_DISABLE", "1")

    class Tensor:
        device = "cpu"

        def to(self, device: str) -> str:
            return f"on {device}"

    class Loader(list[Any]):
        sampler = "mine"

    watched: Any = gpuwatch.watch(Loader([Tensor()]), to="cuda")
    assert (list(watched), len(watched), watched.sampler) == (["on cuda"], 1, "mine")


def test_moving_is_a_transfer_and_its_errors_are_the_users(watch: Watch, clock: Clock) -> None:
    class Tensor:
        def to(self, device: str) -> Any:
            if device == "gone":
                raise RuntimeError("no such device")
            clock.sleep_ms(4)
            return device

    moved: list[Any] = []
    for batch in watch.steps([{"x": Tensor()}, {"x": Tensor()}], to="cuda"):
        clock.sleep_ms(6)
        moved.append(batch)
    assert moved == [{"x": "cuda"}, {"x": "cuda"}]
    assert states_ms(watch) == {"transfer": 8, "compute": 12}
    with pytest.raises(RuntimeError, match="no such device"):
        list(watch.steps([Tensor()], to="gone"))


def test_a_forked_child_records_tells_and_prints_nothing(
    watch: Watch, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = connect(watch)
    loop(watch, clock)
    monkeypatch.setattr(hook_watch, "open_watches", [watch])
    watch._publisher.accounts.lock.acquire()  # the background thread was at work when the process forked
    hook_watch.forget_in_child()
    loop(watch, clock)
    assert watch.report().steps == 0
    watch.close()
    watch._at_exit()
    assert sender.frames == [] and sender.connected, "the parent's socket is left alone"
    assert hook_watch.open_watches == []


def test_a_closed_one_is_released_in_a_process_of_multiprocessing(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of a sweep's stayed there, with its last steps and a file descriptor."""
    monkeypatch.setattr(hook_watch, "parent_pid", lambda: 1)
    registry = multiprocessing.util._finalizer_registry  # type: ignore[attr-defined]
    before = set(registry)
    watch = fake_watch(clock, monkeypatch)
    assert len(set(registry) - before) == 1
    watch.close()
    assert set(registry) == before


def test_only_the_process_that_made_it_ends_it(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getpid", lambda: -5)
    watch._at_exit()
    assert not watch.session.closed


# How it ends --------------------------------------------------------------------------------------------------------


def test_an_error_of_an_earlier_cell_is_no_failure_of_a_later_run(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """IPython and Python's prompt keep the last error's type: after one, each run of a notebook had failed."""
    monkeypatch.setattr(sys, "last_type", MemoryError, raising=False)  # Python also, before it calls atexit's functions
    for is_prompt in (False, True):
        if is_prompt:
            monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
        with fake_watch(clock, monkeypatch) as watch:
            pass
        assert watch._publisher.raised is not is_prompt


def test_an_error_that_is_being_handled_when_the_run_begins_is_none_of_it(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training in `except FileNotFoundError:` (no checkpoint yet), or for lack of memory (with a smaller batch)."""
    monkeypatch.delattr(sys, "last_type", raising=False)
    try:
        raise FileNotFoundError("no checkpoint")
    except FileNotFoundError:
        with fake_watch(clock, monkeypatch) as watch:
            pass
        assert watch._publisher.raised is False
        with pytest.raises(ValueError), fake_watch(clock, monkeypatch) as watch:
            raise ValueError from None
        assert watch._publisher.raised is True


# What the agent receives --------------------------------------------------------------------------------------------


def test_steps_are_reported_with_totals_that_close(watch: Watch, clock: Clock) -> None:
    sender = connect(watch)
    loop(watch, clock)
    turn(watch, hello=True)
    loop(watch, clock, 2)
    turn(watch)
    hello, first, second = reported(sender)
    assert isinstance(hello, wire.Hello) and hello.run == watch.run and hello.pid == os.getpid()
    assert isinstance(first, wire.Steps) and isinstance(second, wire.Steps)
    assert (first.first_step, second.first_step, second.totals.steps) == (0, 3, 5)
    assert list(wire.unpack(second.columns["compute_ns"])) == [7 * MS, 7 * MS]
    assert list(wire.unpack(first.columns["epoch_start"])) == [1, 0, 0]


def test_without_an_agent_steps_are_counted_as_dropped_and_nothing_is_kept(
    watch: Watch, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(50):
        loop(watch, clock, 100)
        turn(watch)
    publisher = watch._publisher
    assert (publisher._totals().records_dropped, len(publisher.send_buffer.frames), len(watch._recorder.log)) == (
        5000,
        0,
        0,
    )
    sender = connect(watch)
    loop(watch, clock)
    turn(watch)
    [message] = reported(sender)[-1:]
    assert isinstance(message, wire.Steps)
    assert (message.first_step, message.totals.steps, message.totals.records_dropped) == (5000, 5003, 5000)


def test_an_agent_that_is_away_gets_a_minute_of_records_and_the_count_of_older_ones(watch: Watch, clock: Clock) -> None:
    sender = connect(watch)
    sender.connected = False
    for _ in range(150):
        loop(watch, clock, 10)
        turn(watch)
    sender.connected = True
    turn(watch)
    assert len(sender.frames) == 121, "a minute of them, and who it is"
    turn(watch)  # the count of what had to go is in the next message
    messages = [message for message in reported(sender) if isinstance(message, wire.Steps)]
    rows = sum(wire.step_count(message.columns) for message in messages)
    assert rows + messages[-1].totals.records_dropped == 1500
    assert [m.totals.watermark_ns for m in messages] == sorted(m.totals.watermark_ns for m in messages)
    assert messages[0].first_step == 1500 - rows


def test_ten_thousand_steps_a_second_are_reported_without_loss_in_bounded_messages(watch: Watch, clock: Clock) -> None:
    sender = connect(watch)
    loop(watch, clock, 10_000)
    turn(watch)
    messages = [message for message in reported(sender) if isinstance(message, wire.Steps)]
    assert [message.first_step for message in messages] == [index * 1024 for index in range(10)]
    assert sum(wire.step_count(message.columns) for message in messages) == 10_000
    assert max(map(len, sender.frames)) < 64_000
    assert messages[-1].totals.records_dropped == 0


def test_what_waits_for_an_agent_is_bounded_in_bytes_too(watch: Watch, clock: Clock) -> None:
    sender = connect(watch)
    sender.connected = False
    for _ in range(12):
        loop(watch, clock, 10_000)
        turn(watch)
    publisher = watch._publisher
    assert 3 << 20 < sum(len(frame) for frame, _ in publisher.send_buffer.frames) <= 4 << 20
    assert sum(steps for _, steps in publisher.send_buffer.frames) + publisher._totals().records_dropped == 120_000


def test_the_hello_comes_first_also_where_the_agent_connects_meanwhile(watch: Watch, clock: Clock) -> None:
    """Steps without it are of a process that the agent does not know: "no running process that the agent can see"."""
    sender = connect(watch)
    send, refusals = sender.send, iter((False,))
    sender.send = lambda frame: next(refusals, True) and send(frame)  # type: ignore[method-assign]
    for _ in range(2):
        loop(watch, clock)
        turn(watch)
    messages = reported(sender)
    assert [type(message) for message in messages] == [wire.Hello, wire.Steps, wire.Steps]
    columns = [message.columns["samples"] for message in messages if isinstance(message, wire.Steps)]
    assert [len(column) // 8 for column in columns] == [3, 3]


def test_an_open_phase_is_sent_with_its_time(watch: Watch, clock: Clock) -> None:
    sender = connect(watch)
    with watch.phase("eval"):
        clock.sleep_ms(20)
        turn(watch)
        clock.sleep_ms(30)
    turn(watch)
    sent = [message for message in reported(sender) if isinstance(message, wire.Steps)]
    assert [(m.activity, m.totals.states_ns) for m in sent] == [
        ("phase eval", {"eval": 20 * MS}),
        ("startup", {"eval": 50 * MS}),
    ]


def test_a_phase_in_every_step_does_not_flood_the_agent(watch: Watch, clock: Clock) -> None:
    sender = connect(watch)
    for _ in range(5000):
        with watch.phase("logging"):
            clock.sleep_ms(1)
    turn(watch)
    assert len(sender.frames) == 2  # a Hello and one message


def test_a_tag_that_is_no_utf_8_is_sent_with_a_question_mark(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a file's name: "publishing to the agent failed", and the agent never had the run."""
    watch = fake_watch(clock, monkeypatch, tags={"data": b"/data/caf\xe9".decode(errors="surrogateescape")})
    sender = connect(watch)
    turn(watch, hello=True)
    hello, *_ = reported(sender)
    assert isinstance(hello, wire.Hello) and hello.tags == {"data": "/data/caf?"}
    watch.close()


def test_a_hello_that_was_not_received_is_sent_again_at_once(watch: Watch, clock: Clock) -> None:
    sender = connect(watch)
    sender.connected = False
    turn(watch, hello=True)
    sender.connected = True
    turn(watch)
    assert isinstance(reported(sender)[0], wire.Hello)
    before = len(sender.frames)
    turn(watch)
    assert not any(isinstance(message, wire.Hello) for message in reported(sender)[before:])


def test_the_good_bye_carries_the_complete_totals(watch: Watch, clock: Clock) -> None:
    sender = connect(watch)
    loop(watch, clock)
    clock.sleep_ms(100)
    publisher = watch._publisher
    with publisher.accounts.lock:
        publisher.accounts.finish(clock())
    publisher._publish(hello=True, bye=True)
    *_, last, bye = reported(sender)
    assert isinstance(last, wire.Steps) and isinstance(bye, wire.Bye)
    assert bye.totals.states_ns == {"compute": 21 * MS, "other": 100 * MS}
    assert bye.totals.steps == 3


def test_an_agent_that_came_back_elsewhere_is_found(
    watch: Watch, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = "ipc:///first"
    monkeypatch.setattr("gpuwatch.wire.endpoint.find", lambda: where)
    made: list[tuple[str, Any]] = []

    def make(endpoint: str, token: str | None) -> Any:
        from benchmarks.fakes import MemorySender

        made.append((endpoint, MemorySender()))
        return made[-1][1]

    monkeypatch.setattr("gpuwatch.wire.sockets.ZmqSender", make)
    turn(watch, hello=True)
    turn(watch, hello=True)
    assert [endpoint for endpoint, _ in made] == ["ipc:///first"]
    made[0][1].connected = False
    where = "ipc:///second"
    for _ in range(19):
        turn(watch, hello=True)
    assert len(made) == 1, "a restart at the same place is given its time"
    for _ in range(3):
        turn(watch, hello=True)
    assert [endpoint for endpoint, _ in made] == ["ipc:///first", "ipc:///second"]
    messages = reported(made[1][1])
    assert isinstance(messages[0], wire.Hello) and len(messages) > 20, "with all that had waited"


def test_an_endpoint_that_cannot_be_used_is_named_once(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    watch = fake_watch(clock, monkeypatch)
    monkeypatch.setenv("GPUWATCH_ENDPOINT", "http://collector:80")
    for _ in range(3):
        loop(watch, clock)
        turn(watch, hello=True)
    assert [record.getMessage() for record in caplog.records] == [
        "gpuwatch: nothing is sent to an agent: GPUWATCH_ENDPOINT=http://collector:80: "
        "give ipc:///absolute/path.sock or tcp://127.0.0.1:PORT"
    ]
    assert watch.report().steps == 9
    watch.close()


def test_one_line_is_printed_early_in_a_long_first_pass_once_there_are_steps(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    watch = fake_watch(clock, monkeypatch, quiet=False)
    watch.session._early_ns = clock() + 60_000 * MS
    printed_at_s, begin_ns = [], clock()
    for _ in watch.steps(range(1500)):
        clock.sleep_ms(100)
        if printed := capsys.readouterr().err:
            assert printed == "\ngpuwatch: healthy: 100% of the time is compute, the input keeps up\n"
            printed_at_s.append((clock() - begin_ns) / 1e9)
    assert len(printed_at_s) == 1 and 60 < printed_at_s[0] < 70
    assert capsys.readouterr().err.count("gpuwatch ·") == 1
    for _ in watch.steps(range(1500)):
        clock.sleep_ms(100)
    assert capsys.readouterr().err == ""
    watch.close()


def test_no_early_line_follows_a_verdict(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    watch = fake_watch(clock, monkeypatch, quiet=False)
    watch.session._early_ns = clock() + 60_000 * MS
    loop(watch, clock)
    assert capsys.readouterr().err.count("gpuwatch ·") == 1
    for _ in watch.steps(range(1500)):
        clock.sleep_ms(100)
    assert capsys.readouterr().err == ""
    watch.close()
