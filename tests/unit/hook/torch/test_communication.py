"""What a step waited for other ranks is booked once: as comm_wait, and not as compute too."""

from __future__ import annotations

import copy
import logging
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed.fsdp

from gpuwatch.ledger.events import COMM, ENTER, EXIT, PART, STEP
from gpuwatch.ledger.timeline import Timeline
from tests.unit.hook.fakes import Clock, connect, fake_watch, reported, turn


def totals(line: Timeline) -> dict[str, int]:
    return {state: ns for state, ns in line.ledger.totals_ns.items() if ns}


def test_the_wait_is_taken_out_of_compute_and_reported_with_the_step() -> None:
    line = Timeline(0)
    steps = line.apply([(COMM, 60, 90), (STEP, 0, 100, 20, 10, 1, False)])
    assert totals(line) == {"input_wait": 20, "transfer": 10, "compute": 40, "comm_wait": 30}
    assert (steps[0].comm_wait_ns, steps[0].compute_ns, line.counts.comm_steps) == (30, 70, 1)


def test_a_step_that_was_not_measured_says_so() -> None:
    line = Timeline(0)
    steps = line.apply([(STEP, 0, 100, 20, 0, 1, False), (COMM, 150, 150), (STEP, 100, 200, 20, 0, 1, False)])
    assert [step.comm_wait_ns for step in steps] == [None, 0]
    assert line.counts.comm_steps == 1


def test_a_step_in_parts_keeps_its_wait_and_a_phase_takes_none() -> None:
    line = Timeline(0)
    log: list[tuple[object, ...]] = [(COMM, 10, 30), (PART, 0, 50, 0, 0, 1, False), (ENTER, 50, "eval"), (COMM, 55, 60)]
    log += [(STEP, 50, 70, 0, 0, 1, False), (EXIT, 70), (COMM, 80, 90), (STEP, 70, 100, 0, 0, 1, False)]
    steps = line.apply(log)
    assert totals(line) == {"compute": 50, "comm_wait": 30, "eval": 20}
    assert [step.comm_wait_ns for step in steps] == [30]


def test_a_wait_never_exceeds_what_is_left_of_its_step() -> None:
    line = Timeline(0)
    line.apply([(COMM, 0, 500), (STEP, 0, 100, 90, 0, 1, False)])
    assert totals(line) == {"input_wait": 90, "comm_wait": 10}


def test_the_wire_has_the_column_only_where_it_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    watch = fake_watch(clock, monkeypatch)
    agent = connect(watch)
    for measured in (False, True):
        with watch.step():
            clock.sleep_ms(10)
            if measured:
                watch._recorder.log.append((COMM, clock.now_ns - 4_000_000, clock.now_ns))
        turn(watch)
    columns = [set(message.columns) for message in reported(agent) if hasattr(message, "columns") and message.columns]
    assert ["comm_wait_ns" in names for names in columns] == [False, True]


def test_what_cannot_be_measured_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    watch = fake_watch(Clock(), monkeypatch)
    model = object()
    with caplog.at_level(logging.WARNING):
        assert watch.watch_communication(model) is model
    assert "comm_wait is not measured: object is not DDP or FSDP" in caplog.text


@pytest.fixture
def process_group() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    yield
    torch.distributed.destroy_process_group()


def test_a_model_that_is_watched_twice_waits_once(monkeypatch: pytest.MonkeyPatch, process_group: None) -> None:
    watch = fake_watch(Clock(), monkeypatch)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    watch.watch_communication(watch.watch_communication(model))
    with watch.step():
        model(torch.ones(2)).sum().backward()
        assert [entry[0] for entry in watch._recorder.log].count(COMM) == 1
    watch.close()
    assert not model._forward_hooks


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_watched_model_is_copied_and_pickled_as_without(
    monkeypatch: pytest.MonkeyPatch, process_group: None, copied: Callable[[Any], Any]
) -> None:
    """The hook's method brought the whole recorder with it: `torch.save(model)` raised a PicklingError."""
    watch = fake_watch(Clock(), monkeypatch)
    model = watch.watch_communication(torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1)))
    with watch.step():
        copied(copied(model))(torch.ones(2)).sum().backward()
        assert COMM not in [entry[0] for entry in watch._recorder.log], "the copy is another model"
        model(torch.ones(2)).sum().backward()
        assert [entry[0] for entry in watch._recorder.log].count(COMM) == 1
    watch.close()


class ReturnsParts(torch.nn.Linear):
    """Returns its bias too, as contrastive models return the scale of their loss."""

    def __init__(self, output: Callable[..., Any]) -> None:
        super().__init__(2, 1)
        self.output = output

    def forward(self, x: torch.Tensor) -> Any:
        return self.output(features=super().forward(x), bias=self.bias)


def backward_passes(output: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> ReturnsParts:
    """Return the model after three measured steps of one that returns this."""
    watch = fake_watch(Clock(), monkeypatch)
    model = watch.watch_communication(torch.nn.parallel.DistributedDataParallel(ReturnsParts(output)))
    for _ in range(3):
        with watch.step():
            found = model(torch.ones(2))
            (found["features"].sum() + found["bias"].sum()).backward()
    assert [entry[0] for entry in watch._recorder.log].count(COMM) == 3
    watch.close()
    return model.module  # type: ignore[no-any-return]


def test_a_parameter_that_a_model_returns_gets_no_hooks(monkeypatch: pytest.MonkeyPatch, process_group: None) -> None:
    """Each step added one that stayed: the thousandth backward pass called a thousand."""
    assert not backward_passes(dict, monkeypatch).bias._backward_hooks


class Output(OrderedDict[str, Any]):
    """As transformers' ModelOutput and diffusers' BaseOutput, which have a `__getitem__` of their own."""

    def __getitem__(self, key: Any) -> Any:
        return dict(self.items())[key] if isinstance(key, str) else tuple(self.values())[key]


def test_waits_are_measured_of_a_model_that_returns_a_model_output(
    monkeypatch: pytest.MonkeyPatch, process_group: None
) -> None:
    backward_passes(Output, monkeypatch)


def test_fsdp_on_the_cpu_is_not_measured(
    monkeypatch: pytest.MonkeyPatch, process_group: None, caplog: pytest.LogCaptureFixture
) -> None:
    watch = fake_watch(Clock(), monkeypatch)
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    model = torch.nn.Sequential(torch.distributed.fsdp.fully_shard(torch.nn.Linear(2, 1), mesh=mesh))
    with caplog.at_level(logging.WARNING):
        watch.watch_communication(model)
    assert "comm_wait is not measured: FSDP is measured on a device only" in caplog.text
