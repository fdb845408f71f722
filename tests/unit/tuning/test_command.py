"""The command `gpuwatch tune`: its output, and the step that it takes from a run."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import gpuwatch.commands
from gpuwatch.commands.tune import step_of_run
from tests.unit.reports.fake_source import FakeSource, steps
from tests.unit.tuning.machines import Machine

commands_tune: Any = sys.modules["gpuwatch.commands.tune"]  # `gpuwatch.commands.tune` is the function


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path, handler = list(sys.path), signal.getsignal(signal.SIGTERM)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.path[:] = path
    signal.signal(signal.SIGTERM, handler)
    sys.modules.pop("tuned_talks", None)


def test_what_a_module_prints_as_it_is_imported_is_not_in_the_json(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (directory / "tuned_talks.py").write_text("print('Using device: cuda')\ndef make(num_workers): return [1]\n")
    monkeypatch.setattr(commands_tune, "tune_loader", lambda *_, **__: Machine(0.1).sweep(0.04))
    with pytest.raises(typer.Exit):
        gpuwatch.commands.tune("tuned_talks.py:make", json=True)
    out, err = capsys.readouterr()
    assert json.loads(out)["chosen"]["num_workers"] == 3
    assert "Using device: cuda" in err


def test_the_step_of_a_run_on_a_device_is_the_device_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Input-bound and asynchronous: the host launches for 5 ms, waits 200 for data; the device computes for 42."""
    on_device: dict[str, list[Any]] = {
        "input_wait_s": [0.160] * 50,
        "host_wait_s": [0.001] * 50,
        "device_transfer_s": [0.002] * 50,
        "device_compute_s": [0.042] * 50,
    }
    source = FakeSource(taken=steps(50, 0.200, 0.005, **on_device))
    monkeypatch.setattr(commands_tune, "Client", lambda *_: source)
    assert step_of_run("http://agent", "resnet") == pytest.approx(0.045)


def test_without_a_device_it_is_the_host_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands_tune, "Client", lambda *_: FakeSource(taken=steps(50, 0.060, 0.040)))
    assert step_of_run("http://agent", "resnet") == pytest.approx(0.040)
