"""No step, full utilisation and hardly any power: kernels that spin, as a collective does that waits for a rank."""

from __future__ import annotations

from gpuwatch.diagnosis.finding import Evidence, Finding
from gpuwatch.diagnosis.thresholds import THRESHOLDS
from gpuwatch.diagnosis.window import Window
from gpuwatch.formatting import duration, percent


def hung(window: Window) -> Finding | None:
    """Found when a stalled run's GPU reads busy at a power far below what it drew while the run made steps."""
    if window.stalled_s is None:
        return None
    for gpu in window.gpus:
        if gpu.utilization_ratio is None or gpu.power_watts is None or not gpu.power_usual_watts:
            continue
        fallen = gpu.power_watts / gpu.power_usual_watts
        if gpu.utilization_ratio < THRESHOLDS.gpu_busy or fallen > THRESHOLDS.power_fallen:
            continue
        return Finding(
            cause="hung",
            severity="critical",
            title="training hangs: the GPU spins without doing work",
            ratio=1.0,
            evidence=(
                Evidence("no step", window.stalled_s, "s", f"no step for {duration(window.stalled_s)}"),
                Evidence("utilization", gpu.utilization_ratio, "ratio", f"GPU {gpu.gpu} reads {percent(gpu.utilization_ratio)} busy"),
                Evidence("power", fallen, "ratio", f"it draws {gpu.power_watts:.0f} W, {percent(fallen)} of the {gpu.power_usual_watts:.0f} W of its steps"),
            ),
            advice="a collective waits for a rank that does not come: gpuwatch stacks, which looks at all ranks, before ending anything",
        )  # fmt: skip
    return None
