"""The one table of numbers: checked, and replaced as a whole at an agent's start."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from gpuwatch.diagnosis.rules.eval_share import eval_share
from gpuwatch.diagnosis.thresholds import THRESHOLDS, Thresholds, use
from gpuwatch.diagnosis.verdict import give_verdict
from gpuwatch.errors import ConfigError
from gpuwatch.hook import process_state as this_process
from gpuwatch.hook import watch as hook
from tests.unit.rules.windows import states, steps, window

PLAIN = asdict(Thresholds())


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    use(Thresholds())


def test_what_is_chosen_is_what_rules_and_verdict_compare_with() -> None:
    columns = steps(100, 0.001, 0.099)
    evaluating = window(columns, states_s=states(columns, eval=1.0))  # 9% of the time
    assert eval_share(evaluating) is None and give_verdict(evaluating).state == "compute"
    use(Thresholds(phase_share=0.05))
    assert eval_share(evaluating) is not None and give_verdict(evaluating).state == "eval"
    assert asdict(THRESHOLDS) == {**PLAIN, "phase_share": 0.05}


@pytest.mark.parametrize(
    ("values", "why"),
    [({"input_share": 10}, "a share is from 0 to 1"), ({"min_steps": -1}, "cannot be negative"), ({"gpu_idle_s": float("nan")}, "negative")],
)  # fmt: skip
def test_numbers_that_cannot_be_are_refused(values: dict[str, float], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Thresholds(**values)  # type: ignore[arg-type]


def test_seconds_and_factors_may_be_above_one() -> None:
    assert Thresholds(
        gpu_idle_s=900, first_batch_factor=3, first_batch_min_s=2, workers_per_core=4, pcie_bytes_per_s=2e10
    )


def test_a_training_s_own_verdict_compares_with_the_file_that_the_environment_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "gpuwatch.toml"
    file.write_text("[thresholds]\ninput_share = 0.33\n")
    monkeypatch.setenv("GPUWATCH_CONFIG", str(file))
    monkeypatch.setattr(this_process, "made", 0)
    hook.Watch(quiet=True).close()
    assert THRESHOLDS.input_share == 0.33


def test_a_file_that_cannot_be_read_hurts_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GPUWATCH_CONFIG", str(tmp_path / "absent.toml"))
    monkeypatch.setattr(this_process, "made", 0)
    hook.Watch(quiet=True).close()
    assert "absent.toml" in caplog.text and asdict(THRESHOLDS) == PLAIN
