"""Lightning's own ways: sanity checks, batches ahead, accumulation, validation inside an epoch, ends of any kind."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import gpuwatch
from gpuwatch.hook.session import Session
from tests.integration.integrations import workload as w
from tests.integration.integrations.loops import fit_lightning

pl = w.require("lightning.pytorch")

from gpuwatch.integrations.lightning import GpuWatchCallback  # noqa: E402

pytestmark = pytest.mark.alone


def fit(truth: w.Truth, directory: Path, **options: Any) -> tuple[gpuwatch.Report, Any]:
    with gpuwatch.Watch(quiet=True) as watch:
        trainer = fit_lightning(truth, directory, [GpuWatchCallback(watch)], **options)
        return watch.report(), trainer


def test_sanity_checks_and_validation_inside_an_epoch_are_no_training_input(truth: w.Truth, tmp_path: Path) -> None:
    report, _ = fit(truth, tmp_path, num_sanity_val_steps=2, val_check_interval=0.5)
    assert truth.spent_s["eval"] > 5 * w.EVAL_BATCHES * w.EVAL_S  # one check before, two in each epoch
    assert (report.steps, report.samples) == (w.STEPS, w.SAMPLES)
    w.near(report, truth)


def test_what_a_validation_waits_for_data_is_known_and_stays_evaluation(truth: w.Truth, tmp_path: Path) -> None:
    """The advice was to evaluate half as often, for a validation that waited for its loader all the time."""
    with gpuwatch.Watch(quiet=True) as watch:
        fit_lightning(truth, tmp_path, [GpuWatchCallback(watch)], max_epochs=1, val_check_interval=0.5)
        report, waited_s = watch.report(), watch._publisher._totals().eval_wait_ns / 1e9
    assert 2 * w.EVAL_BATCHES * w.BATCH_SIZE * 0.001 <= waited_s < 0.5 * truth.spent_s["eval"]
    w.near(report, truth)


def test_a_loader_without_length_is_fetched_a_batch_ahead(truth: w.Truth, tmp_path: Path) -> None:
    loader = DataLoader(w.Stream(truth, w.BATCHES * w.BATCH_SIZE), batch_size=w.BATCH_SIZE)
    report, _ = fit(truth, tmp_path, loader=loader, max_epochs=2)
    assert (report.steps, report.samples) == (2 * w.BATCHES, 2 * w.BATCHES * w.BATCH_SIZE)
    w.near(report, truth)


def test_accumulation_and_max_steps_inside_an_epoch(truth: w.Truth, tmp_path: Path) -> None:
    report, trainer = fit(truth, tmp_path, max_epochs=-1, max_steps=5, accumulate_grad_batches=2)
    assert trainer.global_step == 5
    assert (report.steps, report.samples) == (10, 10 * w.BATCH_SIZE)
    w.near(report, truth)


def test_waits_for_other_ranks_are_measured_where_the_strategy_is_ddp(
    truth: w.Truth, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.environ", dict(os.environ))  # Lightning leaves rank and world size in it
    report, _ = fit(truth, tmp_path, max_epochs=1, strategy="ddp")
    torch.distributed.destroy_process_group()
    assert report.steps == w.BATCHES
    assert 0 < report.states["comm_wait"] < report.states["compute"]


def test_a_resumed_training_counts_what_it_trains(
    truth: w.Truth, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    monkeypatch.setattr(Session, "count_from", lambda session, step: counted.append(step()))
    fit_lightning(truth, tmp_path, [], max_epochs=1)
    fresh = w.Truth()
    report, trainer = fit(fresh, tmp_path / "resumed", max_epochs=2, resume=next(tmp_path.glob("*.ckpt")))
    assert trainer.global_step == 2 * w.BATCHES and counted == [w.BATCHES]
    assert 0 < report.phases["checkpoint_load"] <= report.states["other"]
    assert (report.steps, report.samples) == (w.BATCHES, w.BATCHES * w.BATCH_SIZE)
    w.near(report, fresh)


@pytest.mark.parametrize(("error", "raised"), [(RuntimeError, RuntimeError), (KeyboardInterrupt, SystemExit)])
def test_an_exception_ends_the_watch_and_restores_everything(
    error: type[BaseException],
    raised: type[BaseException],
    truth: w.Truth,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from lightning.pytorch.loops.fetchers import _DataFetcher

    before = DataLoader.__iter__, _DataFetcher.__next__, _DataFetcher.__iter__

    def fail(step: int) -> None:
        if step == 3:
            raise error("in the middle")

    callback = GpuWatchCallback(run="broken")
    with pytest.raises(raised):
        fit_lightning(truth, tmp_path, [callback], update=fail)
    assert (DataLoader.__iter__, _DataFetcher.__next__, _DataFetcher.__iter__) == before
    err = capsys.readouterr().err
    assert err.count("gpuwatch · broken") == 1
    assert "4 steps" in err


def test_the_verdict_is_printed_once_and_the_trainer_is_left_as_it_was(
    truth: w.Truth, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = fit_lightning(truth, tmp_path, [GpuWatchCallback(run="once")], max_epochs=1)
    assert capsys.readouterr().err.count("gpuwatch · once") == 1
    owners = trainer, trainer.strategy, trainer.fit_loop.epoch_loop.val_loop
    for owner, name in zip(owners, ("save_checkpoint", "batch_to_device", "run"), strict=True):
        assert name not in vars(owner) and getattr(owner, name).__func__.__module__.startswith("lightning.")


def test_the_trainer_can_be_pickled_while_it_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader's spawned workers get it with `collate_fn=self.collate` of a data module: training ended there."""
    from lightning.pytorch.demos.boring_classes import BoringModel

    sent: list[bytes] = []
    monkeypatch.setattr(BoringModel, "on_train_start", lambda self: sent.append(pickle.dumps(self.trainer)))
    options = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "default_root_dir": tmp_path}
    with gpuwatch.Watch(quiet=True) as watch:
        pl.Trainer(max_epochs=1, callbacks=[GpuWatchCallback(watch)], **options).fit(BoringModel())
        assert watch.report().steps == 64
    assert pickle.loads(sent[0]).max_epochs == 1


def test_pytorch_lightning_works_with_the_same_callback(truth: w.Truth, tmp_path: Path) -> None:
    w.require("pytorch_lightning")
    report, _ = fit(truth, tmp_path, package="pytorch_lightning")
    assert (report.steps, report.samples) == (w.STEPS, w.SAMPLES)
    w.near(report, truth)


def test_workers_start_inside_the_wait_and_are_known(truth: w.Truth, tmp_path: Path) -> None:
    loader = DataLoader([{"x": torch.ones(8), "labels": torch.zeros(1)}] * 8, batch_size=4, num_workers=1)
    with gpuwatch.Watch(quiet=True) as watch:
        fit_lightning(truth, tmp_path, [GpuWatchCallback(watch)], loader=loader, max_epochs=1)
        known = watch._publisher.accounts.loader
    assert known is not None and known.num_workers == 1 and len(known.worker_pids) == 1


def test_a_private_api_that_is_gone_is_said_once_and_training_goes_on(
    truth: w.Truth, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import lightning.pytorch.loops.fetchers as fetchers

    callback = GpuWatchCallback(quiet=True)
    trainer = pl.Trainer(
        max_epochs=1, logger=False, accelerator="cpu", enable_checkpointing=False, enable_progress_bar=False
    )
    monkeypatch.delattr(fetchers, "_DataFetcher")
    for _ in range(2):
        callback.setup(trainer, None, "fit")
        callback.teardown(trainer, None, "fit")
    assert sum("has no _DataFetcher" in record.message for record in caplog.records) == 1


def test_disabled_nothing_is_touched(truth: w.Truth, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUWATCH_DISABLE", "1")
    seen, original = [], DataLoader.__iter__

    fit_lightning(
        truth,
        tmp_path,
        [GpuWatchCallback()],
        max_epochs=1,
        update=lambda step: seen.append(DataLoader.__iter__ is original),
    )
    assert seen == [True] * w.BATCHES


def test_a_wrong_option_is_refused_before_training() -> None:
    with pytest.raises(TypeError, match="nmae"):
        GpuWatchCallback(nmae="a")


def test_the_callback_can_be_pickled_for_a_spawned_process() -> None:
    with gpuwatch.Watch(quiet=True) as watch:
        copy = pickle.loads(pickle.dumps(GpuWatchCallback(watch, run="a")))
    assert copy._watch is None and copy._options == {"run": "a"}
