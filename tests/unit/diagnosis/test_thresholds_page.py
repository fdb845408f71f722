"""docs/reference/thresholds.md is what the table says, and every number has its meaning."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

from gpuwatch.diagnosis.thresholds import Thresholds

ROOT = Path(__file__).parents[3]


def test_the_committed_page_is_fresh_and_lists_every_threshold() -> None:
    command = [sys.executable, str(ROOT / "scripts/thresholds_page.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout == (ROOT / "docs/reference/thresholds.md").read_text(), "run `make golden`"
    assert all(f"| `{each.name}` | {each.default!r} |" in done.stdout for each in fields(Thresholds))
