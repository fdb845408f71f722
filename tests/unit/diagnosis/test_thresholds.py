"""The one table of numbers: checked, and passed to rules as a value."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuwatch.diagnosis.report import give_verdict
from gpuwatch.diagnosis.rules import diagnose
from gpuwatch.diagnosis.rules.device import eval_share
from gpuwatch.diagnosis.thresholds import THRESHOLDS, Thresholds
from gpuwatch.errors import ConfigError
from gpuwatch.hook import account
from gpuwatch.hook import watch as hook
from tests.unit.hook.fakes import Clock, fake_watch
from tests.unit.rules.windows import states, steps, window


def test_a_site_s_thresholds_are_what_rules_and_verdict_compare_with() -> None:
    columns = steps(100, 0.001, 0.099)
    evaluating = window(columns, states_s=states(columns, eval=1.0))  # 9% of the time
    assert eval_share(evaluating) is None and give_verdict(evaluating).state == "compute"
    site = Thresholds(phase_share=0.05)
    assert eval_share(evaluating, site) is not None
    assert [finding.cause for finding in diagnose(evaluating, site)][:1] == ["eval_share"]
    assert give_verdict(evaluating, thresholds=site).state == "eval"
    assert Thresholds() == THRESHOLDS


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
    monkeypatch.setattr(account, "site_thresholds", None)
    assert verdict_on_a_phase(monkeypatch) == "eval"
    file = tmp_path / "gpuwatch.toml"
    file.write_text("[thresholds]\nphase_share = 1.0\n")
    monkeypatch.setenv("GPUWATCH_CONFIG", str(file))
    assert verdict_on_a_phase(monkeypatch) == "compute"
    assert account.thresholds() == Thresholds(phase_share=1.0)


def verdict_on_a_phase(monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the verdict on a run of steps in which an evaluation takes most of the time."""
    monkeypatch.setattr(hook, "_made", 0)
    clock = Clock()
    with fake_watch(clock, monkeypatch) as watch:
        for _ in range(10):
            with watch.step():
                clock.sleep_ms(1)
        with watch.phase("eval"):
            clock.sleep_ms(500)
        return watch.report().verdict.state


def test_a_file_that_cannot_be_read_hurts_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GPUWATCH_CONFIG", str(tmp_path / "absent.toml"))
    monkeypatch.setattr(hook, "_made", 0)
    monkeypatch.setattr(account, "site_thresholds", None)
    hook.Watch(quiet=True).close()
    assert "absent.toml" in caplog.text and account.thresholds() is THRESHOLDS
