"""Steps of a training whose batches come from no watched loader: each lasts from one optimizer step to the next.

The time from an optimizer step to the next forward pass is the step's wait: torch does nothing of the model in it.
Forward passes without gradients are an evaluation or a rollout: time between them (an environment's, say) is counted.
Where only functions of tensors are called, no module, all of a step computes, or all from its first copy to the device.
The count of optimizer steps distinguishes training from a pass that only reads.
"""

import sys
from collections.abc import Callable
from functools import partial
from itertools import islice
from threading import get_ident
from types import FrameType, SimpleNamespace
from typing import Any
from weakref import WeakSet, ref

from gpuwatch.errors import pass_on
from gpuwatch.hook.metering import FetchEvidence
from gpuwatch.hook.recorder import METERED, MOST_TAKEN, Recorder, is_autograds
from gpuwatch.hook.torch.patches import GlobalHook, Patches
from gpuwatch.ledger.events import CLOSED, DATA_WAIT, IN_STEP, LOOSE, TAKEN
from gpuwatch.ledger.states import EVAL

_TEACHES, _OF_TEACHER = 5, 2
"""So many steps in a row begin with so few passes without gradients: those are no evaluation."""
APART = 4  # what comes so many steps after the last time is not a part of each step
_RESTS_FOR = 8  # visits
_ENTERS = "_maybe_set_eval_frame", "set_eval_frame"  # by which torch's compiler enters a function, since 2.6 and before
_COMPILED: Any = SimpleNamespace(training=True)
_BEGUN_EVERY_NS = 20_000_000  # quick steps are not all checked for rare events, such as a device
_PARAMETERS = 64  # of each optimizer, whose gradients are compared
_DEPTH = 16  # frames between a function for checkpointed activations and the first module that it calls


class OptimizerSteps:
    """Called after each step of any of torch's optimizers, in whichever thread makes it."""

    def __init__(self, recorder: Recorder, begin: Callable[[], None]) -> None:
        """`begin` is called when a step computes (not each quick one); not by optimizers, which take no hook then."""
        self._recorder = recorder
        self._begin = begin
        self._own_ns = 0  # the hook's own time in the last steps on a device
        # After each step of an optimizer; away for as long as these are not counted.
        self._hook = GlobalHook("optimizer_step_post", self.stepped)
        self.is_installed = False
        # Before each, once it bounds steps.
        self._before = GlobalHook("optimizer_step_pre", partial(self.guarded, self._optimizer_begins))
        self._bounded_by = 0  # the optimizer whose step began the open one
        self._pass_began: tuple[object, int] = (None, 0)  # the last pass over a loader; `count` before it
        self._evaluates = False  # whether its first step does not train
        self._trains_in_mode = False  # whether a pass has begun with a module in training mode
        self._recorded = 0  # how much autograd had recorded before that step, where no optimizer of torch's is known
        self._records = False  # whether it has recorded anything in the first step of any pass
        # References to some before that step, and how often each had changed.
        self._gradients: list[tuple[Any, int]] = []
        self._next_call = GlobalHook("module_forward_pre", partial(self.guarded, self._note_calls))
        self._awaited: list[Callable[[Any], None]] = []  # what is called then
        # the next with gradients, and the end of one without
        self._next_forward = GlobalHook("module_forward_pre", partial(self.guarded, self._begin_forward))
        self._forward_end = GlobalHook("module_forward", partial(self.guarded, self._end_forward))
        self._module_hooks = self._next_call, self._next_forward, self._forward_end
        self._begun_ns = 0  # when `begin` was last called in a steady step
        self._pass = 0  # the module whose pass without gradients is open
        self._bare = 0  # passes without gradients in this wait
        self._with_teacher = 0  # steps in a row that begin with a teacher's
        self._trained = self._in_mode_at = 0  # the module that is trained; `count` when it was last called otherwise
        self._backwards = self._backwards_before = 0  # backward passes in the open step, and in the one before
        self._followed = set[int]()  # those, by number, that one more forward pass has followed
        self._of_last: dict[int, set[int]] = {}  # the same of the last step that this optimizer began
        self._awaits_more = False  # whether such a forward pass is waited for
        self._is_inside = False  # a backward pass, or an optimizer's step
        self._of_backward: list[Any] | None = None  # optimizers that have made a step in the backward pass that is open
        self._entered = (0, 0)  # when the evaluation that is open began, with the time between passes so far
        self._is_hidden = False  # a compiled function may call the model, and is not seen
        self._compiled: Any = None  # the class of compiled models, once it is prepared for hooks
        self._has_entered = False  # a compiled function was called
        self._frame, self._entered_module = 0, None  # that which calls a compiled model or function now, and this
        self._awaits_next = False  # whether the next forward pass is waited for after it
        self._patches, self._of_compiler = Patches(), Patches()
        self.on_compiler: Callable[[], None] = lambda: None  # called when it is there, before hooks are added
        self._owner = object()
        self.level = 0  # that of the evaluation that is open; 0 without one
        self.on_first: Callable[[], None] = lambda: None  # called when an optimizer makes its first step
        self.is_covered: Callable[[], bool] | None = None  # a Watch that was opened later has this thread's steps
        self.count = self._count_at_drop = 0
        self._loop = object()  # what bounds the steps in which an optimizer made its last one, if that is no optimizer
        self._rests = False  # steps are not counted, as they bound nothing and nothing asks for the count
        self._woken_at = 0  # `trained_steps` when `wake` was last called
        self._rested_for = 0  # visits since then
        self.trained_steps = self._trained_ns = 0  # steps of loops that an optimizer made one in; when the last began
        self._last: Callable[[], Any] = lambda: None  # the optimizer of the last of them
        self._trainers = WeakSet[Any]()  # all optimizers that have made a step while these were counted
        self._has_failed = False

    def install(self) -> None:
        """Count from now on, once torch's optimizers are loaded."""
        self.is_installed = self._hook.can_be_added
        self.wake()

    def remove(self) -> None:
        """Leave torch as it was."""
        self.is_installed = self._rests = False
        self._hook.remove()
        self._before.remove()
        self.await_call()
        self._leave_forward()
        self._patches.restore()
        self._patches = Patches()
        self._leave_compiler()

    def _leave_compiler(self) -> None:
        """See no compiled function until modules are to have hooks again: torch asks at each optimizer step, too."""
        self._of_compiler.restore()
        self._of_compiler, self._compiled = Patches(), None

    def _leave_forward(self) -> bool:
        """Stop waiting for the next forward pass; return whether it was waited for."""
        self._recorder.end_gap(0)
        awaited, self._pass, self._awaits_next = self._awaits_next, 0, False
        self._forward_end.remove()
        return self._next_forward.remove() or awaited

    def give_way(self) -> None:
        """A pass over a loader begins: what followed the last optimizer step, say a warm-up's, was no step's wait."""
        recorder = self._recorder
        if recorder.step_owner is self._owner and recorder.thread == get_ident() and self._leave_forward():
            recorder.abandon_bounded(recorder.clock())

    def first_step(self, of_pass: object) -> None:
        """A pass has its first batch; `evaluates` shows after its first step whether it is an evaluation."""
        self.await_call()
        self._pass_began, self._evaluates, self._recorded = (of_pass, self.count), False, _recorded()
        before = [] if self._trains_in_mode else self._some_gradients()  # else `evaluates` does not ask for them
        self._gradients = [(grad if grad is None else ref(grad), _changes(grad)) for grad in before]
        self.await_call(self._note_call)

    def evaluates(self, of_pass: object) -> bool:
        """Whether the pass is an evaluation: its first step called a module without training it; no optimizer stepped.

        Nor did it compute gradients for a step made batches later, where no pass begins with a module in training mode.
        Without an optimizer of torch's: autograd recorded nothing in it, but did in the first step of an earlier pass.
        """
        if self._pass_began[0] is of_pass:
            self.await_call()  # no module was called
            if not self.count:
                records = _recorded() > self._recorded
                self._evaluates, self._records = self._records and not records, self._records or records
        evaluates = self._evaluates and self._pass_began == (of_pass, self.count)
        return evaluates and (self._trains_in_mode or not self._has_new_gradients())

    def _has_new_gradients(self) -> bool:
        """Whether gradients have changed since the pass had its first batch."""
        if _recorded() == self._recorded:
            return False
        pairs = zip(self._some_gradients(), self._gradients, strict=False)
        return any(g is not None and (of is None or of() is not g or _changes(g) != was) for g, (of, was) in pairs)

    def _some_gradients(self) -> list[Any]:
        """Return gradients of what each optimizer changes; None for a parameter without."""
        try:
            trained = [(p for g in of.param_groups for p in g["params"] if p.requires_grad) for of in self._trainers]
            return [each.grad for of_one in trained for each in islice(of_one, _PARAMETERS)]
        except Exception as error:  # an optimizer of the user's making
            pass_on(error)
            return []

    def _note_call(self, module: Any) -> None:
        self._evaluates = not (module.training and sys.modules["torch"].is_grad_enabled())
        self._trains_in_mode |= not self._evaluates

    def await_call(self, call: Callable[[Any], None] | None = None) -> None:
        """Have this called, too, with the next module that the training thread calls; None: wait for none any more."""
        if call is None:
            self._next_call.remove()
            self._awaited = []
        elif self._next_call.can_be_added and self._may_hook():
            self._awaited.append(call)
            self._next_call.add()

    def _note_calls(self, module: Any, *_: Any) -> None:
        awaited = self._awaited
        if self._recorder.thread == get_ident():
            self.await_call()  # none stays while a compiled model runs
            for call in awaited:
                call(module)

    def trains(self, model: Any) -> bool:
        """Whether the optimizer that a loop's step was last trained by changes this model."""
        first = next(iter(getattr(self._last(), "param_groups", ())), {"params": ()})["params"][:1]
        return any(each is parameter for each in first for parameter in model.parameters())

    def feeds_one_batch(self) -> bool:
        """Note that a pass was dropped with its first batch; return whether the one before was too, few steps ago."""
        before, self._count_at_drop = self._count_at_drop, self.count
        return 0 < self.count - before <= MOST_TAKEN

    def guarded(self, call: Callable[..., None], *arguments: object) -> None:
        """Call it. After an error nothing is done any more: training goes on without."""
        if self._has_failed:
            return
        begin = self._recorder.clock() if self._recorder.timeline is not None else 0
        try:
            call(*arguments)
            if begin:
                self._own_ns += self._recorder.clock() - begin
        except Exception as error:
            self._has_failed = True
            self._recorder.failed("bounding steps by the optimizer", error)

    def wake(self) -> None:
        """Count again: a pass begins or ends, what may be an evaluation begins, or the last time is long ago."""
        self._rests, self._woken_at, self._rested_for = False, self.trained_steps, 0
        if self.is_installed and not self._hook.is_on:
            self._hook.add()

    def visit(self) -> None:
        """Take the hook away while it rests, as an empty call costs 1 µs; now and then count again to know what trains.

        Called between two steps. Other threads may go through torch's hooks at any time: of several none is taken away.
        """
        if not self._rests:
            return
        self._rested_for += 1
        if self._rested_for == _RESTS_FOR:
            self.wake()
        elif self._hook.is_alone:
            self._hook.remove()

    def stepped(self, of: Any, *_: Any) -> None:
        """An optimizer has made a step. A watched loop counts as many as evaluations need. `_`: torch's arguments."""
        if self._rests:
            return
        recorder = self._recorder
        if recorder.step_owner is self._loop and recorder.is_here():
            self.count += 1
            self._train(of)
            if self.trained_steps - self._woken_at >= APART and type(self._loop) is FetchEvidence:
                self._rests, self._count_at_drop = True, sys.maxsize  # `count` is too small from now on
                if not (self._has_entered or any(hook.is_on for hook in self._module_hooks)):
                    self._leave_compiler()
        else:
            self.guarded(self._stepped, of)

    def _stepped(self, of: Any) -> None:
        """An optimizer has made a step that may bound one. On a device the hook's cost is metered."""
        self._step(of)
        recorder = self._recorder
        if recorder.timeline is not None and recorder.step_owner is self._owner and self.count % METERED == 0:
            recorder.meter.note(self._own_ns // METERED, False, recorder.active_timeline is not None)
            self._own_ns = 0
            recorder.visit_device(recorder.clock())

    def _step(self, of: Any) -> None:
        """End the open step, if it is bounded by this, and begin the next one."""
        recorder, owner, optimizer = self._recorder, self._recorder.step_owner, id(of)
        if self._of_backward is not None and recorder.thread == get_ident():
            self._of_backward.append(of)
            return
        self.count += 1
        self._is_inside = False
        is_usual = recorder.steady is self._owner and recorder.batch_ready_ns and self._backwards < 2
        is_usual = is_usual and not self._frame and recorder.thread == get_ident()
        if is_usual and not (self.is_covered and self.is_covered()):
            self._of_last.pop(self._bounded_by, None)
            self._bounded_by, self._backwards = optimizer, 0
            self._next_forward.add()
            recorder.next_bounded(recorder.clock())  # what the hook takes is no wait
            return
        if self.count == 1:
            self.on_first()
        is_of_another = owner not in (None, LOOSE, self._owner) and recorder.is_here()
        if is_of_another and (owner is not TAKEN or recorder.trained_taken()):
            self._train(of)
            if owner is not TAKEN:
                self._loop = owner
            return  # a step of a watched loop, or a declared one
        if self.is_covered and self.is_covered():
            self.give_way()
            return
        is_bare = owner is self._owner and self._is_bare
        if recorder.in_phase or recorder.thread == CLOSED or (is_bare and optimizer != self._bounded_by):
            return  # or one more optimizer of the same step
        if recorder.thread != get_ident() and (is_autograds() or not recorder.claim_thread()):
            return
        now = recorder.clock()
        recorder.leave_steady()
        if is_bare:
            self._leave_forward()
            if recorder.activity is DATA_WAIT:  # the first such step: what of it was no wait is not known
                recorder.abandon_bounded(now)
        self._trainers.add(of)
        if not self._before.is_on:
            self._before.add()
            self._patches.wrap(sys.modules["torch"].autograd, "backward", self._backward)
        waits = not is_bare or recorder.transfer_ns > 0
        recorder.begin_bounded(self._owner, now, until_pass=not is_bare)
        self._of_last[self._bounded_by], self._followed = self._followed, set()
        self._backwards_before, self._backwards = self._backwards, 0
        self._bounded_by = optimizer
        if waits and not self._is_hidden:
            recorder.begin_part(DATA_WAIT, now)
        self._await_forward()

    def _train(self, of: Any) -> None:
        """Count the loop's open step as trained by this optimizer, once."""
        began_ns = self._recorder.begin_ns
        self._trainers.add(of)
        if self._trained_ns != began_ns:
            self._trained_ns, self.trained_steps, self._last = began_ns, self.trained_steps + 1, ref(of)

    @property
    def _is_bare(self) -> bool:
        """Whether no forward pass of the open step was seen."""
        return self._is_hidden or self._next_forward.is_on or self._awaits_next

    def _may_hook(self) -> bool:
        """Whether modules may have hooks: not where a compiled function may call the model; each would recompile it."""
        if self._compiled is None and (compiler := sys.modules.get("torch._dynamo.eval_frame")) is not None:
            self._compiled = getattr(compiler, "OptimizedModule", None)
            self.on_compiler()
            self._of_compiler.wrap(self._compiled, "__call__", self._call_compiled)
            enters = next((name for name in _ENTERS if hasattr(compiler, name)), None)
            self._is_hidden = enters is None
            if enters is not None:
                self._of_compiler.wrap(compiler, enters, self._set_compiled)
        return not (self._is_hidden or self._frame)

    def _await_forward(self) -> None:
        if self._may_hook():
            self._next_forward.add()
        self._awaits_next |= self._frame != 0

    def _call_compiled(self, original: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a model that is compiled as a whole."""
        self._enter_compiled(module, frame := sys._getframe())
        try:
            return original(module, *args, **kwargs)
        finally:
            self._leave_compiled(frame)

    def _set_compiled(self, original: Callable[[Any], Any], callback: Any) -> Any:
        """Torch begins (by a callback) or ends a compiled function: a module to a loop, unless maybe an optimizer."""
        frame = sys._getframe(2)
        if callable(callback) and frame.f_code.co_name != "__enter__":  # of a context, which ends in another frame
            self._enter_compiled(_COMPILED, frame)
            return original(callback)
        before = original(callback)
        self._leave_compiled(frame)
        return before

    def _enter_compiled(self, module: Any, frame: FrameType) -> None:
        """Remove the hooks of modules: torch warns of them, and would compile again. What they do is done here."""
        if self._frame or self._recorder.thread != get_ident():
            return
        may_be_optimizer = self._backwards and self._recorder.step_owner is self._owner
        if module is not _COMPILED or not may_be_optimizer:
            for hook, call in ((self._next_call, self._note_calls), (self._next_forward, self._begin_forward)):
                if hook.is_on:
                    self.guarded(call, module)
        self._awaits_next = self._next_forward.remove()  # it is a pass without gradients, or none
        self._forward_end.remove()
        self._frame, self._entered_module, self._has_entered = id(frame), module, True

    def _leave_compiled(self, frame: FrameType) -> None:
        if self._frame == id(frame):
            module, awaits = self._entered_module, self._awaits_next
            self._frame, self._entered_module, self._awaits_next = 0, None, False
            if awaits:
                self.guarded(self._end_forward, module)
                self.guarded(self._await_forward)

    def _begin_forward(self, module: Any, *_: Any) -> None:
        """A forward pass begins: of training, which ends the wait, or of an evaluation or a rollout."""
        recorder = self._recorder
        now = recorder.clock()  # first, as the hook's own time is no wait
        records = sys.modules["torch"].is_grad_enabled()
        is_usual = recorder.steady is self._owner and not recorder.batch_ready_ns and records and module.training
        if is_usual and recorder.thread == get_ident():
            recorder.bounded_computes(now)
            self._next_forward.remove()
            self._trained, self._with_teacher = id(module), 0
            if now - self._begun_ns > _BEGUN_EVERY_NS:
                self._begun_ns = now
                self._begin()
            return
        trains = (records or _is_checkpointed()) and not self._is_in_mode(module)
        is_inner = not trains and self._pass not in (0, id(module))  # of another module's pass
        if recorder.thread != get_ident() or is_inner or (recorder.in_phase and not self.level):
            return
        if self._awaits_more and not trains:  # on the batch that was trained on, to log something
            return
        recorder.end_gap(now)
        if not trains:
            if self._with_teacher < _TEACHES:
                self._pass = id(module)
                self._forward_end.add()
                self._bare += 1
                if not self.level and recorder.step_owner is self._owner:
                    self.level = recorder.enter(EVAL, now)
                    self._entered = now, recorder.gaps_ns
                return
        elif self.level:  # a teacher's pass is a part of each step, and followed by the next one at once
            gaps_ns = recorder.gaps_ns - self._entered[1]
            teaches = self._bare <= _OF_TEACHER and 2 * gaps_ns < now - self._entered[0]
            self._with_teacher = self._with_teacher + 1 if teaches else 0
        else:
            self._with_teacher = 0
        self._compute(now)

    def _is_in_mode(self, module: Any) -> bool:
        """Whether the module that is trained is called in evaluation mode, which the last steps have not done."""
        if module.training:
            self._trained = id(module)
        if module.training or self._trained != (self._pass or id(module)):
            return False
        before, self._in_mode_at = self._in_mode_at, self.count
        return self.level > 0 or self.count - before >= APART

    def _compute(self, now: int) -> None:
        """The open step computes from now on."""
        recorder, level = self._recorder, self.level
        self._bare = self.level = 0
        if level:
            recorder.exit(level, now)
        self._leave_forward()
        is_first, self._awaits_more = not self._awaits_more, False
        if not is_first:
            self._followed.add(self._backwards)
        if recorder.end_bounded_wait(now):
            is_usual = is_first and self._backwards_before == 1 and self._compiled is not None
            if is_usual and recorder.active_timeline is None and not (recorder.parts or recorder.lacks_batch):
                recorder.become_steady()
        if is_first:
            self._begin()

    def _backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Make a backward pass. Optimizers in it end the step; else a batch is awaited, if one came here before."""
        recorder = self._recorder
        if recorder.step_owner is not self._owner or recorder.thread != get_ident() or self._is_inside:
            return original(*args, **kwargs)
        self._is_inside, self._of_backward = True, (made := list[Any]())
        try:
            return original(*args, **kwargs)
        finally:
            self._is_inside, self._of_backward = False, None
            self._backwards += 1
            if made:
                self.guarded(self._step, made[-1])
            elif recorder.steady is None or self._backwards > 1:
                self.guarded(self._end_backward)

    def _end_backward(self) -> None:
        recorder = self._recorder
        self._await_no_more()
        if not (self._next_forward.is_on or self._is_hidden) and recorder.doing() is IN_STEP:
            self._awaits_more = True
            if self._backwards in self._of_last.get(self._bounded_by, ()):
                recorder.begin_part(DATA_WAIT, recorder.clock())
            self._await_forward()

    def _await_no_more(self) -> bool:
        """Stop waiting for one more forward pass of the step; return whether it was waited for."""
        awaited, self._awaits_more = self._awaits_more, False
        if awaited:
            self._leave_forward()
            if self._recorder.activity is DATA_WAIT:
                self._recorder.end_part(self._recorder.clock())
        return awaited

    def _optimizer_begins(self, *_: Any) -> None:
        recorder = self._recorder
        if recorder.step_owner is not self._owner or recorder.thread != get_ident():
            return
        self._is_inside = True  # it may make passes of its own
        if self._is_bare and not self._await_no_more() and recorder.doing() is not DATA_WAIT:
            self._begin()

    def _end_forward(self, module: Any, *_: Any) -> None:
        """A forward pass has ended: if it was of an evaluation or a rollout, the time until the next one is a gap."""
        if self._pass == id(module):
            self._pass = 0
            self._recorder.begin_gap()


def _changes(gradient: Any) -> int:
    return int(getattr(gradient, "_version", 0))


def _recorded() -> int:
    """Return a number that grows with each operation of this thread that autograd records; 0 where torch has none."""
    return int(getattr(sys.modules.get("torch.autograd"), "_get_sequence_nr", int)())


def _is_checkpointed() -> bool:
    """Whether a module is called for activations that the backward pass recomputes: autograd records none of them."""
    frame: Any = sys._getframe(1)
    for _ in range(_DEPTH):  # no generator: a compiler of the model's call would be asked to compile it
        if frame is None or (frame.f_code.co_name == "forward" and "checkpoint" in frame.f_code.co_filename):
            return frame is not None
        frame = frame.f_back
    return False
