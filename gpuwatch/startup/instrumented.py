"""What `gpuwatch run` instruments in a script, by module. Imports only `os`: every Python that it starts reads it."""

import os

FRAMEWORKS = {
    "transformers.trainer": ("transformers", "Trainer.train"),
    "lightning.pytorch.trainer.trainer": ("lightning", "Trainer.fit"),
    "pytorch_lightning.trainer.trainer": ("lightning", "Trainer.fit"),
    "ignite.engine.engine": ("ignite", "Engine.run"),
}
"""Module → the file of gpuwatch/integrations whose `unchanged` replaces a method that trains, and that method."""

MODULES = {
    "torch.utils.data.dataloader": "watch_loaders",
    "torch.optim.optimizer": "watch_optimizers",
    "torch.serialization": "watch_set_up",
    "torch.distributed.checkpoint.state_dict_loader": "watch_set_up",
    "torch.distributed.distributed_c10d": "watch_set_up",
    "torchdata.stateful_dataloader.stateful_dataloader": "watch_loaders",
    "accelerate.data_loader": "watch_loaders",
    **dict.fromkeys(FRAMEWORKS, "watch_framework"),
}
"""Module → the function of gpuwatch/integrations/instrument.py that is called with it once it is imported."""


def is_on(switch: str) -> bool:
    """Whether an environment variable that is a switch has a value other than 0, false or no."""
    return switch.strip().lower() not in ("", "0", "false", "no")


def notes() -> str:
    """Return the file in which a process that has printed a verdict notes which ones have started it. Raises: OSError.

    `os.devnull` without one. What has a link is a file or a pipe of the program, which may use this descriptor itself.
    """
    path = os.environ.get("GPUWATCH_AUTO_NOTES", os.devnull)
    return os.devnull if os.stat(path).st_nlink else path  # noqa: PTH116  pathlib would be imported for this alone
