"""Every scenario of `benchmarks/accuracy.py` with torch's own CUDA events: injected time is reported within the same bound."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cuda_runtime.runtime import Runtime, loaded

loaded()  # skips all of them
pytestmark = pytest.mark.cuda_runtime

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SECONDS = 1.5


class SimulatedDevice:
    """What a scenario keeps busy: torch's current stream on the simulated runtime. The truth is when the runtime worked on what."""

    target = "cuda"

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._worked: list[tuple[int, int, str]] = []

    def launch(self, seconds: float, kind: str = "compute") -> None:
        self._runtime.launch(round(seconds * 1e9))
        end_ns = self._runtime.end_ns()
        self._worked.append((end_ns - round(seconds * 1e9), end_ns, kind))

    def copy(self, do: Callable[[], Any], seconds: float, blocking: bool) -> Any:
        """Copy a batch; it takes so long on the device."""
        self.launch(seconds, "transfer")
        if blocking:
            self.synchronize()
        return do()

    def synchronize(self) -> None:
        import torch

        torch.cuda.synchronize()

    def watch_with(self, watch: Any) -> None:
        """Nothing to do: the watch finds the device by itself, once the loop begins."""

    def spans(self) -> list[tuple[int, int, str]]:
        return self._worked


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
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import accuracy
    import accuracy_lab

    monkeypatch.setattr(accuracy_lab, "CudaDevice", lambda: SimulatedDevice(runtime))
    row = accuracy.measure(name, accuracy.CUDA, SECONDS)
    if not row.holds:  # a pause of the machine between two clocks is no error of the ledger: it does not come twice
        row = accuracy.measure(name, accuracy.CUDA, 2 * SECONDS)
    state, error = row.worst
    assert abs(error) <= accuracy.BOUND_POINTS, (
        f"{state}: {accuracy.shares(row.truth)} was {accuracy.shares(row.reported)}"
    )
    assert sum(row.reported.values()) == pytest.approx(100, abs=accuracy.BOUND_CLOSURE)
    assert row.steps > 0
