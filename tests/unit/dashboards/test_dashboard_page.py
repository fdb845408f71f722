"""Pieces of the page: figures, legends, the verdict's markup, and which run and time are shown."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpuwatch.api import Collector, Finding, Recent, Run, Series, Spread, Steps
from gpuwatch.diagnosis import finding
from gpuwatch.diagnosis.finding import Conclusion, Evidence, Verdict
from gpuwatch.diagnosis.rates import Cost
from gpuwatch.errors import SourceError
from gpuwatch.tools.reports import display as shown
from gpuwatch.tools.reports.display import display
from gpuwatch.tools.reports.page import TEMPLATES
from gpuwatch.tools.stacks.records import HotLine, ProcessStacks, Stacks
from gpuwatch_dashboards.launch import streamlit_command
from gpuwatch_dashboards.panels import BY_KEY
from gpuwatch_dashboards.query import Node, Span
from gpuwatch_dashboards.render import cards
from gpuwatch_dashboards.render.charts import PICKS, drawn_lines, legend_values, line_option, picked, spoken
from gpuwatch_dashboards.render.timeline import full_colour_s, step_rows
from gpuwatch_dashboards.selection import concluded, key_of, run_panels, select, settled, span_of, worst_of

RUN = Run(
    run="r1", rank=0, name="resnet50-a", status="running", started_s=1000.0, watermark_s=1100.0, last_message_s=1100.2,
    host="node-17", user="alice", steps=812, world_size=2,
    recent=Recent(duration_s=60.0, states={"input_wait": 37.2}, step_s_p50=0.1, step_s_p95=0.13, data_wait_s_p50=0.06, steps_per_s=9.7, samples_per_s=622.0),
    verdict=Verdict("input", 0.62, "input-bound: 62% of the time training waited for data"),
)  # fmt: skip
FINDING = Finding(
    "input_single_process",
    "warning",
    "slow <loader>",
    0.62,
    (Evidence("data wait", 0.62, "ratio", "data wait 62%"),),
    "num_workers 0 → 8",
    2.6,
    since_s=1010.0,
)
SPAN = Span(1000.0, 1100.0)


def ledger(*states: tuple[str, tuple[float | None, ...]]) -> list[list[Series]]:
    return [
        [Series({"state": s}, tuple((1000.0 + n, v) for n, v in enumerate(values))) for s, values in states],
    ]


def test_verdict_has_the_sentence_its_number_and_who_it_is_about() -> None:
    html = cards.verdict(replace(RUN, findings=(FINDING,)))
    assert '<h1 class="gw-sentence">input-bound: 62% of the time training waited for data</h1>' in html
    assert 'data-state="input"' in html
    for text in (
        "resnet50-a",
        "● running",
        "rank 0 of 2",
        "alice@node-17",
        "<b>62%</b>",
        "<b>9.70</b>",
        "<b>100 ms</b>",
    ):
        assert text in html
    assert "<b>up to 2.60×</b>" in html


def test_what_the_gpus_cost_is_a_figure_where_there_is_a_price() -> None:
    html = cards.verdict(replace(RUN, cost=Cost("EUR", 2, 8.4, 12.5, {"compute": 7.0, "input_wait": 5.5})))
    assert (
        "<b>12.50 EUR</b><span>cost so far</span>" in html
        and "<b>5.50 EUR</b><span>of it outside compute</span>" in html
    )
    assert "EUR" not in cards.verdict(RUN)
    cost = Cost("EUR", 2, 8.4, 12.5, {"compute": 12.5}, 0.9)
    html = cards.verdict(replace(RUN, energy_joules={"compute": 3.6e6}, cost=cost))
    assert "<b>1.00 kWh</b><span>used by its GPUs for 0.90 EUR</span>" in html


def test_one_step_is_one_step() -> None:
    columns = {name: Spread([0.06], [0.06], [0.06]) for name in ("data_wait_s", "transfer_s", "compute_s")}
    card = step_rows(Steps(steps=1, step=[0], count=[1], time_s=[1000.0], end_s=[1000.2], columns=columns))
    assert "What did this step do, and when?" in card.head and card.spoken == "1 step one by one, a row each of host"


def test_a_run_shorter_than_a_second_has_its_length_and_says_that_it_was_not_sampled() -> None:
    short = replace(RUN, status="ended", watermark_s=1000.3)
    assert "<span>for 300 ms</span>" in cards.verdict(short)
    ledger, cpu = run_panels(short, [BY_KEY["ledger"], BY_KEY["cpu"]])
    assert ledger.empty == "This run ended before its first sample." and cpu == BY_KEY["cpu"]
    assert "This run ended before its first sample." in cards.card(ledger, [[]], SPAN).head
    [workers] = run_panels(replace(short, status="running"), [BY_KEY["loader_workers"]])
    assert workers.empty == "The first second of this run has not been counted yet."
    for run in (RUN, replace(RUN, status="ended"), None):
        assert run_panels(run, [BY_KEY["loader_workers"]]) == [BY_KEY["loader_workers"]]


def test_verdict_leaves_out_what_was_not_measured() -> None:
    html = cards.verdict(replace(RUN, recent=None, verdict=None))
    assert "no verdict yet" in html
    assert "steps/s" not in html and "p95" not in html and "None" not in html


def test_what_others_sent_is_escaped() -> None:
    html = cards.verdict(replace(RUN, name="<script>x</script>")) + cards.findings([FINDING], 1100.0, True)
    assert "<script>" not in html and "slow &lt;loader&gt;" in html


def test_finding_has_evidence_advice_and_an_upper_bound() -> None:
    html = cards.findings([FINDING], 1100.0, live=True)
    for text in ("data wait 62%", "num_workers 0 → 8", "up to 2.60×", "upper bound", "for 1m 30s", "warning"):
        assert text in html
    assert "up to" not in cards.findings([replace(FINDING, predicted_speedup=None)], 1100.0, live=True)
    assert "No bottleneck found" in cards.findings([], 1100.0, live=True)


def test_a_predicted_range_is_shown_instead_of_the_upper_bound() -> None:
    known = replace(FINDING, predicted_range=(1.2, 2.6))
    html = cards.findings([known], 1100.0, live=True)
    assert "<b>1.20× to 2.60×</b> the throughput" in html and "predicted" in html and "upper bound" not in html
    assert "<b>1.20× to 2.60×</b>" in cards.verdict(replace(RUN, findings=(known,)))


def test_a_consequence_is_inside_its_root_and_not_a_card_of_its_own() -> None:
    burst = Finding("burst_every_n", "warning", "one slow step in 4", 0.3, (), "b", root="input_single_process")
    deeper = Finding("too_many_workers", "info", "more workers than cores", 0.1, (), "c", root="burst_every_n")
    alone = Finding("sync_every_step", "warning", "a sync a step", 0.2, (), "d", root="host_bound")
    html = cards.findings([FINDING, burst, deeper, alone], 1100.0, live=True)
    found = re.findall(r'<article[^>]* data-cause="(\w+)".*?</article>', html, re.DOTALL)
    assert found == ["input_single_process", "sync_every_step"], "a root that is not there makes no consequence"
    first = html[: html.index("</article>")]
    assert first.index("one slow step in 4 · 30%") < first.index("more workers than cores · 10%")


def test_a_straggler_names_its_rank_on_every_rank_s_page() -> None:
    late = Finding("straggler", "critical", "late at every step", 0.4, (), "look at its host", rank=3)
    other = replace(RUN, rank=3, findings=(late, FINDING))
    html = cards.findings(cards.findings_of([RUN, other, replace(other, run="another")], RUN), 1100.0, live=True)
    assert re.findall(r'data-cause="(\w+)"', html) == ["straggler"]
    assert "critical · 40% · rank 3" in html


def test_after_the_end_what_the_process_found_over_the_run_is_shown() -> None:
    """The agent's own findings are about the last minute: it has none of a run that has ended."""
    own = finding.Finding("input_single_process", "warning", "slow loader", 0.62, FINDING.evidence, FINDING.advice, 2.6)
    verdict = Verdict("input", 0.62, "input-bound")
    ended = replace(RUN, status="ended", conclusion=Conclusion(verdict, (own, replace(own, cause="b", rank=1))))
    assert [(each.cause, each.advice) for each in concluded(ended)] == [
        (c, "num_workers 0 → 8") for c in (own.cause, "b")
    ]
    html = cards.findings(cards.findings_of([ended], ended), 1100.0, live=False)
    assert "num_workers 0 → 8" in html and "warning · 62%</p>" in html and "No finding" not in html
    assert "<b>up to 2.60×</b>" in cards.verdict(ended)
    other = replace(RUN, rank=1, status="ended")
    assert [each.cause for each in cards.findings_of([ended, other], other)] == ["b"]
    assert concluded(other) == [] == concluded(replace(ended, findings=(FINDING,)))


def test_declared_rates_are_figures() -> None:
    recent = replace(RUN.recent, tokens_per_s=12_500.4, flops_per_s=2.5e14, mfu_ratio=0.4)
    html = cards.verdict(replace(RUN, recent=recent))
    assert "<b>12,500</b><span>tokens/s</span>" in html and "<b>250</b><span>TFLOP/s</span>" in html
    assert "<b>40%</b><span>MFU</span>" in html
    assert "MFU" not in cards.verdict(RUN) and "tokens" not in cards.verdict(RUN)


def test_finding_about_a_gpu_names_it_once() -> None:
    html = cards.findings([replace(FINDING, gpu="GPU-5fa3")], 1070.0, live=True)
    assert "· GPU-5fa3 ·" in html and "GPU GPU" not in html


def test_past_findings_say_what_they_follow_from() -> None:
    root = replace(FINDING, seen_s=1090.0, predicted_range=(1.2, 2.6))
    burst = replace(FINDING, cause="burst_every_n", title="one slow step in 4", root="input_single_process")
    html = cards.past_findings([root, burst], lambda time_s: f"{time_s:.0f}")
    assert "1010 to 1090 · 62% · predicted 1.20× to 2.60× the throughput" in html
    assert "62% · a consequence of: slow &lt;loader&gt;" in html


def test_finding_shows_where_the_code_stood_escaped() -> None:
    line = HotLine("/x/data <b>.py", 88, "Photos.decode", 0.71, 0.9)
    seen = Stacks(1000.0, 3.0, 25.0, (ProcessStacks(0, 1, "worker", 2, 75, (line,), 0.1),), ("/var/f.json",))
    html = cards.findings([replace(FINDING, stacks=seen)], 1100.0, live=True)
    assert (
        "Where the code was" in html
        and "worker 2" in html
        and "data &lt;b&gt;.py:88 Photos.decode: 71% of samples" in html
        and "/var/f.json" in html
    )
    assert "Where the code was" not in cards.findings([FINDING], 1100.0, live=True)


def test_failing_collectors_are_named_and_absent_ones_are_not() -> None:
    node = Node("n", (Collector("cpu", True), Collector("gpu", None, "no driver"), Collector("disk", False, "denied")))
    html = cards.PAGES.foot("agent at u", "12:00:00", node, RUN)
    assert "disk (denied)" in html and "gpu" not in html and "cpu" not in html


def test_away_says_where_and_what_to_do() -> None:
    html = cards.PAGES.away(SourceError("the agent at http://x:1 does not answer", "start it with `gpuwatch up`"))
    assert "The agent at http://x:1 does not answer." in html and "<code>gpuwatch up</code>" in html


def test_states_that_are_not_present_are_left_out_and_the_useful_one_lies_at_the_bottom() -> None:
    traces = ledger(("input_wait", (0.6, 0.6)), ("eval", (0.0, 0.0)), ("compute", (0.4, 0.4)))
    lines = drawn_lines(BY_KEY["ledger"], traces)
    assert [line.name for line in lines] == ["computing", "waiting for data"]
    assert [(line.name, text) for line, text in legend_values(BY_KEY["ledger"], lines)] == [
        ("waiting for data", "60%"),
        ("computing", "40%"),
    ]


def test_stack_is_interrupted_at_a_gap_and_its_lines_share_their_times() -> None:
    lines = drawn_lines(BY_KEY["ledger"], ledger(("compute", (1.0, 1.0, None, 1.0)), ("eval", (0.5,))))
    drawn = line_option(BY_KEY["ledger"], lines, SPAN)
    assert drawn["dataset"]["source"] == {
        "t0": [1_000_000, 1_001_000, 1_002_000, 1_003_000],
        "v0": [100.0, 100.0, None, 100.0],
        "v1": [50.0, None, None, None],
    }
    assert [series["stack"] for series in drawn["series"]] == ["all", "all"]


def test_percentiles_are_lines_over_the_stack_and_no_part_of_it() -> None:
    panel = BY_KEY["step_time"]
    phases = [
        Series({"phase": phase}, ((1000.0, value), (1002.0, value)))
        for phase, value in (("data_wait", 0.06), ("compute", 0.04))
    ]
    percentiles = [Series({"percentile": name}, ((1001.0, value),)) for name, value in (("p95", 0.4), ("p50", 0.09))]
    lines = drawn_lines(panel, [phases, percentiles])
    drawn = line_option(panel, lines, SPAN)
    series = {each["name"]: each for each in drawn["series"]}
    assert list(series) == ["computing", "data wait", "p50", "p95"]
    assert [name for name, each in series.items() if "stack" in each] == ["computing", "data wait"]
    assert series["p95"]["lineStyle"]["width"] > 0 and "areaStyle" not in series["p95"]
    assert drawn["dataset"]["source"] == {
        "t0": [1_000_000, 1_002_000], "v0": [40.0, 40.0], "v1": [60.0, 60.0], "t2": [1_001_000, None], "v2": [90.0, None], "v3": [400.0, None],
    }  # fmt: skip
    assert drawn["yAxis"]["max"] == 460.0  # room for the line, which is higher than the stack
    assert [(line.name, text) for line, text in legend_values(panel, lines)] == [
        ("p95", "400 ms"), ("p50", "90.0 ms"), ("data wait", "60.0 ms"), ("computing", "40.0 ms"),
    ]  # fmt: skip


def test_every_line_is_drawn_to_its_end_however_short_the_first_one_is() -> None:
    """ECharts reads as many values of each column as the first one has."""
    panel = BY_KEY["findings"]
    traces = [
        Series({"cause": cause}, tuple((1000.0 + n, 0.5) for n in range(points)))
        for cause, points in (("epoch_start_pause", 2), ("straggler", 5))
    ]
    source = line_option(panel, drawn_lines(panel, [traces]), SPAN)["dataset"]["source"]
    assert {name: len(column) for name, column in source.items()} == {"t0": 5, "v0": 5, "t1": 5, "v1": 5}
    assert (source["v0"], source["v1"]) == ([50.0, 50.0, None, None, None], [50.0] * 5)


def test_a_chart_of_money_names_the_currency() -> None:
    panel = BY_KEY["cost_by_kind"]
    traces = [[Series({"kind": "useful"}, ((1000.0, 40.0), (1001.0, 41.0)))]]
    drawn = cards.card(panel, traces, SPAN, currency="EUR")
    assert ">Cost per hour, EUR</h2>" in drawn.head and drawn.spoken.startswith("Cost per hour, EUR: ")
    assert ">Cost per hour</h2>" in cards.card(panel, traces, SPAN).head
    assert "EUR" not in cards.card(BY_KEY["gpus_by_kind"], [*traces, []], SPAN, currency="EUR").head


def test_chart_is_scaled_and_its_times_are_unix_ms() -> None:
    panel = BY_KEY["shm"]
    traces = [
        [Series({"mount": "host"}, ((1000.0, 32.0 * 2**20),))],
        [Series({"mount": "host"}, ((1000.0, 64.0 * 2**20),))],
    ]
    lines = drawn_lines(panel, traces)
    drawn = line_option(panel, lines, SPAN)
    assert drawn["dataset"]["source"] == {"t0": [1_000_000], "v0": [32.0], "v1": [64.0]}
    assert [series["name"] for series in drawn["series"]] == ["used (host)", "size (host)"]
    assert [series["encode"] for series in drawn["series"]] == [{"x": "t0", "y": "v0"}, {"x": "t0", "y": "v1"}]
    assert drawn["yAxis"]["axisLabel"]["formatter"] == "{value} MiB"
    assert drawn["tooltip"]["valueFormatter"] == "%.3g MiB"
    assert (drawn["xAxis"][0]["min"], drawn["xAxis"][0]["max"]) == (1_000_000, 1_100_000)
    assert spoken(panel, lines) == "/dev/shm: used (host) 32.0 MiB, size (host) 64.0 MiB"


def test_click_finds_its_moment() -> None:
    lines = drawn_lines(BY_KEY["ledger"], ledger(("compute", (1.0, 1.0))))
    drawn = line_option(BY_KEY["ledger"], lines, SPAN, pick=True)
    assert len(drawn["series"][-1]["data"]) == PICKS
    assert picked(0, 1000.0, 1000.0 + PICKS) == 1000.5
    assert picked(PICKS - 1, 1000.0, 1000.0 + PICKS) == 1000.0 + PICKS - 0.5


def test_many_lines_have_a_legend_that_sums_them_up() -> None:
    panel = BY_KEY["gpu_utilization"]
    traces = [[Series({"gpu": str(n), "UUID": f"u{n}"}, ((1000.0, n / 10),)) for n in range(8)]]
    [(line, text)] = legend_values(panel, drawn_lines(panel, traces))
    assert (line.name, text) == ("GPU 0 to GPU 7:", "0% to 70%, mean 35%")


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.1034, "s", "103 ms"),
        (2.5, "s", "2.50 s"),
        (62e-6, "s", "62.0 µs"),
        (0.62, "ratio", "62%"),
        (64 * 2**20, "bytes", "64.0 MiB"),
        (1.21 * 2**30, "bytes/s", "1.21 GiB/s"),
        (0.0, "bytes/s", "0.00 B/s"),
        (None, "s", "–"),
    ],
)
def test_numbers_for_people(value: float | None, unit: str, text: str) -> None:
    assert display(value, unit) == text  # type: ignore[arg-type]


def test_newest_running_run_is_shown_and_kept_while_it_runs() -> None:
    old = replace(RUN, run="old", started_s=1.0)
    ended = replace(RUN, run="ended", started_s=3000.0, status="ended")
    new = replace(RUN, run="new", started_s=2000.0)
    assert select([ended, old, new], None) == new
    assert select([ended, old, new], key_of(old)) == old
    assert select([ended, old, new], key_of(ended)) == new
    assert select([ended], None) == ended
    assert select([], None) is None
    assert select([ended, old, new], key_of(new), "ended") == ended
    assert select([old, new], key_of(old), "unknown") == old


def test_link_names_a_rank() -> None:
    ranks = [replace(RUN, rank=1), RUN]
    assert select(ranks, None, "r1") == RUN
    assert select(ranks, None, "r1", "1") == ranks[0]
    assert select(ranks, key_of(ranks[0]), "r1") == ranks[0], "it stays while the link names no rank"
    assert select(ranks, key_of(ranks[0]), "r1", "0") == RUN
    assert select(ranks, key_of(ranks[0]), "r1", "7") == ranks[0], "not known: as without a link"


def test_link_names_the_newest_run_of_a_name() -> None:
    old, new = replace(RUN, run="r2", started_s=500.0), replace(RUN, run="r3", started_s=2000.0, status="ended")
    assert select([RUN, old, new], None, "resnet50-a") == new
    assert select([RUN, old, new], None, "r2") == old
    assert select([old, replace(RUN, name="r2")], None, "r2") == old, "an id is another run's name"
    assert select([new, replace(RUN, name="")], None, "") == replace(RUN, name=""), "the running one"


def losing(rank: int, lost_s: float, **more: object) -> Run:
    return replace(
        RUN, rank=rank, recent=Recent(duration_s=60.0, states={"compute": 60.0 - lost_s, "input_wait": lost_s}), **more
    )


def test_the_worst_rank_loses_clearly_more_or_is_named_by_a_finding() -> None:
    alike = [losing(n, 6.0 + n) for n in range(4)]
    assert worst_of(alike) is None and worst_of(alike[:1]) is None
    assert worst_of([*alike, losing(4, 20.0)]) == losing(4, 20.0)
    late = losing(5, 6.0, findings=(replace(FINDING, cause="straggler", rank=5),))
    assert worst_of([*alike, losing(4, 20.0), late]) == late
    gone = losing(6, 0.0, status="lost")
    assert worst_of([*alike, late, gone]) == gone
    waits = replace(RUN, rank=7, recent=Recent(duration_s=60.0, states={"compute": 20.0, "comm_wait": 40.0}))
    assert worst_of([*alike, waits]) is None  # its wait is another rank's fault
    known = [*alike, late]
    assert select(known, None) == select(known, None, "r1") == late and select(known, None, "r1", "0") == alike[0]


def test_span_ends_with_the_run_and_has_a_point_every_two_seconds_at_most() -> None:
    assert span_of(RUN, 900.0, 1100.0) == Span(1000.0, 1100.0, 50)
    assert span_of(RUN, 60.0, 1100.0) == Span(1040.0, 1100.0, 30)
    assert span_of(replace(RUN, started_s=0.0), None, 10_000.0) == Span(0.0, 10_000.0, 300)
    ended = replace(RUN, status="ended")
    assert span_of(ended, None, 10_000.0).end_s == 1100.2


def test_span_moves_by_whole_intervals_and_leaves_out_what_may_still_come() -> None:
    hour = settled(Span(10_000.0, 13_600.0, 300))  # a point every 12 s
    assert (hour.start_s, hour.end_s, hour.points) == (9996.0, 13_596.0, 300)
    assert settled(Span(10_008.0, 13_608.0, 300)) == settled(Span(10_009.0, 13_609.0, 300)) == hour
    assert settled(Span(10_010.0, 13_610.0, 300)).end_s == 13_608.0


def test_command_is_headless_quiet_and_on_loopback() -> None:
    argv, environment = streamlit_command(8501, "127.0.0.1", "http://127.0.0.1:9478", None)
    assert argv[:4] == [sys.executable, "-m", "streamlit", "run"]
    for option in ("server.address=127.0.0.1", "server.port=8501", "browser.gatherUsageStats=false",
                   "server.fileWatcherType=none", "server.headless=true"):  # fmt: skip
        assert f"--{option}" in argv
    assert environment == {"GPUWATCH_AGENT_URL": "http://127.0.0.1:9478"}
    assert streamlit_command(1, prometheus_url="http://p:9090")[1]["GPUWATCH_PROMETHEUS_URL"] == "http://p:9090"


@pytest.mark.parametrize(
    ("waits_s", "full_s"),
    [
        ([0.064] * 990 + [0.5] * 10, 0.192),  # all wait alike, but for the first of each epoch
        ([0.064] * 1000, 0.064),
        ([0.0] * 990 + [0.5] * 10, 0.5),  # only they wait
        ([0.01] * 500 + [1.0] * 500, 1.0),
        ([0.0] * 5, 1.0),
    ],
)
def test_full_colour_of_the_heat_map_leaves_room_for_what_stands_out(waits_s: list[float], full_s: float) -> None:
    assert full_colour_s(sorted(waits_s)) == pytest.approx(full_s)


def test_alerts_are_listed_by_severity() -> None:
    """Prometheus answers in no order; an alert of a severity of the site's own comes last."""
    given = ("info", "page", "warning", "critical", "warning")
    traces = [[Series({"alertname": f"A{n}", "severity": of}, ((0.0, 1.0),)) for n, of in enumerate(given)]]
    shown = str(cards.table(BY_KEY["fleet_alerts"], traces))
    assert re.findall(r"\b(A\d)\b", shown) == ["A3", "A2", "A4", "A0", "A1"]


def test_colours_with_a_meaning_are_in_no_style_sheet() -> None:
    """They are those of display.py: a change of one left the meter and the mark of the worst rank as they were."""
    own = {each.lower() for name, each in vars(shown).items() if name.isupper() and isinstance(each, str)}
    assert len(own) == 11
    folder = Path(find_spec("gpuwatch_dashboards").submodule_search_locations[0])  # type: ignore[union-attr, index]
    sheets = [*folder.glob("*.css"), *TEMPLATES.glob("*.css"), *TEMPLATES.glob("*.html")]
    assert {path.name for path in sheets} >= {"style.css", "parts.css", "pages.html"}
    assert [(path.name, each) for path in sheets for each in own if each in path.read_text().lower()] == []
    named = set(re.findall(r"var\((--gw[\w-]+)", (folder / "style.css").read_text()))
    given = set(re.findall(r"(--gw-[a-z]+):", (folder / "app.py").read_text() + (folder / "style.css").read_text()))
    assert named - given == set() and {"--gw-lost", "--gw-work", "--gw-mark"} <= named
