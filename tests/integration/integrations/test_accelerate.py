"""Accelerate: a watched loader is still the loader that Accelerate prepared."""

from __future__ import annotations

import importlib
import time
from typing import Any

import pytest
import torch

import gpuwatch
from tests.integration.integrations import workload as w

accelerate = w.require("accelerate")

from gpuwatch.integrations import accelerate as integration  # noqa: E402

pytestmark = pytest.mark.alone

WATCHES = pytest.mark.parametrize("watched", [gpuwatch.watch, integration.watch], ids=["gpuwatch", "integration"])


@pytest.fixture
def accelerator() -> Any:
    return accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)


@WATCHES
def test_the_loader_keeps_what_it_is(watched: Any, accelerator: Any, truth: w.Truth) -> None:
    loader = accelerator.prepare(w.train_loader(truth))
    with gpuwatch.Watch(quiet=True):
        seen = watched(loader)
        assert len(seen) == w.BATCHES
        assert seen.dataset is loader.dataset
        assert seen.total_batch_size == w.BATCH_SIZE
        seen.set_epoch(3)
        assert loader.iteration == 3


@WATCHES
def test_gradient_state_and_gather_for_metrics_are_unaffected(watched: Any, accelerator: Any, truth: w.Truth) -> None:
    loader = accelerator.prepare(w.train_loader(truth, 3 * w.BATCH_SIZE))
    model, optimizer = accelerator.prepare(model := torch.nn.Linear(8, 1), torch.optim.SGD(model.parameters()))
    synced, ends, gathered = [], [], 0
    with gpuwatch.Watch(quiet=True) as watch:
        for batch in watched(loader):
            with accelerator.accumulate(model):
                accelerator.backward(model(batch["x"]).sum())
                synced.append(accelerator.sync_gradients)
                optimizer.step()
            ends.append(accelerator.gradient_state.end_of_dataloader)
            assert accelerator.gradient_state.active_dataloader is loader
            gathered += len(accelerator.gather_for_metrics(batch["labels"]))
        report = watch.report()
    assert synced == [False, True, True]
    assert ends == [False, False, True]
    assert gathered == 3 * w.BATCH_SIZE
    assert not accelerator.gradient_state.in_dataloader
    assert (report.steps, report.samples) == (3, 3 * w.BATCH_SIZE)


@WATCHES
def test_skipped_batches_are_no_steps(watched: Any, accelerator: Any, truth: w.Truth) -> None:
    loader = accelerator.skip_first_batches(accelerator.prepare(w.train_loader(truth)), 3)
    with gpuwatch.Watch(quiet=True) as watch:
        batches = [batch["x"][0, 0].item() for batch in watched(loader)]
        report = watch.report()
    assert batches == [12.0, 16.0, 20.0]
    assert (report.steps, report.samples) == (3, 3 * w.BATCH_SIZE)


def test_copies_inside_the_fetch_are_distinguished_by_the_integration_alone(
    accelerator: Any, truth: w.Truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    import accelerate.data_loader as module

    spent, copy = w.Truth({"transfer": 0.0}), module.send_to_device

    def slow(*arguments: Any, **options: Any) -> Any:
        spent.spend("transfer", 0.02)
        return copy(*arguments, **options)

    monkeypatch.setattr(module, "send_to_device", slow)
    for watched, transfer in ((integration.watch, True), (gpuwatch.watch, False)):
        truth.spent_s["input_wait"] = truth.spent_s["compute"] = spent.spent_s["transfer"] = 0.0
        with gpuwatch.Watch(quiet=True) as watch:
            for _ in watched(accelerator.prepare(w.train_loader(truth))):
                truth.spend("compute", w.COMPUTE_S)
            report = watch.report()
        states, bound_s = report.states, truth.bound_s(report.duration_s)
        copied = spent.spent_s["transfer"]
        waited = truth.spent_s["input_wait"] + (0.0 if transfer else copied)
        own_s = (
            report.duration_s - truth.spent_s["input_wait"] - truth.spent_s["compute"] - copied
        )  # the loaders' own code
        assert states.get("transfer", 0.0) == pytest.approx(copied if transfer else 0.0, abs=bound_s)
        assert waited - bound_s <= states["input_wait"] <= waited + own_s + bound_s
        assert own_s < 0.1 * report.duration_s


def test_a_broken_off_loop_restores_accelerate(accelerator: Any, truth: w.Truth) -> None:
    import accelerate.data_loader as module

    before = module.send_to_device
    with gpuwatch.Watch(quiet=True):
        for _ in integration.watch(accelerator.prepare(w.train_loader(truth))):
            assert module.send_to_device is not before
            break
    assert module.send_to_device is before


def test_workers_are_known_to_the_integration(accelerator: Any) -> None:
    loader = accelerator.prepare(torch.utils.data.DataLoader([torch.zeros(8)] * 8, batch_size=4, num_workers=1))
    with gpuwatch.Watch(quiet=True) as watch:
        for _ in integration.watch(loader):
            known = watch._publisher.accounts.loader
            assert known is not None and known.num_workers == 1 and len(known.worker_pids) == 1


@WATCHES
def test_a_watched_loader_may_be_prepared(watched: Any, accelerator: Any, truth: w.Truth) -> None:
    before = accelerate.Accelerator._prepare_one, accelerate.Accelerator.skip_first_batches
    with gpuwatch.Watch(quiet=True) as watch:
        model = torch.nn.Linear(8, 1)
        model, optimizer, loader = accelerator.prepare(
            model, torch.optim.SGD(model.parameters()), watched(w.train_loader(truth, 6 * w.BATCH_SIZE))
        )
        assert loader.total_batch_size == w.BATCH_SIZE, "it is Accelerate's loader that is watched"
        assert accelerator._dataloaders[0].dataset is loader.dataset
        synced = []
        for batch in accelerator.skip_first_batches(loader, 2):
            with accelerator.accumulate(model):
                accelerator.backward(model(batch["x"]).sum())
                optimizer.step()
                synced.append(accelerator.sync_gradients)
        report = watch.report()
    assert (report.steps, report.samples) == (4, 4 * w.BATCH_SIZE)
    assert synced == [False, True, False, True]
    assert (accelerate.Accelerator._prepare_one, accelerate.Accelerator.skip_first_batches) == before


def test_copies_of_a_loader_that_was_prepared_while_watched_are_transfer(
    accelerator: Any, truth: w.Truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("accelerate.data_loader")

    def slow(batch: Any, *args: Any, **kwargs: Any) -> Any:
        time.sleep(0.01)
        return batch

    monkeypatch.setattr(module, "send_to_device", slow)
    with gpuwatch.Watch(quiet=True) as watch:
        for _ in accelerator.prepare(gpuwatch.watch(w.train_loader(truth, 6 * w.BATCH_SIZE))):
            pass
        report = watch.report()
    assert report.steps == 6
    assert report.states["transfer"] >= 0.05
