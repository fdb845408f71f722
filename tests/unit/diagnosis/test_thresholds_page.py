"""docs/reference/thresholds.md is what the table says, and every number has its meaning."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields

from gpuwatch.diagnosis.thresholds import THRESHOLDS, Thresholds
from tests.programs import ROOT


def test_the_committed_page_is_fresh_and_lists_every_threshold() -> None:
    command = [sys.executable, str(ROOT / "scripts/thresholds_page.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout == (ROOT / "docs/reference/thresholds.md").read_text(), "run `make golden`"
    assert all(f"| `{each.name}` | {each.default!r} |" in done.stdout for each in fields(Thresholds))


def test_numbers_in_the_text_of_other_pages_are_the_thresholds() -> None:
    """The tables are generated; their numbers stand in sentences too, which a changed threshold left as they were."""
    of = THRESHOLDS
    expected = {
        "concepts/causes.md": (
            f"waits for data for at least {of.input_share:.0%} of its time",
            f"From {of.input_share_mild:.0%} to {of.input_share:.0%} the verdict",
            f"A run of fewer than {of.short_run_steps} steps, or of less than {of.short_run_s:g} s in steps",
            f"and ≥ {of.input_share:.0%} of the time passes between an optimizer step",
            f"≥ {of.input_share:.0%} of the time passes between forward passes",
            f"≥ {of.phase_share:.0%} of the time passes outside",
            f"≥ {of.phase_share:.0%} of the time, and ≥ {of.step_idle:.0%} of a step",
        ),
        "concepts/jobs.md": (f"the gain is below {of.checkpoint_gain:.0%}",),
        "concepts/ledger.md": (f"`held_idle` up to {of.gpu_idle_utilization:.0%} of that",),
        "guides/ddp.md": (
            f"by at least {of.straggler_share:.0%} of the step",
            f"differs from the estimate by {100 * of.mfu_gap:.0f} points or more",
        ),
    }
    texts = {page: " ".join((ROOT / "docs" / page).read_text().split()) for page in expected}
    assert [(page, each) for page, of_page in expected.items() for each in of_page if each not in texts[page]] == []
