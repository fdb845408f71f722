"""The pages and the Markdown: complete, self-contained, and safe with names that others gave."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

from msgspec.structs import replace

from gpuwatch.tools.reports.comparison import broken, compare, parse_gate
from gpuwatch.tools.reports.gather import gather
from gpuwatch.tools.reports.model import LedgerOverTime, RunReport, StepsOverTime
from gpuwatch.tools.reports.page import (
    as_html,
    as_markdown,
    ledger_plot,
    macros,
    plain,
    step_plot,
)
from tests.unit.reports.fake_source import FINDING, START_S, FakeSource, run

HANGING = {**FINDING, "cause": "burst_every_n", "title": "every fourth step is slow", "root": "input_cpu"}
REPORT = gather(FakeSource(findings=[FINDING, HANGING]), "resnet", START_S + 100)


def test_the_page_says_what_matters_and_needs_nothing_else() -> None:
    page = as_html(REPORT, broken(REPORT, [parse_gate("input_wait=0.1")]))
    for text in (
        "input-bound: 60% of the time training waited for data",
        "num_workers 4 → 10",
        "<b>up to 2.50×</b> the throughput",
        "limit exceeded: input_wait is 60%",
        "100 ms",
        "tag team",
    ):
        assert text in page, text
    assert not re.search(r"(src|href)=|<script|@import|url\(", page)
    assert len(page) < 200_000


def test_a_consequence_stands_within_its_root() -> None:
    page = as_html(REPORT)
    root, consequence = page.index("too few loader workers"), page.index("every fourth step is slow")
    between = page[root:consequence]
    assert between.count('<article class="gw-finding"') == 1 and "</article>" not in between


def test_names_from_outside_stay_text() -> None:
    evil = "<script>alert(1)</script>|`x`\n# head"
    report = gather(
        FakeSource([run(name=evil, host=evil, tags={evil: evil})], findings=[{**FINDING, "title": evil}]), evil, START_S
    )
    assert "<script" not in as_html(report) and "&lt;script&gt;" in as_html(report)
    assert "<script" not in as_html(compare(report, report))
    markdown = as_markdown(report)
    assert "\n# head" not in markdown and r"\<script\>" in markdown
    assert plain("a|b\n`c`") == r"a\|b \`c\`"
    assert plain("\x1b]0;owned\x07\x9b31m\u202e") == r"·\]0;owned··31m·", "it is printed to terminals"


def over_time(ends: tuple[float, ...], states: dict[str, tuple[float, ...]], until_s: float) -> RunReport:
    """Return the report with this ledger over time."""
    return replace(REPORT, over_time=LedgerOverTime(ends, states), until_s=until_s)


def stepped(low: list[float], high: list[float], wait: list[float], until_s: float) -> RunReport:
    """Return the report with a group of steps a second."""
    times = tuple(START_S + n for n in range(len(low)))
    groups = StepsOverTime(times, tuple(low), tuple(low), tuple(high), tuple(wait))
    return replace(REPORT, steps_over_time=groups, until_s=until_s)


def test_plots_are_well_formed_and_empty_without_anything_to_show() -> None:
    columns = {"compute": (0.5, 1.0), "input_wait": (0.5, 0.0)}
    found = replace(REPORT.findings[0], cause="a & b", severity="critical", episodes=((START_S, START_S + 1),))
    plots = [
        ledger_plot(over_time((START_S + 1, START_S + 2), columns, START_S + 2)),
        step_plot(stepped([0.1], [0.3], [0.05], START_S + 1)),
        macros("plots.html").episodes([found], START_S, START_S + 2),
        macros("parts.html").bar({"compute": 0.75, "input_wait": 0.25}),
    ]
    for plot in plots:
        ElementTree.fromstring(plot.strip())
    assert 'x="0%" y="17" width="50.0%"' in plots[2] and "a &amp; b" in plots[2]
    assert (ledger_plot(over_time((), {}, 1)), step_plot(stepped([], [], [], 1))) == ("", "")
    assert "When each cause was active" in as_html(REPORT)
    assert "When each cause was active" not in as_html(replace(REPORT, findings=()))


def test_a_stack_reaches_the_top_and_a_bar_the_end() -> None:
    columns = {"compute": (1.0,), "input_wait": (3.0,)}
    plot = ledger_plot(over_time((START_S + 1,), columns, START_S + 1))
    polygons = re.findall(r'points="([^"]+)"', plot)
    heights = [[float(point.split(",")[1]) for point in polygon.split()] for polygon in polygons]
    assert (max(heights[0]), min(heights[0])) == (1000.0, 750.0)  # computing: the lowest quarter
    assert (max(heights[1]), min(heights[1])) == (750.0, 0.0)
    bar = macros("parts.html").bar({"compute": 0.75, "input_wait": 0.25})
    assert re.findall(r"--gw:(#\w+);width:([\d.]+)%", bar) == [("#0072B2", "75.00"), ("#D55E00", "25.00")]
    assert 'aria-label="computing 75%, waiting for data 25%"' in bar


def test_the_longest_step_is_within_the_plot() -> None:
    usual, wait = [0.1] * 40, [0.05] * 40
    spike = [*usual[:-1], 2.0]
    assert ">100 ms</text>" in step_plot(stepped(usual, usual, wait, START_S + 40))
    assert ">2.0 s</text>" in step_plot(stepped(usual, spike, wait, START_S + 40))


def test_markdown_has_the_same_facts() -> None:
    text = as_markdown(REPORT)
    assert "| waiting for data | 6.0 s | 60% |" in text
    assert "  - **every fourth step is slow**" in text  # hangs below its root
    both = as_markdown(compare(REPORT, REPORT))
    assert "| step, mean | 100 ms | 100 ms | +0% |" in both


def test_compute_by_section_is_that_of_all_ranks_and_absent_without_the_request() -> None:
    ranks = [
        run(rank=0, breakdown={"forward": 1.0, "backward": 5.0}),
        run(rank=1, breakdown={"forward": 2.0, "backward": 1.0, "optimizer": 1.0}),
    ]
    report = gather(FakeSource(ranks), "last", START_S + 200)
    assert report.breakdown == {"forward": 3.0, "backward": 6.0, "optimizer": 1.0}
    for page in (as_html(report), as_markdown(report)):
        assert "In compute: forward and the rest 30%, backward 60%, optimizer 10%." in page
    without = gather(FakeSource([run()]), "last", START_S + 200)
    assert "In compute" not in as_html(without) + as_markdown(without)
