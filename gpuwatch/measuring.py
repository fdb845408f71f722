"""By which device a recorder's steps are measured, and when that rests. Called in the training thread, but for the last release."""

from __future__ import annotations

from gpuwatch.device import DeviceTimeline
from gpuwatch.entries import DEVICE, REST
from gpuwatch.recorder import Recorder


def adopt_device(recorder: Recorder, timeline: DeviceTimeline) -> None:
    """Measure by this timeline from the next batch on."""
    recorder.leave_steady()
    if recorder.home is not None:
        release_device(recorder, recorder.clock())
    recorder.home = timeline
    if not recorder.in_phase:
        recorder.device = timeline


def release_device(recorder: Recorder, at_ns: int | None) -> None:
    """Stop measuring by the device: what it has not finished is left to the host's clock. None: do not ask it again."""
    home, recorder.home, recorder.device = recorder.home, None, None
    if home is not None:
        for times in home.harvest(at_ns) if at_ns is not None else ():
            recorder.log.append((DEVICE, times))
        for _ in range(home.abandon()):
            recorder.log.append((DEVICE, None))
    if recorder.resting:
        recorder.resting = False
        recorder.log.append((REST, False))


def rest_device(recorder: Recorder, resting: bool) -> None:
    """From now on leave steps out of the device's timeline, or measure them again. Called while a batch is fetched."""
    home = recorder.home
    if home is None or resting == recorder.resting or recorder.in_phase:
        return
    recorder.leave_steady()
    recorder.resting = resting
    recorder.log.append((REST, resting))
    if resting:
        home.interrupt()
        recorder.device = None
    else:
        home.resume()
        recorder.device = home
