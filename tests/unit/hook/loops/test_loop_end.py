"""A loop that has ended in a process that lives on is no stall: a notebook, an open Watch, work after training."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import pytest

from benchmarks.fakes import FakeDevice, measure_by
from gpuwatch.hook.watch import Watch
from tests.unit.hook.fakes import MS, Clock, S, states_ms


def live_on(watch: Watch, clock: Clock, seconds: int) -> None:
    """Let time pass as the background thread sees it."""
    for _ in range(2 * seconds):
        clock.sleep_ms(500)
        watch._publisher.accounts.apply(clock())


def ends(watch: Watch, clock: Clock, how: str) -> None:
    """Train three steps of 10 ms, and end the loop."""
    if how == "stopped cell":
        with pytest.raises(KeyboardInterrupt):
            for number in watch.steps(range(9)):
                clock.sleep_ms(10)
                if number == 2:
                    raise KeyboardInterrupt
        return
    for number in watch.steps(range(3 if how == "finished" else 9)):
        clock.sleep_ms(10)
        if number == 2 and how == "broken off":
            break


@pytest.mark.parametrize("how", ["finished", "broken off", "stopped cell"])
def test_time_after_a_loop_is_other_and_no_stall(watch: Watch, clock: Clock, how: str) -> None:
    ends(watch, clock, how)
    live_on(watch, clock, 100)
    accounts = watch._publisher.accounts
    assert states_ms(watch) == {"compute": 30, "other": 100_000}
    assert (accounts.activity, accounts.window(clock())[0].stalled_s) == ("idle", None)
    assert accounts.timeline.ledger.sum_ns == 100 * S + 30 * MS, "final, not only provisional"
    ends(watch, clock, how)
    assert accounts.activity != "step"
    live_on(watch, clock, 1)
    assert states_ms(watch) == {"compute": 60, "other": 101_000}
    assert accounts.activity == "between_steps", "it trained a second ago"


def test_a_loop_that_hangs_is_stalled_and_so_is_the_first_wait_of_another_pass(watch: Watch, clock: Clock) -> None:
    first = iter(watch.steps(range(9)))
    for _ in itertools.islice(first, 3):
        clock.sleep_ms(10)
    live_on(watch, clock, 50)
    assert states_ms(watch) == {"compute": 20, "stalled": 50_010}
    del first
    live_on(watch, clock, 50)
    assert states_ms(watch)["other"] == 50_000

    def batches() -> Iterator[int]:
        live_on(watch, clock, 40)
        assert watch._publisher.accounts.window(clock())[0].stalled_s == 40.0
        yield 1

    for _ in watch.steps(batches()):
        pass
    assert states_ms(watch)["stalled"] == 50_010 + 40_000
    assert states_ms(watch)["other"] == 50_000


def test_a_wait_soon_after_a_loop_is_stalled_only_from_its_own_begin(watch: Watch, clock: Clock) -> None:
    ends(watch, clock, "finished")
    live_on(watch, clock, 20)

    def batches() -> Iterator[int]:
        live_on(watch, clock, 29)
        assert watch._publisher.accounts.window(clock())[0].stalled_s is None, "49 s since the loop, 29 s of this wait"
        live_on(watch, clock, 2)
        yield 1

    for _ in watch.steps(batches()):
        pass
    assert {name: ms for name, ms in states_ms(watch).items() if name in ("other", "stalled")} == {
        "other": 20_000,
        "stalled": 31_000,
    }


def test_an_evaluation_in_a_phase_does_not_hide_a_hang_of_the_training_around_it(watch: Watch, clock: Clock) -> None:
    for _ in range(3):
        with watch.step():
            clock.sleep_ms(10)
    with watch.phase("eval"):
        ends(watch, clock, "finished")
    live_on(watch, clock, 40)
    assert states_ms(watch) == {"compute": 30, "eval": 30, "stalled": 40_000}


def test_a_device_that_is_not_polled_any_more_leaves_no_stall_either(watch: Watch, clock: Clock) -> None:
    device = FakeDevice(clock)
    measure_by(watch, device)
    for _ in watch.steps(range(3)):
        device.launch(0.01)
        clock.sleep_ms(10)
    live_on(watch, clock, 60)
    states = states_ms(watch)
    assert "stalled" not in states
    assert states["other"] >= 59_000


@pytest.mark.parametrize("error", [TimeoutError, KeyboardInterrupt])
def test_a_wait_that_ends_in_an_error_is_a_wait_and_not_the_end_of_the_pass(
    watch: Watch, clock: Clock, error: type[BaseException]
) -> None:
    def batches() -> Iterator[int]:
        yield from range(8)
        clock.sleep_ms(2000)
        raise error

    with pytest.raises(error):
        for _ in watch.steps(batches()):
            clock.sleep_ms(10)
    live_on(watch, clock, 1)
    window = watch._publisher.accounts.window(clock())[0]
    assert (window.end_s, window.states_s["input_wait"]) == (0.0, 2.0)
    assert window.share("input_wait") == pytest.approx(2.0 / 3.08)


def test_a_wait_that_ends_the_pass_is_its_end(watch: Watch, clock: Clock) -> None:
    def batches() -> Iterator[int]:
        yield from range(8)
        clock.sleep_ms(2000)

    for _ in watch.steps(batches()):
        clock.sleep_ms(10)
    live_on(watch, clock, 1)
    window = watch._publisher.accounts.window(clock())[0]
    assert (window.end_s, window.states_s["input_wait"], window.share("input_wait")) == (2.0, 2.0, 0.0)


@pytest.mark.parametrize("place", ["zip", "data"])
def test_a_wait_that_ends_the_pass_is_its_end_beside_another_loader_and_in_a_data_context(
    watch: Watch, clock: Clock, place: str
) -> None:
    def batches() -> Iterator[int]:
        yield from range(8)
        clock.sleep_ms(2000)

    loop = iter(watch.steps(batches()))
    for _ in zip(watch.steps(range(9)), loop, strict=False) if place == "zip" else ():
        clock.sleep_ms(10)
    with contextlib.suppress(StopIteration):
        while place == "data":
            with watch.data():
                next(loop)
            clock.sleep_ms(10)
    live_on(watch, clock, 1)
    window = watch._publisher.accounts.window(clock())[0]
    assert (window.states_s["input_wait"], window.share("input_wait")) == (2.0, 0.0)
