"""A run that the history keeps and the agent no longer has, as the API returns it."""

from __future__ import annotations

from gpuwatch.alerting.thresholds import Prices
from gpuwatch.diagnosis.rates import Cost
from gpuwatch_agent.runs import Run, read_record
from gpuwatch_agent.runs.views import run_view
from tests.unit.agent.hooks import BOOT, FakeHook, S


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
