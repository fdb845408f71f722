"""Lightning with gpuwatch: one callback. `python examples/train_lightning.py`"""

import tempfile

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from gpuwatch.integrations.lightning import GpuWatchCallback


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 1)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.layer(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


data = TensorDataset(torch.randn(512, 64))
trainer = pl.Trainer(
    max_epochs=2,
    accelerator="auto",
    devices=1,
    default_root_dir=tempfile.mkdtemp(),
    logger=False,
    enable_progress_bar=False,
    callbacks=[GpuWatchCallback(run="lightning example")],
)
trainer.fit(Model(), DataLoader(data, batch_size=16, shuffle=True), DataLoader(data, batch_size=64))
