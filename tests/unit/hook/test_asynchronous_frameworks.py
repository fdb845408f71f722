"""What is claimed of a framework that computes asynchronously and is not measured: JAX, TensorFlow on a GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from gpuwatch import wire
from gpuwatch.diagnosis.report import give_verdict
from gpuwatch.diagnosis.rules import diagnose
from gpuwatch.hook.account import device
from gpuwatch.hook.identity import asynchronous_framework, torch_steps
from tests.unit.hook.fakes import Clock, connect, fake_watch, reported, turn
from tests.unit.rules.windows import STARVED


@pytest.fixture
def jax_on_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """JAX as it is once it has set up a GPU."""
    monkeypatch.setattr(torch_steps, "seen", False)
    client = SimpleNamespace(platform_version="PJRT C API\ncuda 12080")
    jax = SimpleNamespace(default_backend=lambda: "gpu", devices=lambda: [SimpleNamespace(client=client)])
    bridge = SimpleNamespace(backends_are_initialized=lambda: True)
    monkeypatch.setitem(sys.modules, "jax", jax)
    monkeypatch.setitem(sys.modules, "jax._src.xla_bridge", bridge)
    return bridge


def test_a_jax_run_that_was_not_measured_is_not_called_input_bound(
    jax_on_gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    watch = fake_watch(clock, monkeypatch)
    sender = connect(watch)

    def batches() -> Iterator[int]:
        for number in range(100):
            clock.sleep_ms(62)
            yield number

    for _ in watch.steps(batches()):
        clock.sleep_ms(38)
    report = watch.report()
    assert (report.device, report.timeline, report.findings) == ("jax:cuda", "host", ())
    assert (report.verdict.state, report.verdict.ratio) == ("unknown", pytest.approx(0.62))
    assert report.verdict.sentence == (
        "the host waited for data 62% of the time; JAX runs asynchronously, "
        "so it is not known for how much of that the device was idle"
    )
    assert "throughput" not in str(report)
    turn(watch, hello=True)
    hello = next(message for message in reported(sender) if isinstance(message, wire.Hello))
    assert (hello.device, hello.timeline) == ("jax:cuda", "host")


def test_no_rule_of_the_input_family_speaks_of_an_unmeasured_framework() -> None:
    assert diagnose(STARVED) != []
    for device_name, words in (("jax:tpu", "JAX runs"), ("tensorflow", "TensorFlow runs")):
        window = replace(STARVED, device=device_name)
        assert [finding for finding in diagnose(window) if finding.predicted_speedup is not None] == []
        assert [finding.cause for finding in diagnose(window) if finding.cause.startswith("input")] == []
        assert words in give_verdict(window).sentence
    assert give_verdict(replace(STARVED, device="jax:tpu", timeline="device")).state == "input"


def test_jax_that_only_was_imported_is_not_asked_and_torch_that_trains_decides(
    jax_on_gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert device() == "jax:cuda"
    monkeypatch.setattr(torch_steps, "seen", True)
    assert (asynchronous_framework(), device()) == (None, "cpu")
    monkeypatch.setattr(torch_steps, "seen", False)
    jax_on_gpu.backends_are_initialized = lambda: False
    assert (asynchronous_framework(), device()) == (None, "cpu")


def test_the_first_step_of_a_torch_optimizer_is_noticed(jax_on_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    watch = fake_watch(Clock(), monkeypatch)
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for number in watch.steps([1, 2]):
        assert device() == ("jax:cuda" if number == 1 else "cpu")
        weight.sum().backward()
        optimizer.step()
    watch.close()
    monkeypatch.setattr(torch_steps, "seen", False)
    optimizer.step()
    assert not torch_steps.seen  # the hook is gone


@pytest.mark.parametrize(("devices", "expected"), [(["CPU"], None), (["CPU", "GPU"], "tensorflow"), ([], "tensorflow")])
def test_tensorflow_is_synchronous_on_the_cpu_alone(
    devices: list[str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_steps, "seen", False)
    logical = [SimpleNamespace(device_type=name) for name in devices]
    context = SimpleNamespace(_initialized=True, _logical_devices=logical)
    monkeypatch.setitem(sys.modules, "tensorflow.python.eager.context", SimpleNamespace(_context=context))
    assert asynchronous_framework() == expected
    context._initialized = False
    assert asynchronous_framework() is None
