"""Declared phases of a run and its compute by section: sums over its processes, in the API and on the metrics page."""

from __future__ import annotations

import msgspec
import pytest

from gpuwatch import wire
from gpuwatch.alerting.thresholds import Prices
from gpuwatch.diagnosis.window import make_window
from gpuwatch.errors import ProtocolError
from gpuwatch_agent.exporter import run_samples
from gpuwatch_agent.runs import Run, read_record
from gpuwatch_agent.runs.views import run_view
from tests.unit.agent.hooks import BOOT, FakeHook, S, wall_s


def declare(hook: FakeHook, **seconds: int) -> FakeHook:
    for name, spent in seconds.items():
        hook.spend("other", spent * S)
        hook.declared_ns[name] = hook.declared_ns.get(name, 0) + spent * S
    return hook


def hear(run: Run, hook: FakeHook) -> None:
    run.apply(hook.message(), hook.at_ns, wall_s(hook.at_ns))


def series(run: Run, metric: str = "gpuwatch_phase_seconds_total") -> dict[str, float]:
    found = run_samples(run, 0)
    return {sample.labels[-1]: sample.value for sample in found if sample.metric == metric}


def test_phases_of_all_processes_are_summed_and_served() -> None:
    run, first = Run("r", 0, BOOT), FakeHook()
    hear(run, first)
    assert series(run) == {}, "no phase, no series"
    hear(run, declare(first, rollout=6, sync=1))
    second = FakeHook(first.at_ns + S, sender="sender-b")
    hear(run, declare(second, rollout=2, **{str(number): 1 for number in range(7)}))
    expected = {"rollout": 8.0, "sync": 1.0, **dict.fromkeys("012345", 1.0), "rest": 1.0}
    assert series(run) == expected
    assert run_view(run, Prices()).phases == expected
    record = run.record()
    assert record is not None and run_view(read_record(record), Prices()).phases == expected


def test_totals_whose_phases_went_back_are_ignored() -> None:
    run, hook = Run("r", 0, BOOT), FakeHook()
    hear(run, declare(hook, rollout=6))
    hook.declared_ns = {"rollout": 5 * S}
    hook.spend("other", S)
    hear(run, hook)
    assert series(run) == {"rollout": 6.0}


def test_the_last_minute_has_its_own_phases() -> None:
    run, hook = Run("r", 0, BOOT), FakeHook()
    hear(run, declare(hook, rollout=30))
    run.remember(hook.at_ns)
    for _ in range(70):
        hear(run, declare(hook, sync=1))
        run.remember(hook.at_ns)
    window = make_window(*run.recent())
    assert dict(window.declared) == {"sync": 1.0}


def test_compute_by_section_is_summed_served_and_kept_when_the_agent_restarts() -> None:
    run, first, metric = Run("r", 0, BOOT), FakeHook(), "gpuwatch_compute_breakdown_seconds_total"
    hear(run, first.step())
    assert series(run, metric) == {} and run_view(run, Prices()).breakdown == {}
    first.breakdown_ns = {"forward": 3 * S, "backward": 5 * S}
    hear(run, first.step())
    second = FakeHook(first.at_ns + S, sender="sender-b")
    second.breakdown_ns = {"forward": S, "backward": S, "optimizer": 2 * S}
    hear(run, second.step())
    expected = {"forward": 4.0, "backward": 6.0, "optimizer": 2.0}
    assert series(run, metric) == expected == run_view(run, Prices()).breakdown
    record = run.record()
    assert record is not None
    again = read_record(record)
    assert series(again, metric) == expected == run_view(again, Prices()).breakdown


def test_a_hook_and_an_agent_of_different_versions_understand_each_other() -> None:
    hook = FakeHook().step()
    hook.breakdown_ns = {"forward": S, "backward": S}
    message = msgspec.msgpack.decode(wire.encode(hook.message()))
    del message["totals"]["breakdown_ns"]
    old = wire.decode(msgspec.msgpack.encode(message))
    assert isinstance(old, wire.Steps) and old.totals.breakdown_ns == {}
    message["totals"]["something_newer"] = {"forward": 1}
    assert isinstance(wire.decode(msgspec.msgpack.encode(message)), wire.Steps)
    hook.breakdown_ns = {"sideways": S}
    with pytest.raises(ProtocolError, match="sideways"):
        wire.decode(wire.encode(hook.message()))


def test_a_run_s_processes_have_a_phase_of_sixty_days_together_and_its_record_is_read_again() -> None:
    run, at_ns = Run("run-a", 0, BOOT), 100 * S
    for number in range(20):  # 16 processes are kept; the sums of earlier ones are in `before`
        hook = FakeHook(at_ns, sender=f"sender-{number}").spend("other", 20 * 86_400 * S)
        hook.declared_ns = {"rollout": 20 * 86_400 * S}
        run.apply(hook.message(), hook.at_ns, wall_s(hook.at_ns))
        run.apply(hook.bye(), hook.at_ns, wall_s(hook.at_ns))
        at_ns = hook.at_ns
    record = run.record()
    assert record is not None
    assert read_record(record).counts.declared_ns == {"rollout": 400 * 86_400 * S}
