"""The Trainer's own ways: batches fetched before the step begins, accumulation, resuming, ends of any kind."""

from __future__ import annotations

import gc
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import gpuwatch
from gpuwatch.hook.session import Session
from tests.integration.integrations import workload as w
from tests.integration.integrations.loops import hf_trainer

hf = w.require("transformers")

from gpuwatch.integrations.transformers import GpuWatchCallback  # noqa: E402

pytestmark = pytest.mark.alone


def train(truth: w.Truth, directory: Path, resume: str | None = None, **options: Any) -> gpuwatch.Report:
    with gpuwatch.Watch(quiet=True) as watch:
        hf_trainer(truth, directory, [GpuWatchCallback(watch)], **options).train(resume)
        return watch.report()


def test_micro_batches_that_are_fetched_together_are_one_step(truth: w.Truth, tmp_path: Path) -> None:
    report = train(truth, tmp_path, num_train_epochs=2, gradient_accumulation_steps=4)
    assert (report.steps, report.samples) == (2 * 2, 2 * w.BATCHES * w.BATCH_SIZE)  # 4 + 2 batches an epoch
    w.near(report, truth)
    assert report.step_s == pytest.approx(3 * (w.BATCH_SIZE * w.SAMPLE_S + w.COMPUTE_S), rel=0.35)


def test_waits_for_other_ranks_are_measured_where_the_model_is_ddp(truth: w.Truth, tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        with gpuwatch.Watch(quiet=True) as watch:
            model = torch.nn.parallel.DistributedDataParallel(w.Model(truth))
            options = {"eval_strategy": "no", "save_strategy": "no", "remove_unused_columns": False}
            hf_trainer(truth, tmp_path, [GpuWatchCallback(watch)], model, num_train_epochs=1, **options).train()
            report = watch.report()
    finally:
        torch.distributed.destroy_process_group()
    assert report.steps == w.BATCHES
    assert 0 < report.states["comm_wait"] < report.states["compute"]


def test_max_steps_inside_an_epoch_and_evaluation_between_steps(truth: w.Truth, tmp_path: Path) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "no"}
    report = train(truth, tmp_path, max_steps=5, **options)
    assert (report.steps, report.samples) == (5, 5 * w.BATCH_SIZE)
    assert truth.spent_s["eval"] > 2 * w.EVAL_BATCHES * w.EVAL_S
    w.near(report, truth)


def test_a_resumed_training_skips_batches_and_counts_what_it_trains(
    truth: w.Truth, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    monkeypatch.setattr(Session, "count_from", lambda session, step: counted.append(step()))
    options = {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "no", "num_train_epochs": 1}
    hf_trainer(truth, tmp_path, [], max_steps=4, **options).train()
    fresh = w.Truth()
    report = train(fresh, tmp_path, resume=str(tmp_path / "checkpoint-4"), **options)
    assert (report.steps, report.samples) == (w.BATCHES - 4, (w.BATCHES - 4) * w.BATCH_SIZE)
    assert counted == [4]
    assert 0 < report.phases["checkpoint_load"] <= report.states["other"]
    w.near(report, fresh)


def test_a_trainer_that_generates_while_it_prepares_its_inputs_has_a_rollout_and_no_copies(
    truth: w.Truth, tmp_path: Path
) -> None:
    def generate(trainer: Any, inputs: Any) -> Any:
        time.sleep(0.03)
        return inputs

    def prepare(trainer: Any, inputs: Any) -> Any:  # as TRL's do it
        time.sleep(0.01)  # what it does besides is no copy either
        return hf.Trainer._prepare_inputs(trainer, trainer._generate_and_score_completions(inputs))

    options = {"eval_strategy": "no", "save_strategy": "no", "num_train_epochs": 1}
    with gpuwatch.Watch(quiet=True) as watch:
        trainer = hf_trainer(truth, tmp_path, [GpuWatchCallback(watch)], **options)
        methods = {"_generate_and_score_completions": generate, "_prepare_inputs": prepare}
        trainer.__class__ = type("Generating", (type(trainer),), methods)
        trainer.train()
        report = watch.report()
    assert report.phases["rollout"] == pytest.approx(w.BATCHES * 0.03, rel=0.25)
    assert report.states.get("transfer", 0.0) < 0.02 * report.duration_s
    w.near(report, truth)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_ends_the_watch_and_restores_everything(
    error: type[BaseException], truth: w.Truth, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import accelerate.data_loader

    gc.collect()
    assert hf.Trainer.train.__module__ == "transformers.trainer" and not hasattr(hf.Trainer.train, "__wrapped__")
    before = DataLoader.__iter__, accelerate.data_loader.send_to_device, hf.Trainer.train

    class Broken(w.Model):
        forwards = 0

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            self.forwards += 1
            if self.forwards == 4:
                raise error("in the middle")
            return super().forward(x, labels)

    trainer = hf_trainer(truth, tmp_path, [GpuWatchCallback(run="broken")], model=Broken(truth))
    assert hf.Trainer.train is not before[2]
    own = set(vars(trainer))
    with pytest.raises(error):
        trainer.train()
    err = capsys.readouterr().err
    assert err.count("gpuwatch · broken") == 1 and "4 steps" in err
    new = set(vars(trainer)) - own
    assert not new & {"get_batch_samples", "evaluate", "predict", "_prepare_inputs", "_save_checkpoint", "save_model"}
    assert (DataLoader.__iter__, accelerate.data_loader.send_to_device) == before[:2]
    del trainer
    gc.collect()
    assert hf.Trainer.train is before[2]


def test_two_trainings_with_one_callback_are_two_verdicts_and_another_trainer_none(
    truth: w.Truth, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"max_steps": 2, "save_strategy": "no", "eval_strategy": "no"}
    trainer = hf_trainer(truth, tmp_path, [GpuWatchCallback(run="twice")], **options)
    trainer.train()
    trainer.train()
    hf_trainer(truth, tmp_path, [], **options).train()
    assert capsys.readouterr().err.count("gpuwatch · twice") == 2


def test_a_callback_that_is_pickled_measures_in_the_process_that_gets_it(
    truth: w.Truth, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As with `hyperparameter_search(backend="ray")`, which sends the trainer to another process."""
    with gpuwatch.Watch(quiet=True) as watch:
        sent = pickle.dumps(GpuWatchCallback(watch, run="sent"))
    gc.collect()
    assert not hasattr(hf.Trainer.train, "__wrapped__")  # as in that process
    options = {"max_steps": 2, "save_strategy": "no", "eval_strategy": "no"}
    hf_trainer(truth, tmp_path, [pickle.loads(sent)], **options).train()
    assert capsys.readouterr().err.count("gpuwatch · sent") == 1


def test_copies_inside_the_fetch_are_transfer(truth: w.Truth, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import accelerate.data_loader

    copy = accelerate.data_loader.send_to_device
    spent = w.Truth({"transfer": 0.0})

    def slow(*arguments: Any, **options: Any) -> Any:
        spent.spend("transfer", 0.02)
        return copy(*arguments, **options)

    monkeypatch.setattr(accelerate.data_loader, "send_to_device", slow)
    report = train(truth, tmp_path, max_steps=5, save_strategy="no", eval_strategy="no")
    assert report.states["transfer"] == pytest.approx(spent.spent_s["transfer"], abs=spent.bound_s(report.duration_s))
    w.near(report, truth)
