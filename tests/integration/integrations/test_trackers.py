"""`Watch(log="auto")` with the real trackers, offline, in their own process; skipped where one is not installed."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.programs import ROOT

TRAIN = """
import json, sys, time
import gpuwatch
import gpuwatch.hook.trackers

gpuwatch.hook.trackers.INTERVAL_NS = 300_000_000  # 0.3 s in place of 30
gpuwatch.hook.trackers._FINISH_S = 60.0  # not 5: a busy machine is no server that hangs

def batches():
    for number in range(200):
        time.sleep(0.02)
        yield number

def train(each=lambda number: None):
    with gpuwatch.Watch(run="tracked", log="auto", quiet=True) as watch:
        for number in watch.steps(batches()):
            time.sleep(0.01)
            each(number)
"""
WANDB = """
import wandb
run = wandb.init(mode="offline", project="x", settings=wandb.Settings(silent=True))
steps = []
def each(number):
    run.log({"loss": 1.0}, step=number)
    steps.append(run.step)
train(each)
print(json.dumps({"summary": dict(run.summary), "steps": steps}))
run.finish()
"""
MLFLOW = """
import mlflow
mlflow.set_tracking_uri("file://" + sys.argv[1] + "/mlruns")
with mlflow.start_run() as run:
    train()
client = mlflow.MlflowClient()
data = client.get_run(run.info.run_id).data
live = client.get_metric_history(run.info.run_id, "gpuwatch/live/input_wait_ratio")
page = client.list_artifacts(run.info.run_id)[0].path
print(json.dumps({"summary": data.metrics, "tags": data.tags, "live": [each.value for each in live], "page": page}))
"""
TENSORBOARD = """
from torch.utils.tensorboard import SummaryWriter
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
with SummaryWriter(sys.argv[1]):
    train()
events = EventAccumulator(sys.argv[1])
events.Reload()
last = {tag: events.Scalars(tag)[-1].value for tag in events.Tags()["scalars"]}
live = [each.value for each in events.Scalars("gpuwatch/live/input_wait_ratio")]
verdict = events.Tensors("gpuwatch/verdict/text_summary")[0].tensor_proto.string_val[0].decode()
print(json.dumps({"summary": last, "live": live, "verdict": verdict}))
"""


def ran(tmp_path: Path, module: str, script: str) -> Any:
    """Return what the script printed, as JSON."""
    if find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    file = tmp_path / "train.py"
    file.write_text(TRAIN + script)
    environ = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
        "PYTHONPATH": str(ROOT),
        "MLFLOW_ALLOW_FILE_STORE": "true",
    }
    done = subprocess.run(
        [sys.executable, str(file), str(tmp_path)],
        env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))


def check_summary(summary: dict[str, Any]) -> None:
    assert summary["gpuwatch/steps"] == 200
    shares = sum(value for name, value in summary.items() if name.endswith("_ratio") and "live" not in name)
    assert shares == pytest.approx(1.0)
    assert 0.05 < summary["gpuwatch/input_wait_ratio"] < 0.95


def test_wandb_offline(tmp_path: Path) -> None:
    got = ran(tmp_path, "wandb", WANDB)
    check_summary(got["summary"])
    assert "waited for data" in got["summary"]["gpuwatch/verdict"]
    assert got["steps"] == list(range(200)), "the program's own steps are as without gpuwatch"
    assert list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))


def test_mlflow_in_a_file_store(tmp_path: Path) -> None:
    got = ran(tmp_path, "mlflow", MLFLOW)
    check_summary(got["summary"])
    assert "waited for data" in got["tags"]["gpuwatch/verdict"] and got["page"] == "gpuwatch-report.html"
    assert len(got["live"]) >= 2


def test_tensorboard_s_event_files(tmp_path: Path) -> None:
    got = ran(tmp_path, "tensorboard", TENSORBOARD)
    check_summary(got["summary"])
    assert len(got["live"]) >= 2 and "waited for data" in got["verdict"]
