"""A run that ends soon leaves its finding, though an older one is diagnosed in every fifth tick only."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from gpuwatch.config import AgentSettings
from tests.unit.agent import whole_agent
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


def scraped(agent: WholeAgent, second: int) -> list[str]:
    """Let a second pass, and return the series; every fifth is taken by a scrape."""
    agent.tick(second * S)
    if second % 5 == 0:
        agent.sampler.snapshot.page.taken += 1  # type: ignore[union-attr]
    return [name for (name,) in agent.page()]


def test_a_job_array_of_short_runs_stays_below_600_series(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """56 runs of 10 s, eight at a time, each its own job.

    With the series of GPUs and the node, about 175, there were 910.
    """
    monkeypatch.setattr(whole_agent, "SERIES", AgentSettings().series)
    agent, now, most = WholeAgent(tmp_path, monkeypatch, BEGIN_NS), BEGIN_NS // S, 0
    for turn in range(7):
        ranks = range(8)
        hooks = [
            FakeHook(now * S, run=f"run-{turn}-{n}", sender=f"{turn}-{n}", job=f"7_{turn}_{n}", pid=1000 + turn * 8 + n)
            for n in ranks
        ]
        agent.hear(*(hook.hello() for hook in hooks))
        for _ in range(10):
            for hook in hooks:
                for _ in range(10):
                    hook.step()
                agent.hear(hook.message())
            now += 1
            most = max(most, len(scraped(agent, now)))
        agent.hear(*(hook.bye() for hook in hooks))
    jobs = [sum("job_id=" in name and "run_info" not in name for name in scraped(agent, now + s)) for s in range(1, 31)]
    agent.close()
    assert jobs[0] > 0 and jobs[-1] == 0, "of a job that ended well nothing stays once two scrapes took its end"
    assert most <= 420, most


@pytest.mark.parametrize("failed", [False, True])
def test_a_job_whose_attempt_failed_stays_as_long_as_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failed: bool
) -> None:
    """The next attempt is expected, and JobRestartLoop goes on. A good-bye ends its alerts: only `run_up` stays."""
    monkeypatch.setattr(whole_agent, "SERIES", AgentSettings().series)
    agent, now = WholeAgent(tmp_path, monkeypatch, BEGIN_NS), BEGIN_NS // S
    hook = FakeHook(BEGIN_NS, job="7")
    agent.hear(hook.hello())
    for _ in range(30):
        for _ in range(10):
            hook.step()
        agent.hear(hook.message())
        now += 1
        scraped(agent, now)
    agent.hear(replace(hook.bye(), failed=failed))
    there = []
    for second in range(1, 150):
        names = scraped(agent, now + second)
        up, job = (
            any(name.startswith(f"gpuwatch_{what}") for name in names) for what in ("run_up", "job_attempts_total")
        )
        there.append((up, job))
    agent.close()
    assert there[0] == (True, True) and there[-1] == (False, False)
    alone = there.count((True, False))
    assert alone == 0 if failed else 100 <= alone <= 115, alone
