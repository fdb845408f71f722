"""A training that knows nothing of gpuwatch. `gpuwatch run -- python examples/train_unchanged.py`"""

import torch
from torch.utils.data import DataLoader, TensorDataset

model = torch.nn.Linear(64, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(torch.randn(512, 64)), batch_size=16, shuffle=True)

for _ in range(2):
    for (batch,) in loader:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
