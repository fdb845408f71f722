"""A rank that makes no step because another rank of its run is in a phase is not stuck: no finding, no notification."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuwatch.config import Config
from gpuwatch_agent.notify.conditions import conditions
from tests.unit.agent.hooks import FakeHook, S, wall_s
from tests.unit.agent.whole_agent import WholeAgent

BEGIN_NS = 100 * S


@pytest.mark.parametrize(
    ("activity", "state", "wrong"),
    [("phase eval", "eval", []), ("phase export", "other", []), ("step", "stalled", [0, 1])],
)
def test_a_rank_that_waits_for_another_ones_phase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, activity: str, state: str, wrong: list[int]
) -> None:
    agent = WholeAgent(tmp_path, monkeypatch, BEGIN_NS)
    hooks = [FakeHook(BEGIN_NS, rank=rank, sender=f"sender-{rank}", pid=4711 + rank) for rank in range(2)]
    for hook in hooks:
        agent.hear(hook.hello())
    for second in range(1, 200):
        for hook in hooks:
            if second < 60:
                for _ in range(10):
                    hook.step()
                agent.hear(hook.message())
            else:
                first = hook.rank == 0
                hook.spend(state if first else "stalled", S)
                agent.hear(hook.message(activity if first else "step"))
        agent.tick(BEGIN_NS + second * S)
    assert agent.sampler.snapshot is not None
    agent.close()
    found = conditions(agent.sampler.snapshot, wall_s(agent.clock.now_ns), Config())
    assert [each.key for each in found if each.severity == "critical"] == [f"RunStalled/run-a/{rank}" for rank in wrong]
