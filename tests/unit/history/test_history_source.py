"""A run that the history keeps and the agent no longer has, as the API returns it."""

from __future__ import annotations

import pytest

from gpuwatch.alerting.thresholds import Prices
from gpuwatch.diagnosis.rates import Cost
from gpuwatch_agent.runs import Run, read_record
from gpuwatch_agent.runs.views import run_view
from tests.unit.agent.hooks import BOOT, FakeHook, S, wall_s


def test_it_costs_what_it_cost_while_it_was_there() -> None:
    hook = FakeHook().spend("input_wait", 1800 * S).spend("compute", 3600 * S)
    run = Run("run-a", 0, BOOT)
    run.apply(hook.hello(), hook.at_ns, 0.0)
    run.apply(hook.message(), hook.at_ns, 0.0)
    run.gpus = {"GPU-0": "NVIDIA H200"}
    record = run.record()
    assert record is not None
    kept = read_record(record)
    cost = run_view(kept, Prices(gpu_hour=2.0, currency="EUR", models={"NVIDIA H200": 4.0})).cost
    assert cost == Cost("EUR", 1, 4.0, 6.0, {"input_wait": 2.0, "compute": 4.0})
    assert run_view(kept, Prices()).cost is None


def test_it_is_known_up_to_its_last_process_which_began_after_a_pause() -> None:
    run, last = Run("run-a", 0, BOOT), 0.0
    for sender, begin_ns in (("sender-a", 100 * S), ("sender-b", 3700 * S)):
        hook = FakeHook(begin_ns, sender=sender).spend("compute", 10 * S)
        for message in (hook.hello(), hook.message(), hook.bye()):
            run.apply(message, hook.at_ns, wall_s(hook.at_ns))
        last = wall_s(hook.at_ns)
    record = run.record()
    assert record is not None
    view = run_view(read_record(record), Prices())
    assert (view.watermark_s, sum(view.states.values())) == (pytest.approx(last), pytest.approx(20.0))
