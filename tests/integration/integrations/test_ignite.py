"""Ignite's own ways: evaluators, epoch lengths, terminate, exceptions."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.utils.data import DataLoader

import gpuwatch
from gpuwatch.hook.session import Session
from tests.integration.integrations import workload as w
from tests.integration.integrations.loops import ignite_trainer

ignite = w.require("ignite.engine")

from gpuwatch.integrations.ignite import GpuWatchCallback, GpuWatchHandler  # noqa: E402

pytestmark = pytest.mark.alone


def test_epochs_of_another_length_than_the_loader(truth: w.Truth, tmp_path: Path) -> None:
    trainer = ignite_trainer(truth, tmp_path)
    with gpuwatch.Watch(quiet=True) as watch:
        GpuWatchHandler(watch)(trainer)
        trainer.run(w.train_loader(truth), max_epochs=2, epoch_length=5)
        report = watch.report()
    assert (report.steps, report.samples) == (10, 10 * w.BATCH_SIZE)
    w.near(report, truth)


def test_an_unsized_loader_and_max_iters(truth: w.Truth, tmp_path: Path) -> None:
    trainer = ignite_trainer(truth, tmp_path)
    loader = DataLoader(w.Stream(truth, 3 * w.BATCH_SIZE), batch_size=w.BATCH_SIZE)
    with gpuwatch.Watch(quiet=True) as watch:
        GpuWatchHandler(watch).attach(trainer)
        trainer.run(loader, max_iters=8)
        report = watch.report()
    assert (report.steps, report.samples) == (8, 8 * w.BATCH_SIZE)
    w.near(report, truth)


def test_a_resumed_engine_counts_on(truth: w.Truth, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    monkeypatch.setattr(Session, "count_from", lambda session, step: counted.append(step()))
    trainer = ignite_trainer(truth, tmp_path)
    trainer.load_state_dict({"epoch_length": w.BATCHES, "max_epochs": 2, "iteration": w.BATCHES})
    with gpuwatch.Watch(quiet=True) as watch:
        GpuWatchHandler(watch).attach(trainer)
        trainer.run(w.train_loader(truth))
    assert counted == [w.BATCHES]


def test_terminate_in_the_middle_of_an_epoch(truth: w.Truth, tmp_path: Path) -> None:
    trainer = ignite_trainer(truth, tmp_path)
    trainer.add_event_handler(ignite.Events.ITERATION_COMPLETED(once=5), trainer.terminate)
    with gpuwatch.Watch(quiet=True) as watch:
        GpuWatchHandler(watch).attach(trainer)
        trainer.run(w.train_loader(truth), max_epochs=2)
        report = watch.report()
    assert (report.steps, report.samples) == (5, 5 * w.BATCH_SIZE)
    w.near(report, truth)


def test_an_exception_passes_and_everything_is_restored(
    truth: w.Truth, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from ignite.handlers import Checkpoint

    before = DataLoader.__iter__, ignite.Engine.run, Checkpoint.__call__
    trainer = ignite_trainer(truth, tmp_path)

    def fail() -> None:
        raise RuntimeError("in the middle")

    trainer.add_event_handler(ignite.Events.ITERATION_COMPLETED(once=4), fail)
    handler = GpuWatchCallback(run="broken").attach(trainer)
    with pytest.raises(RuntimeError, match="in the middle"):
        trainer.run(w.train_loader(truth))
    err = capsys.readouterr().err
    assert err.count("gpuwatch · broken") == 1 and "4 steps" in err
    assert (DataLoader.__iter__, ignite.Engine.run, Checkpoint.__call__) == before
    assert "_setup_dataloader_iter" not in vars(trainer)
    handler.detach()
    assert "run" not in vars(trainer)


def test_an_engine_without_data_has_steps_and_no_samples(truth: w.Truth, tmp_path: Path) -> None:
    trainer = ignite.Engine(lambda engine, batch: truth.spend("compute", 0.05))
    with gpuwatch.Watch(quiet=True) as watch:
        GpuWatchHandler(watch).attach(trainer)
        trainer.run(max_epochs=2, epoch_length=5)
        report = watch.report()
    assert (report.steps, report.samples) == (10, None)
    assert report.states["compute"] == pytest.approx(
        truth.spent_s["compute"], abs=truth.bound_s(report.duration_s) + 0.005
    )
