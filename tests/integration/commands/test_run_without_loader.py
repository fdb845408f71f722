"""`gpuwatch run` on programs that iterate no DataLoader: something is always printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TRAINING = """
import time, torch
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
def get_batch():
    time.sleep(0.03)
    return torch.randn(8, 64)
for step in range(60):
    loss = model(get_batch()).square().mean()
    until = time.perf_counter() + 0.01
    while time.perf_counter() < until: pass
    loss.backward(); optimizer.step(); optimizer.zero_grad()
"""


def printed(program: str, tmp_path: Path) -> str:
    (tmp_path / "train.py").write_text(program)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GPUWATCH_ENDPOINT": f"ipc://{tmp_path}/none.sock"}
    done = subprocess.run(
        [sys.executable, "-m", "gpuwatch", "run", "--", sys.executable, "train.py"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return " ".join(done.stderr.split())


def test_a_loop_without_a_loader_has_a_verdict(tmp_path: Path) -> None:
    text = printed(TRAINING, tmp_path)
    assert "59 steps" in text and "no training step was seen" not in text
    share = re.search(r"(\d+)% of the time was spent between an optimizer step and the next forward pass", text)
    assert share and 55 <= int(share[1]) <= 85, text
    assert re.search(r"of it is in get_batch \(train.py:6\)", text), text


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import torch", "no DataLoader was iterated in the main thread, and no torch optimizer"),
        ("pass", "has not imported torch"),
    ],
)
def test_without_a_step_one_line_says_why(program: str, reason: str, tmp_path: Path) -> None:
    text = printed(program, tmp_path)
    assert text.count("gpuwatch: no training step was seen") == 1 and reason in text
