"""Phases that the training declares by name: a part of `other`, reported by their names on every surface."""

from __future__ import annotations

import pytest

from gpuwatch import wire
from gpuwatch.diagnosis.report import give_verdict
from gpuwatch.diagnosis.rules import diagnose
from gpuwatch.diagnosis.window import Window
from gpuwatch.errors import ProtocolError
from gpuwatch.hook.watch import Watch
from gpuwatch_agent.runs.records import went_back
from tests.unit.hook.fakes import Clock, connect, fake_watch, reported, states_ms, turn


def spend(watch: Watch, clock: Clock, name: str, ms: int) -> None:
    with watch.phase(name):
        clock.sleep_ms(ms)


def phases_ms(watch: Watch) -> dict[str, float]:
    return {name: round(seconds * 1e3, 3) for name, seconds in watch.report().phases.items()}


def test_a_named_phase_keeps_its_name_and_is_a_part_of_other(watch: Watch, clock: Clock) -> None:
    for _ in range(4):
        spend(watch, clock, "rollout", 61)
        with watch.step():
            clock.sleep_ms(30)
        spend(watch, clock, "weight_sync", 5)
        spend(watch, clock, "checkpoint", 2)
        clock.sleep_ms(2)
    assert phases_ms(watch) == {"rollout": 244, "weight_sync": 20}
    assert states_ms(watch) == {"compute": 120, "other": 264 + 8, "checkpoint": 8}
    report = watch.report()
    few = "short: 4 steps, too few for a prediction; so far "
    assert report.verdict.sentence == f"{few}rollout takes 61% of the time"
    assert "rollout 61%  weight_sync 5.0%" in str(report)
    assert [finding.cause for finding in report.findings] == ["phase_bound"]
    assert "inference engine" in report.findings[0].advice


def test_the_innermost_name_counts_and_steps_and_loops_inside_belong_to_it(watch: Watch, clock: Clock) -> None:
    with watch.phase("rollout"):
        clock.sleep_ms(10)
        for _ in watch.steps(range(3)):
            clock.sleep_ms(10)
        with watch.phase("reward"):
            clock.sleep_ms(7)
        with watch.phase("eval"):
            clock.sleep_ms(100)
        clock.sleep_ms(3)
    assert phases_ms(watch) == {"rollout": 43, "reward": 7}
    assert states_ms(watch) == {"other": 50, "eval": 100}


def test_a_phase_that_is_open_counts_too_and_an_evaluation_is_no_named_one(watch: Watch, clock: Clock) -> None:
    with watch.phase("rollout"):
        clock.sleep_ms(50)
        assert phases_ms(watch) == {"rollout": 50}
    with watch.phase("eval"):
        clock.sleep_ms(50)
        assert phases_ms(watch) == {"rollout": 50}


def test_names_beyond_eight_are_rest_and_no_name_harms(watch: Watch, clock: Clock) -> None:
    names = ["a\ud800b", "", "rest", "{x}", "ü" * 500, *map(str, range(8))]
    for name in names:
        spend(watch, clock, name, 10)
    spend(watch, clock, "7", 10)
    spend(watch, clock, "{x}", 990)
    found = phases_ms(watch)
    assert found == {
        "a?b": 10, "unnamed": 10, "rest": 10 + 4 * 10 + 10, "{x}": 1000, "ü" * 128: 10, **dict.fromkeys("0123", 10),
    }  # fmt: skip
    sender = connect(watch)
    turn(watch)
    totals = next(message.totals for message in reported(sender) if isinstance(message, wire.Steps))
    assert {name: ns / 1e6 for name, ns in totals.declared_ns.items()} == found
    assert watch.report().findings[0].evidence[0].text == "{x} takes 88% of the time"


def test_the_eight_names_are_those_that_take_most_and_no_counter_goes_back(watch: Watch, clock: Clock) -> None:
    sender = connect(watch)
    for number in range(300):
        spend(watch, clock, f"once-{number}", 1)
    spend(watch, clock, "rest", 7)  # a name like any other's rest
    for _ in range(5):
        spend(watch, clock, "rollout", 1)  # its first two are the rest's
        spend(watch, clock, "weight_sync", 100)
        turn(watch)
    found = phases_ms(watch)
    assert len(found) == 9 and (found["rollout"], found["weight_sync"]) == (3, 500)
    assert sum(found.values()) == 300 + 7 + 5 * 101
    last = wire.Totals(start_ns=0, watermark_ns=0, states_ns={}, records_dropped=0)
    for message in reported(sender):
        if isinstance(message, wire.Steps):
            assert not went_back(message.totals, last)
            last = message.totals
    assert last.declared_ns["weight_sync"] == 500_000_000
    text = str(watch.report())
    assert "weight_sync takes 62% of the time" in text and "rest takes" not in text


@pytest.mark.parametrize(("name", "state"), [("Eval", "eval"), (" CHECKPOINT\n", "checkpoint"), ("a\tb", "other")])
def test_states_are_known_in_any_spelling(watch: Watch, clock: Clock, name: str, state: str) -> None:
    spend(watch, clock, name, 10)
    assert states_ms(watch) == {state: 10} and phases_ms(watch) == ({"a b": 10} if state == "other" else {})


def test_what_no_phase_declares_is_said_to_be_outside_of_them() -> None:
    states = {"compute": 40.0, "other": 60.0}

    def sentence(**phases: float) -> str:
        return give_verdict(Window(100.0, states, phases)).sentence

    assert sentence() == "60% of the time was spent outside of training steps and declared phases"
    assert sentence(log=10.0) == "50% of the time was spent outside of training steps and declared phases"
    assert sentence(rollout=45.0) == "rollout takes 45% of the time"
    assert sentence(a=19.0, b=18.0, c=17.0) == "declared phases take 54% of the time, a the most"
    assert sentence(a=2.0, rest=52.0) == "declared phases take 54% of the time, each a small part"
    assert not diagnose(Window(100.0, states, {"a": 2.0, "rest": 52.0}))
    assert give_verdict(Window(100.0, {"compute": 85.0, "other": 15.0}, {"a": 15.0})).state == "compute"


def test_a_sender_whose_phases_exceed_their_state_is_rejected() -> None:
    origin = wire.Origin(wire.PROTOCOL_VERSION, "s", "b", 1, 1)

    def message(declared_ns: dict[str, int]) -> bytes:
        totals = wire.Totals(
            start_ns=0, watermark_ns=10, states_ns={"other": 10}, records_dropped=0, declared_ns=declared_ns
        )
        return wire.encode(wire.Bye(origin=origin, run="r", rank=0, totals=totals))

    assert wire.decode(message({"rollout": 10}))
    for wrong in ({"rollout": 11}, {"a": 6, "b": 6}, {"a": -1}, {str(n): 0 for n in range(10)}):
        with pytest.raises(ProtocolError):
            wire.decode(message(wrong))


def test_files_of_one_checkpoint_are_one_save(watch: Watch, clock: Clock) -> None:
    for _ in range(3):
        with watch.step():
            clock.sleep_ms(30)
        spend(watch, clock, "checkpoint", 2)  # the model
        spend(watch, clock, "checkpoint", 2)  # the optimizer
    watch.report()
    assert watch.session.publisher.accounts.timeline.counts.saves == 3


def test_an_evaluation_before_the_training_takes_nothing_from_other(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    watch = fake_watch(clock, monkeypatch)
    for _ in watch.steps(range(10)):  # the mean of the data, say
        clock.sleep_ms(10)
    turn(watch)
    with watch.phase("eval"):  # of the pretrained model
        clock.sleep_ms(60_000)
    turn(watch)
    for number in watch.steps(range(1000)):
        clock.sleep_ms(10)
        if number == 0:
            watch.session._begin_training()  # as the hook of torch's optimizers does
        with watch.phase("rollout"):
            clock.sleep_ms(10)
    turn(watch)
    accounts = watch._publisher.accounts
    assert accounts.untrained_s["compute"] == pytest.approx(0.1, abs=0.02)
    assert accounts.untrained_s.get("other", 0.0) < 1  # it was 60 s
    window, _ = accounts.window(clock())
    assert window.share("other") == pytest.approx(10 / 80, abs=0.01)  # 10 s of 60 + 10 + 10; it was 0
    watch.close()


def test_a_compilation_in_the_first_training_step_takes_nothing_from_the_time_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It counted as one before the training: of the 60 s in which the model is built 50 were the training's `other`."""
    clock = Clock()
    watch = fake_watch(clock, monkeypatch)
    for _ in watch.steps(range(10)):
        clock.sleep_ms(10)
    turn(watch)
    clock.sleep_ms(60_000)
    for number in watch.steps(range(100)):
        if number == 0:
            with watch.phase("compile"):
                clock.sleep_ms(50_000)
                turn(watch)
            watch.session._begin_training()
        clock.sleep_ms(10)
    turn(watch)
    assert watch._publisher.accounts.untrained_s["other"] == pytest.approx(60, abs=0.1)  # it was 10
    watch.close()


def test_a_pause_between_cells_before_the_training_is_subtracted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    watch = fake_watch(clock, monkeypatch)
    for _ in watch.steps(range(10)):
        clock.sleep_ms(10)
    with watch.phase("between cells"):
        clock.sleep_ms(600_000)
    turn(watch)
    for number in watch.steps(range(100)):
        if number == 0:
            watch.session._begin_training()
        clock.sleep_ms(1000)
        with watch.phase("rollout"):
            clock.sleep_ms(1000)
    turn(watch)
    window, _ = watch._publisher.accounts.window(clock())
    assert window.untrained_s.get("other", 0.0) < 1  # it was 600 s, and so were the 600 s between cells
    assert window.share("other") == pytest.approx(0.5, abs=0.01)  # it was 0
    watch.close()
