"""Steps of a training whose loop takes its batches from no watched loader: each lasts from one optimizer step to the next.

The time from an optimizer step to the next forward pass is the step's wait: torch does nothing of the model in it. Forward passes without
gradients are an evaluation, or a rollout: the time between them, an environment's for example, is counted. Where no module is called, but functions
of tensors, all of a step computes. And the count of optimizer steps distinguishes training from a pass that only reads.
"""

import sys
import threading
from collections.abc import Callable
from threading import get_ident
from typing import Any, Literal

from gpuwatch.hook.recorder import MOST_TAKEN, Recorder
from gpuwatch.hook.torch.patches import Patches, remove_hooks
from gpuwatch.ledger.events import CLOSED, DATA_WAIT, LOOSE, TAKEN
from gpuwatch.ledger.states import EVAL, OTHER

_TEACHES, _OF_TEACHER = 5, 2
"""So many steps in a row begin with so few passes without gradients: those are no evaluation."""


class OptimizerSteps:
    """Called after each step of any of torch's optimizers, in whichever thread makes it."""

    def __init__(self, recorder: Recorder, begin: Callable[[], None]) -> None:
        """`begin` is called when a step bounded so begins to compute: not by the optimizer, whose hooks cannot be added to meanwhile."""
        self._recorder = recorder
        self._begin = begin
        self._hooks: list[Any] = []  # after each step of an optimizer; once no module was called, before each too
        self._bounded_by = 0  # the optimizer whose step began the open one
        self._pass_began: tuple[object, int] = (None, 0)  # the last pass over a loader; `count` before it
        self._evaluates = False  # whether its first step does not train
        self._recorded = 0  # how much autograd had recorded before that step, where no optimizer of torch's is known
        self._records = False  # whether it has recorded anything in the first step of any pass
        self._first_hooks: list[Any] = []  # while that is waited for
        self._forward_hooks: list[Any] = []  # while the next forward pass with gradients is waited for
        self._pass = 0  # the module whose pass without gradients is open
        self._bare = 0  # passes without gradients in this wait
        self._with_teacher = 0  # steps in a row that begin with a teacher's
        self._entered = (0, 0)  # when the evaluation that is open began, with the time between passes so far
        self._is_hidden = False  # a compiled function calls the model
        self._compiled: Any = None  # the class of compiled models, once it is prepared for hooks
        self._patches = Patches()
        self.on_compiler: Callable[[], None] = lambda: None  # called when it is there, before hooks are added
        self._owner = object()
        self._level = 0  # that of the evaluation that is open; 0 without one
        self.on_first: Callable[[], None] = lambda: None  # called when an optimizer makes its first step
        self.is_covered: Callable[[], bool] = lambda: False  # a Watch that was opened later has this thread's steps
        self.count = self._count_at_drop = 0
        self._has_failed = False

    def install(self) -> None:
        """Count from now on, once torch's optimizers are loaded."""
        if not self._hooks and (hook := at_each_optimizer_step(self.stepped)) is not None:
            self._hooks.append(hook)

    def remove(self) -> None:
        """Leave torch as it was."""
        remove_hooks(self._hooks)
        remove_hooks(self._first_hooks)
        self._leave_forward()
        self._patches.restore()

    def _leave_forward(self) -> bool:
        """Stop waiting for the next forward pass; return whether it was waited for."""
        self._recorder.end_gap(0)
        self._pass = 0
        return remove_hooks(self._forward_hooks)

    def end(self, now_ns: int) -> None:
        """The run ends. What followed the last optimizer step was no step."""
        if self._recorder.step_owner is self._owner:
            self._recorder.abandon(now_ns, OTHER)

    def give_way(self) -> None:
        """A pass over a loader begins: what followed the last optimizer step, a warm-up's for example, was no wait of a step."""
        recorder = self._recorder
        if recorder.step_owner is self._owner and recorder.thread == get_ident() and self._leave_forward():
            self.end(recorder.clock())

    def first_step(self, of_pass: object) -> None:
        """A pass has its first batch; `evaluates` can tell after its first step whether it is an evaluation."""
        remove_hooks(self._first_hooks)
        self._pass_began, self._evaluates, self._recorded = (of_pass, self.count), False, _recorded()
        if self.count and (modules := self._modules()) is not None:
            register = modules.register_module_forward_pre_hook
            self._first_hooks.append(register(lambda module, _: self._guarded(self._note_call, module)))

    def evaluates(self, of_pass: object) -> bool:
        """Whether the pass is an evaluation: its first step has called a module without training it, and made no step of an optimizer.

        Without an optimizer of torch's: autograd has recorded nothing in it, but has in the first step of an earlier pass.
        """
        if self._pass_began[0] is of_pass:
            remove_hooks(self._first_hooks)  # no module was called
            if not self.count:
                records = _recorded() > self._recorded
                self._evaluates, self._records = self._records and not records, self._records or records
        return self._evaluates and self._pass_began == (of_pass, self.count)

    def _note_call(self, module: Any) -> None:
        if self._recorder.thread == get_ident():
            remove_hooks(self._first_hooks)  # none stays while a compiled model runs
            self._evaluates = not (module.training and sys.modules["torch"].is_grad_enabled())

    @property
    def is_installed(self) -> bool:
        return bool(self._hooks)

    def feeds_one_batch(self) -> bool:
        """Note that a pass was dropped with its first batch; return whether the one before was too, and few steps were between them."""
        before, self._count_at_drop = self._count_at_drop, self.count
        return 0 < self.count - before <= MOST_TAKEN

    def stepped(self, optimizer: Any, *_: Any) -> None:
        """End the open step, if it is bounded by this, and begin the next one. (Torch passes its arguments too.)"""
        self._guarded(self._step, id(optimizer))

    def _guarded(self, call: Callable[..., None], *arguments: object) -> None:
        """Call it. After an error nothing is done any more: training goes on without."""
        if self._has_failed:
            return
        try:
            call(*arguments)
        except Exception as error:
            self._has_failed = True
            self._recorder.failed("bounding steps by the optimizer", error)

    def _step(self, optimizer: int) -> None:
        self.count += 1
        if self.count == 1:
            self.on_first()
        recorder, owner = self._recorder, self._recorder.step_owner
        is_of_another = owner not in (None, LOOSE, self._owner) and recorder.thread == get_ident()
        if is_of_another and (owner is not TAKEN or recorder.trained_taken()):
            return  # a step of a watched loop, or a declared one
        if self.is_covered():
            self.give_way()
            return
        is_bare = owner is self._owner and (self._is_hidden or bool(self._forward_hooks))  # no call was seen since
        if recorder.in_phase or recorder.thread == CLOSED or (is_bare and optimizer != self._bounded_by):
            return  # or one more optimizer of the same step
        is_pythons = get_ident() in getattr(threading, "_active", {})  # another one cannot claim the recorder
        if recorder.thread != get_ident() and not (is_pythons and recorder.claim_thread()):
            return
        now = recorder.clock()
        if is_bare:
            self._leave_forward()
            if recorder.activity is DATA_WAIT:  # the first such step: what of it was no wait is not known
                recorder.end_part(now)
                self.end(now)
            if len(self._hooks) == 1:
                self._hooks.append(at_each_optimizer_step(lambda *_: self._guarded(self._begin_bare), "pre"))
        recorder.end_step(now)
        recorder.begin_step(self._owner, now, by_optimizer=True)
        self._bounded_by = optimizer
        if not is_bare and not self._is_hidden:
            recorder.begin_part(DATA_WAIT, now)
        self._await_forward()

    def _modules(self) -> Any:
        """Return torch's functions that add hooks of modules; None where a compiled function calls the model: torch would compile it again with each."""
        compiled = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)
        if compiled is not self._compiled:
            self._compiled = compiled
            self.on_compiler()
            self._patches.wrap(compiled, "__call__", self._call_compiled)
        return None if self._is_hidden else sys.modules["torch.nn.modules.module"]

    def _await_forward(self) -> None:
        if (modules := self._modules()) is not None:
            self._forward_hooks = [
                modules.register_module_forward_pre_hook(lambda module, _: self._guarded(self._begin_forward, module)),
                modules.register_module_forward_hook(lambda module, *_: self._guarded(self._end_forward, module)),
            ]

    def _call_compiled(self, original: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a model that is compiled as a whole without hooks: torch warns of them, and would compile it again."""
        if self._recorder.thread != get_ident():
            return original(module, *args, **kwargs)
        for hooks, call in ((self._first_hooks, self._note_call), (self._forward_hooks, self._begin_forward)):
            if hooks:
                self._guarded(call, module)
        awaited = remove_hooks(self._forward_hooks)  # it is a pass without gradients
        try:
            return original(module, *args, **kwargs)
        finally:
            if awaited:
                self._guarded(self._end_forward, module)
                self._guarded(self._await_forward)

    def compiles(self) -> None:
        """Torch compiles a function: if that was to call a model, steps have no wait from now on, and passes are not known to be evaluations."""
        if self._recorder.thread == get_ident() and (self._forward_hooks or self._first_hooks):
            self._is_hidden = True
            remove_hooks(self._first_hooks)
            if self._forward_hooks:
                self._guarded(self._compute, self._recorder.clock())

    def _begin_forward(self, module: Any) -> None:
        """A forward pass begins: of training, which ends the wait, or of an evaluation or a rollout."""
        recorder = self._recorder
        trains = sys.modules["torch"].is_grad_enabled()
        is_inner = not trains and self._pass not in (0, id(module))  # of another module's pass
        if recorder.thread != get_ident() or is_inner or (recorder.in_phase and not self._level):
            return
        now = recorder.clock()
        recorder.end_gap(now)
        if not trains:
            if self._with_teacher < _TEACHES:
                self._pass = id(module)
                self._bare += 1
                if not self._level and recorder.step_owner is self._owner:
                    self._level = recorder.enter(EVAL, now)
                    self._entered = now, recorder.gaps_ns
                return
        elif self._level:  # a teacher's pass is a part of each step, and followed by the next one at once
            gaps_ns = recorder.gaps_ns - self._entered[1]
            teaches = self._bare <= _OF_TEACHER and 2 * gaps_ns < now - self._entered[0]
            self._with_teacher = self._with_teacher + 1 if teaches else 0
        else:
            self._with_teacher = 0
        self._compute(now)

    def _compute(self, now: int) -> None:
        """The open step computes from now on."""
        recorder, level = self._recorder, self._level
        self._bare = self._level = 0
        if level:
            recorder.exit(level, now)
        self._leave_forward()
        self._begin()
        if recorder.step_owner is self._owner and recorder.activity is DATA_WAIT:
            recorder.end_part(now)

    def _begin_bare(self) -> None:
        """An optimizer's step begins in a step in which no module was called."""
        recorder = self._recorder
        if recorder.step_owner is self._owner and recorder.thread == get_ident() and recorder.activity is not DATA_WAIT:
            self._begin()

    def _end_forward(self, module: Any) -> None:
        """A forward pass has ended: if it was of an evaluation or a rollout, the time until the next one is a gap."""
        if self._pass == id(module):
            self._pass = 0
            self._recorder.begin_gap(self._recorder.clock())


def _recorded() -> int:
    """Return a number that grows with each operation of this thread that autograd records; 0 where torch has none."""
    return int(getattr(sys.modules.get("torch.autograd"), "_get_sequence_nr", int)())


def at_each_optimizer_step(call: Callable[..., None], when: Literal["pre", "post"] = "post") -> Any | None:
    """Have this called before or after each step of any of torch's optimizers; return the hook's handle, None where torch has none loaded."""
    optimizer: Any = sys.modules.get("torch.optim.optimizer")
    register = getattr(optimizer, f"register_optimizer_step_{when}_hook", None)
    return None if register is None else register(call)
