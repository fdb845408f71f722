"""What a user's own streams and `synchronize()` wait for, on the torch device without hardware.

Each test runs in a fork that has the device.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import gpuwatch  # noqa: E402
from benchmarks import async_device  # noqa: E402
from benchmarks.accuracy.lab import DATA, LAUNCH, OTHER, AsyncDevice, Lab  # noqa: E402
from benchmarks.async_device import NAME, launch  # noqa: E402
from tests.integration.benchmarks.test_async_device import on_the_device  # noqa: E402
from tests.servers import require  # noqa: E402

pytestmark = pytest.mark.alone
MOST_POINTS = 10.0
"""Booked wrongly it would be 50 points and more, and on a busy machine the host wakes up late.

The rows of `python -m benchmarks.accuracy` hold 2.
"""


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """Build the device, and import what torch needs for an optimizer: once for all forks."""
    require(*async_device.COMPILERS)
    async_device.build()
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with gpuwatch.Watch(quiet=True) as watch:  # the first pass learns torch's rules
        list(watch.steps(range(2)))


def watched(**options: Any) -> gpuwatch.Watch:
    torch.ones(1, device=NAME)
    return gpuwatch.Watch(quiet=True, budget=1.0, **options)


def slowly(batches: int = 1000) -> Iterator[int]:
    for number in range(batches):
        time.sleep(0.003)
        yield number


@pytest.fixture
def lab() -> Callable[[], Any]:
    """Return what makes a watched training that keeps the truth: for the fork, which has the device."""
    return lambda: Lab(1.0, AsyncDevice(), by_device=True, budget=1.0)


def points_off(lab: Any) -> dict[str, float]:
    """End the run; return how far each reported state is from the truth, in points."""
    report = lab.finish()
    assert report.timeline == "device" and report.unverified_ratio == 0
    true_ns, whole_s = lab.true_ns(), sum(report.states.values())
    states = {*true_ns, *report.states} - {"startup"}
    return {state: 100 * (report.states.get(state, 0) - true_ns.get(state, 0) / 1e9) / whole_s for state in states}


def synchronize_imported_earlier() -> Callable[[], None]:
    return torch.accelerator.synchronize


def synchronize_the_stream() -> Callable[[], None]:
    return lambda: torch.asyncdev.current_stream().synchronize()


def synchronize_an_event() -> Callable[[], None]:
    return lambda: torch.asyncdev.current_stream().record_event().synchronize()


def synchronize_by_the_module() -> Callable[[], None]:
    return lambda: torch.asyncdev.synchronize()


WAYS = [synchronize_imported_earlier, synchronize_by_the_module, synchronize_the_stream, synchronize_an_event]


@pytest.mark.parametrize("way", WAYS)
@on_the_device
def test_a_synchronize_waits_for_work_and_is_no_pause_of_the_host(
    way: Callable[[], Callable[[], None]], lab: Any
) -> None:
    """24 ms behind the optimizer's step, waited for: the device works all the time but for the fetch."""
    synchronize, lab = way(), lab()
    for _ in lab.loop(slowly()):
        lab.train(0.006)
        lab.truth.now(LAUNCH)  # for as long as the host waits for the device
        launch(0.024)
        synchronize()
        if lab.over():
            break
        lab.truth.now(DATA)
    off = points_off(lab)
    assert max(map(abs, off.values())) <= MOST_POINTS, off


@pytest.mark.parametrize("ahead", [0, 1])
@on_the_device
def test_a_loop_without_a_loader_waits_for_copies_on_another_stream(ahead: int, lab: Any) -> None:
    """The stream of the copies was taken for the training's, and all of its time for compute."""
    from benchmarks.accuracy.scenarios import Launches

    lab = lab()
    model, bounds = Launches(lab), lab.watch.session.torch_hooks.optimizer
    hook = lab.optimizer.register_step_post_hook(lambda of, *_: None if bounds.is_installed else bounds.stepped(of))
    main, side = torch.asyncdev.current_stream(), torch.asyncdev.Stream()
    batch, copied = torch.zeros(8).pin_memory(), []
    lab.truth.now(OTHER)
    lab.optimizer.step()
    async_device.settings(to_device_s=0.024)
    while not lab.over():
        lab.truth.now(DATA)
        time.sleep(0.006)
        with torch.asyncdev.stream(side):
            copied.append(batch.to(NAME, non_blocking=True))
            done = side.record_event()
        if len(copied) > ahead:
            lab.truth.now(LAUNCH)
            main.wait_event(done) if not ahead else main.wait_stream(side)
            model(copied.pop(0))
            lab.parameter.detach()[0].item()
            lab.optimizer.step()
    hook.remove()
    off = points_off(lab)
    assert max(map(abs, off.values())) <= MOST_POINTS, off


@pytest.mark.parametrize("waits_by", ["wait_stream", "an event"])
@pytest.mark.parametrize("kind", ["transfer", "compute"])
@on_the_device
def test_a_stream_that_waits_for_copies_on_another_one_is_in_transfer_and_for_work_computes(
    kind: str, waits_by: str, lab: Any
) -> None:
    """Every step waits for 24 ms on another stream, which waits for this one first: that wait is not the training's."""
    lab = lab()
    main, side = torch.asyncdev.current_stream(), torch.asyncdev.Stream()
    batch = torch.zeros(8).pin_memory()
    async_device.settings(to_device_s=0.024)
    for _ in lab.loop(slowly()):
        lab.truth.now(LAUNCH)
        side.wait_stream(main)
        with torch.asyncdev.stream(side):
            if kind == "transfer":
                batch.to(NAME, non_blocking=True)
            else:
                launch(0.024)
            done = side.record_event()
        if waits_by == "wait_stream":
            main.wait_stream(side)
        else:
            done.wait()
        lab.train(0.006)
        lab.truth.now(LAUNCH)  # for as long as the host waits for the device
        torch.accelerator.synchronize()
        if lab.over():
            break
        lab.truth.now(DATA)
    off = points_off(lab)
    assert lab.true_ns()[kind] > 0.4 * lab.truth.wall_ns
    assert max(map(abs, off.values())) <= MOST_POINTS, off


@on_the_device
def test_torch_is_left_as_it_was_and_its_own_errors_pass() -> None:
    def there() -> list[Any]:
        device = torch.asyncdev
        own = [vars(device.Stream)[name] for name in ("wait_event", "synchronize")]
        own += [vars(device.Event)[name] for name in ("wait", "synchronize")]
        return [*own, torch._C._accelerator_synchronizeDevice, torch.accelerator.synchronize]

    before = there()
    outer, inner = watched(run="outer"), watched(run="inner")
    passes = outer.steps(slowly(3)), inner.steps(slowly(3))
    for number, _ in enumerate(zip(*passes, strict=True)):
        assert [ours is own for ours, own in zip(there(), before, strict=True)] == [False] * 5 + [True]
        assert pickle.loads(pickle.dumps(torch.accelerator.synchronize)) is torch.accelerator.synchronize
        if number == 1:
            async_device.fail("synchronize")
            with pytest.raises(RuntimeError, match=r"^asyncdev: injected error in synchronize"):
                torch.accelerator.synchronize()
            async_device.fail("wait")
            timed = torch.asyncdev.Event(enable_timing=True)
            timed.record()
            with pytest.raises(RuntimeError, match=r"^asyncdev: injected error in wait"):
                torch.asyncdev.current_stream().wait_event(timed)
            with pytest.raises(TypeError):
                torch.asyncdev.current_stream().wait_event()
    outer.close()  # the one below the other
    assert there() != before
    inner.close()
    assert there() == before


@on_the_device
def test_what_is_compiled_sees_torchs_own() -> None:
    from torch._dynamo.testing import EagerAndRecordGraphs

    def step(x: Any) -> Any:
        y = x * 2
        torch.accelerator.synchronize()
        return y + 1

    def graphs(batches: Any) -> tuple[int, list[float]]:
        torch._dynamo.reset()
        backend = EagerAndRecordGraphs()
        compiled = torch.compile(step, backend=backend)
        results = [float(compiled(torch.ones(1, device=NAME)).cpu()) for _ in batches]
        return len(backend.graphs), results

    bare = graphs(slowly(4))
    with watched() as watch:
        assert graphs(watch.steps(slowly(4))) == bare
        assert graphs(watch.steps(slowly(4))) == bare
