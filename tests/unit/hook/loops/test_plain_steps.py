"""`w.step()` as a plain call at the end of each step: two lines for a loop without a loader, and no new indentation."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from gpuwatch import wire
from gpuwatch.hook.watch import Watch
from tests.unit.hook.fakes import Clock, connect, reported, states_ms, turn


def test_a_step_lasts_from_one_call_to_the_next_and_what_follows_the_last_is_no_step(
    watch: Watch, clock: Clock
) -> None:
    clock.sleep_ms(500)
    for _ in range(4):
        clock.sleep_ms(10)
        watch.step(samples=8, tokens=100)
    assert (watch.report().steps, watch.report().samples, watch.report().tokens) == (3, 24, 300)
    clock.sleep_ms(70)
    watch.close()
    assert states_ms(watch) == {"startup": 510, "compute": 30, "other": 70}
    assert watch.report().steps == 3


def test_waits_phases_and_evaluations_inside_are_known(watch: Watch, clock: Clock) -> None:
    watch.step()
    for number in range(3):
        with watch.data():
            clock.sleep_ms(6)
        clock.sleep_ms(4)
        if number == 1:
            with watch.phase("eval"):
                clock.sleep_ms(50)
                watch.step()
                for _ in watch.steps(range(2)):
                    clock.sleep_ms(5)
        watch.step()
    assert states_ms(watch) == {"input_wait": 18, "compute": 12, "eval": 60}
    assert watch.report().steps == 3


def test_inside_a_step_of_another_kind_a_call_marks_nothing(watch: Watch, clock: Clock) -> None:
    for _ in watch.steps(range(3)):
        clock.sleep_ms(10)
        watch.step()
    with watch.step():
        clock.sleep_ms(10)
        watch.step()
        clock.sleep_ms(10)
    assert watch.report().steps == 4
    assert states_ms(watch) == {"compute": 50}


def test_a_context_that_is_entered_marks_nothing_more_and_another_thread_disturbs_nothing(
    watch: Watch, clock: Clock
) -> None:
    step = watch.step()
    for _ in range(2):
        with step:
            clock.sleep_ms(10)
    del step
    assert watch.report().steps == 2
    watch.step()
    clock.sleep_ms(5)
    thread = threading.Thread(target=watch.step)
    thread.start()
    thread.join()
    watch.step()
    assert watch.report().steps == 3


def test_after_the_end_and_when_disabled_a_call_does_nothing(
    watch: Watch, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch.step()
    watch.close()
    watch.step()
    assert watch.report().steps == 0
    monkeypatch.setenv("GPUWATCH_DISABLE", "1")
    other = Watch()
    other.step()
    assert other.report().steps == 0


@pytest.mark.parametrize("count", [10**30, 1 << 62, -5])
def test_what_cannot_be_a_count_is_not_known_and_ends_no_publishing(watch: Watch, clock: Clock, count: int) -> None:
    sender = connect(watch)
    for _ in range(3):
        clock.sleep_ms(10)
        watch.step(samples=count, tokens=count)
    for _ in watch.steps(range(4), samples=lambda _: count, tokens=lambda _: count):
        clock.sleep_ms(10)
    turn(watch)
    [sent] = [message for message in reported(sender) if isinstance(message, wire.Steps)]
    assert sent.totals.steps == watch.report().steps == 6
    assert (watch.report().samples, watch.report().tokens or None) == (None, None)


def test_counts_may_be_numpys(watch: Watch) -> None:
    for _ in range(2):
        with watch.step(samples=np.int64(32), tokens=np.uint16(500)):  # type: ignore[arg-type]
            pass
    assert (watch.report().samples, watch.report().tokens) == (64, 1000)


@pytest.mark.parametrize(("step_ms", "visits"), [(10, 4 + 24), (0.1, 4 + 3)])
def test_of_quick_steps_fewer_look_for_a_device(watch: Watch, clock: Clock, step_ms: float, visits: int) -> None:
    """To look takes as long as ten such steps do otherwise."""
    for _ in range(100):
        with watch.step(), watch.data():
            clock.sleep_ms(step_ms)
    assert watch._recorder.meter.visits == pytest.approx(visits, abs=1)
