"""The torch device without hardware behaves as CUDA does, and its account of its own work is right.

Each test runs in a fork that has the device.
"""

from __future__ import annotations

import functools
import io
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from benchmarks import async_device  # noqa: E402
from benchmarks.async_device import NAME, launch  # noqa: E402
from tests.servers import require  # noqa: E402

pytestmark = pytest.mark.alone

MS = 1_000_000
SLOW_MS = 40.0
"""Within so much the machine answers: what is asked for is longer by as much as matters."""


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    require(*async_device.COMPILERS)
    async_device.build()


def on_the_device(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test in a fork that has loaded the device: this process is left without it."""

    @functools.wraps(test)
    def forked(**arguments: Any) -> None:
        async_device.in_a_fork(lambda: test(**arguments))

    return forked


def event() -> Any:
    return torch.Event(device=NAME, enable_timing=True)


def recorded() -> Any:
    made = event()
    made.record()
    return made


@contextmanager
def takes_ms(least: float, most: float) -> Iterator[None]:
    begin = time.monotonic()
    yield
    took = (time.monotonic() - begin) * 1e3
    assert least <= took <= most, f"took {took:.2f} ms, not {least} to {most}"


@on_the_device
def test_it_is_torchs_accelerator_and_set_up_by_its_first_use() -> None:
    assert torch.accelerator.is_available() and torch.accelerator.current_accelerator().type == NAME
    assert (torch.accelerator.device_count(), torch.accelerator.current_device_index()) == (2, 0)
    assert not torch.asyncdev.is_initialized()
    assert torch.accelerator.current_stream().stream_id == 0
    assert not torch.asyncdev.is_initialized()
    torch.ones(1, device=NAME)
    assert torch.asyncdev.is_initialized()
    with torch.asyncdev.device(1):
        assert torch.ones(1, device=NAME).device.index == 1 == torch.asyncdev.current_device()
    assert torch.asyncdev.current_device() == 0


@on_the_device
def test_a_launch_returns_at_once_and_its_event_is_reached_after_its_time() -> None:
    begin, end = recorded(), event()
    with takes_ms(0, SLOW_MS):
        launch(0.200)
        end.record()
        assert begin.query() and not end.query()
        with pytest.raises(RuntimeError, match="completed"):
            begin.elapsed_time(end)
    with takes_ms(100, 200 + SLOW_MS):
        end.synchronize()
    assert end.query()
    assert begin.elapsed_time(end) == pytest.approx(200, abs=1)
    with takes_ms(0, SLOW_MS):
        torch.accelerator.synchronize()


@on_the_device
def test_launches_queue_behind_each_other_and_an_empty_stream_begins_now() -> None:
    begin = recorded()
    launch(0.010)
    launch(0.020)
    middle = recorded()
    middle.synchronize()
    time.sleep(0.030)
    launch(0.005)
    end = recorded()
    end.synchronize()
    assert begin.elapsed_time(middle) == pytest.approx(30, abs=1)
    assert 35 <= middle.elapsed_time(end) <= 35 + SLOW_MS


@on_the_device
def test_streams_overlap_until_one_waits_for_another() -> None:
    main, side = torch.accelerator.current_stream(), torch.Stream(device=NAME)
    since = time.monotonic_ns()
    with side:
        assert torch.accelerator.current_stream() == side
        launch(0.100)
    launch(0.100)
    assert torch.accelerator.current_stream() == main
    with takes_ms(80, 100 + SLOW_MS):
        torch.accelerator.synchronize()
    assert async_device.busy_ns(since) <= (100 + SLOW_MS) * MS
    with side:
        launch(0.060)
    main.wait_stream(side)
    launch(0.010)
    with takes_ms(60, 70 + SLOW_MS):
        main.synchronize()
    with side:
        launch(0.060)
        reached = side.record_event()
    assert not side.query() and main.query()
    main.wait_event(reached)
    assert not main.query()
    with takes_ms(50, 60 + SLOW_MS):
        main.synchronize()
    assert side.query()


@on_the_device
def test_reading_a_result_waits_for_the_work_before_it() -> None:
    value = torch.full((2,), 3.0, device=NAME)
    for read in (
        lambda: value[0].item(),
        lambda: value.cpu()[0],
        lambda: value.tolist()[0],
        lambda: float(value.sum()) / 2,
    ):
        launch(0.050)
        with takes_ms(40, 50 + SLOW_MS):
            assert read() == 3.0
    for needs_a_size in (lambda: value.nonzero(), lambda: value[value > 1], lambda: torch.equal(value, value)):
        launch(0.050)
        with takes_ms(40, 50 + SLOW_MS):
            needs_a_size()


@on_the_device
def test_a_pageable_copy_holds_the_host_and_a_pinned_one_does_not() -> None:
    async_device.settings(to_device_s=0.050)
    pageable, pinned = torch.arange(4.0), torch.arange(4.0).pin_memory()
    assert (pageable.is_pinned(), pinned.is_pinned()) == (False, True)
    with takes_ms(50, 50 + SLOW_MS):
        assert pageable.to(NAME, non_blocking=True).device.type == NAME
    with takes_ms(50, 50 + SLOW_MS):
        pinned.to(NAME)
    with takes_ms(0, SLOW_MS):
        moved = pinned.to(NAME, non_blocking=True)
    with takes_ms(10, 50 + SLOW_MS):
        assert moved.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert {kind for _, _, kind in async_device.spans()} == {"transfer"}


def trained(device: str, make: Callable[[Any], Any]) -> list[float]:
    """Return the losses of a small convolutional network on data that a DataLoader hands out."""
    torch.manual_seed(0)
    layers = (
        torch.nn.Conv2d(1, 4, 3),
        torch.nn.BatchNorm2d(4),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(64, 3),
    )
    data = torch.utils.data.TensorDataset(torch.randn(24, 1, 6, 6), torch.randint(3, (24,)))
    model = torch.nn.Sequential(*layers).to(device)
    optimizer = make(model.parameters())
    losses = []
    for images, labels in torch.utils.data.DataLoader(data, batch_size=4, pin_memory=device == NAME):
        assert images.is_pinned() == (device == NAME)
        loss = torch.nn.functional.cross_entropy(model(images.to(device, non_blocking=True)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        functools.partial(torch.optim.AdamW, lr=0.01, foreach=True),
        functools.partial(torch.optim.AdamW, lr=0.01, fused=True),
    ],
    ids=["sgd", "adamw-foreach", "adamw-fused"],
)
@on_the_device
def test_training_gives_the_same_losses_as_on_the_cpu(make: Callable[[Any], Any]) -> None:
    on_cpu, here = trained("cpu", make), trained(NAME, make)
    assert len(here) == 6 and here[-1] != here[0]
    assert here == pytest.approx(on_cpu, rel=1e-5)


@on_the_device
def test_what_a_training_uses_besides_works() -> None:
    weight = torch.nn.Parameter(torch.ones(3, device=NAME))
    stepped: list[float] = []
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.register_post_accumulate_grad_hook(lambda each: stepped.append(optimizer.step() or each[0].item()))
    (weight * 2).sum().backward()
    assert stepped == [-1.0]
    scaler = torch.amp.GradScaler(NAME, init_scale=4.0)
    with torch.autocast(NAME, dtype=torch.bfloat16):
        loss = torch.nn.functional.linear(torch.ones(1, 3, device=NAME), weight[None].detach().requires_grad_()).sum()
    scaler.scale(loss).backward()
    assert scaler.get_scale() == 4.0
    file = io.BytesIO()
    torch.save({"weight": weight}, file)
    file.seek(0)
    loaded = torch.load(file)["weight"]
    assert loaded.device.type == NAME and loaded.tolist() == [-1.0] * 3
    assert repr(weight.detach()) == "tensor([-1., -1., -1.], device='asyncdev:0')"


@on_the_device
def test_its_account_of_busy_and_idle_time_is_what_was_launched() -> None:
    main, side = torch.accelerator.current_stream(), torch.Stream(device=NAME)
    since = time.monotonic_ns()
    launch(0.020)
    main.synchronize()
    time.sleep(0.030)
    with side, async_device.working_on("eval"):
        launch(0.010)
    launch(0.010, "transfer")
    torch.accelerator.synchronize()
    until = time.monotonic_ns()
    (first, first_end, work), (second, second_end, then) = async_device.stream_spans(0)
    assert (first_end - first, second_end - second) == (20 * MS, 10 * MS) and (work, then) == ("compute", "transfer")
    assert [end - begin for begin, end, _ in async_device.stream_spans(side.stream_id)] == [10 * MS]
    assert [kind for _, _, kind in async_device.spans()] == ["compute", "eval", "transfer"]
    assert async_device.busy_ns(since, until, stream=0) == 30 * MS
    assert async_device.idle_ns(since, until, stream=0) == until - since - 30 * MS
    union = async_device.busy_ns(since, until)
    assert 30 * MS < union <= 40 * MS and async_device.idle_ns(since, until) == until - since - union


def test_where_work_overlaps_a_copy_is_not_counted() -> None:
    spans = [(0, 10, "compute"), (5, 15, "transfer"), (15, 20, "transfer"), (17, 18, "eval"), (30, 31, "compute")]
    assert async_device.flattened(spans) == [
        (0, 10, "compute"),
        (10, 17, "transfer"),
        (17, 18, "eval"),
        (18, 20, "transfer"),
        (30, 31, "compute"),
    ]


@on_the_device
def test_an_operation_takes_the_time_that_is_set_and_a_view_none() -> None:
    value = torch.ones(4, 4, device=NAME)
    async_device.settings(op_s=0.010)
    begin = recorded()
    value.t().reshape(2, 8)[0].detach().unsqueeze(0).expand(3, 8)
    viewed = recorded()
    value.add_(1).mul_(2)
    end = recorded()
    end.synchronize()
    assert begin.elapsed_time(viewed) < SLOW_MS / 2
    assert viewed.elapsed_time(end) == pytest.approx(20, abs=5)


@pytest.mark.parametrize(("call", "do"), [
    ("create", lambda: event().record()),
    ("record", lambda: EVENTS[0].record()),
    ("query", lambda: EVENTS[0].query()),
    ("elapsed", lambda: EVENTS[0].elapsed_time(EVENTS[1])),
    ("synchronize", lambda: torch.accelerator.synchronize()),
    ("launch", lambda: launch(0)),
])  # fmt: skip
@on_the_device
def test_the_nth_call_of_a_kind_fails(call: str, do: Callable[[], Any]) -> None:
    EVENTS[:] = recorded(), recorded()
    async_device.reset()
    async_device.fail(call, nth=3, times=2)
    failed = []
    for _ in range(6):
        try:
            do()
            failed.append(False)
        except RuntimeError as error:
            assert f"injected error in {call}" in str(error)
            failed.append(True)
    assert failed == [False, False, True, True, False, False]
    assert async_device.calls()[call] == 6
    async_device.fail(call, times=-1)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="injected"):
            do()
    async_device.reset()
    do()


EVENTS: list[Any] = []


@on_the_device
def test_torchs_own_events_neither_count_nor_fail() -> None:
    async_device.fail("record", times=-1)
    async_device.fail("query", times=-1)
    side = torch.Stream(device=NAME)
    side.wait_stream(torch.accelerator.current_stream())
    torch.Event(device=NAME).record()
    assert async_device.calls()["record"] == 0


@on_the_device
def test_events_may_be_late_or_never_complete_and_are_illegal_while_capturing() -> None:
    async_device.settings(event_delay_s=0.060)
    late = recorded()
    assert not late.query()
    with takes_ms(40, 60 + SLOW_MS):
        late.synchronize()
    async_device.settings(event_delay_s=-1)
    never = recorded()
    assert not never.query()
    with pytest.raises(RuntimeError, match="never completes"):
        never.synchronize()
    async_device.settings(event_delay_s=0, capturing=1)
    assert torch.accelerator.current_stream().is_capturing()
    for illegal in (late.query, late.record, lambda: event().record(), torch.accelerator.synchronize):
        with pytest.raises(RuntimeError, match="while a stream is capturing"):
            illegal()
    launch(0.001)
    async_device.settings(capturing=0)
    assert late.query()


@on_the_device
def test_wrong_use_raises() -> None:
    with pytest.raises(ValueError, match="recorded"):
        event().elapsed_time(event())
    untimed = torch.Event(device=NAME)
    untimed.record()
    with pytest.raises(ValueError, match="timing"):
        untimed.elapsed_time(recorded())
    with pytest.raises(RuntimeError, match="there is no device 2"):
        torch.ones(1, device=f"{NAME}:2")
    with pytest.raises(RuntimeError, match="device"):
        torch.ones(2, device=NAME) + torch.ones(2)


def test_without_a_compiler_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(async_device.NoCompiler, match="install-test-tools"):
        async_device.build()
