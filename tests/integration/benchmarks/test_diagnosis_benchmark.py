"""The benchmark of the diagnosis on four of its programs: a cause, another one, two at once, and none.

All programs: `python -m benchmarks.diagnosis`.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.programs import ROOT

pytest.importorskip("torch")
CHOSEN = (
    "the same, waiting for storage",
    "an undeclared evaluation",
    "starved, and evaluating",
    "steps of all lengths",
)


@pytest.mark.alone
def test_causes_are_named_and_a_healthy_program_does_not_alarm() -> None:
    path = os.pathsep.join(map(str, (ROOT, ROOT / "agent", ROOT / "dashboards")))
    command = [sys.executable, "-m", "benchmarks.diagnosis", "--tries", "2"]
    for name in CHOSEN:
        command += ["--only", name]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        "**3 of 3 programs with something wrong were understood (1 of 1 mixtures, both causes named), 0 of 1 healthy ones alarmed.**"
        in done.stdout
    )


def test_a_text_that_no_program_has_is_refused() -> None:
    command = [sys.executable, "-m", "benchmarks.diagnosis", "--only", "flux capacitor"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2 and "no program has flux capacitor" in done.stderr
