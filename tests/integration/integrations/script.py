"""A training script that is not watched: `python script.py LOOP DIRECTORY`.

LOOP is one of this file or a framework's in loops.py. It prints the truth as JSON on stdout.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from tests.integration.integrations import workload as w  # noqa: E402


def plain(truth: w.Truth, directory: Path, prepare: Any = None) -> None:
    model, loader = w.Model(truth), w.train_loader(truth)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    evaluation = w.eval_loader(truth)
    if prepare is not None:
        model, optimizer, loader, evaluation = prepare(model, optimizer, loader, evaluation)
    for _ in range(w.EPOCHS):
        for batch in loader:
            optimizer.zero_grad()
            model(**batch)["loss"].backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            for batch in evaluation:
                model(**batch)
        model.train()


def accelerate(truth: w.Truth, directory: Path) -> None:
    from accelerate import Accelerator

    plain(truth, directory, Accelerator(cpu=True).prepare)


def workers(truth: w.Truth, directory: Path) -> None:
    """Samples are made in a process that iterates a loader of its own for every sample."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for batch in torch.utils.data.DataLoader(Nested(), batch_size=2, num_workers=1, multiprocessing_context="spawn"):
        model(batch).sum().backward()
        optimizer.step()


class Nested(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return next(iter(torch.utils.data.DataLoader([torch.ones(1)]))).reshape(1)


def watched(truth: w.Truth, directory: Path) -> None:
    """A script that has the one line already."""
    import gpuwatch

    plain(truth, directory, lambda *objects: [*objects[:2], gpuwatch.watch(objects[2]), objects[3]])


if __name__ == "__main__":
    w.warm_up()
    measured, begin = w.Truth(), time.perf_counter()
    if sys.argv[1] in globals():
        globals()[sys.argv[1]](measured, Path(sys.argv[2]))
    else:
        from tests.integration.integrations.loops import LOOPS

        assert sys.argv[1] in LOOPS, "add the workload in that framework to `LOOPS` in loops.py"
        LOOPS[sys.argv[1]](measured, None, Path(sys.argv[2]))
    print(json.dumps({**measured.spent_s, "wall": time.perf_counter() - begin}), flush=True)
