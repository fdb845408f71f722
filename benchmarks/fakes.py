"""Fakes of tests and benchmarks: a device with its own timeline, a clock set by hand, a sender that keeps frames."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpuwatch.hook.watch import Watch


class FakeClock:
    """A monotonic clock in ns that `sleep` advances."""

    def __init__(self, start_ns: int = 1_000_000_000) -> None:
        self.now_ns = start_ns

    def __call__(self) -> int:
        return self.now_ns

    def sleep(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)


@dataclass
class FakeEvent:
    """A point of the stream: reached once the clock has passed it. Times in ns."""

    at_ns: int = -1


class FakeDevice:
    """A device that runs launches one after another, in parallel to the host. It has no kernels: only time.

    `launch` returns at once, as on a GPU; `synchronize` waits. `idle_ns` is the truth to compare with: how long the
    stream was empty between the first launch and the last. Implements `gpuwatch.ledger.device_timeline.Events`.
    """

    def __init__(
        self,
        clock: Callable[[], int] = time.monotonic_ns,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._end_ns: int | None = None
        self._side_end_ns = 0
        self.idle_ns = 0
        self.idle: list[tuple[int, int]] = []
        """When the stream was empty, as (begin, end) on the clock, up to the last launch."""
        self.busy_ns = 0
        self.events_made = 0
        self.synchronized = 0
        self.capturing = False
        self.foreign = 0
        self.elsewhere = False
        """Another stream of the same device is current: set by tests."""
        self._free: list[FakeEvent] = []

    def launch(self, seconds: float) -> None:
        """Queue work that takes so long on the device."""
        now = self._clock()
        if self._end_ns is None:
            self._end_ns = now
        self._was_idle(self._end_ns, now)
        self._end_ns = max(now, self._end_ns) + round(seconds * 1e9)
        self.busy_ns += round(seconds * 1e9)

    def launch_aside(self, seconds: float) -> None:
        """Queue work on the other stream."""
        self._side_end_ns = max(self._clock(), self._side_end_ns) + round(seconds * 1e9)

    def wait_aside(self) -> None:
        """Have this stream wait for what was launched on the other one so far."""
        self.wait_until(self._side_end_ns)

    def wait_until(self, at_ns: int) -> None:
        """Have this stream wait until a moment, as for another device."""
        end_ns = max(self._clock(), self._end_ns or 0)
        self._was_idle(self._end_ns or end_ns, max(at_ns, end_ns))
        self._end_ns = max(at_ns, end_ns)

    def synchronize(self) -> None:
        """Wait until the device has done all that was launched."""
        self.synchronized += 1
        wait_ns = (self._end_ns or 0) - self._clock()
        if wait_ns > 0:
            self._sleep(wait_ns / 1e9)

    @property
    def done_ns(self) -> int:
        """How much of what was launched the device has finished by now. Any thread may read it."""
        return self.busy_ns - max(0, (self._end_ns or 0) - self._clock())

    def record(self, event: FakeEvent | None) -> FakeEvent:
        if self.capturing:
            raise RuntimeError("an event was recorded during a capture")
        event = event or self._new()
        event.at_ns = max(self._clock(), self._end_ns or 0)
        return event

    def record_aside(self) -> FakeEvent | None:
        if self.capturing or not self.elsewhere:
            return None
        event = self._new()
        event.at_ns = max(self._clock(), self._side_end_ns)
        return event

    def ready(self, event: FakeEvent) -> bool:
        if self.capturing:
            raise RuntimeError("an event was queried during a capture")
        return self._clock() >= event.at_ns

    def elapsed_ns(self, first: FakeEvent, second: FakeEvent) -> int:
        if not (self.ready(first) and self.ready(second)):
            raise RuntimeError("both events must be completed before calculating elapsed time")
        return second.at_ns - first.at_ns

    def release(self, event: FakeEvent) -> None:
        self._free.append(event)

    def usable(self) -> bool:
        if self.elsewhere:
            self.foreign += 1
        return not self.capturing and not self.elsewhere

    def saw(self, device: object) -> None:
        pass

    def _was_idle(self, begin_ns: int, end_ns: int) -> None:
        if end_ns > begin_ns:
            self.idle_ns += end_ns - begin_ns
            self.idle.append((begin_ns, end_ns))

    def _new(self) -> FakeEvent:
        if self._free:
            return self._free.pop()
        self.events_made += 1
        return FakeEvent()


def measure_by(watch: Watch, device: FakeDevice) -> None:
    """Have a watch measure by this device from the next batch on; an optimizer's `step()` counts as the last launch."""
    watch.session.torch_hooks.attach(device)


class MemorySender:
    """A `gpuwatch.wire.sockets.ZmqSender` that keeps frames in a list; refuses them while `connected` is False."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.connected = True

    def send(self, frame: bytes) -> bool:
        if self.connected:
            self.frames.append(frame)
        return self.connected

    def is_accepted(self) -> bool:
        return True

    def close(self) -> None:
        self.connected = False
