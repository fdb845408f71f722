"""Ignite with gpuwatch: attach to the trainer. `python examples/train_ignite.py`"""

import torch
from ignite.engine import Engine, Events
from torch.utils.data import DataLoader, TensorDataset

from gpuwatch.integrations.ignite import GpuWatchHandler

model = torch.nn.Linear(64, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(torch.randn(512, 64)), batch_size=16, shuffle=True)


def update(engine: Engine, batch: list[torch.Tensor]) -> float:
    optimizer.zero_grad()
    loss = model(batch[0]).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def infer(engine: Engine, batch: list[torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return model(batch[0])


trainer, evaluator = Engine(update), Engine(infer)
trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run(loader))
GpuWatchHandler(run="ignite example").attach(trainer)
trainer.run(loader, max_epochs=2)
