"""Where backward passes and optimizer steps begin and end: compute by section, on request.

`torch.autograd.backward`, which `Tensor.backward` calls, is replaced from the first step until the Watch is closed, and
optimizers have hooks. What is compiled as a whole, or replayed as a graph, calls neither: it is not measured. An
optimizer that steps inside a backward pass is a part of it.
"""

import sys
from collections.abc import Callable
from threading import get_ident
from typing import Any

from gpuwatch.hook.recorder import METERED, Recorder
from gpuwatch.hook.torch.device_events import device_in_use
from gpuwatch.hook.torch.patches import GlobalHook, Patches
from gpuwatch.ledger.events import IN_STEP, SECTION
from gpuwatch.ledger.states import BACKWARD, FORWARD, OPTIMIZER


class Breakdown:
    """Marks the sections of one recorder's steps, in its training thread, if it is `on`."""

    def __init__(self, recorder: Recorder, on: bool) -> None:
        self._recorder, self.on = recorder, on
        self._patches = Patches()
        self._begin = GlobalHook("optimizer_step_pre", self._optimizer_begins)
        self._end = GlobalHook("optimizer_step_post", self._optimizer_ends)
        self._in_backward = False
        self._optimizer = 0, 0  # the outermost one that steps, and when the piece of a step began in which it does

    def install(self) -> None:
        """Mark from now on, once torch is loaded. Call it before adding hooks that end a step after an optimizer's."""
        if self.on and not self._begin.is_on and self._begin.can_be_added:
            self._begin.add()
            self._end.add()
            self._patches.wrap(sys.modules["torch"].autograd, "backward", self._backward)

    def remove(self) -> None:
        """Leave torch as it was."""
        self._begin.remove()
        self._end.remove()
        self._patches.restore()

    def _backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        recorder, loss = self._recorder, args[0] if args else None
        own, torch = not self._in_backward and recorder.thread == get_ident(), sys.modules["torch"]
        if not (own and (recorder.timeline or (getattr(loss, "is_cpu", True) and not device_in_use(torch)))):
            return original(*args, **kwargs)  # that of a checkpoint inside a backward pass, for example
        try:
            self._in_backward = True
            self._enter(BACKWARD)
            return original(*args, **kwargs)
        finally:
            self._in_backward = False
            self._enter(OPTIMIZER if self._optimizer[1] == recorder.begin_ns else FORWARD)

    def _optimizer_begins(self, optimizer: Any, *_: Any) -> None:
        (which, since_ns), recorder = self._optimizer, self._recorder
        is_inside = self._in_backward or (since_ns == recorder.begin_ns and which != id(optimizer))
        if recorder.thread == get_ident() and not is_inside:
            self._optimizer = id(optimizer), recorder.begin_ns
            self._enter(OPTIMIZER)

    def _optimizer_ends(self, optimizer: Any, *_: Any) -> None:
        if self._recorder.thread == get_ident() and self._optimizer == (id(optimizer), self._recorder.begin_ns):
            self._optimizer = 0, 0
            self._enter(FORWARD)

    def _enter(self, section: str) -> None:
        """Note that a section of the open step begins; on a device by its events, as the host only launches work."""
        recorder = self._recorder
        if recorder.thread != get_ident() or recorder.doing() is not IN_STEP:
            return
        now, timeline = recorder.clock(), recorder.active_timeline
        if timeline is not None:
            timeline.mark(section)
        elif recorder.timeline is None:
            recorder.log.append((SECTION, section, now))
        if now % METERED == 0:
            recorder.meter.launched(recorder.clock() - now, METERED)
