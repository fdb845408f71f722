"""Torch's compiler, first imported by a `torch.compile` in a watched loop, learns torch's own functions, not ours."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("torch")

PROGRAM = """
import sys, torch
from gpuwatch import Watch

class Recording(torch.Tensor):
    pass

watch = Watch(quiet=True, endpoint="ipc:///no/listener/here.sock")
for turn in range(2):
    for index, batch in enumerate(watch.steps([torch.ones(2)] * 3)):
        if turn == index == 0:
            assert "torch._dynamo.callback" not in sys.modules
            functions = [lambda x: x.to(torch.float64) * 2, lambda x: torch.Tensor.to(x, torch.float64) * 3]
            compiled = [torch.compile(call, fullgraph=True, backend="eager") for call in functions]
        for call in compiled:
            call(batch), call(batch.as_subclass(Recording))
        assert "to" in torch.Tensor.__dict__
states = watch.report().states
watch.close()
from torch._dynamo.utils import counters
print(counters["stats"]["unique_graphs"], states["compile"] > 0, "to" in torch.Tensor.__dict__)
"""


def test_what_is_compiled_after_a_late_import_is_traced_whole() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["4", "True", "False"], done.stderr[-3000:]
