"""Hooks in torch while a training is watched, all removed again: device times, copies, compilations, checkpoints."""

import os
import sys
from collections.abc import Callable
from functools import partial
from threading import current_thread, get_ident, main_thread
from typing import Any

from gpuwatch.hook.identity import asynchronous_framework, torch_steps
from gpuwatch.hook.recorder import Recorder
from gpuwatch.hook.torch.breakdown import Breakdown
from gpuwatch.hook.torch.communication import CommunicationWatch
from gpuwatch.hook.torch.compile import CompileWatch
from gpuwatch.hook.torch.device_events import torch_events
from gpuwatch.hook.torch.evaluations import Evaluations
from gpuwatch.hook.torch.memory import SNAPSHOT
from gpuwatch.hook.torch.optimizer_steps import OptimizerSteps
from gpuwatch.hook.torch.patches import GlobalHook, Patches
from gpuwatch.hook.torch.stream_waits import StreamWaits
from gpuwatch.hook.torch.transfers import READS, TransferWatch
from gpuwatch.ledger.device_pieces import Events
from gpuwatch.ledger.device_timeline import DeviceTimeline
from gpuwatch.ledger.events import BETWEEN, IN_STEP, STARTUP
from gpuwatch.ledger.states import CHECKPOINT, CHECKPOINT_LOAD, RENDEZVOUS

_DCP = "torch.distributed.checkpoint"
PHASES: dict[str, tuple[str, dict[str, str]]] = {
    "torch.serialization": ("torch", {"save": CHECKPOINT, "load": CHECKPOINT_LOAD}),
    f"{_DCP}.state_dict_saver": (_DCP, {"save": CHECKPOINT, "async_save": CHECKPOINT}),
    f"{_DCP}.state_dict_loader": (_DCP, {"load": CHECKPOINT_LOAD}),
    "safetensors.torch": ("safetensors.torch", {"save_file": CHECKPOINT, "load_file": CHECKPOINT_LOAD}),
    "accelerate.utils.other": ("accelerate.utils.other", {"safe_save_file": CHECKPOINT}),
    "transformers.modeling_utils": ("transformers.modeling_utils", {"safe_save_file": CHECKPOINT}),
    "torch.distributed.distributed_c10d": ("torch.distributed", {"init_process_group": RENDEZVOUS}),
}
"""By module: the package that has its functions by the same names, and the phase that each of these is."""


class PhaseWatch:
    """Books saves, loads and the initial wait for other ranks in the training thread as phases, while a run is open."""

    def __init__(self, recorder: Recorder, in_evaluation: Callable[[], bool]) -> None:
        self._recorder, self._in_evaluation = recorder, in_evaluation
        self._patches = Patches()
        self._wrapped: set[str] = set()

    def install(self) -> None:
        """Wrap the functions of those modules that are imported by now."""
        for name, (package, functions) in PHASES.items():
            module = sys.modules.get(name)
            if module is not None and package in sys.modules and name not in self._wrapped:
                self._wrapped.add(name)
                for function, phase in functions.items():
                    if hasattr(module, function):
                        self._patches.wrap(module, function, partial(self._timed, phase), sys.modules[package])

    def remove(self) -> None:
        self._patches.restore()

    def _timed(self, phase: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        recorder = self._recorder
        # A data set may load its samples so: in a fetch it is a part of that. So is what happens in a declared phase.
        is_between = phase == CHECKPOINT and (recorder.in_bounded_wait() or self._in_evaluation())
        if not is_between and recorder.doing() not in (IN_STEP, BETWEEN, STARTUP):
            return original(*args, **kwargs)
        if recorder.thread is None and current_thread() is main_thread():  # before the first pass or step
            recorder.claim_thread(steps=False)
        if recorder.thread != get_ident():
            return original(*args, **kwargs)
        level = recorder.enter(phase, recorder.clock())
        try:
            return original(*args, **kwargs)
        finally:
            if recorder.thread == get_ident():
                recorder.exit(level, recorder.clock())


class TorchHooks:
    """The hooks of one recorder. Nothing of torch is imported for them, and no device is set up."""

    def __init__(self, recorder: Recorder, device_events: bool, transfers: bool, breakdown: bool = False) -> None:
        self._recorder = recorder
        self._device_events = device_events
        self._transfers = TransferWatch(recorder) if transfers else None
        self._compiling = CompileWatch(recorder)
        self._launches = GlobalHook("optimizer_step_post", recorder.launched)
        # notes torch's steps where another framework computes too
        self._torch_steps = GlobalHook("optimizer_step_post", lambda *_: setattr(torch_steps, "seen", True))
        self._bounded = False
        self.optimizer = OptimizerSteps(recorder, self._begin_optimizer_step)
        self.evaluations = Evaluations(recorder, self.optimizer)
        self.optimizer.on_compiler = self._compiling.install
        self.communication = CommunicationWatch(recorder)
        self._streams = StreamWaits(recorder)
        self._breakdown = Breakdown(recorder, breakdown)
        self.phases = PhaseWatch(recorder, lambda: 0 < self.optimizer.level == recorder.level)
        self._for_all_steps = self._compiling, self.phases, self._breakdown, self.evaluations
        self._accelerate: Patches | None = None
        self.on_first: Callable[[], None] = lambda: None  # called when the first step begins that an optimizer bounds
        self.on_step: Callable[[], None] = lambda: None  # called before each such step

    def make_loader(self, prepare: Callable[[], Patches]) -> None:
        """A loader is watched, and may be given to Accelerate before its first pass: `prepare` patches that."""
        if self._accelerate is None and "accelerate.accelerator" in sys.modules:
            self._accelerate = prepare()

    def begin_loop(self) -> None:
        """A pass over a loader begins: time copies and compilations while it runs."""
        self._leave_accelerate()
        if self._transfers is not None:
            self._transfers.install()
        self._install()
        self.optimizer.install()

    def _install(self) -> None:
        for each in self._for_all_steps:
            each.install()

    def _begin_optimizer_step(self) -> None:
        """A step that an optimizer bounds begins to compute: as `begin_loop`, once, and `find_device`."""
        if not self._bounded:
            self._bounded = True
            self.begin_loop()
            self.on_first()
        self.find_device()
        self.on_step()

    def begin_step(self) -> None:
        """A step without a loader begins: its copies are declared, so that nothing is put in place of torch's own."""
        self._install()
        self.find_device()

    def end_loop(self) -> None:
        """The pass is over."""
        self.optimizer.wake()
        if self._transfers is not None:
            self._transfers.remove()

    def find_device(self) -> None:
        """Measure by the device once the user's code has set one up, and by another one if the training moved there."""
        recorder, torch = self._recorder, sys.modules.get("torch")
        timeline, framework = recorder.timeline, asynchronous_framework()
        if framework is not None:
            self._torch_steps.add()
        if not self._device_events or recorder.device_failed or not (timeline is None or timeline.is_astray):
            return
        # A torch that only pins another framework's batches sets CUDA up too, and allocates nothing on it.
        is_used = torch is not None and (framework is None or torch.cuda.memory_allocated() > 0 or torch_steps.seen)
        events = torch_events(torch) if is_used else None
        if events is not None:
            self.attach(events)

    def attach(self, events: Events) -> None:
        """Measure by these events from the next batch on."""
        if os.environ.get(SNAPSHOT) and getattr(events, "kind", None) == "cuda":
            try:
                sys.modules["torch"].cuda.memory._record_memory_history(max_entries=100_000)
            except Exception as error:  # not every allocator can
                self._recorder.failed("recording live allocations", error)
        timeline = DeviceTimeline(events)
        self.communication.measure_by(timeline)
        timeline.divides = self._breakdown.on
        self._recorder.adopt_device(timeline)
        self._streams.install(getattr(events, "kind", None))
        if self._transfers is not None:
            self._transfers.also(READS)
        self._launches.add()

    def remove_all(self, in_training_thread: bool) -> None:
        """Remove every hook. The device is polled a last time in the training thread only."""
        self.remove_from_torch()
        self._recorder.release_device(self._recorder.clock() if in_training_thread else None)

    def remove_from_torch(self) -> None:
        """Leave torch as it was. No device is touched, so that a forked child may call this too."""
        self._leave_accelerate()
        if self._transfers is not None:
            self._transfers.remove_all()
        hooked = *self._for_all_steps, self.optimizer, self.communication, self._streams
        for each in (*hooked, self._launches, self._torch_steps):
            each.remove()

    def _leave_accelerate(self) -> None:
        patches, self._accelerate = self._accelerate, None
        if patches is not None:
            patches.restore()
