"""Every scenario of `python -m benchmarks.accuracy` with torch's own CUDA events.

Injected time is reported within the same bound.
"""

from __future__ import annotations

import ast
import warnings
from pathlib import Path

import pytest

from tests.cuda_runtime.runtime import Runtime, loaded

loaded()  # skips all of them
pytestmark = pytest.mark.cuda_runtime

SCENARIOS = Path(__file__).parents[2] / "benchmarks" / "accuracy" / "scenarios.py"
SECONDS = 1.5


def scenarios() -> list[str]:
    """Return the names of all scenarios, read from the file: an import of it would import torch in every collection."""
    tree = ast.parse(SCENARIOS.read_text(encoding="utf-8"))
    calls = [
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Scenario"
    ]
    return [call.args[0].value for call in calls if isinstance(call.args[0], ast.Constant)]


@pytest.mark.parametrize("name", scenarios())
def test_injected_time_is_reported_within_two_points(
    name: str, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The stub of cuBLASLt does no maths; torch warns and takes plain cuBLAS.
    warnings.filterwarnings("ignore", "gemm_and_bias error")
    from benchmarks.accuracy import lab, measure, page

    def spin(seconds: float) -> None:
        runtime.launch(round(seconds * 1e9))

    monkeypatch.setattr(lab, "cuda_device", lambda: lab.TimedDevice("cuda", spin))
    row = measure.measure(name, measure.DEVICE, SECONDS, measure.CUDA)
    if not row.holds:  # a pause of the machine between two clocks is no error of the ledger: it does not come twice
        row = measure.measure(name, measure.DEVICE, 2 * SECONDS, measure.CUDA)
    state, error = row.worst
    assert abs(error) <= measure.BOUND_POINTS, f"{state}: {page.shares(row.truth)} was {page.shares(row.reported)}"
    assert sum(row.reported.values()) == pytest.approx(100, abs=measure.BOUND_CLOSURE)
    assert row.steps > 0
