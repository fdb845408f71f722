"""`gpuwatch demo` for each bottleneck: the verdict names it, and the command ends with status 0."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest


def demo(bottleneck: str, seconds: int, more_s: int = 60) -> tuple[str, str]:
    command = [sys.executable, "-m", "gpuwatch", "demo", "--bottleneck", bottleneck, "--seconds", str(seconds)]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + more_s, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.alone
@pytest.mark.parametrize(
    ("bottleneck", "sentence", "advice"),
    [
        ("input", r"input-bound: (\d+)% of the time", "num_workers="),
        ("epoch-start", r"input-bound: (\d+)% of the time", "persistent_workers=True"),
        ("eval", r"evaluation takes (\d+)% of the time", "evaluate half as often"),
        ("none", r"healthy: (\d+)% of the time is compute", "stop tuning the loader"),
    ],
)
def test_the_verdict_names_the_bottleneck_that_was_chosen(bottleneck: str, sentence: str, advice: str) -> None:
    out, err = demo(bottleneck, 10)
    final = err[err.rindex("gpuwatch · ") :]  # the whole run's, printed last
    assert re.search(sentence, final), final
    assert advice in " ".join(final.split())
    live = re.findall(r"^ +\d+ s  (.+)$", out, re.MULTILINE)
    assert live and re.search(sentence, live[-1])
    assert "gpuwatch demo --bottleneck" in out  # what to try next


@pytest.mark.alone
def test_a_job_that_crashes_twice_has_its_goodput_and_what_saving_oftener_would_gain() -> None:
    out, _ = demo("crash", 24, 300)
    assert out.count("killed; it is started again") == 2
    job = out[out.index("gpuwatch · job demo-crash") :]
    assert "3 attempts, 2 interrupted" in job
    assert re.search(r"goodput \d+%: spent on new steps\n  where .*redone", job)
    steps = re.search(r"steps   ([\d,]+), of which ([\d,]+) redone\n", job)
    assert steps is not None
    done, redone = (int(each.replace(",", "")) for each in steps.groups())
    assert 0 < redone < done
    assert re.search(r"restart .*imports .*checkpoint_load", job)
    advice = r"checkpoints are too rare .* do save every .* \([^)]*1\.\d+× the throughput\)"
    assert re.search(advice, " ".join(job.split()))
    verdict = re.search(
        r"Verdict: killed 2 times: (\d+)% of (\d+\.\d) s went into new steps, (\d+)% into restarts and repeated steps\n"
        r"  Save every .* instead of every .*: (up to )?1\.\d+× .*the throughput, predicted\n",
        job,
    )
    assert verdict is not None, job
    assert int(verdict[1]) + int(verdict[3]) <= 100
    assert float(verdict[2]) < 24 + 18  # s: torch is imported once, before
