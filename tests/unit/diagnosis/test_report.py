"""The verdict's text, to the character."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gpuwatch.diagnosis.rates import Done
from gpuwatch.diagnosis.report import Report, make_report
from gpuwatch.diagnosis.window import HostFacts, StepColumns, Window
from gpuwatch.wire import Loader

WINDOW = Window(
    duration_s=192.0,
    states_s={"compute": 60.0, "input_wait": 120.0, "startup": 2.0, "checkpoint": 9.6, "other": 0.4},
    steps=StepColumns(
        data_wait_s=(1.0, 0.04, 0.04, 0.04, 0.04, 0.04, 0.04),
        transfer_s=(0.0,) * 7,
        compute_s=(0.02,) * 7,
        epoch_start=(True, *(False,) * 6),
    ),
    fetch_cpu_ratio=0.96,
    loader=Loader(num_workers=0, batch_bytes=12 << 20),
    host=HostFacts(cpu_cores=16),
)


ABOUT = {"run": "host-1-2", "name": "train.py"}


def report(window: Window = WINDOW, steps: int = 3000) -> Report:
    return make_report(window, Done(180.0, steps, 96_000), **ABOUT, provisional={"other": 0.1})


def test_the_verdict_of_a_run_that_waits_for_its_loader() -> None:
    assert str(report()) == (
        "gpuwatch · train.py · 3m 12s, 3,000 steps of 60 ms\n"
        "  input-bound: 63% of the time training waited for data\n"
        "  where input_wait 62%  compute 31%  checkpoint 5.0%  startup 1.0%  other 0.2%\n"
        "  why   batches are prepared in the training process: training waited for data 63% of the time (on\n"
        "        average 40 ms of a 60 ms step); num_workers=0; 96% of a fetch is CPU work (decoding,\n"
        "        augmentation)\n"
        "  do    DataLoader(num_workers=3, persistent_workers=True); expect a step of 21.6 ms to 36.6 ms;\n"
        "        takes up to 72 MiB of /dev/shm (1.64× to 2.78× the throughput)"
    )


def test_a_short_run_promises_nothing() -> None:
    short = make_report(WINDOW, Done(3.0, 7, None), **ABOUT)
    assert [(each.predicted_speedup, each.predicted_range) for each in short.findings] == [(None, None)]
    lines = str(short).splitlines()
    assert lines[1].startswith("  short: 7 steps, too few for a prediction; so far input-bound: 63%")
    assert lines[-1] == "  do    DataLoader(num_workers=3, persistent_workers=True); takes up to 72 MiB of /dev/shm"
    assert str(make_report(WINDOW, Done(1.0, 1, None), run="a", name="b")).startswith(
        "gpuwatch · b · 3m 12s, 1 step of"
    )


def test_the_verdict_of_a_healthy_run() -> None:
    window = Window(duration_s=10.0, states_s={"compute": 9.9, "input_wait": 0.1})
    assert str(report(window, steps=1000)).splitlines()[:3] == [
        "gpuwatch · train.py · 10.0 s, 1,000 steps",
        "  healthy: 99% of the time is compute, the input keeps up",
        "  where compute 99%  input_wait 1.0%",
    ]


def test_on_a_gpu_the_host_clock_says_what_it_cannot_see() -> None:
    window = Window(duration_s=10.0, device="cuda", states_s={"compute": 5.0, "input_wait": 5.0})
    lines = str(report(window)).splitlines()
    assert lines[1] == (
        "  input-bound: 50% of the time training waited for data (by the host clock: work queued on the device may hide part of it)"
    )
    assert lines[2].endswith("(host clock)")


def test_the_numbers_behind_the_text() -> None:
    made = report()
    assert (made.verdict.state, round(made.verdict.ratio, 3)) == ("input", 0.632)
    assert made.step_s == pytest.approx(0.06)
    assert sum(made.states.values()) == made.duration_s
    assert list(made.shares) == ["input_wait", "compute", "checkpoint", "startup", "other"]
    assert (made.steps, made.samples, made.provisional) == (3000, 96_000, {"other": 0.1})


def test_no_line_is_longer_than_a_terminal_but_the_sentence() -> None:
    assert max(map(len, str(report()).splitlines())) <= 100


def test_what_the_gpu_cost_is_shown_where_a_price_is_given() -> None:
    window = replace(WINDOW, device="cuda")
    reported = make_report(window, Done(180.0, 3000, None), price=(18.0, "EUR"), **ABOUT)
    assert reported.cost is not None and reported.cost.states["input_wait"] == pytest.approx(120 / 3600 * 18)
    assert "  cost  0.96 EUR, 0.60 EUR of it input_wait (one GPU at 18.00 EUR an hour)" in str(reported).splitlines()
    on_cpu = make_report(WINDOW, Done(180.0, 3000, None), price=(18.0, "EUR"), **ABOUT)
    assert on_cpu.cost is None and "cost" not in str(on_cpu)
