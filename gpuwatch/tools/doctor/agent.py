"""The agent's own view: is it ready, do its collectors work, does it fit this package, does its clock agree."""

from __future__ import annotations

from gpuwatch.tools.doctor.outcome import Outcome, ok, problem, skipped, warning
from gpuwatch.tools.doctor.surroundings import Surroundings

_CLOCK_S = 2.0
_NONE = "no agent answers"


def agent(around: Surroundings) -> Outcome:
    """Whether the agent answers and takes its samples. One that nobody asked for may be absent."""
    view = around.agent()
    if view.status is None:
        if view.state != "silent" and not around.agent_wanted:
            return skipped(f"none at {view.url}; runs print their verdicts all the same", "gpuwatch up starts one")
        return problem(f"{view.url}: {view.error}", "gpuwatch up starts one; --agent URL names one elsewhere")
    if not view.ready:
        return problem(
            f"{view.url} is not ready: {view.not_ready}",
            "gpuwatch agent's stderr says which collector hangs; a full or slow disk under the history does it too",
        )
    return ok(f"{view.url} is ready, gpuwatch {view.status.version} on {view.status.host}")


def collectors(around: Surroundings) -> Outcome:
    """The collectors of the agent that fail, in its own words."""
    status = around.agent().status
    if status is None:
        return skipped(_NONE)
    listed = status.collectors
    failing = [f"{one.name}: {one.message or 'no reason given'}" for one in listed if one.success is False]
    nothing = [one.name for one in listed if one.success is None]
    if failing:
        return problem("; ".join(failing), "its own message says what; the checks here often say why (ptrace, driver)")
    without = f"; nothing to measure here: {', '.join(nothing)}" if nothing else ""
    return ok(f"{len(listed) - len(nothing)} of {len(listed)} work{without}")


def agent_version(around: Surroundings) -> Outcome:
    """Whether agent and this package, which is what the hooks of this environment are, have one version."""
    status = around.agent().status
    if status is None:
        return skipped(_NONE)
    theirs, ours = status.version, around.gpuwatch_version
    if theirs != ours:
        return warning(
            f"the agent is {theirs}, this package {ours}",
            f"pip install 'gpuwatch-training=={theirs}' here, or update and restart the agent",
        )
    return ok(f"both are {ours}")


def agent_clock(around: Surroundings) -> Outcome:
    """Whether the agent's wall clock agrees with this machine's: it dates the history and the alerts."""
    view = around.agent()
    if view.status is None:
        return skipped(_NONE)
    if abs(view.ahead_s) > _CLOCK_S:
        way = "ahead of" if view.ahead_s > 0 else "behind"
        return warning(
            f"the agent's clock is {abs(view.ahead_s):.1f} s {way} this machine's",
            "synchronise both: timedatectl set-ntp true, or chrony",
        )
    return ok(f"within {_CLOCK_S:.0f} s of this machine's")
