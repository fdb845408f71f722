"""Accelerate with gpuwatch: prepare, then watch. `python examples/train_accelerate.py`"""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import gpuwatch
from gpuwatch.integrations.accelerate import watch

accelerator = Accelerator()
model = torch.nn.Linear(64, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(torch.randn(512, 64)), batch_size=16, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

with gpuwatch.Watch(run="accelerate example") as run:
    for _ in range(2):
        for (batch,) in watch(loader):
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        with run.phase("eval"), torch.no_grad():
            for (batch,) in loader:
                model(batch)
