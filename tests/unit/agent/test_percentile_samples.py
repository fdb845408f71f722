"""Step time percentiles and MFU of the last minute as series: present while steps are taken, absent otherwise."""

from __future__ import annotations

from typing import Any

import msgspec

from gpuwatch.api import Recent, Run
from gpuwatch.metrics import Sample
from gpuwatch_agent.exporter import recent_samples

METRIC = "gpuwatch_step_percentile_seconds"


def view(**more: Any) -> Run:
    plain = Run("r", 3, "r", "running", 0.0, 0.0, 0.0, recent=Recent(step_s_p50=0.1, step_s_p95=0.4))
    return msgspec.structs.replace(plain, **more)


def test_a_running_run_has_both() -> None:
    assert list(recent_samples(view())) == [
        Sample(METRIC, 0.1, ("r", "3", "p50")),
        Sample(METRIC, 0.4, ("r", "3", "p95")),
    ]


def test_mfu_is_a_series_where_operations_and_peak_are_declared() -> None:
    declared = view(recent=Recent(mfu_ratio=0.41))
    assert list(recent_samples(declared)) == [Sample("gpuwatch_run_mfu_ratio", 0.41, ("r", "3"))]
    assert list(recent_samples(view(recent=Recent()))) == []


def test_without_a_step_in_the_last_minute_and_after_the_end_there_is_none() -> None:
    assert list(recent_samples(view(recent=None))) == []
    assert list(recent_samples(view(status="ended"))) == []
