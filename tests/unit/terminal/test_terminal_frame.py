"""The screen as a whole: what it says, and that it fits."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from rich.cells import cell_len

from gpuwatch.api import Collector, Finding, Recent
from gpuwatch.costs import Cost
from gpuwatch.errors import SourceError
from gpuwatch_dashboards.terminal.facts import Facts
from gpuwatch_dashboards.terminal.frame import frame
from gpuwatch_dashboards.terminal.gpu_curves import GpuCurves
from gpuwatch_dashboards.terminal.view import Page, View
from tests.unit.terminal.screens import FINDING, NOW, facts, level, run, screen

AWAY = SourceError(
    "the agent at http://127.0.0.1:1 does not answer", "http://127.0.0.1:1", "start it with `gpuwatch up`"
)
PAGES: tuple[Page, ...] = ("runs", "gpus", "findings", "help")
SIZES = ((80, 24), (60, 20), (160, 50), (120, 30), (40, 10), (20, 5), (1, 1))


@pytest.mark.parametrize(("size", "page"), list(itertools.product(SIZES, PAGES)))
def test_every_page_fills_the_terminal_exactly(size: tuple[int, int], page: Page) -> None:
    width, height = size
    many = facts(*(run(f"r{n}", name="日本語 name of a run " * 4) for n in range(1, 9)), gpus=8)
    for shown in (many, facts(run("r1", recent=None, verdict=None, states={})), facts(), facts(gpus=8), AWAY, None):
        lines = screen(shown, width, height, View(page=page))
        assert len(lines) == min(height, max(height, 1))
        assert {cell_len(line) for line in lines} == {width}


def test_run_page_at_80_by_24_says_it_all() -> None:
    text = "\n".join(screen(facts(run("r1"), gpus=8)))
    for said in (
        "▸ name-r1         ● running   9.70  103 ms █████╱╱╱╱╱╱╱╱╱",
        "input-bound: 62% of the time training waited for data ",
        "╱╱ waiting for data 62% (60%)  ██ computing 35% (35%)",
        "step p50 103 ms · p95 131 ms · 9.70 steps/s · 621 samples/s",
        "mean 103 ms = 64.0 ms data wait + 3.00 ms transfer + 36.0 ms computing",
        "the loader runs in the training process  62%, for 1m 35s",
        "why  data wait 62% of the time; 11 of 16 cores idle",
        "do   num_workers 0 → 8 → up to 2.6× faster",
        "GPU  0 █ 0%  1 █ 10%  2 █ 20%",
        "CPU 31% iowait 5%  pressure CPU 8% I/O 3% mem 0%  shm 32/64 MiB  mem 64/256 GiB",
        "net ↓41 ↑2 MiB/s  disk read 180 write 6 MiB/s",
        "g  GPUs   f  findings   ?  help   q  quit",
    ):
        assert said in text, f"{said}\n{text}"


def test_what_a_run_costs_is_told_where_there_is_a_price() -> None:
    cost = Cost("EUR", 1, 4.2, 12.5, {"compute": 7.0, "input_wait": 5.5})
    assert "12.50 EUR (5.50 EUR outside compute)" in "\n".join(screen(facts(run("r1", cost=cost))))
    assert "12.50 EUR (5.50 EUR outside compute)" in "\n".join(screen(facts(run("r1", cost=cost, recent=None)), 60, 20))
    assert "EUR" not in "\n".join(screen(facts(run("r1"))))


def test_at_60_by_20_verdict_ledger_and_what_to_do_are_there() -> None:
    text = "\n".join(screen(facts(run("r1"), run("r2"), run("r3"), run("r4"), gpus=8), 60, 20))
    for said in (
        "▸ name-r1      ●   9.70",
        "input-bound: 62% of the time",
        "waiting for data 62%",
        "num_workers 0 → 8",
        "q  quit",
    ):
        assert said in text, f"{said}\n{text}"


def test_a_large_screen_adds_the_ledger_over_time_and_every_gpu() -> None:
    lines = screen(facts(run("r1"), gpus=8), 160, 50)
    assert sum("NVIDIA H200" in line for line in lines) == 8
    area = lines[next(n for n, line in enumerate(lines) if "100%" in line) :][:10]
    assert [line[13] for line in area] == ["╱"] * 6 + ["█"] * 4


def test_the_chosen_run_stays_in_sight_of_a_long_list() -> None:
    shown = facts(*(run(f"r{n}") for n in range(1, 31)))
    lines = screen(shown, view=View(run="r20/0"))
    assert any(line.startswith("▸ name-r20") for line in lines)
    assert "of 30" in lines[1]
    assert "── name-r20 ●" in "\n".join(lines)


def test_a_run_just_chosen_is_not_shown_with_another_one_s_curves() -> None:
    text = "\n".join(screen(facts(run("r1"), run("r2")), view=View(run="r2/0")))
    assert "mean" not in text
    assert "input wait                     –" in text
    assert "CPU         ▂" in text


def test_eight_gpus_fit_and_sixteen_scroll() -> None:
    eight = screen(facts(run(), gpus=8), view=View(page="gpus", gpu=7))
    assert sum("141 GiB" in line for line in eight) == 8
    assert next(line for line in eight if line.startswith("▸")).split()[1] == "7"
    sixteen = screen(facts(run(), gpus=16), 60, 20, View(page="gpus", gpu=15))
    assert any(line.startswith("▸ 15") for line in sixteen)
    assert "of 16" in sixteen[1]
    assert "██ computing 25%" in "\n".join(sixteen)


def test_a_gpu_says_who_holds_it_by_the_run_s_name_and_its_finding() -> None:
    idle = Finding("held_idle", "warning", "GPU 0 is held and does nothing", 1.0, (), "end it", gpu="GPU-0")
    shown = facts(run("r1"), gpus=1, gpu_findings=(idle,))
    text = "\n".join(screen(shown, 120, 30, View(page="gpus")))
    assert "u0" in text and "GPU 0 is held and does nothing" in text
    assert "GPU 0 is held" in "\n".join(screen(shown, view=View(page="findings")))


def test_empty_node_shows_the_line_to_add() -> None:
    text = "\n".join(screen(facts()))
    assert "No training run on node-17 yet." in text
    assert "for batch in gpuwatch.watch(loader):" in text


def test_agent_away_says_url_remedy_and_that_it_goes_on() -> None:
    text = "\n".join(screen(AWAY))
    assert "The agent at http://127.0.0.1:1 does not answer." in text
    assert "Start it with gpuwatch up." in text
    assert "tries again every second" in text
    assert "quit" in text


def test_what_was_not_measured_is_a_dash_and_never_a_zero() -> None:
    text = "\n".join(screen(facts(run("r1", recent=Recent(60.0, {"compute": 60.0}), findings=()))))
    line = next(line for line in text.splitlines() if line.startswith("▸"))
    assert line.split()[4:7] == ["–", "–", "██████████████"]
    assert "No bottleneck found in the last minute." in text


def test_what_fails_on_the_node_is_said() -> None:
    text = "\n".join(screen(facts(run(), collectors=(Collector("gpu", False, "NVML hangs"),), history_failures=3)))
    assert "fails: gpu" in text and "history: 3 commits failed" in text


def test_findings_scroll_to_their_end() -> None:
    shown = facts(*(run(f"r{n}") for n in range(1, 9)))
    first = frame(View(page="findings"), shown, 80, 24)
    last = screen(shown, view=View(page="findings", scroll=first.scroll_end))
    assert first.scroll_end == 8 * 4 - 22
    assert "name-r8" in "\n".join(last) and "name-r1 " not in "\n".join(last)


def test_names_and_advice_cannot_control_the_terminal() -> None:
    evil = "x\x1b]0;owned\x07\x9b31m\u202e\n[red]"
    finding = Finding("c", "warning", evil, 0.5, FINDING.evidence, evil)
    for page in PAGES:
        lines = screen(facts(run("r1", name=evil, findings=(finding,), user=evil), gpus=1), view=View(page=page))
        text = "".join(lines)
        assert all(character.isprintable() for character in text)
    assert "[red]" in "".join(screen(facts(run("r1", name=evil)), 160, 50))


def test_little_of_much_and_nothing_at_all_are_readable() -> None:
    known = facts(run("r1"))
    little = replace(
        known.strands, shm_used_bytes=4096.0, shm_size_bytes=24.0 * 2**30, rates={"received": 0.0, "sent": 1e6}
    )
    text = "\n".join(screen(replace(known, strands=little)))
    assert "shm 4 KiB/24 GiB" in text and "net ↓0 ↑977 KiB/s" in text


def with_curves(gpus: int, **more: object) -> Facts:
    keys = [(str(n), f"GPU-{n}") for n in range(gpus)]
    curves = GpuCurves(
        NOW - 300,
        NOW,
        utilization={key: level(0.25) for key in keys},
        memory={key: level(0.5) for key in keys},
        power_watts={key: level(412.0) for key in keys},
        temperature_celsius={key: level(61.0) for key in keys},
    )
    return facts(run("r1"), gpus=gpus, gpu_curves=curves, **more)


def test_the_chosen_gpu_has_its_last_minutes_below_the_list() -> None:
    lines = screen(with_curves(8), view=View(page="gpus", gpu=3))
    [utilization] = [line for line in lines if line.startswith(" utilisation")]
    [power] = [line for line in lines if line.startswith(" power")]
    assert (
        utilization.count("▂") == 18
        and "25%" in utilization
        and "memory      ▄" in utilization
        and " 50%" in utilization
    )
    assert "412 W" in power and "61 °C" in power
    assert sum("141 GiB" in line for line in lines) == 8
    assert "⏎  its run" in lines[-1] and lines[-1].rstrip().endswith("q  quit")


def test_a_tall_screen_draws_a_gpu_s_curves_higher_and_a_low_one_leaves_them_out() -> None:
    tall = screen(with_curves(8), 120, 40, View(page="gpus"))
    at = next(n for n, line in enumerate(tall) if line.startswith(" utilisation"))
    assert "▆" in tall[at] and "█" not in tall[at - 2]  # a quarter of three lines of eighths
    low = screen(with_curves(8), 80, 16, View(page="gpus"))
    assert not any(line.startswith(" utilisation") for line in low)
    assert any("▸ 0" in line for line in low)


def test_without_runs_every_gpu_that_fits_is_listed() -> None:
    lines = screen(facts(gpus=4))
    assert sum("141 GiB" in line for line in lines) == 4
