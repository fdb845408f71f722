"""docs/reference/metrics.md is what the catalogue says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_committed_page_is_fresh() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/metrics_page.py")], capture_output=True, text=True, check=True, timeout=30
    )
    assert done.stdout == (ROOT / "docs/reference/metrics.md").read_text(), "run `make golden`"
