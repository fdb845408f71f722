"""Time between two forward passes, with neither a backward pass nor an optimizer's step in between: that of an environment's step, for example.

Some of these gaps are profiled, which shows the user's function, and what torch itself takes: a thread that samples gets Python's lock in
torch's own calls most often, and hardly ever in short Python functions.
"""

from __future__ import annotations

import sys
from collections import Counter
from random import randrange
from types import FrameType
from typing import TYPE_CHECKING, Any

from gpuwatch.hook.torch.patches import Patches
from gpuwatch.host.frames import OwnFrames, Place, place_of
from gpuwatch.ledger.events import DATA_WAIT
from gpuwatch.ledger.states import COMPUTE, EVAL, OTHER

if TYPE_CHECKING:
    from gpuwatch.hook.recorder import Recorder

GAP = "gap"  # what the frames of a gap are kept under
_LEAST_PASSES = 8  # forward passes a step; with fewer the loss and the like are between them
_MOST_SKIPPED, _LEAST_PROFILED = 8, 3
_MOST_EVENTS = 1_000  # of a gap, after which it is no longer profiled


class ForwardGaps:
    """The gaps of one recorder's training thread."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._patches: Patches | None = None
        self._since_ns = self._inside = 0  # when the last pass ended, 0: no gap is open; the module whose pass is open
        # All gaps until a step's first pass with gradients, by the state that they are in.
        self._known_ns = {EVAL: 0, COMPUTE: 0, OTHER: 0}
        self._sampled_ns = self._steps_ns = self._steps = self._passes = 0  # gaps of the other passes, in some steps
        self.step_began_ns = (
            0  # when a step's first pass with gradients began, whose gaps count up to the optimizer's step
        )
        self.is_wanted, self._frames = False, OwnFrames()  # whether to profile a gap; what was found
        self._skipped = 0  # gaps until one is profiled, at random: passes of several networks alternate
        self._events = self._last_ns = self._in_torch_ns = self._cost_ns = 0
        self._found: list[tuple[Any, int]] = []
        self._torch_ns = self._profiled_ns = 0
        self._profiled: Counter[str] = Counter()

    def watch(self, since_ns: int) -> None:
        """Notice backward passes. An optimizer's step has ended: a gap begins at `since_ns`, unless that is 0."""
        self.close(since_ns)
        if self._patches is None:
            self._patches = Patches()
            for name in ("backward", "grad"):
                self._patches.wrap(sys.modules["torch.autograd"], name, self._backward)
        self._profile_some()

    def close(self, since_ns: int = 0) -> None:
        """An optimizer's step ends the step."""
        self._leave_profile()
        if self.step_began_ns:
            self._steps_ns += self._recorder.clock() - self.step_began_ns
            self._steps += 1
        self.step_began_ns = self._inside = 0
        self._since_ns = since_ns

    def remove(self) -> None:
        self._leave_profile()
        patches, self._patches = self._patches, None
        if patches is not None:
            patches.restore()

    def pass_begins(self, module: Any, state: str) -> bool:
        """Return whether this is no part of another module's pass. `state`: that of the gap."""
        if self._inside and self._inside != id(module):
            return False
        profiled = self._leave_profile()
        self._inside, since_ns, self._since_ns = id(module), self._since_ns, 0
        if profiled:
            self._profiled[kind := GAP if since_ns else DATA_WAIT] += 1
            for place, ns in self._found:
                self._frames.count(kind, place, ns // 1000)
        if not since_ns:
            return True
        spent_ns = self._recorder.clock() - since_ns - self._cost_ns * profiled
        if self.step_began_ns:
            self._sampled_ns += spent_ns
            self._passes += 1
        else:
            self._known_ns[state] += spent_ns
        if profiled:
            self._torch_ns += self._in_torch_ns
            self._profiled_ns += self._in_torch_ns + sum(ns for _, ns in self._found)
        return True

    def pass_ends(self, module: Any) -> None:
        """A module's pass has ended: a gap begins, if that was no part of another's."""
        if self._inside != id(module):
            return
        self._inside, self._since_ns = 0, self._recorder.clock()
        self._profile_some()

    def _profile_some(self) -> None:
        """Profile the gap that begins, if it is one's turn."""
        if self.is_wanted and not self._skipped and sys.getprofile() is None:
            self.is_wanted, self._skipped = False, randrange(_MOST_SKIPPED)
            self._events, self._cost_ns, self._in_torch_ns, self._found = 0, 0, 0, []
            self._last_ns = self._recorder.clock()
            sys.setprofile(self._profile)
        elif self.is_wanted:
            self._skipped = max(0, self._skipped - 1)

    def place(self, kind: str = GAP) -> Place | None:
        """Return the user's function that most of the profiled gaps, or DATA_WAITs, were spent in; None with few of them."""
        return self._frames.most_frequent(kind) if self._profiled[kind] >= _LEAST_PROFILED else None

    @property
    def rollout_ns(self) -> int:
        """The gaps of all passes without gradients between two steps so far."""
        return self._known_ns[EVAL]

    def spent_s(self, compute_s: float) -> dict[str, float]:
        """Return the seconds of gaps so far by state, without what torch took of them, of so much compute."""
        sampled = (
            self._sampled_ns / self._steps_ns if self._steps_ns and self._passes >= _LEAST_PASSES * self._steps else 0.0
        )
        own = 1 - self._torch_ns / self._profiled_ns if self._profiled_ns else 1.0
        known_s = {state: ns / 1e9 for state, ns in self._known_ns.items()}
        known_s[COMPUTE] += sampled * max(0.0, compute_s - known_s[COMPUTE])
        return {state: own * spent_s for state, spent_s in known_s.items() if spent_s}

    def _backward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """A backward pass: what was between it and the last forward pass, a loss, is a part of training."""
        self.is_wanted |= self._leave_profile()
        self._since_ns = 0
        return original(*args, **kwargs)

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        """Python calls this at each call and return: what has passed since the last one was spent in the frame that ran."""
        began_ns = self._recorder.clock()
        spent_ns = began_ns - self._last_ns
        ran: FrameType | None = frame.f_back if event == "call" else frame
        called = getattr(argument, "__self__", None) if event in ("c_return", "c_exception") else None
        module = "" if ran is None else ran.f_globals.get("__name__", "")
        if any(str(name).startswith("torch") for name in (module, getattr(called, "__module__", ""))):
            self._in_torch_ns += spent_ns
        else:
            self._found.append((place_of(ran), spent_ns))
        self._events += 1
        if self._events >= _MOST_EVENTS:
            sys.setprofile(None)
        self._last_ns = self._recorder.clock()
        self._cost_ns += self._last_ns - began_ns

    def _leave_profile(self) -> bool:
        """Stop profiling; return whether this gap was profiled."""
        if sys.getprofile() == self._profile:
            sys.setprofile(None)
        was, self._last_ns = bool(self._last_ns), 0
        return was
