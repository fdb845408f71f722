"""What an agent would say of a run, from what it exported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpuwatch.api import Finding, Recent
from gpuwatch.diagnosis.finding import Verdict
from gpuwatch.diagnosis.verdict import give_verdict
from gpuwatch.diagnosis.window import StepColumns, Window


def verdict_of(
    recent: Recent,
    whole_s: Mapping[str, float],
    phases_s: Mapping[str, float],
    findings: Sequence[Finding],
    info: Mapping[str, str],
    since_step_s: float | None,
) -> Verdict | None:
    """Return what the agent would say, from what it exported: the last minute decides, of a run that is over the whole.

    Of the steps only that there are any is known; their mean stands for them.
    """
    states_s = recent.states or whole_s
    if not states_s:
        return None
    mean_step = StepColumns(
        (phases_s.get("data_wait", 0.0),), (phases_s.get("transfer", 0.0),), (phases_s.get("compute", 0.0),), (False,)
    )
    stalled = any(finding.cause == "stalled" for finding in findings)
    window = Window(
        duration_s=sum(states_s.values()),
        states_s=states_s,
        timeline=info.get("timeline", "host"),
        device=info.get("device", "cpu"),
        steps=mean_step if phases_s or not recent.states else StepColumns(),
        stalled_s=since_step_s if stalled else None,
    )
    return give_verdict(window, findings)


def finding_of(cause: str, ratio: float) -> Finding:
    return Finding(
        cause=cause,
        severity="info" if cause.endswith("saturated") else "warning",
        title=cause.replace("_", " "),
        ratio=ratio,
        evidence=(),
        advice="Prometheus has the share only: evidence and advice are on the node's own page (`gpuwatch dashboard`).",
    )
