"""The steps that `python -m benchmarks.dashboards` serves from a history file, with fewer of them."""

from __future__ import annotations

import json

import pytest

from benchmarks.dashboards import __main__ as benchmark


def test_the_page_gets_kept_steps_as_the_agent_answers_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "MESSAGES", 20)
    with benchmark.a_million_kept(1_790_000_000.0) as reader:
        kept = benchmark.KeptSteps(2_000, benchmark.STEP_S, 0.0, 5000, reader=reader)
        answer = json.loads(json.dumps(kept.downsampled(1_790_000_000.0, {"points": "100"})))
    assert answer["steps"] == 2_000
    assert len(answer["step"]) == len(answer["columns"]["data_wait_s"]["mean"]) == 100
