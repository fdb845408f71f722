"""Samples, tokens and declared operations a second: counted in training only, absent where they are not declared."""

from __future__ import annotations

import math
from typing import Any

import pytest

from gpuwatch.diagnosis.rates import Done, Throughput, declared, throughput
from gpuwatch.errors import ConfigError
from gpuwatch.wire import Flops
from gpuwatch_agent.gpus.readings import DENSE_PEAKS, dense_peak
from tests.unit.hook.fakes import Clock, connect, fake_watch, reported, states_ms, turn


class Tokens:
    """A batch of sequences."""

    def __init__(self, samples: int, length: int) -> None:
        self.shape, self.nbytes = (samples, length), 0


def test_rates_by_the_finest_count_that_is_declared() -> None:
    done = Done(10.0, 5, samples=40, tokens=4000)
    assert throughput(done) == Throughput(4.0, 400.0, None, None)
    assert throughput(done, Flops(per_step=100.0)).flops_per_s == 50.0
    assert throughput(done, Flops(per_step=100.0, per_sample=10.0)).flops_per_s == 40.0
    rates = throughput(done, Flops(per_sample=10.0, per_token=2.0, peak=1600.0))
    assert (rates.flops_per_s, rates.mfu_ratio) == (800.0, 0.5)
    assert throughput(Done(10.0, 5), Flops(per_token=2.0)).flops_per_s is None
    assert throughput(Done(10.0, 5), Flops(peak=1600.0)).mfu_ratio is None
    assert throughput(Done(0.0, 5, 5)) == Throughput()


@pytest.mark.parametrize("value", [0, -1.0, 10**400, math.inf, math.nan, "1e12"])
def test_what_is_no_number_above_0_is_named(value: Any) -> None:
    with pytest.raises(ConfigError, match="peak_flops="):
        declared(None, None, None, value)
    assert declared(None, None, None, None) is None


def test_tokens_are_counted_like_samples_and_not_in_an_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    watch = fake_watch(clock, monkeypatch, flops_per_token=2.0, peak_flops=16_000.0)
    agent = connect(watch)
    batches = [Tokens(4, 100), Tokens(4, 100), Tokens(2, 100)]
    for _ in watch.steps(batches, tokens=lambda batch: batch.shape[0] * batch.shape[1]):
        clock.sleep_ms(100)
        with watch.phase("eval"):
            for _ in watch.steps([Tokens(9, 9)], tokens=lambda batch: 81):
                clock.sleep_ms(50)
    with watch.step(samples=1, tokens=50):
        clock.sleep_ms(100)
    report = watch.report()
    assert (report.steps, report.samples, report.tokens) == (4, 11, 1050)
    assert report.throughput.tokens_per_s == pytest.approx(2625.0)
    assert report.throughput.mfu_ratio == pytest.approx(5250 / 16_000)
    assert "  rate  2,625 tokens/s  5.25e-09 TFLOP/s  MFU 33%" in str(report)
    turn(watch, hello=True)
    hello, *_, last = reported(agent)
    assert last.totals.tokens == 1050  # type: ignore[union-attr]
    assert hello.flops == Flops(per_token=2.0, peak=16_000.0)  # type: ignore[union-attr]


def test_a_counter_that_fails_costs_the_samples_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    watch = fake_watch(clock, monkeypatch)
    for _ in watch.steps([Tokens(4, 1)] * 3, tokens=lambda batch: batch.nothing):
        clock.sleep_ms(1)
    report = watch.report()
    assert (report.samples, report.tokens, report.throughput.tokens_per_s) == (12, None, None)
    assert "rate" not in str(report)


@pytest.mark.parametrize("name", ["train", "training", " Train "])
def test_a_phase_called_training_is_training(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    clock = Clock()
    watch = fake_watch(clock, monkeypatch)
    with watch.phase(name):
        for _ in watch.steps([Tokens(1, 1)] * 5):
            clock.sleep_ms(10)
    assert (watch.report().steps, states_ms(watch)) == (5, {"compute": 50.0})


def test_peaks_are_those_of_the_data_sheets_at_a_clock_that_the_model_has() -> None:
    """The clocks are those that NVIDIA's white papers give for tensor operations, in GHz."""
    clocks = {name: round(peak.flops_per_s / peak.flops_per_clock / 1e9, 2) for name, peak in DENSE_PEAKS.items()}
    assert clocks == {
        "NVIDIA GB300": 2.01, "NVIDIA GB200": 2.01, "NVIDIA B300": 1.86, "NVIDIA B200": 1.86, "NVIDIA H200 NVL": 1.55, "NVIDIA H200": 1.83, "NVIDIA GH200": 1.83, "NVIDIA H100 NVL": 1.55,
        "NVIDIA H100 PCIe": 1.62, "NVIDIA H800 PCIe": 1.62, "NVIDIA H100": 1.83, "NVIDIA H800": 1.83, "NVIDIA A100": 1.41, "NVIDIA A800": 1.41,
        "NVIDIA A30": 1.44, "NVIDIA A40": 1.74, "NVIDIA A10": 1.7, "NVIDIA A2": 1.76, "NVIDIA L40S": 2.49, "NVIDIA L40": 2.49, "NVIDIA L4": 2.04,
        "Tesla V100 SXM2": 1.53, "Tesla V100 PCIE": 1.37, "Tesla V100S PCIE": 1.59, "Tesla T4": 1.59,
    }  # fmt: skip


def test_a_model_is_found_by_the_name_that_its_driver_gives() -> None:
    by_name = {name: DENSE_PEAKS[row] for row, names in {
        "NVIDIA H100": ("NVIDIA H100 80GB HBM3",), "NVIDIA H100 PCIe": ("NVIDIA H100 PCIe",),
        "NVIDIA H100 NVL": ("NVIDIA H100 NVL",), "NVIDIA H200": ("NVIDIA H200",), "NVIDIA H200 NVL": ("NVIDIA H200 NVL",),
        "NVIDIA GB200": ("NVIDIA GB200",), "NVIDIA B200": ("NVIDIA B200",), "NVIDIA GH200": ("NVIDIA GH200 480GB",), "NVIDIA L4": ("NVIDIA L4",), "NVIDIA L40S": ("NVIDIA L40S",), "NVIDIA L40": ("NVIDIA L40",),
        "NVIDIA B300": ("NVIDIA B300 SXM6 AC",), "NVIDIA GB300": ("NVIDIA GB300",),
        "NVIDIA A100": ("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe", "NVIDIA A100-PCIE-40GB"),
        "NVIDIA A800": ("NVIDIA A800-SXM4-80GB", "NVIDIA A800 80GB PCIe"), "NVIDIA H800": ("NVIDIA H800",),
        "NVIDIA H800 PCIe": ("NVIDIA H800 PCIe",), "NVIDIA A30": ("NVIDIA A30",), "NVIDIA A40": ("NVIDIA A40",), "NVIDIA A10": ("NVIDIA A10",), "NVIDIA A2": ("NVIDIA A2",),
        "Tesla V100 SXM2": ("Tesla V100-SXM2-16GB", "Tesla V100-SXM2-32GB"), "Tesla V100 PCIE": ("Tesla V100-PCIE-16GB",),
        "Tesla V100S PCIE": ("Tesla V100S-PCIE-32GB",), "Tesla T4": ("Tesla T4",),
    }.items() for name in names}  # fmt: skip
    assert {name: dense_peak(name) for name in by_name} == by_name
    others = ["", "NVIDIA H20", "NVIDIA L20", "NVIDIA A10G", "NVIDIA A16", "NVIDIA A1000", "NVIDIA RTX A6000"]
    others += ["NVIDIA GeForce RTX 3090", "NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 5090", "AMD Instinct MI300X"]
    others += ["Tesla V100-SXM3-32GB", "Tesla P100-SXM2-16GB", "NVIDIA L40-48Q", "NVIDIA B300 SXM6 AC MIG 1g.34gb"]
    others += ["NVIDIA A40-48Q", "NVIDIA A10-24Q", "NVIDIA A100-SXM4-40GB MIG 1g.5gb"]
    for other in others:
        assert dense_peak(other) is None
