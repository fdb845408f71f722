"""Compute by section in real time: unmodified programs under `gpuwatch run`, Lightning, torch's compiler and device."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import gpuwatch  # noqa: E402
from benchmarks import async_device  # noqa: E402
from tests.programs import ROOT  # noqa: E402
from tests.servers import require  # noqa: E402

pytestmark = pytest.mark.alone

SLOW = """
import time, torch

class Takes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        time.sleep(0.06)
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        time.sleep(0.1)
        return gradient

class Slow(torch.optim.SGD):
    def step(self, closure=None):
        loss = None if closure is None else closure()
        time.sleep(0.04)
        super().step()
        return loss
"""

WITHOUT_A_LOADER = """
model = torch.nn.Linear(4, 1)
optimizer = Slow(model.parameters(), 0.1)
for step in range(16):
    Takes.apply(model(torch.ones(2, 4))).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

WITH_A_LOADER_AND_ACCUMULATION = """
model = torch.nn.Linear(4, 1)
optimizer = Slow(model.parameters(), 0.1)
for number, batch in enumerate(torch.utils.data.DataLoader(torch.ones(32, 4), batch_size=2)):
    Takes.apply(model(batch)).sum().backward()
    if number % 2:
        optimizer.step()
        optimizer.zero_grad()
"""

LIGHTNING = """
import lightning.pytorch as pl

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = torch.nn.Linear(4, 1)
    def training_step(self, batch, index):
        return Takes.apply(self.model(batch)).sum()
    def configure_optimizers(self):
        return Slow(self.parameters(), 0.1)

trainer = pl.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False)
trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(32, 4), batch_size=2))
"""


def shares(text: str) -> tuple[float, ...]:
    """Return the per cent of forward, backward and optimizer that the verdict has."""
    found = re.search(r"in compute: forward and the rest ([\d.]+)%, backward ([\d.]+)%, optimizer ([\d.]+)%", text)
    assert found, text
    return tuple(float(share) for share in found.groups())


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        pytest.param(WITHOUT_A_LOADER, (30, 50, 20), id="no loader"),
        pytest.param(WITH_A_LOADER_AND_ACCUMULATION, (33.3, 55.6, 11.1), id="a loader, accumulated gradients"),
        pytest.param(LIGHTNING, (30, 50, 20), id="lightning"),
    ],
)
def test_the_shares_of_an_unmodified_program(program: str, expected: tuple[float, ...], tmp_path: Path) -> None:
    if program is LIGHTNING:
        pytest.importorskip("lightning.pytorch")
    (tmp_path / "train.py").write_text(SLOW + program)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GPUWATCH_ENDPOINT": f"ipc://{tmp_path}/none.sock"}
    done = subprocess.run(
        [sys.executable, "-m", "gpuwatch", "run", "--breakdown", "--", sys.executable, "train.py"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert shares(done.stderr) == pytest.approx(expected, abs=2)


@pytest.mark.filterwarnings("ignore")  # dynamo reads `.grad` of a loss
def test_what_is_compiled_has_as_many_graphs_as_without() -> None:
    """A function with a backward pass and an optimizer's step in it, and a model."""
    from torch._dynamo.testing import CompileCounter

    def trained(breakdown: bool) -> tuple[int, int, int]:
        torch._dynamo.reset()
        counter, of_optimizer, of_step = CompileCounter(), CompileCounter(), CompileCounter()
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        compiled = torch.compile(model, backend=counter)
        update = torch.compile(optimizer.step, backend=of_optimizer)

        def step(batch: Any) -> Any:
            loss = model(batch).sum()
            loss.backward()
            return loss

        whole = torch.compile(step, backend=of_step)
        with gpuwatch.Watch(quiet=True, breakdown=breakdown) as watch:
            for batch in watch.steps([torch.ones(2, 4)] * 6):
                optimizer.zero_grad()
                compiled(batch).sum().backward()
                update()
                whole(batch)
        return counter.frame_count, of_optimizer.frame_count, of_step.frame_count

    assert trained(True) == trained(False)


ON_A_DEVICE = """
import time, torch, gpuwatch
from benchmarks import async_device
async_device.load()
launch = async_device.launch

class Launches(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        launch(0.012)
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        launch(0.020)
        return gradient

class Slow(torch.optim.SGD):
    def step(self, closure=None):
        launch(0.008)
        super().step()

weight = torch.nn.Parameter(torch.ones(8, device=async_device.NAME))
optimizer = Slow([weight], 0.1)
with gpuwatch.Watch(budget=1.0, breakdown=True, quiet=True) as watch:
    for _ in watch.steps(range(50)):
        Launches.apply(weight * 2).sum().backward()
        optimizer.step()
        time.sleep(0.002)
    torch.accelerator.synchronize()
    watch._recorder.poll(watch._recorder.clock())
    report = watch.report()
    assert report.timeline == "device"
    print(report)
"""


def test_the_shares_of_a_device_that_runs_behind_the_host() -> None:
    """The host launches each section within a millisecond.

    It runs in its own process: autograd's engine asks for devices only once.
    """
    require(*async_device.COMPILERS)
    async_device.build()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", ON_A_DEVICE], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert shares(done.stdout) == pytest.approx((30, 50, 20), abs=2)
