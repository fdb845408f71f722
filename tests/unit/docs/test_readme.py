"""The README's first screen shows what the code prints: a window's facts, diagnosed, as text."""

from __future__ import annotations

import os
import re
from pathlib import Path

from gpuwatch.diagnosis.rates import Done
from gpuwatch.diagnosis.report import make_report
from gpuwatch.diagnosis.window import HostFacts, StepColumns, Window
from gpuwatch.wire import Loader

README = Path(__file__).parents[3] / "README.md"
_STEPS = 181
STARVED = Window(
    duration_s=8.0,
    states_s={"input_wait": 5.57, "compute": 2.4, "startup": 0.03},
    steps=StepColumns(
        data_wait_s=(0.0307,) * _STEPS,
        transfer_s=(0.0,) * _STEPS,
        compute_s=(0.0132,) * _STEPS,
        epoch_start=(True, *(False,) * (_STEPS - 1)),
    ),
    fetch_cpu_ratio=0.95,
    loader=Loader(num_workers=0, batch_bytes=6 << 20),
    host=HostFacts(cpu_cores=8, cpu_busy_ratio=0.2),
)


def test_golden_sample_of_the_readme() -> None:
    printed = f"{make_report(STARVED, Done(8.0, _STEPS, 11_584), run='host-1-2', name='train.py')}\n"
    text, sample = README.read_text(), re.compile(r"(?<=^```\n)gpuwatch · .*?(?=```)", re.DOTALL | re.MULTILINE)
    if os.environ.get("UPDATE_GOLDEN"):
        text = sample.sub(lambda _: printed, text, count=1)
        README.write_text(text)
    found = sample.search(text)
    assert found is not None and found.group() == printed, "run `make golden`"


def test_the_figures_of_the_comparison_are_those_of_the_evidence() -> None:
    """A benchmark that is run again changes the evidence: the README follows it."""
    overhead = (README.parent / "docs/evidence/overhead.md").read_text()
    added = dict(re.findall(r"^\| (.+?) \| [^|]+ \| ([\d.]+) \(", overhead, re.MULTILINE))
    on_gpu = " ".join((README.parent / "docs/evidence/gpu-checklist.md").read_text().split())
    longer = re.search(r"host-bound step of 1\.0 ms, .* takes ([\d.]+) to ([\d.]+) ms longer", on_gpu, re.DOTALL)
    share = re.search(r"gpuwatch's own share is ([\d.]+) to ([\d.]+)% of the step time", on_gpu)
    assert longer is not None and share is not None
    first_us = "–".join(f"{1000 * float(each):.0f}" for each in longer.groups())
    table = README.read_text().partition("## Compared with")[2]
    rows = dict(re.findall(r"^\| \[?([\w. -]+?)\]?(?:\(.*?\))? \| .* \| (.*) \|$", table, re.MULTILINE))
    own = (
        added["gpuwatch: clocks and queue"],
        added["gpuwatch: and two `.to(device)` a step timed"],
    )
    assert rows["gpuwatch"].startswith(f"{own[0]} µs a step for the clocks, {own[1]} µs with evidence")
    assert f"on an H100 {share[1]}–{share[2]}% of host-bound steps of 1 ms, {first_us} µs a step" in rows["gpuwatch"]
    assert rows["TraceML"].startswith(f"{added['TraceML']} µs a step")
    assert rows["torch.profiler"].startswith(f"{added['torch.profiler, active']} µs a step")
