"""The contexts of a loop without a loader, and of phases. They only call the recorder: this is the hot path."""

from __future__ import annotations

from threading import get_ident
from typing import TYPE_CHECKING

from gpuwatch.hook.events import IN_STEP, LOOSE, TOKENS

if TYPE_CHECKING:
    from gpuwatch.hook.watch import Watch


class StepContext:
    """`with w.step():` — one step of a loop that has no loader. A step inside a step is a part of that one."""

    __slots__ = ("_recorder", "_samples", "_tokens", "_watch")

    def __init__(self, watch: Watch, samples: int, tokens: int | None = None) -> None:
        self._watch = watch
        self._tokens = tokens
        self._recorder = watch._recorder
        self._samples = samples

    def __enter__(self) -> None:
        recorder = self._recorder
        if recorder.thread != get_ident():
            if not recorder.claim_thread():
                return
            self._watch._start()
        recorder.countdown -= 1
        if recorder.countdown <= 0:
            self._watch._visit_step()
        if not recorder.in_step:
            recorder.open(self, recorder.clock())
        elif recorder.step_owner is LOOSE:
            recorder.begin_step(self, recorder.clock())
        else:
            return
        recorder.samples = self._samples
        if self._tokens is not None:
            recorder.log.append((TOKENS, self._tokens))

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        recorder = self._recorder
        if recorder.step_owner is self and recorder.thread == get_ident():
            recorder.end_step(recorder.clock())


class PartContext:
    """`with w.data():` and `with w.transfer():` — the training thread waits for input, or copies a batch."""

    __slots__ = ("_part", "_recorder", "_watch")

    def __init__(self, watch: Watch, part: str) -> None:
        self._watch = watch
        self._recorder = watch._recorder
        self._part = part

    def __enter__(self) -> None:
        recorder = self._recorder
        if recorder.thread != get_ident():
            if not recorder.claim_thread(steps=False):
                return
            self._watch._start()
        # A usual case, written out.
        if recorder.steady is None and recorder.activity is IN_STEP and recorder.device is None:
            recorder.parts.append(IN_STEP)
            recorder.activity = self._part
            recorder.mark_ns = recorder.clock()
        else:
            recorder.begin_part(self._part, recorder.clock())

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        recorder = self._recorder
        if recorder.thread == get_ident():
            recorder.end_part(recorder.clock())


class PhaseContext:
    """`with w.phase("eval"):` — time that belongs to a declared phase, steps inside it included."""

    __slots__ = ("_levels", "_name", "_recorder", "_watch")

    def __init__(self, watch: Watch, name: str) -> None:
        self._watch = watch
        self._recorder = watch._recorder
        self._name = name
        self._levels: list[int] = []

    def __enter__(self) -> None:
        recorder = self._recorder
        if recorder.claim_thread(steps=False):
            self._watch._start()
            self._levels.append(recorder.enter(self._name, recorder.clock()))
        else:
            self._levels.append(0)

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        level = self._levels.pop()
        if level and self._recorder.thread == get_ident():
            self._recorder.exit(level, self._recorder.clock())
