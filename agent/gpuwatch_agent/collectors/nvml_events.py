"""XID errors: the driver's own word that a GPU, or what runs on it, has failed. Count, number and time of the last one.

The driver keeps them for whoever has registered, from the registration on; it is asked without waiting. *Never run on real hardware yet.*
Source: the event functions of https://docs.nvidia.com/deploy/nvml-api.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pynvml

from gpuwatch.metrics import Sample
from gpuwatch_agent.collectors.nvml import Gpu

_MOST_A_TURN = 64


@dataclass
class _Seen:
    count: int = 0
    last: int | None = None
    last_s: float = 0.0


class XidWatch:
    """The XID errors of all GPUs since the agent started, over any number of registrations."""

    def __init__(self, wall_clock: Callable[[], float]) -> None:
        self._wall_clock = wall_clock
        self._events: Any = None
        self._uuids: dict[int, str] = {}
        """By the address that a handle is."""
        self._seen: dict[str, _Seen] = {}

    def register(self, gpus: Sequence[Gpu]) -> None:
        """Ask to be told of these GPUs' errors; ones that cannot tell are left out. An earlier registration ends."""
        self.close()
        try:
            self._events = pynvml.nvmlEventSetCreate()
        except pynvml.NVMLError:
            return
        for gpu in gpus:
            try:
                pynvml.nvmlDeviceRegisterEvents(gpu.handle, pynvml.nvmlEventTypeXidCriticalError, self._events)
            except pynvml.NVMLError:
                continue
            self._uuids[_address(gpu.handle)] = gpu.device.uuid
            self._seen.setdefault(gpu.device.uuid, _Seen())

    def close(self) -> None:
        """End the registration; before NVML is shut down."""
        if self._events is not None:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlEventSetFree(self._events)
        self._events, self._uuids = None, {}

    def poll(self) -> None:
        """Take what has happened since the last time, without waiting. Raises: NVMLError, but not for "nothing has"."""
        if self._events is None or not self._uuids:
            return
        for _ in range(_MOST_A_TURN):
            try:
                event = pynvml.nvmlEventSetWait_v2(self._events, 0)
            except pynvml.NVMLError_Timeout:
                return
            seen = self._seen.get(self._uuids.get(_address(event.device), ""))
            if seen is not None and event.eventType & pynvml.nvmlEventTypeXidCriticalError:
                seen.count += 1
                seen.last, seen.last_s = int(event.eventData), self._wall_clock()

    def samples(self, gpu: Gpu) -> list[Sample]:
        """Return a GPU's errors; nothing for one that does not tell."""
        seen = self._seen.get(gpu.device.uuid)
        if seen is None:
            return []
        labels = (str(gpu.device.index), gpu.device.uuid)
        samples = [Sample("gpuwatch_gpu_xid_errors_total", seen.count, labels)]
        if seen.last is not None:
            samples.append(Sample("gpuwatch_gpu_last_xid", seen.last, labels))
            samples.append(Sample("gpuwatch_gpu_last_xid_timestamp_seconds", seen.last_s, labels))
        return samples


def _address(handle: Any) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0
