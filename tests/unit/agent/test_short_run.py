"""A run that ends soon leaves its finding, though an older one is diagnosed in every fifth tick only."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.agent.hooks import FakeHook, S
from tests.unit.agent.whole_agent import WholeAgent

BEGIN_NS = 100 * S


@pytest.mark.parametrize("earlier", range(5))
def test_eight_seconds_are_enough_for_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, earlier: int) -> None:
    """Whatever tick of the agent it begins in."""
    agent = WholeAgent(tmp_path, monkeypatch, BEGIN_NS)
    for second in range(earlier):
        agent.tick(BEGIN_NS + second * S)
    hook = FakeHook(BEGIN_NS + earlier * S)
    agent.hear(hook.hello())
    for second in range(1, 9):
        for _ in range(10):
            hook.step()
        agent.hear(hook.message(), *([hook.bye()] if second == 8 else []))
        agent.tick(hook.at_ns)
    agent.tick(hook.at_ns + S)
    found = {finding.cause: finding for finding in agent.history.reader.findings("run-a")}
    agent.close()
    assert [cause for cause in found if cause.startswith("input")], found
