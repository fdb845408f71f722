"""What each page says, and that it fits."""

from __future__ import annotations

import itertools
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs
from rich.cells import cell_len

from gpuwatch.api import Collector, Finding, Gpu, HistoryFile, Recent
from gpuwatch.diagnosis import finding
from gpuwatch.diagnosis.finding import Conclusion, Verdict
from gpuwatch.diagnosis.rates import Cost
from gpuwatch.errors import SourceError
from gpuwatch.wire import Loader
from gpuwatch_dashboards.panels import live_panels
from gpuwatch_dashboards.render import cards
from gpuwatch_dashboards.top import Facts, Sampled
from gpuwatch_dashboards.top.drawing import fitted
from gpuwatch_dashboards.top.pages import HELP, PageName, View, once
from gpuwatch_dashboards.top.sections import finding_lines
from tests.unit.top.screens import FINDING, NOW, facts, node_traces, run, screen, trace

AWAY = SourceError("the agent at http://127.0.0.1:1 does not answer", "start it with `gpuwatch up`")
DOCUMENT = Path(__file__).parents[3] / "docs/guides/top.md"
PAGES: tuple[PageName, ...] = ("runs", "gpus", "findings", "panels", "help")
SIZES = ((80, 24), (60, 20), (160, 50), (120, 30), (40, 24), (40, 10), (20, 5), (2, 3))
BURST = Finding(
    "burst_every_n", "warning", "every 8th step waits", 0.12, (), "shuffle files", root="input_single_process"
)


@pytest.mark.parametrize(("size", "page"), list(itertools.product(SIZES, PAGES)))
def test_every_page_fits_any_terminal(size: tuple[int, int], page: PageName) -> None:
    width, height = size
    many = facts(*(run(f"r{n}", name="日本語 name of a run " * 4) for n in range(1, 9)), gpus=8)
    for shown in (many, facts(run("r1", recent=None, verdict=None, states={})), facts(), facts(gpus=8), AWAY, None):
        assert {cell_len(line) for line in screen(shown, width, height, View(page=page))} <= {width}


def test_run_page_at_80_by_24_has_everything() -> None:
    lines = screen(facts(run("r1"), gpus=8))
    assert len(lines) == 22
    assert "\n".join(line.rstrip() for line in lines) == (
        "  run             status    step/s     p50 last minute    verdict\n"
        "▸ name-r1         ● running   9.70  103 ms █████╱╱╱╱╱╱╱╱╱   input-bound: 62% of…\n"
        "── name-r1 ● running · alice@node-17 · 6m 40s · 3,883 steps ───────────────────\n"
        "  input-bound: 62% of the time training waited for data\n"
        " last minute ███████████████████████▞▞╱╱╱╱╱╱╱╱╱╱╱╱╱╱╱╱╱╱╱╱╱╱╱╱╱╱╱╱╱╱╱╱╱╱╱╱╱╱╱╱\n"
        " (whole run) ███████████████████████░░░╱╱╱╱╱╱╱╱╱╱╱╱╱╱╱╱╱╱╱╱╱╱╱╱╱╱╱╱╱╱╱╱╱╱╱╱╱╱╱\n"
        " ╱╱ waiting for data 62% (60%)  ██ computing 35% (35%)  ▞▞ transfer 3.0% (0%)\n"
        " ░░ start-up 0% (5.0%)\n"
        " step p50 103 ms · p95 131 ms · 9.70 steps/s · 621 samples/s\n"
        " mean 103 ms = 64.0 ms data wait + 3.00 ms transfer + 36.0 ms computing\n"
        "  !  the loader runs in the training process  62%, for 1m 35s\n"
        "   do   num_workers 0 → 8 → up to 2.60× faster\n"
        "   why  data wait 62% of the time; 11 of 16 cores idle\n"
        " step time   ▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇ 100 ms   input wait  ▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅▅ 62%\n"
        " CPU         ▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂ 31%      /dev/shm    ▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄ 50%\n"
        "\n\n\n\n"
        " GPU  0 █ 0%  1 █ 10%  2 █ 20%  3 █ 30%  4 █ 40%  5 █ 50%  6 █ 60%  7 █ 70%\n"
        " CPU 31% iowait 5%  pressure CPU 8% I/O 3% mem 0%  shm 32/64 MiB  mem 64/256 GiB\n"
        " net ↓41 ↑2 MiB/s  disk read 180 write 6 MiB/s"
    )


def test_at_60_by_20_and_at_40_columns_verdict_states_and_what_to_do_are_there() -> None:
    shown = facts(run("r1"), run("r2"), run("r3"), run("r4"), gpus=8)
    for width, height, row in ((60, 20, "▸ name-r1      ●   9.70  103 ms"), (40, 24, "▸ name-r1        ●  103 ms")):
        text = "\n".join(screen(shown, width, height))
        for part in (row, "input-bound: 62% of the time", "waiting for data 62%", "num_workers 0 → 8", "CPU 31%"):
            assert part in text, f"{part}\n{text}"


def test_what_a_run_costs_is_shown_where_there_is_a_price() -> None:
    cost = Cost("EUR", 1, 4.2, 12.5, {"compute": 7.0, "input_wait": 5.5})
    assert "12.50 EUR (5.50 EUR outside compute)" in "\n".join(screen(facts(run("r1", cost=cost))))
    assert "12.50 EUR (5.50 EUR outside compute)" in "\n".join(screen(facts(run("r1", cost=cost, recent=None)), 60, 20))
    assert "EUR" not in "\n".join(screen(facts(run("r1"))))


def test_mfu_and_tokens_are_shown_where_they_are_known() -> None:
    recent = Recent(
        duration_s=60.0,
        states={"compute": 60.0},
        step_s_p50=0.1,
        step_s_p95=0.1,
        data_wait_s_p50=0.0,
        steps_per_s=10.0,
        samples_per_s=320.0,
        tokens_per_s=163840.0,
        mfu_ratio=0.412,
    )
    text = "\n".join(screen(facts(run("r1", recent=recent)), 100))
    assert "10.0 steps/s · 320 samples/s · 163,840 tokens/s · MFU 41%" in text
    assert "MFU" not in "\n".join(screen(facts(run("r1"))))


def test_a_predicted_range_is_shown_instead_of_the_upper_bound() -> None:
    ranged = structs.replace(FINDING, predicted_range=(1.91, 2.58))
    text = "\n".join(screen(facts(run("r1", findings=(ranged,)))))
    assert "num_workers 0 → 8 → 1.91× to 2.58× faster" in text and "up to" not in text
    exact = structs.replace(FINDING, predicted_range=(1.88, 1.92))
    assert "→ 1.92× faster" in "\n".join(screen(facts(run("r1", findings=(exact,)))))
    nothing = structs.replace(FINDING, predicted_range=(0.9, 1.01), predicted_speedup=None)
    assert "faster" not in "\n".join(screen(facts(run("r1", findings=(nothing,)))))


def test_a_consequence_is_listed_under_its_root_and_not_as_a_finding_of_its_own() -> None:
    shown = facts(run("r1", findings=(FINDING, BURST)))
    text = [line.rstrip() for line in screen(shown, view=View(page="findings"))]
    at = text.index("  !  the loader runs in the training process  62%, for 1m 35s")
    assert text[at : at + 5] == [
        "  !  the loader runs in the training process  62%, for 1m 35s",
        "   do   num_workers 0 → 8 → up to 2.60× faster",
        "   why  data wait 62% of the time; 11 of 16 cores idle",
        "       └  every 8th step waits  12%",
        "     do   shuffle files",
    ]
    alone = "\n".join(screen(facts(run("r1", findings=(BURST,)))))
    assert (
        "  !  every 8th step waits  12%" in alone and "└" not in alone
    )  # its root is gone: it is a finding of its own
    low = "\n".join(line.plain for line in finding_lines((FINDING, BURST), NOW, True, 80, full=False))
    assert "└  every 8th step waits" in low and "shuffle files" not in low


def test_after_the_end_what_was_found_over_the_whole_run_is_listed() -> None:
    own = {name: getattr(FINDING, name) for name in finding.Finding.__struct_fields__}
    known = Conclusion(Verdict("input", 0.62, "input-bound"), (finding.Finding(**own),))
    shown = facts(run("r1", status="ended", recent=None, findings=(), conclusion=known))
    for view in (View(), View(page="findings")):
        lines = [line.rstrip() for line in screen(shown, view=view)]
        at = lines.index(" Found over the whole run:")
        assert lines[at + 1 : at + 3] == [
            "  !  the loader runs in the training process  62%",
            "   do   num_workers 0 → 8 → up to 2.60× faster",
        ]
    assert "whole run:" not in "\n".join(screen(facts(run("r1", conclusion=known))))
    nothing = facts(run("r1", status="ended", findings=(), conclusion=Conclusion(known.verdict)))
    assert " No finding was active when the run stopped." in "\n".join(screen(nothing))


def test_a_straggler_is_named_by_its_rank() -> None:
    straggler = Finding("straggler", "warning", "the others wait for one rank", 0.3, (), "", rank=3)
    assert "the others wait for one rank  30%, rank 3" in "\n".join(screen(facts(run("r1", findings=(straggler,)))))


def test_a_large_screen_adds_the_shares_over_time_and_every_gpu() -> None:
    lines = screen(facts(run("r1"), gpus=8), 160, 50)
    assert sum("NVIDIA H200" in line for line in lines) == 8
    area = lines[next(n for n, line in enumerate(lines) if "100%" in line) :][:10]
    assert [line[13] for line in area] == ["╱"] * 6 + ["█"] * 4
    assert "5 min" in area[-1]


def test_the_chosen_run_stays_in_sight_of_a_long_list() -> None:
    shown = facts(*(run(f"r{n}") for n in range(1, 31)))
    lines = screen(shown, view=View(run="r20/0"))
    assert any(line.startswith("▸ name-r20") for line in lines)
    assert "of 30" in lines[0]
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
    assert "of 16" in sixteen[0]
    assert "██ computing 25%" in "\n".join(sixteen)


def test_a_gpu_names_who_holds_it_by_the_run_s_name_and_its_finding() -> None:
    idle = Finding("held_idle", "warning", "GPU 0 is held and does nothing", 1.0, (), "end it", gpu="GPU-0")
    shown = facts(run("r1"), gpus=1, node={"findings": (idle,)})
    held = replace(shown, node=structs.replace(shown.node, gpus=(structs.replace(shown.gpus[0], run="r1"),)))
    text = "\n".join(screen(held, 120, 30, View(page="gpus")))
    assert "name-r1 · u0" in text and "GPU 0 is held and does nothing" in text
    assert "GPU 0 is held" in "\n".join(screen(shown, view=View(page="findings")))


@pytest.mark.parametrize(("state", "held"), [("unknown", "–"), ("busy_unattributed", "–"), ("free", "no process")])
def test_only_a_gpu_that_is_known_to_be_free_has_no_process(state: str, held: str) -> None:
    """Of one that fell off the bus, or where the agent cannot list processes, nothing is known."""
    gpu = Gpu("0", "GPU-0", state=state)
    lines = screen(facts(run("r1"), gpus=1, node={"gpus": (gpu,)}), 120, 30, View(page="gpus"))
    assert next(line for line in lines if line.startswith("▸ 0")).rstrip().endswith(f" {held}")
    assert f'<td data-label="Held by"><span>{held}</span></td>' in cards.gpu_table([gpu], [], [])


def test_every_panel_is_listed_with_its_curves_or_why_there_is_none() -> None:
    lines = [line.rstrip() for line in screen(facts(run("r1"), gpus=2), 80, 200, View(page="panels"))]
    assert [line[3:].split(" ─")[0] for line in lines if line.startswith("── ")] == [
        panel.title for panel in live_panels()
    ]
    at = next(n for n, line in enumerate(lines) if line.startswith("── CPU"))
    assert lines[at + 1 : at + 3] == [
        f" busy, of all cores     {'▂' * 46} 31%",
        f" idle, waiting for I/O  {'▁' * 46} 5.0%",
    ]
    at = next(n for n, line in enumerate(lines) if line.startswith("── Where the time goes"))
    assert "computing" in lines[at + 1] and "waiting for data" in lines[at + 2]
    assert " Nothing found." in lines


def test_a_run_shorter_than_a_second_says_that_it_was_not_sampled() -> None:
    short = run("r1", status="ended", watermark_s=NOW - 399.7, steps=1, loader=Loader(num_workers=1))
    shown = facts(short, series=Sampled("r1/0", NOW - 300, NOW, node_traces()))
    lines = screen(shown, 80, 200, View(page="panels"))
    at = next(n for n, line in enumerate(lines) if line.startswith("── Loader workers"))
    assert lines[at + 1].rstrip() == " This run ended before its first sample."
    text = "\n".join(lines)
    assert "No loader workers" not in text and "No step has ended" not in text and "is unknown" not in text
    assert "■ ended · alice@node-17 · 1 worker · 300 ms · 1 step ─" in "\n".join(screen(shown))


def test_empty_node_shows_the_line_to_add() -> None:
    text = "\n".join(screen(facts()))
    assert "No training run on node-17 yet." in text
    assert "for batch in gpuwatch.watch(loader):" in text


def test_agent_away_names_url_remedy_and_that_it_goes_on() -> None:
    text = "\n".join(screen(AWAY))
    assert "The agent at http://127.0.0.1:1 does not answer." in text
    assert "Start it with gpuwatch up." in text
    assert "tries again every second" in text


def test_what_was_not_measured_is_a_dash_and_never_a_zero() -> None:
    text = "\n".join(screen(facts(run("r1", recent=Recent(duration_s=60.0, states={"compute": 60.0}), findings=()))))
    line = next(line for line in text.splitlines() if line.startswith("▸"))
    assert line.split()[4:7] == ["–", "–", "██████████████"]
    assert "No bottleneck found in the last minute." in text


def test_what_fails_on_the_node_is_shown_first() -> None:
    node = {"collectors": (Collector("gpu", False, "NVML hangs"),), "history": HistoryFile(failures=3)}
    for width in (80, 40):
        text = "\n".join(screen(facts(run(), node=node), width))
        assert "fails: gpu" in text and "history: 3 commits failed" in text


def test_names_and_advice_cannot_control_the_terminal() -> None:
    evil = "x\x1b]0;owned\x07\x9b31m\u202e\n[red]"
    finding = Finding("c", "warning", evil, 0.5, FINDING.evidence, evil)
    for page in PAGES:
        lines = screen(facts(run("r1", name=evil, findings=(finding,), user=evil), gpus=1), view=View(page=page))
        assert all(character.isprintable() for character in "".join(lines))
    assert "[red]" in "".join(screen(facts(run("r1", name=evil)), 160, 50))


def test_little_of_much_and_nothing_at_all_are_readable() -> None:
    known = facts(run("r1"))
    little = node_traces(
        **{
            "node_shm ": trace(4096.0 / (24.0 * 2**30), mount="m"),
            "shm used ({mount})": trace(4096.0, mount="m"),
            "shm size ({mount})": trace(24.0 * 2**30, mount="m"),
            "network received": trace(0.0),
            "network sent": trace(1e6),
        }
    )
    text = "\n".join(screen(replace(known, series=replace(known.series, traces=little))))
    assert "shm 4 KiB/24 GiB" in text and "net ↓0 ↑977 KiB/s" in text
    assert "node: no samples yet" in "\n".join(screen(replace(known, series=replace(known.series, traces={}))))


def test_of_several_dev_shm_the_fullest_is_shown() -> None:
    known = facts(run("r1"))
    used = trace(60e6, mount="/dev/shm") + trace(50e6, mount="/proc/7/root/dev/shm")
    size = trace(1e9, mount="/dev/shm") + trace(64e6, mount="/proc/7/root/dev/shm")
    share = trace(0.06, mount="/dev/shm") + trace(50 / 64, mount="/proc/7/root/dev/shm")
    traces = node_traces(**{"node_shm ": share, "shm used ({mount})": used, "shm size ({mount})": size})
    assert "shm 47.7/61 MiB" in "\n".join(screen(replace(known, series=replace(known.series, traces=traces))))


def test_the_chosen_gpu_has_its_last_minutes_below_the_list() -> None:
    lines = screen(facts(run("r1"), gpus=8), view=View(page="gpus", gpu=3))
    [utilization] = [line for line in lines if line.startswith(" utilisation")]
    [power] = [line for line in lines if line.startswith(" power")]
    assert utilization.count("▂") == 18 and "25%" in utilization
    assert "memory      ▄" in utilization and " 50%" in utilization
    assert "412 W" in power and "61.0 °C" in power
    assert sum("141 GiB" in line for line in lines) == 8


def test_a_tall_screen_draws_a_gpu_s_curves_higher() -> None:
    tall = screen(facts(run("r1"), gpus=8), 120, 40, View(page="gpus"))
    at = next(n for n, line in enumerate(tall) if line.startswith(" utilisation"))
    assert "▆" in tall[at] and "█" not in tall[at - 2]  # a quarter of three lines of eighths
    assert any("▸ 0" in line for line in screen(facts(run("r1"), gpus=8), 80, 16, View(page="gpus")))


def test_without_runs_every_gpu_is_listed() -> None:
    assert sum("141 GiB" in line for line in screen(facts(gpus=4), height=26)) == 4


def example() -> Facts:
    """Return the facts of the sample in docs/guides/top.md."""
    finding = structs.replace(
        FINDING, advice="DataLoader(num_workers=2, persistent_workers=True)", predicted_range=(1.91, 2.58)
    )
    recent = Recent(
        duration_s=60.0,
        states={"input_wait": 37.2, "compute": 21.0, "transfer": 1.8},
        step_s_p50=0.103,
        step_s_p95=0.131,
        data_wait_s_p50=0.064,
        steps_per_s=9.7,
        samples_per_s=621.4,
        mfu_ratio=0.412,
    )
    training = run("resnet50-a", name="resnet50-a", recent=recent, findings=(finding, BURST))
    cards = tuple(
        Gpu(str(n), f"GPU-{n}", "NVIDIA H200", state, 0.35 + 0.04 * n, (61 + n) * 2**30, 141 * 2**30, 312.0 - 9 * n,
            "resnet50-a", "alice, pid 4711")
        for n, state in enumerate(("input_wait", "compute"))
    )  # fmt: skip
    return facts(training, gpus=2, node={"gpus": cards})


def test_golden_sample_of_the_documentation() -> None:
    class Source:
        def read(self, wanted: str | None = None) -> Facts:
            return example()

    drawn = "".join(f"{fitted(line, 80).plain.rstrip()}\n" for line in once(Source(), 80))  # type: ignore[arg-type]
    page, sample = DOCUMENT.read_text(), re.compile(r"(?<=prints it:\n\n```\n).*?(?=```\n)", re.DOTALL)
    if os.environ.get("UPDATE_GOLDEN"):
        page = sample.sub(lambda _: drawn, page)
        DOCUMENT.write_text(page)
    found = sample.search(page)
    assert found is not None and found.group() == drawn, "run `make golden`"


def test_the_documentation_lists_every_key_of_the_help_page() -> None:
    rows = re.findall(r"^\| (`.*?) \|", DOCUMENT.read_text(), re.MULTILINE)
    listed = {key for row in rows for key in re.findall(r"`(.+?)`", row)}
    helped = {key for keys, _ in HELP["keys"] for key in keys.split()} - {"Enter"}
    assert helped <= listed
