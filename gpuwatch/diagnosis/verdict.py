"""A window in one sentence: the state that decides what to do, with its share."""

from __future__ import annotations

from collections.abc import Sequence

from gpuwatch.diagnosis.finding import Finding, Verdict
from gpuwatch.diagnosis.thresholds import THRESHOLDS
from gpuwatch.diagnosis.window import Window
from gpuwatch.formatting import duration, percent
from gpuwatch.ledger.states import (
    CHECKPOINT,
    COMPUTE,
    EVAL,
    HOST_WAIT,
    INPUT_WAIT,
    OTHER,
    STALLED,
    STARTUP,
    TRANSFER,
    UNKNOWN,
)

_SENTENCES = {
    INPUT_WAIT: ("input", "input_share", "input-bound: {} of the time training waited for data"),
    TRANSFER: ("transfer", "transfer_share", "transfer-bound: {} of the time went into copies to the device"),
    HOST_WAIT: ("host", "input_share", "host-bound: {} of the time the device waited for the host's code"),
    EVAL: ("eval", "phase_share", "evaluation takes {} of the time"),
    CHECKPOINT: ("checkpoint", "phase_share", "checkpoints take {} of the time"),
    OTHER: ("other", "phase_share", "{} of the time passed outside of training steps and declared phases"),
    STALLED: ("stalled", "phase_share", "stalled for {} of the time: no step was made"),
    UNKNOWN: ("unknown", "phase_share", "{} of the time is not known: the training process sent nothing"),
}
"""By state: the verdict's name, the threshold of the share from which it can be the verdict, the sentence."""


def give_verdict(window: Window, findings: Sequence[Finding] = ()) -> Verdict:
    """Return the verdict on a window.

    The largest loss that is worth a change decides; without one the verdict is `compute`, which is good. A run that is stalled
    now is stalled, whatever it did before. Start-up is left aside once there are steps: it passes.
    """
    if window.stalled_s is not None:
        return Verdict("stalled", window.share(STALLED), _stalled_sentence(window.stalled_s))
    if not len(window.steps) and window.share(STARTUP) >= window.share(*_SENTENCES):
        return Verdict("startup", window.share(STARTUP), "starting up: no training step yet")
    losses = [
        (window.share(state), state)
        for state, (_, least, _) in _SENTENCES.items()
        if window.share(state) >= getattr(THRESHOLDS, least)
    ]
    if not losses:
        share = window.share(COMPUTE)
        if any(finding.cause == "host_bound" for finding in findings):
            return Verdict("host", share * (window.kept_up_ratio or 0.0), _host_bound_sentence(window, share))
        saturated = any(finding.cause == "gpu_saturated" for finding in findings)
        good = "the GPU is saturated" if saturated else "the input keeps up"
        text = f"healthy: {percent(share)} of the time is compute, {good}"
        return Verdict("compute", share, text + _without_first(window))
    ratio, state = max(losses)
    name, _, sentence = _SENTENCES[state]
    if state == INPUT_WAIT and window.waits_hidden_in is not None:
        return Verdict("unknown", ratio, _hidden_sentence(window.waits_hidden_in, ratio))
    text = sentence.format(percent(ratio)) + _without_first(window)
    if state == INPUT_WAIT and window.timeline == "host" and window.device != "cpu":
        text += " (by the host's clock: what the device had queued may hide a part)"
    return Verdict(name, ratio, text)


def _hidden_sentence(framework: str, ratio: float) -> str:
    waited = f"by the host's clock the loop waited {percent(ratio)} of the time for data"
    return f"{waited}; {framework} runs asynchronously, and what of it the device felt was not measured"


def _host_bound_sentence(window: Window, share: float) -> str:
    pace = "in which the device runs each kernel as soon as the host launches it, and idles in between"
    return f"host-bound: {percent(share)} of the time is compute {pace}" + _without_first(window)


def _without_first(window: Window) -> str:
    """Return that the first step was left aside, where it was."""
    spent = sum(window.first_step_s.values())
    return f" (without the first step, which took {duration(spent)})" if spent else ""


def _stalled_sentence(seconds: float) -> str:
    return f"stalled: no training step for {duration(seconds)}"
