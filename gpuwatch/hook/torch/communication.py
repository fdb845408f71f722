"""How long training waits for other ranks, measured on request for DistributedDataParallel and, on a device, FSDP. And
which collectives a rank has issued, where it makes no progress.

DDP waits until all gradients are reduced in a callback of the autograd engine: two callbacks of ours around it read the
clock on the CPU, or record events on a device, whose stream waits. What is reduced during the backward pass is not
between the two. FSDP makes the stream wait for each collective by `Stream.wait_event`, which `stream_waits` times.
"""

import json
import logging
import sys
from contextlib import ExitStack, nullcontext
from functools import partial
from itertools import islice
from threading import get_ident
from typing import Any
from weakref import WeakSet

from gpuwatch.hook.batches import tensors
from gpuwatch.hook.recorder import Recorder
from gpuwatch.ledger.device_timeline import DeviceTimeline
from gpuwatch.ledger.events import COMM, IN_STEP
from gpuwatch.wire import MAX_GROUPS, Collective

logger = logging.getLogger(__name__)

_OUTPUTS = 16  # tensors of a model's output that get a hook: the loss comes from one of them
_LONGEST = 64  # characters of a group's or an operation's name
_FLIGHT_RECORDERS = "_dump_fr_trace_json", "_dump_nccl_trace_json"  # of all backends but NCCL, and of NCCL


class _Hook(partial[None]):
    """A watched model's: in a copy or a pickle of the model it does nothing, and needs no gpuwatch."""

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")  # of three arguments, as a hook


class CommunicationWatch:
    """The watched models of one recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._watched: WeakSet[Any] = WeakSet()
        self._hooks = ExitStack()  # removes them
        self._begin: Any = None  # when the wait began, or what the device's timeline wants back at its end
        self._pending = False
        self._on_device = False  # the backward pass that comes runs on a device
        self._devices = False  # a watched model is on a device

    def watch(self, model: Any) -> None:
        """Time the waits of a model's steps from the next one on."""
        if model in self._watched:
            return
        is_ddp = _is_ddp(model)
        kinds = {parameter.device.type for parameter in model.parameters()} if is_parallel(model) else set()
        if not kinds or (kinds == {"cpu"} and not is_ddp):
            reason = "FSDP is measured on a device only" if kinds else f"{type(model).__name__} is not DDP or FSDP"
            logger.warning("gpuwatch: comm_wait is not measured: %s", reason)
            return
        self._watched.add(model)
        if is_ddp:
            self._hooks.callback(model.register_forward_hook(_Hook(self._forward)).remove)
        self._devices |= kinds != {"cpu"}
        if self._recorder.timeline is not None:
            self.measure_by(self._recorder.timeline)

    def measure_by(self, timeline: DeviceTimeline) -> None:
        """Have a device's timeline time the waits of the models that are on a device."""
        timeline.watches_ranks |= self._devices

    def remove(self) -> None:
        """Take back hooks."""
        self._hooks.close()

    def _forward(self, module: Any, inputs: Any, output: Any) -> None:
        self._pending = False  # a backward pass that has failed says nothing of the next one
        self._on_device = module.device_type != "cpu"
        waits = module.require_backward_grad_sync or not self._on_device
        if waits and self._trains() and self._recorder.thread == get_ident():
            # As they are in transformers' ModelOutput too, whose own `__getitem__` `tensors` does not call.
            output = tuple(dict.values(output)) if isinstance(output, dict) else output
            for tensor in islice(tensors(output), _OUTPUTS):
                # A leaf is a parameter, which would keep the hook of each step.
                if getattr(tensor, "requires_grad", False) and not tensor.is_leaf:
                    tensor.register_hook(self._backward)

    def _backward(self, gradient: Any) -> None:
        """The backward pass begins. DDP queues its wait later in it, so that `_computed` comes before that."""
        if not self._pending and self._trains():
            self._pending = True
            _engine().queue_callback(self._computed)

    def _computed(self) -> None:
        recorder = self._recorder
        if not self._on_device:
            self._begin = recorder.clock()
        else:  # the streams of the backward pass have joined the current one by now
            self._begin = None if recorder.active_timeline is None else recorder.active_timeline.wait_begins()
        _engine().queue_callback(self._reduced)

    def _reduced(self) -> None:
        self._pending = False
        begin, self._begin = self._begin, None
        if begin is None or not self._trains():
            return
        recorder = self._recorder
        if self._on_device:
            if recorder.active_timeline is not None:
                recorder.active_timeline.wait_ends(begin)
        elif begin >= recorder.begin_ns:
            recorder.log.append((COMM, begin, recorder.clock()))

    def _trains(self) -> bool:
        """Whether a step's own work runs: on a device maybe in autograd's threads, while the training thread waits."""
        recorder = self._recorder
        if recorder.doing() is not IN_STEP:
            return False
        if self._on_device:
            return recorder.active_timeline is not None
        return recorder.active_timeline is None and recorder.thread == get_ident()


def _engine() -> Any:
    return sys.modules["torch"].autograd.Variable._execution_engine


def _classes(module: str, *names: str) -> tuple[type, ...]:
    """Return those of a module's classes that there are; none while it is not imported."""
    return tuple(found for name in names if (found := getattr(sys.modules.get(module), name, None)) is not None)


def _is_ddp(model: Any) -> bool:
    return isinstance(model, _classes("torch.nn.parallel", "DistributedDataParallel"))


def is_parallel(model: Any) -> bool:
    """Whether ranks wait for each other in a model's steps: by DDP, or by FSDP in the model or a part of it."""
    sharded = _classes("torch.distributed.fsdp", "FSDPModule", "FullyShardedDataParallel")
    return _is_ddp(model) or any(isinstance(part, sharded) for part in getattr(model, "modules", tuple)())


def last_collectives() -> tuple[Collective, ...]:
    """Return the last collective this process issued in each process group, by torch's flight recorder; () without one.

    Any thread may ask, also while the training thread is in one. Devices are asked only whether an event was reached.
    """
    torch = sys.modules.get("torch")
    bindings = getattr(getattr(torch, "_C", None), "_distributed_c10d", None)
    last: dict[str, dict[str, Any]] = {}
    for dump in filter(None, (getattr(bindings, name, None) for name in _FLIGHT_RECORDERS)):
        for entry in json.loads(dump(True, False)).get("entries", ()):
            if not entry["is_p2p"]:
                last[entry["process_group"][0]] = entry  # the oldest comes first
    found = [
        Collective(
            group=" ".join(filter(None, (entry["process_group"][1], group)))[:_LONGEST],
            number=entry["collective_seq_id"],
            operation=entry["profiling_name"].rpartition(":")[2][:_LONGEST],
            pending=not entry["retired"] and entry["state"] != "completed",
            of_all_ranks=entry["process_group"][1] == "default_pg",
        )
        for group, entry in last.items()
    ]
    return tuple(sorted(found, key=lambda each: not each.pending)[:MAX_GROUPS])
