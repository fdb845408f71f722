"""Evaluations on tensors in or after some steps over a loader: `model.eval()` to `model.train()`, or without gradients.

What steps do each time is a part of them: a teacher's pass, an average of the weights, activations computed again. So
what is entered in the same place of the program is an evaluation only several steps after the last time.
"""

import functools
import sys
from collections.abc import Callable
from threading import get_ident
from typing import Any
from weakref import ref

from gpuwatch.hook.metering import FetchEvidence
from gpuwatch.hook.recorder import Recorder
from gpuwatch.hook.torch.optimizer_steps import APART, OptimizerSteps
from gpuwatch.hook.torch.tensor_patch import TorchMethods
from gpuwatch.ledger.events import BETWEEN, IN_STEP
from gpuwatch.ledger.states import EVAL

_MOST_PLACES = 1000
_OWNERS = FetchEvidence, type(None)


class Evaluations:
    """Finds them in the training thread."""

    def __init__(self, recorder: Recorder, optimizer: OptimizerSteps) -> None:
        self._recorder, self._optimizer = recorder, optimizer
        context = "__enter__", "__exit__"
        self._methods = (
            TorchMethods(context, self._made, "no_grad"),
            TorchMethods(context, self._made, "inference_mode"),
            TorchMethods(context, self._counted, "enable_grad"),
            TorchMethods(("eval",), self._made, "nn.Module"),
        )
        self._train = TorchMethods(("train",), self._made, "nn.Module")  # each part of a model is asked too
        # How many contexts with gradients are entered: what goes on there may be a part of an evaluation.
        self.enabled = 0
        self._places: dict[tuple[int, int], int] = {}  # where one may begin: steps that had trained by the last time
        self._until: ref[Any] | None = None  # to the model, or the context, that ends it
        self._owner: object = None  # the loop in whose step it is; None between two loops
        self._level = self._count = 0  # the recorder's, 0 without one; steps of optimizers when it began
        self._is_off = False  # an optimizer has made a step in one: that was none

    def install(self) -> None:
        """Look for them from now on, once torch is loaded."""
        for methods in self._methods:
            if not methods.loops:
                methods.install()

    def remove(self) -> None:
        """Leave torch as it was."""
        for methods in (*self._methods, self._train):
            methods.remove_all()

    def _made(self, torch: Any, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        begins = {"eval": self._leaves_training, "__enter__": self._leaves_gradients}.get(name)
        recorder, guarded = self._recorder, self._optimizer.guarded

        @functools.wraps(original)
        def noted(what: Any, *args: Any, **kwargs: Any) -> Any:
            if begins is None:
                if self._until and what is self._until() and args[:1] != (False,) and kwargs.get("mode", True):
                    guarded(self.end, self._owner)
            elif self._until is None and type(recorder.step_owner) in _OWNERS:
                guarded(begins, what)
            return original(what, *args, **kwargs)

        return noted

    def _counted(self, torch: Any, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if self._recorder.thread == get_ident():
                self.enabled = max(0, self.enabled + (1 if name == "__enter__" else -1))
            return original(*args, **kwargs)

        return counted

    def _leaves_training(self, model: Any) -> None:
        if model.training and self._is_apart() and self._optimizer.trains(model):
            self._begin(ref(model))
            self._train.install()

    def _leaves_gradients(self, context: Any) -> None:
        """Wait for a module to be called: without any, weights are changed or logged."""
        if self._is_apart():
            self._until = ref(context)
            self._optimizer.await_call(self._called)

    def _called(self, module: Any) -> None:
        if self._until is not None and not self._level and not sys.modules["torch"].is_grad_enabled():
            self._begin(self._until)

    def _is_apart(self) -> bool:
        """Whether this may be an evaluation, and has not been at this place of the program for several steps."""
        recorder, steps = self._recorder, self._optimizer.trained_steps
        if recorder.thread != get_ident() or self._is_off or recorder.in_phase:
            return False
        if recorder.doing() not in (IN_STEP, BETWEEN):
            return False
        frame: Any = sys._getframe(4)
        if frame.f_code.co_name == "decorate_context":  # of a function that is decorated
            frame = frame.f_back
        place = id(frame.f_code), frame.f_lasti
        self._optimizer.wake()
        before = self._places.get(place, 0 if len(self._places) < _MOST_PLACES else steps)
        self._places[place] = steps
        return steps - before >= APART

    def _begin(self, until: ref[Any]) -> None:
        recorder = self._recorder
        self._until, self._owner, self._count = until, recorder.step_owner, self._optimizer.count
        self._level = recorder.enter(EVAL, recorder.clock())

    def end(self, owner: object) -> None:
        """End any that is open in a step of this loop, or (None) between two: with the step, or as a loop begins."""
        if owner is not self._owner:
            return
        self._optimizer.await_call()
        level, self._level, self._until, self._owner = self._level, 0, None, None
        if level:
            self._is_off = self._optimizer.count != self._count
            self._train.remove()
            self._recorder.exit(level, self._recorder.clock())
