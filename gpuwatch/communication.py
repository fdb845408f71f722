"""How long training waits for the other ranks' gradients: watched on request, for DistributedDataParallel on the CPU.

A rank that is done with its backward pass waits until all ranks' gradients are reduced. DDP does that waiting in a callback of the
autograd engine; two callbacks of our own, around it, read the clock. What DDP reduces while the backward pass still computes is
hidden by it and costs nothing, and is not in the time between the two. Nothing of the communication itself is replaced.
"""

from __future__ import annotations

import logging
import sys
from itertools import islice
from threading import get_ident
from typing import Any

from gpuwatch.batches import tensors
from gpuwatch.entries import COMM, IN_STEP
from gpuwatch.recorder import Recorder

logger = logging.getLogger(__name__)

_OUTPUTS = 16
"""Tensors of a model's output that are looked at: the loss comes from one of them."""


class CommunicationWatch:
    """The watched models of one recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._handles: list[Any] = []
        self._begin_ns = 0
        self._pending = False

    def watch(self, model: Any) -> None:
        """Time the waits of a model's backward passes from its next forward pass on."""
        parallel = sys.modules.get("torch.nn.parallel")
        if parallel is None or not isinstance(model, parallel.DistributedDataParallel):
            logger.warning(
                "gpuwatch: comm_wait is not measured: %s is no DistributedDataParallel", type(model).__name__
            )
        elif any(parameter.device.type != "cpu" for parameter in model.parameters()):
            logger.warning(
                "gpuwatch: comm_wait is not measured on a device: there it is the stream that waits, not the host; it stays in compute"
            )
        else:
            self._handles.append(model.register_forward_hook(self._forward))

    def remove(self) -> None:
        """Take the hooks back."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()

    def _forward(self, module: Any, inputs: Any, output: Any) -> None:
        self._pending = False  # a backward pass that has failed says nothing of the next one
        if self._trains():
            for tensor in islice(tensors(output), _OUTPUTS):
                if tensor.requires_grad:
                    tensor.register_hook(self._backward)

    def _backward(self, gradient: Any) -> None:
        """The backward pass begins. DDP queues its wait later in it, so that `_computed` comes before that."""
        if not self._pending and self._trains():
            self._pending = True
            _engine().queue_callback(self._computed)

    def _computed(self) -> None:
        self._begin_ns = self._recorder.clock()
        _engine().queue_callback(self._reduced)

    def _reduced(self) -> None:
        self._pending = False
        if self._trains() and self._begin_ns >= self._recorder.begin_ns:
            self._recorder.log.append((COMM, self._begin_ns, self._recorder.clock()))

    def _trains(self) -> bool:
        """Whether the training thread is in a step's own work, so that what it waits for is a part of that."""
        recorder = self._recorder
        return recorder.doing() is IN_STEP and recorder.thread == get_ident() and recorder.device is None


def _engine() -> Any:
    return sys.modules["torch"].autograd.Variable._execution_engine
