"""Work on other streams and devices: copies are measured there.

What else runs there is not seen, so the input wait is not certain.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest

from benchmarks.fakes import FakeDevice
from gpuwatch import wire
from tests.unit.hook.fakes import connect, reported, turn
from tests.unit.hook.torch.test_hook_device import Rig

torch = pytest.importorskip("torch")


def test_a_side_stream_prefetcher_is_measured_there(rig: Rig) -> None:
    """Each batch takes 8 ms to copy, the step 3 ms: the device waits 5 ms for it, and the whole 8 ms at first."""

    def prefetched() -> Iterator[int]:
        for number in range(20):
            rig.device.elsewhere = True
            with rig.watch.transfer():
                rig.device.launch_aside(0.008)
            rig.device.elsewhere = False
            rig.device.wait_aside()
            yield number

    for _ in rig.watch.steps(prefetched()):
        rig.train(host_ms=1, launch_ms=3)
    states = rig.states()
    report = rig.watch.report()
    assert report.unverified_ratio == 0.0 and report.coverage == 1.0
    assert states == {"transfer": pytest.approx(8 + 19 * 5), "compute": pytest.approx(20 * 3)}


def test_a_copy_on_another_stream_that_is_done_in_time_costs_nothing(rig: Rig) -> None:
    for _ in rig.watch.steps(rig.batches([0.0] * 20)):
        rig.train(host_ms=1, launch_ms=5)
        rig.device.elsewhere = True
        with rig.watch.transfer():
            rig.device.launch_aside(0.002)
        rig.device.elsewhere = False
    assert rig.states() == {"compute": pytest.approx(100)}


def test_work_on_another_device_makes_the_wait_unverified_and_says_so(rig: Rig) -> None:
    def batches() -> Iterator[int]:
        for number in rig.batches([5.0] * 20):
            rig.device.foreign += 1
            yield number

    sender = connect(rig.watch)
    for _ in rig.watch.steps(batches()):
        rig.train(host_ms=1, launch_ms=2)
    states = rig.states()
    assert sum(states.values()) == pytest.approx(rig.clock.now_ns / 1e6 - 1_000_000)
    report = rig.watch.report()
    assert report.unverified_ratio == 1.0 and report.coverage == 1.0
    assert "input wait unverified: 100% of the steps use other streams or devices" in str(report)
    turn(rig.watch, hello=True)
    messages = reported(sender)
    steps = [message for message in messages if isinstance(message, wire.Steps)]
    assert steps[-1].totals.unverified_steps == 20
    hello = next(message for message in messages if isinstance(message, wire.Hello))
    assert hello.timeline == "device"


@pytest.mark.parametrize("in_mode", [False, True], ids=["", "in torch.device"])
@pytest.mark.parametrize("to", [None, "meta"], ids=["by .to()", "by to="])
def test_batches_that_are_copied_to_another_device_make_the_wait_unverified(
    to: str | None, in_mode: bool, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training on `cuda:1` with current device 0: the events of an idle device say nothing of it."""

    def saw(device: Any) -> None:
        rig.device.foreign += device.type == "meta"  # it stands for another device of the kind

    monkeypatch.setattr(rig.device, "saw", saw)
    for batch in rig.watch.steps([[torch.zeros(2)] * 2 for _ in range(10)], to=to):
        if to is None:
            with torch.device("cpu") if in_mode else nullcontext():  # as of `torch.set_default_device`
                [each.to("meta") for each in batch]
        rig.clock.sleep_ms(5)  # the work is on the other device
        rig.watch._recorder.launched()
    rig.states()
    assert rig.watch.report().unverified_ratio == 1.0


def test_one_stream_is_verified(rig: Rig) -> None:
    for _ in rig.watch.steps(rig.batches([5.0] * 20)):
        rig.train(host_ms=1, launch_ms=2)
    rig.states()
    report = rig.watch.report()
    assert report.unverified_ratio == 0.0 and "unverified" not in str(report)


def test_a_part_of_the_model_on_another_device_is_seen_by_its_copies(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def saw(device: Any) -> None:
        rig.device.foreign += device.type == "meta"

    monkeypatch.setattr(rig.device, "saw", saw)
    for number in rig.watch.steps(rig.batches([5.0] * 10)):
        if number >= 5:  # activations that go on to the next part of the model
            torch.zeros(2, device="meta").to("meta:1")
        rig.train(host_ms=1, launch_ms=2)
    rig.states()
    assert rig.watch.report().unverified_ratio == 0.5


def test_a_step_on_another_stream_is_left_to_the_host_s_clock_and_unverified(rig: Rig) -> None:
    for number in rig.watch.steps(rig.batches([5.0] * 10)):
        rig.device.elsewhere = number in (3, 4)
        rig.train(host_ms=2, launch_ms=2)
    rig.states()
    report = rig.watch.report()
    assert report.steps == 10
    assert report.unverified_ratio == pytest.approx(0.3), "steps 3 and 4, and the one in which it was left again"
    assert report.coverage < 1


def test_a_training_that_moves_to_another_device_is_measured_there(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """`set_device` after the loop's first batches: the events of the first device are left."""
    there = FakeDevice(rig.clock, lambda seconds: rig.clock.sleep_ms(seconds * 1e3))
    monkeypatch.setattr("gpuwatch.hook.torch.install.torch_events", lambda _: there)
    for number in rig.watch.steps(rig.batches([5.0] * 100)):
        rig.device.elsewhere = number >= 3
        (rig.device if number < 3 else there).launch(0.004)
        rig.clock.sleep_ms(4)
        rig.watch._recorder.launched()
        rig.clock.sleep_ms(6)
    rig.device.elsewhere = False
    there.synchronize()
    rig.watch._recorder.poll(rig.clock())
    report = rig.watch.report()
    assert report.steps == 100
    assert 0.4 < report.coverage < 0.9
    assert report.states["host_wait"] == pytest.approx(0.006 * 100 * report.coverage, abs=0.02)
    assert there.events_made > 0


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch)
