"""The generated pages of docs/reference are what the code gives: the metrics, the commands."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.programs import ROOT


@pytest.mark.parametrize("page", ["metrics", "commands"])
def test_the_committed_page_is_fresh(page: str) -> None:
    command = [sys.executable, str(ROOT / f"scripts/{page}_page.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout == (ROOT / f"docs/reference/{page}.md").read_text(), "run `make golden`"
