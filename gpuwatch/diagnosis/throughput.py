"""How fast training goes: samples, tokens and floating-point operations a second. No I/O, no clock."""

from __future__ import annotations

import msgspec

from gpuwatch.errors import ConfigError
from gpuwatch.wire import Flops


class Done(msgspec.Struct, frozen=True):
    """What training steps did in a stretch of time."""

    seconds: float
    steps: int
    samples: float | None = None
    """None: not counted, as with `tokens`."""
    tokens: float | None = None


class Throughput(msgspec.Struct, frozen=True):
    """Rates of one rank over the time that is asked about. None: not counted, or not declared."""

    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    flops_per_s: float | None = None
    """Achieved, from the operations that the user declares for a step, a sample or a token."""
    mfu_ratio: float | None = None
    """Model FLOPs utilisation: `flops_per_s` over the declared peak."""


def declared(
    per_step: float | None, per_sample: float | None, per_token: float | None, peak: float | None
) -> Flops | None:
    """Return what the user declares, None where that is nothing. Raises: ConfigError for what is no number above 0."""
    given = {
        "flops_per_step": per_step,
        "flops_per_sample": per_sample,
        "flops_per_token": per_token,
        "peak_flops": peak,
    }
    for name, value in given.items():
        if value is not None and not (isinstance(value, (int, float)) and 0 < value < float("inf")):
            raise ConfigError(f"{name}={value!r} is not a number above 0; leave it out where it is not known")
    if all(value is None for value in given.values()):
        return None
    return Flops(*(None if value is None else float(value) for value in given.values()))


def throughput(done: Done, flops: Flops | None = None) -> Throughput:
    """Return the rates; all of them None when no time has passed."""
    if done.seconds <= 0:
        return Throughput()
    operations = _operations(done, flops) if flops is not None else None
    per_s = None if operations is None else operations / done.seconds
    peak = flops.peak if flops is not None else None
    return Throughput(
        samples_per_s=None if done.samples is None else done.samples / done.seconds,
        tokens_per_s=None if done.tokens is None else done.tokens / done.seconds,
        flops_per_s=per_s,
        mfu_ratio=None if per_s is None or not peak else per_s / peak,
    )


def _operations(done: Done, flops: Flops) -> float | None:
    """Return what was computed, by the finest count there is: tokens, samples, steps."""
    for count, each in ((done.tokens, flops.per_token), (done.samples, flops.per_sample), (done.steps, flops.per_step)):
        if count is not None and each is not None:
            return count * each
    return None
