"""The accounts of one watched process: its recorder's log applied to a timeline, and what else a diagnosis needs.

Shared by the background thread and `report()`, under one lock that the hot path never takes. A signal handler or a
finalizer may run in a thread that holds the lock already: it gets the lock too, but only reads.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from copy import copy
from threading import get_ident
from typing import TYPE_CHECKING

import msgspec

from gpuwatch.hook.identity import asynchronous_framework
from gpuwatch.hook.recorder import Recorder
from gpuwatch.hook.torch.device_events import device_in_use
from gpuwatch.host.frames import AROUND, worker_place
from gpuwatch.ledger.events import BETWEEN, DATA_WAIT, IDLE, IN_STEP, TAKEN, TRANSFERRING
from gpuwatch.ledger.states import COMPUTE, INPUT_WAIT, OTHER, STALLED, STARTUP, TRANSFER, UNKNOWN, Ledger, median
from gpuwatch.ledger.step_records import StepRecord
from gpuwatch.ledger.timeline import STILL_NS, Timeline
from gpuwatch.wire import MAX_TEXT, Counters, Loader, Standstill, Totals, WorkerDeath

if TYPE_CHECKING:
    from gpuwatch.diagnosis.thresholds import Thresholds
    from gpuwatch.diagnosis.window import StepColumns, Window
    from gpuwatch.hook.evidence import HostWatcher, OwnGpu, StepIdle
    from gpuwatch.hook.metering import FetchEvidence
    from gpuwatch.host.frames import OwnFrames

_STEPS_KEPT = 2048
_PYTHON = "python"  # the part of a step in which it runs Python code that is not torch's
_FIRST = "first wait"  # the wait for the run's first batch
_GAP = "gap"  # what the training thread does between two forward passes without gradients
_PLACES = dict(first=_FIRST, fetch=DATA_WAIT, step=IN_STEP, gap=_GAP, between=BETWEEN, python=_PYTHON, around=AROUND)
_EPOCH_STARTS_KEPT = 256
_LEAST_EMPTY = 8  # so many waits for workers show whether a single one is late
_MOST_FEEDS = 8
_STEPS_SHOWN = 20_000  # rows of a window at most

site_thresholds: Thresholds | None = None  # of the file that GPUWATCH_CONFIG names; None: the defaults


def thresholds() -> Thresholds:
    """Return what this process's own diagnosis compares with."""
    from gpuwatch.diagnosis.thresholds import THRESHOLDS

    return site_thresholds or THRESHOLDS


class Untrained:
    """Steps of whole passes in which no optimizer made a step, and their ns by state."""

    def __init__(self) -> None:
        self._all, self._earlier = Counter[str](), Counter[str]()  # the second: without those of the last pass
        self._first_ns = self._begins_ns = 0  # when the first of these steps began, and the first of the last pass
        self._excluded_ns = (0, 0)  # `Timeline.excluded_ns` at these two moments

    def add(self, step: StepRecord, excluded_ns: int) -> None:
        if not self._first_ns:
            self._first_ns, self._excluded_ns = step.start_ns, (excluded_ns, excluded_ns)
        if step.epoch_start:
            self._earlier, self._begins_ns = self._all.copy(), step.start_ns
            self._excluded_ns = self._excluded_ns[0], excluded_ns
        spent = {INPUT_WAIT: step.data_wait_ns, TRANSFER: step.transfer_ns, COMPUTE: step.compute_ns}
        self._all.update({"steps": 1, **spent})

    def before(self, since_ns: int, excluded_ns: int) -> Counter[str]:
        """Return the sums of the passes that began before, and the time from the first of them until then.

        What `Timeline.excluded_ns` has grown by since then is no `other` of theirs; `excluded_ns` is its value now.
        """
        first_ns, last_ns = self._excluded_ns
        spent, until_ns = (self._earlier, last_ns) if self._begins_ns >= since_ns else (self._all, excluded_ns)
        if spent:
            between_ns = since_ns - self._first_ns - spent.total() + spent["steps"]
            spent[OTHER] = max(0, between_ns - (until_ns - first_ns))
        return spent


class Accounts:
    """Everything known of this process's run."""

    def __init__(self, recorder: Recorder, watcher: HostWatcher | None = None) -> None:
        self.recorder = recorder
        self._watcher = watcher
        self.lock = threading.RLock()
        self._holder: int | None = None  # the thread that holds the lock by `held()`
        self.timeline = Timeline(recorder.clock())
        self.loader: Loader | None = None
        self.batch_sizes: dict[str, int] = {}  # of the loader's batches, by the names in `wire.Loader`
        self.local_world_size = 1  # ranks of the run on this node
        self.worker_deaths: tuple[WorkerDeath, ...] = ()  # loader workers that a signal has killed, 256 at most
        self.first_step: int | None = None  # global number of this process's step 0; None: not known
        self.rewinds: tuple[tuple[int, int], ...] = ()  # as in `wire.Hello`
        self.failures = 0
        self.idle = False  # a loop has ended or was left, and nothing has trained for as long as would be a stall
        self.blind = False  # the hook has stopped recording: time after the watermark is unknown
        self.standstill: Standstill | None = None  # where the process is; None while it makes progress
        self._standstill_ns = 0  # when that was noted
        self.own_gpu: OwnGpu | None = None
        self.step_idle: StepIdle | None = None
        self.frames: OwnFrames | None = None
        self.trained_since_ns: int | None = None  # when the pass began in which an optimizer made its first step
        self._untrained: Untrained | None = Untrained()  # None once all passes to come belong to the training
        self.untrained_s: dict[str, float] = {}  # seconds by state of the passes before the training
        self._untrained_steps = self._first_batches = self._first_waits_ns = 0
        self._recent: deque[StepRecord] = deque(maxlen=_STEPS_KEPT)
        self._epoch_starts: deque[StepRecord] = deque(maxlen=_EPOCH_STARTS_KEPT)
        self._unsent: list[StepRecord] = []
        self.feeds: list[FetchEvidence] = []  # of the training passes that are open, or ended last
        self._waited_ns = self._fetches_sampled = 0

    @property
    def watcher(self) -> HostWatcher:
        """What this process measures of its node."""
        if self._watcher is None:
            from gpuwatch.hook.evidence import HostWatcher

            self._watcher = HostWatcher()
        return self._watcher

    @contextlib.contextmanager
    def held(self) -> Iterator[bool]:
        """Hold the lock; yield False in the middle of a change by this thread: then nothing may be changed."""
        with self.lock:
            if self._holder is not None:
                yield False
                return
            self._holder = get_ident()
            try:
                yield True
            finally:
                self._holder = None

    def replace_lock(self) -> None:
        """Make a new lock: called in a forked child, whose parent's threads may have held the old one."""
        self.lock = threading.RLock()
        self._holder = None

    @property
    def is_held_here(self) -> bool:
        """Whether this thread holds the lock by `held()`."""
        return self._holder == get_ident()

    def apply(self, now_ns: int) -> None:
        """Book all that the recorder has logged, and the time since then that is certain. Call with the lock held."""
        with contextlib.suppress(IndexError):  # one call: a signal handler raises before or after it
            self.timeline.entries.extend(iter(self.recorder.log.popleft, ()))
        steps = self.timeline.apply()
        for step in steps:
            if self._untrained is not None:
                self._note_untrained(step)
            if step.epoch_start:
                self._epoch_starts.append(step)
                self._first_batches += 1
                self._first_waits_ns += step.data_wait_ns
            else:
                self._recent.append(step)
        self._unsent.extend(steps)
        self._collect_evidence()
        if not self.blind:
            self.timeline.book_certain(now_ns, self.recorder.in_step)
            self.idle = self.timeline.book_quiet(now_ns, self._step_ns) == OTHER

    @property
    def bounded_by_optimizer(self) -> bool:
        """Whether most steps last from one optimizer step to the next: no loader feeds them."""
        return 2 * self.recorder.bounded_steps > self.timeline.counts.steps

    @property
    def activity(self) -> str:
        """What the training thread does, as it is published: a copy is a part of the step."""
        doing = self.recorder.doing()
        return IN_STEP if doing is TRANSFERRING else IDLE if self.idle else doing

    @property
    def _step_ns(self) -> int | None:
        """When the open step began; None without one."""
        return self.recorder.begin_ns if self.recorder.step_owner not in (None, TAKEN) else None

    def _note_untrained(self, step: StepRecord) -> None:
        """Add a step to those of passes that train nothing, which are no evidence once a later pass trains."""
        since = self.trained_since_ns
        assert self._untrained is not None
        excluded_ns = step.excluded_ns if step.excluded_ns >= 0 else self.timeline.excluded_ns  # not what is inside it
        if since is None or step.start_ns + step.total_ns <= since:
            self._untrained.add(step, excluded_ns)
            return
        spent_ns, self._untrained = self._untrained.before(since, excluded_ns), None
        self._untrained_steps = spent_ns.pop("steps", 0)
        self.untrained_s = {state: ns / 1e9 for state, ns in spent_ns.items() if ns}
        self._epoch_starts.clear()
        self._recent.clear()
        self._first_batches = self._first_waits_ns = self.timeline.counts.ends_ns = 0

    def begin_feed(self, feed: FetchEvidence) -> None:
        """Compare a training pass that begins with those that are open. Called by the training thread."""
        for each in self.feeds:
            each.is_past, each.led_ns = not each.is_open, -each.inside_ns
        self.feeds.append(feed)
        del self.feeds[:-_MOST_FEEDS]

    def _collect_evidence(self) -> None:
        """Count what fetches have shown: of several loaders that feed a step only the one waited for most counts."""
        waited_ns = self.timeline.counts.phases_ns["data_wait"]
        new_ns, self._waited_ns = waited_ns - self._waited_ns, waited_ns
        new = [(feed, *feed.take()) for feed in list(self.feeds)]
        if feeds := [feed for feed, *_ in new if not feed.is_past]:
            # The loader that begins the steps is never waited for inside of another one's.
            leader = min(reversed(feeds), key=lambda feed: feed.inside_ns)
            leader.led_ns += new_ns - sum(inside_ns for *_, inside_ns in new)
            waits_ns = [max(0, feed.led_ns + feed.inside_ns) for feed in feeds]
            main = feeds[waits_ns.index(max(waits_ns))] if len(feeds) > 1 and any(f.inside_ns for f in feeds) else None
            for feed in feeds:
                feed.is_main = main in (None, feed)
            if main is not None and main.loader is not None:
                ratio = max(waits_ns) / max(1, sum(waits_ns))
                self.loader, self.batch_sizes = msgspec.structs.replace(main.loader, wait_ratio=ratio), main.batch_sizes
        for feed, counts, _ in new:
            self._fetches_sampled += counts[2]
            if feed.is_main:
                self.recorder.fetches.add(counts)
            if feed.is_past and feed in self.feeds:
                self.feeds.remove(feed)

    def take_delta(self) -> tuple[list[StepRecord], int]:
        """Return the steps since the last call, and the index of the first, from 0. Call with the lock held."""
        steps, self._unsent = self._unsent, []
        return steps, self.timeline.counts.steps - len(steps)

    def totals(self, dropped: int, overhead_ns: int) -> Totals:
        """Return the cumulative totals for the wire. Call with the lock held."""
        ledger, counts, fetches = self.timeline.ledger, self.timeline.counts, self.recorder.fetches
        counters = {name: copy(getattr(fetches, name, getattr(counts, name))) for name in Counters.__struct_fields__}
        counters["overhead_ns"] = overhead_ns + self.recorder.meter.cost_ns
        return Totals(
            start_ns=ledger.start_ns,
            watermark_ns=ledger.watermark_ns,
            states_ns={state: ns for state, ns in ledger.totals_ns.items() if ns},
            records_dropped=dropped,
            **counters,
        )

    def settle_cost(self) -> None:
        """Update the hook's own cost, and the sampling rate that follows from it. Call with the lock held."""
        counts = self.timeline.counts
        self.recorder.meter.settle(counts.steps, self._fetches_sampled, counts.total_ns)

    @property
    def which_clock(self) -> str:
        """Where the states come from: "device" once its timeline has measured a step; if it failed, half of them."""
        counts = self.timeline.counts
        least = counts.steps / 2 if self.recorder.device_failed else 0
        return "device" if counts.device_steps and counts.exposed_steps > least else "host"

    def provisional_ns(self, now_ns: int) -> dict[str, int]:
        """Return the time after the watermark by the state it will most likely be booked under. Lock held."""
        tail = Ledger(self.timeline.ledger.watermark_ns)
        begin, parts = self.recorder.open_parts_ns(now_ns)
        if self.blind:
            tail.book(UNKNOWN, now_ns)
            parts = {}
        else:
            held, between = self.timeline.held_tail()
            for state, until in held:
                tail.book(state, min(until, now_ns))
            if not parts or self.timeline.open_phase is not None or between not in (OTHER, STARTUP):
                tail.book(between, now_ns)
            tail.book(between, begin)
        for state, part in parts.items():
            begin += part
            tail.book(state, begin)
        tail.book(COMPUTE, now_ns)  # the training thread went on while its slots were read
        return {state: ns for state, ns in tail.totals_ns.items() if ns}

    def window(self, now_ns: int, settled: bool = True) -> tuple[Window, dict[str, int]]:
        """Return the run as a window, its provisional tail in ns by state: `unknown` if not `settled`. Lock held."""
        from gpuwatch.diagnosis.window import make_window

        states = {state: ns for state, ns in self.timeline.ledger.totals_ns.items() if ns}
        duration_ns = now_ns - self.timeline.start_ns
        tail = self.provisional_ns(now_ns) if settled else {UNKNOWN: duration_ns - sum(states.values())}
        for state, ns in tail.items():
            states[state] = states.get(state, 0) + ns
        first = self.timeline.counts.slow_first
        quiet, since_ns = self.timeline.quiet(now_ns, self._step_ns) or ("", 0)
        fetches, frames, empty = self.recorder.fetches, self.frames, self.recorder.fetches.empty_fetches
        places = {} if frames is None else {f"{name}_place": frames.most_frequent(of) for name, of in _PLACES.items()}
        window = make_window(
            duration_ns,
            states,
            self.totals(0, 0),
            timeline=self.which_clock,
            device=device(),
            steps=_columns(self._steps_in_proportion()),
            first_step_s={} if first is None else {state: ns / 1e9 for state, ns in first.states_ns().items()},
            end_s=self.timeline.counts.ends_ns / 1e9 if self._first_batches == 1 else 0.0,
            fetch_cpu_ratio=fetches.cpu_ratio,
            out_of_order_ratio=fetches.out_of_order / empty if empty >= _LEAST_EMPTY else None,
            loader=self.loader_with_batch(),
            bounded_by_optimizer=self.bounded_by_optimizer,
            untrained_s=self.untrained_s,
            **places,
            gaps_s=self.recorder.gaps_ns / 1e9,
            step_idle_ratio=None if self.step_idle is None else self.step_idle.ratio,
            process_cores=None if self.step_idle is None else self.step_idle.cores,
            worker_cpu_ratios=self.watcher.workers.ratios(),
            worker_busy_ratios=self.watcher.workers.ratios(busy=True),
            worker_waits=self.watcher.workers.waits(),
            worker_place=worker_place(self.loader.worker_pids if self.loader else ()),
            worker_private_bytes=self.watcher.workers.private_bytes,
            host=self.watcher.facts(),
            gpus=() if self.own_gpu is None else self.own_gpu.facts(),
            local_world_size=self.local_world_size,
            worker_deaths=self.worker_deaths,
            activity=self.activity,
            stalled_s=(now_ns - since_ns) / 1e9 if quiet == STALLED else None,
            standstill=self.standstill,
        )
        return window, tail

    def _steps_in_proportion(self) -> list[StepRecord]:
        """Return steps with first batches as frequent among them as in the whole run, so that a diagnosis may sum them.

        First batches are kept of far more passes than other steps, and so they are sampled. In passes so long that
        fewer than two would remain, although the pauses matter, the later steps are repeated instead.
        """
        firsts, later = list(self._epoch_starts), list(self._recent)
        others = self.timeline.counts.steps - self._untrained_steps - self._first_batches
        if len(firsts) < 2 or not later:
            return sorted((*firsts, *later), key=lambda step: step.start_ns)
        wanted = min(len(firsts), round(len(later) * self._first_batches / others))
        if wanted < 2:
            typical_ns = median(step.data_wait_ns for step in later)
            lost_ns = self._first_waits_ns - typical_ns * self._first_batches
            if lost_ns < thresholds().first_batch_share * self.timeline.counts.total_ns:
                return later
            wanted = 2
            rows = min(_STEPS_SHOWN, 2 * others // self._first_batches)
            later *= max(1, round(rows / len(later)))
        stride = len(firsts) / wanted
        firsts = [firsts[-1 - int(stride * index)] for index in range(wanted)]
        # Short passes: most of what is kept are first batches, and the later steps are sampled.
        fitting = max(1, round(wanted * others / self._first_batches))
        return sorted((*firsts, *later[-fitting:]), key=lambda step: step.start_ns)

    def comm_wait_s(self) -> float | None:
        """Return the mean wait for other ranks in the last steps; None unless it was measured in most of them."""
        waits_ns = [step.comm_wait_ns for step in self._recent if step.comm_wait_ns is not None]
        return sum(waits_ns) / len(waits_ns) / 1e9 if 2 * len(waits_ns) > len(self._recent) else None

    @property
    def has_new_workers(self) -> bool:
        """Whether too few samples were taken of the loader's workers, which may end with a short pass."""
        times, pids = self.watcher.workers.times, self.loader.worker_pids if self.loader else ()
        return any(len(times.get(pid, ())) < 2 for pid in pids)

    def sample_host(self) -> None:
        """Sample the node, the loader's workers and the GPU. Not under the lock: the kernel may take long to answer."""
        from gpuwatch.hook.evidence import OwnGpu, StepIdle

        loader = self.loader
        self.watcher.sample(self.recorder.clock() / 1e9, loader.worker_pids if loader else ())
        device = self.recorder.timeline
        if device is not None and device.uuid and (self.own_gpu is None or self.own_gpu.uuid != device.uuid):
            self.own_gpu = OwnGpu(device.uuid)
        trains = self.timeline.counts.steps >= thresholds().min_steps and not self.recorder.in_phase
        if self.own_gpu is not None and trains:
            self.own_gpu.sample()
        if trains:
            self.step_idle = self.step_idle or StepIdle()
            _, parts = self.recorder.open_parts_ns(self.recorder.clock())
            computed_ns = self.timeline.counts.phases_ns["compute"] + parts.get(COMPUTE, 0)
            self.step_idle.sample(computed_ns / 1e9, self.timeline.in_phases_ns / 1e9)

    def sample_frames(self, late_s: float = 0.0) -> None:
        """Sample where the training thread is in the user's code. Called by another one, woken up `late_s` late."""
        from gpuwatch.host.frames import OwnFrames, interrupting

        recorder = self.recorder
        with interrupting(late_s) as kept:
            doing = _GAP if recorder.gap_since_ns > 0 else recorder.doing()
            if doing is DATA_WAIT and not self.timeline.counts.steps:
                doing = _FIRST
            if doing in (_FIRST, DATA_WAIT, IN_STEP, BETWEEN, _GAP):
                self.frames = self.frames or OwnFrames()
                in_python = _PYTHON if doing is IN_STEP and recorder.timeline is None else ""
                self.frames.sample(recorder.thread, doing, in_python, kept, doing is _FIRST)

    def note_standstill(self, now_ns: int) -> None:
        """Note where a process without progress is, every ten seconds. Called by another thread than the training's."""
        from gpuwatch.hook.torch.communication import last_collectives
        from gpuwatch.host.frames import place_of

        if self.idle or not self.timeline.is_still(now_ns):
            self.standstill = None
        elif self.standstill is None or now_ns - self._standstill_ns > STILL_NS:
            place, self._standstill_ns = place_of(self.recorder.thread)[:MAX_TEXT], now_ns
            self.standstill = Standstill(place)  # without a flight recorder that can be read, it is all that is known
            self.standstill = Standstill(place, last_collectives())

    def loader_with_batch(self) -> Loader | None:
        """Return the loader's settings with a batch's size, and whether it is pinned, as a copy of it has shown."""
        seen = {**self.batch_sizes, "pin_memory": self.recorder.pinned}
        known = {name: value for name, value in seen.items() if value is not None}
        if self.loader is None and self.recorder.pinned is None:
            return None
        return msgspec.structs.replace(self.loader or Loader(), **known)

    def finish(self, now_ns: int) -> None:
        """Book the time up to now, when the run ends. Call with the lock held."""
        self.apply(now_ns)
        self.settle_cost()
        for state, ns in self.provisional_ns(now_ns).items():
            self.timeline.ledger.book(state, self.timeline.ledger.watermark_ns + ns)


def _columns(steps: Sequence[StepRecord]) -> StepColumns:
    """Return the steps as a diagnosis uses them: by the device's timeline where it measured them."""
    from gpuwatch.diagnosis.window import StepColumns

    states = [step.states_ns() for step in steps]
    return StepColumns(
        data_wait_s=tuple(each[INPUT_WAIT] / 1e9 for each in states),
        transfer_s=tuple(each[TRANSFER] / 1e9 for each in states),
        compute_s=tuple((sum(each.values()) - each[INPUT_WAIT] - each[TRANSFER]) / 1e9 for each in states),
        epoch_start=tuple(step.epoch_start for step in steps),
        hidden_wait_s=tuple((step.hidden_ns or 0) / 1e9 for step in steps),
    )


def device() -> str:
    """Return what is set up to train on: torch's "cuda", "xpu" …, "jax:cuda", "jax:cpu" …, "tensorflow", else "cpu"."""
    torch = sys.modules.get("torch")
    return (device_in_use(torch) if torch is not None else None) or asynchronous_framework() or "cpu"
