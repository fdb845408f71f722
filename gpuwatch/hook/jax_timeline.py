"""JAX's device timeline: when the device had finished a step, from `Array.is_ready()`, which is polled and never waited for.

JAX has no timing events, but each array knows whether it is computed. When the next batch is requested, the arrays that are not ready are noted;
a thread polls them every millisecond until the batch has come. From the moment at which all were ready the device was idle.
Only weak references are kept. A deleted or donated array is not polled, as some versions of jaxlib crash then: `is_deleted` and `is_ready` are
called from C, so that no thread deletes it in between. That needs the interpreter's lock; without it JAX is not measured.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import filterfalse
from operator import methodcaller
from typing import Any

from gpuwatch.ledger.device_pieces import DeviceTimes, Piece
from gpuwatch.ledger.device_timeline import DeviceTimeline, breaks

POLL_NS = 1_000_000
_BACKOFF = 50  # after a long wait arrays are polled at intervals of a fiftieth of it
POLLED = 32  # of the newest live arrays, and as many of the others: a step's results become ready together
_BEGINS_AT_ONCE_NS = 1_000_000  # a step that begins so soon has not waited for its batch yet: `data()` may follow
_is_deleted, _is_ready = methodcaller("is_deleted"), methodcaller("is_ready")


class _TorchSteps:
    """Whether an optimizer of torch has made a step in this process."""

    seen = False

    def note(self, *_: Any) -> None:
        self.seen = True


torch_steps = _TorchSteps()


def asynchronous_framework() -> str | None:
    """Return what computes asynchronously in this process: "jax:cpu", "jax:cuda", "jax:tpu", "tensorflow" (not on the CPU); None where torch trains."""
    if torch_steps.seen:
        return None
    bridge = sys.modules.get("jax._src.xla_bridge")
    if bridge is not None:
        initialized = getattr(bridge, "backends_are_initialized", None)
        if initialized is None:
            return "jax"
        if initialized():
            return f"jax:{_jax_platform(sys.modules['jax'])}"
    context = getattr(sys.modules.get("tensorflow.python.eager.context"), "_context", None)
    if context is None or not getattr(context, "_initialized", True):
        return None
    devices = getattr(context, "_logical_devices", None)
    if devices and all(device.device_type == "CPU" for device in devices):
        return None
    return "tensorflow"


def _jax_platform(jax: Any) -> str:
    platform = str(jax.default_backend())
    if platform != "gpu":
        return platform
    return "rocm" if "rocm" in str(jax.devices()[0].client.platform_version).lower() else "cuda"


def jax_timeline(clock: Callable[[], int]) -> JaxTimeline | None:
    """Return a timeline of JAX's default device; None where JAX has not set one up, or cannot be measured."""
    jax = sys.modules.get("jax")
    has_lock: Callable[[], bool] = getattr(sys, "_is_gil_enabled", lambda: True)
    if not (asynchronous_framework() or "").startswith("jax:") or not hasattr(jax, "live_arrays") or not has_lock():
        return None
    arrays = JaxArrays(jax.live_arrays, clock)  # type: ignore[union-attr]
    arrays.start()
    return JaxTimeline(arrays)


class Moment:
    """When the device had finished all that was queued by one moment, as far as polling has seen it."""

    def __init__(self, arrays: Iterable[Any], at_ns: int) -> None:
        unready = filterfalse(_is_ready, filterfalse(_is_deleted, arrays))
        self._waiting = [weakref.ref(array) for array in list(unready)]
        self.asked_ns = self.unready_ns = at_ns  # when it was last seen at work
        self.is_closed = not self._waiting  # no array is polled any more
        self.ready_ns = at_ns if self.is_closed else None  # None: not yet, or the arrays were gone before that was seen

    def poll(self, clock: Callable[[], int]) -> None:
        """Poll the arrays. The end is taken as halfway between this poll and the last one: unbiased on average."""
        if self.is_closed:
            return
        now_ns, seen, waiting = clock(), False, self._waiting
        while waiting:
            array = waiting[-1]()
            ready = [] if array is None else list(map(_is_ready, filterfalse(_is_deleted, (array,))))
            if ready == [False]:
                self.unready_ns = now_ns
                return
            seen = seen or bool(ready)
            waiting.pop()
        self.is_closed = True
        if seen:
            self.ready_ns = (self.unready_ns + clock()) // 2


class JaxArrays:
    """The live arrays of JAX's default device, and the thread that polls them. Has what the device's timeline needs of `Events`."""

    def __init__(self, live_arrays: Callable[[], Sequence[Any]], clock: Callable[[], int]) -> None:
        self.foreign = 0
        self._live_arrays = live_arrays
        self.clock = clock
        self.moment: Moment | None = None  # the one that is polled
        self.lock = threading.RLock()  # held while arrays are polled, so that the training thread deletes none
        self._wake = threading.Event()
        self._is_over = False

    def start(self) -> None:
        threading.Thread(target=self._run, name="gpuwatch-jax", daemon=True).start()

    def end(self) -> None:
        self._is_over, self.moment = True, None
        self._wake.set()

    def note(self, at_ns: int) -> Moment:
        """Return the moment at which the device will have finished what is queued by now; poll it from now on."""
        with self.lock:
            self.moment = moment = self.all_done(at_ns)
        if not moment.is_closed:
            self._wake.set()
        return moment

    def all_done(self, at_ns: int) -> Moment:
        """Return the same moment, not polled."""
        live = self._live_arrays()
        others = live[POLLED:]
        return Moment((*live[:POLLED], *others[:: 1 + len(others) // POLLED]), at_ns)

    def poll(self) -> None:
        """Poll the arrays of the current moment."""
        with self.lock:
            if self.moment is not None:
                self.moment.poll(self.clock)

    def usable(self) -> bool:
        return True

    def saw(self, device: Any) -> None:
        """Torch's devices are not JAX's."""

    def _run(self) -> None:
        while not self._is_over:
            self._wake.wait()
            self._wake.clear()
            while (moment := self.moment) is not None and not moment.is_closed:
                time.sleep(max(POLL_NS, (self.clock() - moment.asked_ns) // _BACKOFF) / 1e9)
                try:
                    self.poll()
                except Exception:  # not measured then; the training thread gets the error too
                    moment.is_closed = True


class JaxTimeline(DeviceTimeline):
    """As `DeviceTimeline`, but copies, the host's work within a step, and the device's lag behind the host are not measured."""

    def __init__(self, arrays: JaxArrays) -> None:
        super().__init__(arrays)  # type: ignore[arg-type]  # it records no events
        self._arrays = arrays
        self._before: Moment | None = None  # when the device had finished what came before the next batch
        self._last_piece: tuple[Piece, int] | None = None  # with the gap before it, until its times are set
        self._gap_ns = 0  # of the open piece

    @breaks
    def start(self, at_ns: int) -> None:
        self._open = None
        if self.error is None:
            self._settle(at_ns)
            self._before = self._arrays.note(at_ns)

    @breaks
    def begin(self, at_ns: int) -> None:
        piece, before = self._open, self._before
        if before is None or self.error is not None:
            return
        self._arrays.poll()
        done_ns = before.ready_ns
        if piece is not None and (done_ns is None or self._arrays.all_done(at_ns).ready_ns is None):
            return  # the device is at work: this wait is hidden, or the hidden part is not known
        self._open = piece = piece or Piece(at_ns, detailed=False)
        piece.begin_ns = at_ns
        self._gap_ns = 0 if done_ns is None else max(0, at_ns - done_ns)
        if done_ns is not None:
            self._settle(done_ns)
        elif at_ns - before.asked_ns > _BEGINS_AT_ONCE_NS:
            before.is_closed = True  # what the step launches now may delete the arrays
            self._settle(at_ns)

    @breaks
    def end(self, at_ns: int) -> Piece | None:
        piece, self._open = self._open, None
        self._settle(at_ns if piece is None else piece.begin_ns)
        self._before = self._arrays.note(at_ns)
        self.attention = self.error is not None
        if piece is not None:
            piece.end_ns = at_ns
            self._last_piece = piece, self._gap_ns
            self._pending.append(piece)
            self.harvest(at_ns)
        return piece

    @breaks
    def harvest(self, now_ns: int) -> None:
        before = self._before
        if before is not None and before.is_closed:
            self._settle(before.unready_ns)

    def _settle(self, else_ns: int) -> None:
        """Set the last piece's times: the device had finished it when the arrays were ready; at `else_ns` where that is not known."""
        if self._last_piece is None or self._before is None:
            return
        (piece, gap_ns), self._last_piece = self._last_piece, None
        done_ns = max(self._before.ready_ns or else_ns, piece.end_ns)
        begin_ns = piece.begin_ns
        piece.times = DeviceTimes(begin_ns, gap_ns, 0, done_ns - begin_ns, None, done_ns, None)
        self._pending.clear()

    def copy_begins(self, at_ns: int, follows: bool, in_fetch: bool = False) -> Any | None:
        return None

    def launched(self, at_ns: int) -> None:
        """An optimizer of torch: not JAX's."""

    @property
    def is_astray(self) -> bool:
        """Whether it is torch that trains here."""
        return torch_steps.seen

    def abandon(self) -> None:
        if self._before is not None:
            self._settle(self._before.unready_ns)
        super().abandon()
        self._before = None
        self._arrays.end()
