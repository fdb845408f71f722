"""The program of docs/start/quickstart.md, run as written and as its advice says, prints what the page shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import ROOT

PAGE = (ROOT / "docs/start/quickstart.md").read_text()
ADVICE = "DataLoader(Photos(), batch_size=16, num_workers=1, persistent_workers=True)"


def shape(verdict: str) -> str:
    """Return a verdict without its numbers and line breaks, up to its `do`: the advice depends on the machine."""
    text = re.sub(r" \(excluding the first step, .*?\)", "", " ".join(verdict.partition("  do ")[0].split()))
    text = re.sub(r"where .*? why", "where … why", text)
    # Handing over a batch takes 2% to 9% of a step, by what else the machine does; from 5% on the verdict mentions it.
    text = re.sub(
        r"mostly compute; \d\.?\d?% of the time is data wait: at most 1\.1× the throughput without it", "healthy", text
    )
    text = re.sub(r"healthy: \d+% of the time is compute, the input keeps up", "healthy", text)
    return re.sub(r"[\d.,]+ ?(µs|ms|s|%)?", "#", text)


@pytest.mark.alone
@pytest.mark.parametrize("sample", [0, 1])
def test_the_program_prints_what_the_page_shows(sample: int, tmp_path: Path) -> None:
    program = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0]
    shown = re.findall(r"```\n(gpuwatch · .*?)```", PAGE, re.DOTALL)[sample]
    assert program.count("DataLoader(Photos(), batch_size=16)") == 1 and ADVICE in PAGE
    if sample:
        program = program.replace("DataLoader(Photos(), batch_size=16)", ADVICE)
    (tmp_path / "train.py").write_text(program)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GPUWATCH_ENDPOINT": f"ipc://{tmp_path}/none.sock"}
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    printed = done.stderr[done.stderr.index("gpuwatch · ") :]
    assert shape(printed) == shape(shown), printed
    assert re.search("DataLoader" if sample == 0 else "stop tuning the loader", printed.partition("  do ")[2])
