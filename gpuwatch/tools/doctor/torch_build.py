"""Which CUDA torch was built for, against the driver's. torch is not imported: that takes seconds, and may touch CUDA."""

from __future__ import annotations

import re
from pathlib import Path

from gpuwatch.tools.doctor.outcome import Outcome, ok, problem, skipped, warning
from gpuwatch.tools.doctor.software import numbers
from gpuwatch.tools.doctor.surroundings import Surroundings


def torch(around: Surroundings) -> Outcome:
    """torch's build against the driver: a driver runs the CUDA of its own major version and of earlier ones.

    Source: docs.nvidia.com/deploy/cuda-compatibility.
    """
    folder = around.folder_of("torch")
    if folder is None:
        return skipped("not installed in this Python")
    version, cuda, hip = read_build(folder)
    nvml = around.nvml()
    if hip:
        return ok(f"{version}, built for ROCm {hip}")
    if cuda is None:
        if nvml.gpus:
            return warning(
                f"{version} is built for CPUs, and there are {len(nvml.gpus)} NVIDIA GPUs",
                f"pip install --force-reinstall torch --index-url {_index(nvml.cuda)}",
            )
        return ok(f"{version}, built for CPUs")
    if nvml.cuda is None:
        return ok(f"{version}, built for CUDA {cuda}; no driver to compare with")
    driver = ".".join(map(str, nvml.cuda))
    if numbers(cuda)[0] > nvml.cuda[0]:
        return problem(
            f"{version} is built for CUDA {cuda}; driver {nvml.driver} runs CUDA {driver} at most",
            f"update the driver, or pip install --force-reinstall torch --index-url {_index(nvml.cuda)}",
        )
    later = " (minor versions run together)" if numbers(cuda)[:2] > nvml.cuda else ""
    return ok(f"{version}, built for CUDA {cuda}; the driver runs CUDA {driver}{later}")


def read_build(folder: Path) -> tuple[str, str | None, str | None]:
    """Return torch's version, and the CUDA and ROCm versions it was built for. Source: torch/version.py."""
    text = (folder / "version.py").read_text()

    def value(name: str) -> str | None:
        found = re.search(rf"^{name}(?:\s*:[^=]*)?\s*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
        return found[1] if found else None

    return value("__version__") or "?", value("cuda"), value("hip")


def _index(cuda: tuple[int, int] | None) -> str:
    """Return the package index for a driver; pytorch.org lists which CUDA versions there is one for."""
    return f"https://download.pytorch.org/whl/cu{cuda[0]}{cuda[1]}" if cuda else "https://download.pytorch.org/whl/…"
