"""Time between two forward passes, with neither a backward pass nor an optimizer's step in between: that of an environment's step, for example.

Some of these gaps are profiled, which shows the user's function, and what torch itself takes: a thread that samples gets Python's lock in
torch's own calls most often, and hardly ever in short Python functions.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from random import randrange
from types import FrameType
from typing import TYPE_CHECKING, Any

from gpuwatch.hook.torch.patches import Patches
from gpuwatch.host.frames import OwnFrames, Place, place_of
from gpuwatch.ledger.events import DATA_WAIT
from gpuwatch.ledger.states import COMPUTE, EVAL

if TYPE_CHECKING:
    from gpuwatch.hook.recorder import Recorder

_Passes = tuple[int, int]  # the modules of the pass before a gap, and of the one after it
_SAMPLED, _MOST_KINDS = "sampled", 256
_LEAST_PASSES = 8  # forward passes a step; with fewer the loss and the like are between them
_MOST_SKIPPED, _LEAST_PROFILED = 8, 2
_MOST_EVENTS = 1_000  # of a gap, after which it is no longer profiled


class ForwardGaps:
    """The gaps of one recorder's training thread."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._patches: Patches | None = None
        self._since_ns = self._inside = 0  # when the last pass ended, 0: no gap is open; the module whose pass is open
        self._pass = 0  # the module whose pass ended last
        # By the passes around them: gaps until a step's first pass with gradients, by state; those of the other passes of some steps, as _SAMPLED.
        self._spent_ns: Counter[tuple[str, _Passes]] = Counter()
        self._torch_ns: Counter[_Passes] = Counter()
        self._profiled_ns: Counter[_Passes] = Counter()
        self.rollout_ns = 0  # all gaps between two steps' passes without gradients
        self._steps_ns = self._steps = self._passes = 0  # of the steps that are sampled
        self.step_began_ns = 0  # when the first pass with gradients of such a step began
        self.is_wanted, self._frames = False, OwnFrames()  # whether to profile a gap; what was found
        self._skipped = 0  # gaps until one is profiled, at random: passes of several networks alternate
        self._events = self._last_ns = self._in_torch_ns = self._cost_ns = 0
        self._found: list[tuple[Any, int]] = []
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
        passes = (self._pass, id(module)) if len(self._spent_ns) < _MOST_KINDS else (0, 0)
        if profiled:
            self._profiled[kind := str(passes) if since_ns else DATA_WAIT] += 1
            for place, ns in self._found:
                self._frames.count(kind, place, ns // 1000)
        if not since_ns:
            return True
        spent_ns = self._recorder.clock() - since_ns - self._cost_ns * profiled
        self._spent_ns[_SAMPLED if self.step_began_ns else state, passes] += spent_ns
        self._passes += self.step_began_ns > 0
        self.rollout_ns += spent_ns * (state == EVAL)
        if profiled:
            self._torch_ns[passes] += self._in_torch_ns
            self._profiled_ns[passes] += spent_ns
        return True

    def pass_ends(self, module: Any) -> None:
        """A module's pass has ended: a gap begins, if that was no part of another's."""
        if self._inside != id(module):
            return
        self._pass, self._inside, self._since_ns = self._inside, 0, self._recorder.clock()
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

    def place(self, kind: str | None = None) -> Place | None:
        """Return the user's function that most of the gaps with most time, or of all DATA_WAITs, were spent in; None with too few profiled."""
        if kind is None:
            own_ns: Counter[str] = Counter()
            for (_, passes), ns in list(self._spent_ns.items()):
                own_ns[str(passes)] += int(ns * self._own(passes))
            kind = max(own_ns, key=lambda each: own_ns[each], default="")
        return self._frames.most_frequent(kind) if self._profiled[kind] >= _LEAST_PROFILED else None

    def _own(self, passes: _Passes) -> float:
        """Return the share of these gaps that torch did not take, as far as it is known."""
        whole_ns = self._profiled_ns[passes]
        is_known = whole_ns > 0 and self._profiled[str(passes)] >= 2 * _LEAST_PROFILED
        return max(0.0, 1 - self._torch_ns[passes] / whole_ns) if is_known else 1.0

    def spent_s(self, compute_s: float) -> dict[str, float]:
        """Return the seconds of gaps so far by state, without what torch took of them, of so much compute."""
        spent_s: dict[str, float] = defaultdict(float)
        for (state, passes), ns in list(self._spent_ns.items()):
            spent_s[state] += ns / 1e9 * self._own(passes)
        sampled_s = spent_s.pop(_SAMPLED, 0.0)
        if self._steps_ns and self._passes >= _LEAST_PASSES * self._steps:
            spent_s[COMPUTE] += sampled_s / (self._steps_ns / 1e9) * max(0.0, compute_s - spent_s[COMPUTE])
        return {state: each_s for state, each_s in spent_s.items() if each_s}

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
