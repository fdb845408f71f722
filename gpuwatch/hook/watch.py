"""`Watch`, the training side: it records, prints a verdict, and publishes to an agent if there is one.

It never raises into training, never blocks it and never synchronises the device.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from threading import get_ident
from typing import TYPE_CHECKING, Any, TypeVar

from gpuwatch.diagnosis.rates import declared
from gpuwatch.hook import account
from gpuwatch.hook.identity import Identity, Membership, parent_pid, script_name, sendable
from gpuwatch.hook.loader import WatchedLoader, watch_prepared_loaders
from gpuwatch.hook.metering import BUDGET
from gpuwatch.hook.session import Session, sigchld_held
from gpuwatch.hook.transport import RunFacts
from gpuwatch.host.frames import sample_worker
from gpuwatch.ledger.events import TOKENS, UNKNOWN_SAMPLES, known_count
from gpuwatch.ledger.states import PHASE_STATES
from gpuwatch.startup.instrumented import is_on

if TYPE_CHECKING:
    from gpuwatch.diagnosis.report import Report

T = TypeVar("T")
M = TypeVar("M")
_TRAINING = ("train", "training")

open_watches: list[Watch] = []  # of this process, innermost last
_opening = threading.RLock()  # held while the Watch that ends with the process is opened
_made = 0  # watches that were made in this process so far
_parent_trained = False  # this process was forked by one that had a Watch


class Watch:
    """One training run of this process: every second since it was opened, by state.

    Use it as a context manager, or call `close()`. Options:

    - `run`: its display name (default: GPUWATCH_RUN, else the script's name). The unique id comes from GPUWATCH_RUN,
      the scheduler or torchelastic, else from host, pid and start time, and is `w.run`.
    - `job`: the id that all attempts of the training share (default: GPUWATCH_JOB, else Slurm's, PBS's, LSF's,
      torchrun's or Kubernetes').
    - `tags`: names and values that describe the run; shown, never labels of metrics.
    - `endpoint`: where the agent listens (default: GPUWATCH_ENDPOINT, else the first agent's socket on this node).
    - `quiet`: print no verdict (default: GPUWATCH_QUIET=1).
    - `transfers`: time `Tensor.to` and `Tensor.cuda` of the loop's body; False leaves them as they are.
    - `device_events`: measure by timing events on the device, where there is one; False leaves the host's clock alone.
    - `flops_per_step`, `flops_per_sample`, `flops_per_token`: what this rank computes, forward and backward, in
      floating-point operations; with `peak_flops`, the most that its device can do in a second, the report gives the
      utilisation (MFU).
    - `budget`: share of the step time that gpuwatch may take in the training thread. Above it CPU time is sampled less
      often, and fewer steps are measured by device events; every step is accounted all the same.
    - `log`: "auto" logs the shares every 30 s, and the verdict with a report at the end, to the run of W&B, MLflow,
      TensorBoard, Trackio or Aim that is active; or give that run, a SummaryWriter, or a function of (values, step).
      Default: GPUWATCH_LOG=auto, else nothing.
    - `step`: global number of the first step, as read from the checkpoint that training resumes from: steps that an
      earlier attempt of the job had done count as `redone` in the job's ledger. It counts as the steps here: batches,
      if gradients are accumulated over several.
    - `trace`: allow `gpuwatch trace` to profile some steps (default: GPUWATCH_TRACE=1).
    - `breakdown`: divide compute into forward, backward and optimizer (default: GPUWATCH_BREAKDOWN=1).
      See docs/guides/stacks.md.
    """

    def __init__(
        self,
        run: str | None = None,
        *,
        job: str | None = None,
        tags: Mapping[str, str] | None = None,
        endpoint: str | None = None,
        quiet: bool | None = None,
        transfers: bool = True,
        device_events: bool = True,
        flops_per_step: float | None = None,
        flops_per_sample: float | None = None,
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
        budget: float = BUDGET,
        log: Any = None,
        step: int | None = None,
        trace: bool | None = None,
        breakdown: bool | None = None,
    ) -> None:
        if not isinstance(tags or {}, Mapping):
            raise TypeError(f"tags={tags!r}: give names and values, e.g. {{'team': 'vision'}}")
        global _made
        _made += 1
        membership = Membership("" if _made == 1 else f"-{_made}", forked=_parent_trained)
        facts = RunFacts(
            name=sendable(run or os.environ.get("GPUWATCH_RUN") or script_name()),
            job=sendable(job or membership.identity.job),
            tags={_text(key, 128): _text(value, 256) for key, value in list((tags or {}).items())[:32]},
            flops=declared(flops_per_step, flops_per_sample, flops_per_token, peak_flops),
            breakdown=is_set("GPUWATCH_BREAKDOWN") if breakdown is None else breakdown,
        )
        quiet = is_set("GPUWATCH_QUIET") if quiet is None else quiet
        may_trace = is_set("GPUWATCH_TRACE") if trace is None else trace
        # For gpuwatch's own integrations and tests; not a part of the public interface.
        self.session = Session(membership, facts, endpoint, quiet, transfers, device_events, budget, may_trace)
        self._recorder, self._publisher = self.session.recorder, self.session.publisher
        self._disabled = self.session.disabled = not records_here()
        self._unregister: Callable[[], object] = lambda: None  # from what a process of multiprocessing's calls last
        if self._disabled:
            self._recorder.close()  # all contexts do nothing from now on
        else:
            if os.environ.get("GPUWATCH_CONFIG") and _made <= 1:
                self.session.guard(_read_config, "reading the configuration")
            self.session.log_to("auto" if log is None and is_set("GPUWATCH_LOG") else log)
            for earlier in open_watches:
                earlier.session.torch_hooks.optimizer.is_covered = earlier._is_covered
            open_watches.append(self)
            self._publisher.on_tick = self._answer_requests
            self.session.guard(self.session.torch_hooks.phases.install)
            if step is not None:
                self.session.count_from(lambda: step)
            atexit.register(self._at_exit)
            if parent_pid() is not None:  # a forked process ends without the former
                registered = sys.modules["multiprocessing.util"].Finalize(None, self._at_exit, exitpriority=0)
                self._unregister = registered.cancel

    @property
    def identity(self) -> Identity:
        """Which process this is, and its place in a distributed run as far as it is known by now."""
        return self._publisher.membership.identity

    @property
    def run(self) -> str:
        """The run's unique id, shared by all ranks."""
        return self.identity.run

    def steps(
        self,
        loader: Iterable[T],
        *,
        to: Any = None,
        samples: Callable[[Any], int] | None = None,
        tokens: Callable[[Any], int] | None = None,
        start: int | None = None,
    ) -> Iterable[T]:
        """Return the loader, watched: each batch taken from it begins a step, which lasts until the next request.

        `to` moves each batch to a device and times that as `transfer` (non_blocking where its memory is pinned).
        `samples` returns a batch's number of samples (default: the length of its first tensor), `tokens` its number of
        tokens (default: they are not counted). `start` is the global number of the first step, like `step` of `Watch`;
        for a later pass, that of the checkpoint which was loaded before it.
        """
        if self._disabled and to is None:
            return loader
        if not self._disabled:
            if start is not None:
                self.session.count_from(lambda: start)
            hooks = self.session.torch_hooks
            self.session.guard(lambda: hooks.make_loader(lambda: watch_prepared_loaders(open_session)))
        count = None if samples is None else lambda batch: known_count(int(samples(batch)))
        return WatchedLoader(self.session, loader, to, count, tokens)

    def step(self, samples: int | None = None, tokens: int | None = None) -> AbstractContextManager[None]:
        """Mark one step, for a loop without a loader: `with w.step():` around it, or a plain `w.step()` at its end.

        With plain calls a step lasts until the next call: the first call begins the second step, after the start-up.
        """
        if self._disabled:  # costs a fifth
            return contextlib.nullcontext()
        return PlainStep(self.session, known_count(samples), known_count(tokens))

    def data(self) -> AbstractContextManager[None]:
        """Return a context whose time is a wait for input."""
        return self.session.data

    def transfer(self) -> AbstractContextManager[None]:
        """Return a context whose time is a copy to the device."""
        return self.session.transfer

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Return a context whose time belongs to a phase, steps inside it included.

        "eval", "checkpoint", "startup" and "compile" are states of their own. Any other name, such as "rollout", is a
        part of `other` and reported by its name; except "train" and "training", which change nothing.
        """
        name = " ".join(str(name).split())
        if name.lower() in _TRAINING:
            return contextlib.nullcontext()
        return PhaseContext(self.session, PHASE_STATES.get(name.lower(), sendable(name)) or "unnamed")

    def watch_communication(self, model: M) -> M:
        """Return the model, its waits for other ranks booked as `comm_wait` from now on: DDP, and FSDP on a device.

        Communication that is hidden behind computing is not included. See docs/guides/ddp.md.
        """
        if not self._disabled:
            self.session.guard(lambda: self.session.torch_hooks.communication.watch(model))
        return model

    def report(self) -> Report:
        """Return all wall time since this Watch was opened, by state, with findings; `str()` of it is the verdict.

        Any thread may call it at any time, a signal handler too.
        """
        return self.session.report()

    def close(self) -> None:
        """End the run: print the verdict, send the agent the rest. Safe to call twice.

        In a signal handler that interrupts `report()` the run ends when that report is made.
        """
        if self.session.closed or self._disabled or self._publisher.postpones(self.close):
            return
        with sigchld_held():
            self.session.closed = True
            if self in open_watches:
                open_watches.remove(self)
            atexit.unregister(self._at_exit)
            self._unregister()
            self.session.guard(self.session.close, "closing")

    def __enter__(self) -> Watch:
        self.session.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _is_covered(self) -> bool:
        """Whether a Watch opened later has this thread's steps: an earlier one, not closed, must not count them too."""
        newest_first = (each for each in reversed(open_watches) if each is self or each._recorder.thread == get_ident())
        return next(newest_first, self) is not self

    def _answer_requests(self) -> None:
        """Answer what this process is asked, unless another Watch has made progress since: that one has the steps."""
        running = [each for each in reversed(open_watches) if each._publisher.is_running]
        if max(running, key=lambda each: each._publisher.accounts.timeline.last_progress_ns, default=self) is self:
            self.session.requests.check()

    def _at_exit(self) -> None:
        if os.getpid() == self.identity.pid:
            with contextlib.suppress(Exception):  # torch's error about a dead worker: no training is left to get it
                self.close()


class StepContext:
    """`with w.step():` — one step of a loop that has no loader. A step inside a step is a part of that one."""

    def __init__(self, session: Session, samples: int = UNKNOWN_SAMPLES, tokens: int = UNKNOWN_SAMPLES) -> None:
        self._session, self._recorder = session, session.recorder
        self._samples, self._tokens = samples, tokens
        self._entered = False

    def __enter__(self) -> None:
        self._entered, recorder = True, self._recorder
        if recorder.thread != get_ident():
            if not recorder.claim_thread():
                return
            self._session.start()
        if recorder.enter_step(self, self._samples, self._session.visit_step) and self._tokens >= 0:
            recorder.log.append((TOKENS, self._tokens))

    def __exit__(self, *_: object) -> None:
        recorder = self._recorder
        if recorder.step_owner is self and recorder.thread == get_ident():
            recorder.end_step(recorder.clock())


class PlainStep(StepContext):
    """What `w.step()` returns: it marks a step's end if dropped and never entered, as the result of a plain call is."""

    def __del__(self) -> None:
        if not self._entered:
            self._session.guard(self._mark, "ending a step")

    def _mark(self) -> None:
        recorder = self._recorder
        if recorder.claim_thread():
            self._session.start()
            recorder.mark_step(self._samples, self._tokens, self._session.visit_step)


class PhaseContext:
    """`with w.phase("eval"):` — time that belongs to a declared phase, steps inside it included."""

    def __init__(self, session: Session, name: str) -> None:
        self._session, self._recorder, self._name = session, session.recorder, name
        self._levels: list[int] = []

    def __enter__(self) -> None:
        recorder, level = self._recorder, 0
        if recorder.claim_thread(steps=False):
            self._session.start()
            level = recorder.enter(self._name, recorder.clock())
        self._levels.append(level)

    def __exit__(self, *_: object) -> None:
        level = self._levels.pop()
        if level and self._recorder.thread == get_ident():
            self._recorder.exit(level, self._recorder.clock())


def watch(
    loader: Iterable[T],
    *,
    to: Any = None,
    samples: Callable[[Any], int] | None = None,
    tokens: Callable[[Any], int] | None = None,
    start: int | None = None,
) -> Iterable[T]:
    """Return the loader, watched: `for batch in gpuwatch.watch(loader):` is all that a training loop needs.

    Steps go to the `Watch` that is open, else to one that is opened here and ends with the process. A verdict is
    printed when the loop ends, and when the process ends. See `Watch.steps` for the options.
    """
    if not records_here():
        return Watch().steps(loader, to=to)
    with _opening:
        if not open_watches:
            opened = Watch()
            opened.session.close_with_thread = opened.close
        current = open_watches[-1]
    return current.steps(loader, to=to, samples=samples, tokens=tokens, start=start)


def open_session() -> Session | None:
    """Return the session of the innermost open Watch of this process."""
    return open_watches[-1].session if open_watches else None


def is_set(name: str) -> bool:
    """Whether an environment variable is set to anything but 0, false or no."""
    return is_on(os.environ.get(name, ""))


def _text(value: object, most: int) -> str:
    """Return it as sent: cut, and "?" for what is no UTF-8, as in the name of a file."""
    return str(value)[:most].encode(errors="replace").decode()


def _read_config() -> None:
    """Use the thresholds of the site's file."""
    from gpuwatch.config import own_config

    account.site_thresholds = own_config().thresholds


def records_here() -> bool:
    """Whether this process may record: not with GPUWATCH_DISABLE, nor as a DataLoader worker, for which others wait."""
    data = sys.modules.get("torch.utils.data")
    return not is_set("GPUWATCH_DISABLE") and (data is None or data.get_worker_info() is None)


def forget_in_child() -> None:
    """A forked child (a loader worker, say) records nothing, sends nothing and prints nothing of its parent's."""
    global _opening, _parent_trained, _made
    _opening = threading.RLock()
    _parent_trained = _parent_trained or _made > 0
    _made = 0
    for each in list(open_watches):
        each.session.abandon()
    if open_watches:
        open_watches[0].session.guard(sample_worker, "sampling a loader worker")
    open_watches.clear()


os.register_at_fork(after_in_child=forget_in_child)
