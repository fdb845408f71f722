"""Every scenario of `benchmarks/accuracy.py` with torch's own CUDA events: injected time is reported within the same bound."""

from __future__ import annotations

import ast
import warnings
from pathlib import Path

import pytest

from tests.cuda_runtime.runtime import Runtime, loaded

loaded()  # skips all of them
pytestmark = pytest.mark.cuda_runtime

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SECONDS = 1.5


def scenarios() -> list[str]:
    """Return the names of all scenarios. They are read, not imported: that would import torch where this is only collected."""
    tree = ast.parse((BENCHMARKS / "accuracy_scenarios.py").read_text(encoding="utf-8"))
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
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import accuracy
    import accuracy_lab

    def spin(seconds: float) -> None:
        runtime.launch(round(seconds * 1e9))

    monkeypatch.setattr(accuracy_lab, "cuda_device", lambda: accuracy_lab.TimedDevice("cuda", spin))
    row = accuracy.measure(name, accuracy.DEVICE, SECONDS, accuracy.CUDA)
    if not row.holds:  # a pause of the machine between two clocks is no error of the ledger: it does not come twice
        row = accuracy.measure(name, accuracy.DEVICE, 2 * SECONDS, accuracy.CUDA)
    state, error = row.worst
    assert abs(error) <= accuracy.BOUND_POINTS, (
        f"{state}: {accuracy.shares(row.truth)} was {accuracy.shares(row.reported)}"
    )
    assert sum(row.reported.values()) == pytest.approx(100, abs=accuracy.BOUND_CLOSURE)
    assert row.steps > 0
