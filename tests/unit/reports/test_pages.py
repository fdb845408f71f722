"""The pages and the Markdown: complete, self-contained, and safe with names that others gave."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest

from gpuwatch.tools.reports import broken, compare, gather, parse_gate
from gpuwatch.tools.reports.page import (
    compare_markdown,
    compare_page,
    episodes,
    macros,
    plain,
    run_markdown,
    run_page,
    stacked_shares,
    step_band,
    step_top_s,
)
from tests.unit.reports.fake_source import FINDING, START_S, FakeSource, run

HANGING = {**FINDING, "cause": "burst_every_n", "title": "every fourth step is slow", "root": "input_cpu"}
REPORT = gather(FakeSource(findings=[FINDING, HANGING]), "resnet", START_S + 100)


def test_the_page_says_what_matters_and_needs_nothing_else() -> None:
    page = run_page(REPORT, broken(REPORT, [parse_gate("input_wait=0.1")]))
    for text in (
        "input-bound: 60% of the time training waited for data",
        "num_workers 4 → 10",
        "<b>up to 2.50×</b> the throughput",
        "limit broken: input_wait is 60%",
        "100 ms",
        "tag team",
    ):
        assert text in page, text
    assert not re.search(r"(src|href)=|<script|@import|url\(", page)
    assert len(page) < 200_000


def test_a_consequence_stands_within_its_root() -> None:
    page = run_page(REPORT)
    root, consequence = page.index("too few loader workers"), page.index("every fourth step is slow")
    between = page[root:consequence]
    assert between.count('<article class="gw-finding"') == 1 and "</article>" not in between


def test_names_from_outside_stay_text() -> None:
    evil = "<script>alert(1)</script>|`x`\n# head"
    report = gather(
        FakeSource([run(name=evil, host=evil, tags={evil: evil})], findings=[{**FINDING, "title": evil}]), evil, START_S
    )
    assert "<script" not in run_page(report) and "&lt;script&gt;" in run_page(report)
    assert "<script" not in compare_page(compare(report, report))
    markdown = run_markdown(report)
    assert "\n# head" not in markdown and r"\<script\>" in markdown
    assert plain("a|b\n`c`") == r"a\|b \`c\`"


def test_plots_are_well_formed_and_empty_without_anything_to_show() -> None:
    ends, columns = (START_S + 1, START_S + 2), {"compute": (0.5, 1.0), "input_wait": (0.5, 0.0)}
    plots = [
        stacked_shares(ends, columns, START_S, START_S + 2),
        step_band((START_S,), (0.1,), (0.2,), (0.3,), (0.05,), START_S, START_S + 1),
        episodes([("a & b", "critical", [(START_S, START_S + 1)])], START_S, START_S + 2),
        macros("parts.html").bar({"compute": 0.75, "input_wait": 0.25}),
    ]
    for plot in plots:
        ElementTree.fromstring(plot)
    assert (stacked_shares((), {}, 0, 1), step_band((), (), (), (), (), 0, 1), episodes([], 0, 1)) == ("", "", "")


def test_a_stack_reaches_the_top_and_a_bar_the_end() -> None:
    ends, columns = (START_S + 1,), {"compute": (1.0,), "input_wait": (3.0,)}
    polygons = re.findall(r'points="([^"]+)"', stacked_shares(ends, columns, START_S, START_S + 1))
    heights = [[float(point.split(",")[1]) for point in polygon.split()] for polygon in polygons]
    assert (max(heights[0]), min(heights[0])) == (1000.0, 750.0)  # computing: the lowest quarter
    assert (max(heights[1]), min(heights[1])) == (750.0, 0.0)
    bar = macros("parts.html").bar({"compute": 0.75, "input_wait": 0.25})
    assert re.findall(r"--gw:(#\w+);width:([\d.]+)%", bar) == [("#0072B2", "75.00"), ("#D55E00", "25.00")]
    assert 'aria-label="computing 75%, waiting for data 25%"' in bar


def test_one_long_step_does_not_flatten_all_others() -> None:
    time_s, usual = [START_S + n for n in range(40)], [0.1] * 40
    wait = [0.05] * 40
    plain_plot = step_band(time_s, usual, usual, usual, wait, START_S, START_S + 40)
    spike = [*usual[:-1], 2.0]
    cut = step_band(time_s, usual, usual, spike, wait, START_S, START_S + 40)
    assert ">100 ms</text>" in plain_plot and "higher here" not in plain_plot
    assert ">150 ms</text>" in cut and "higher here and there: up to 2.0 s" in cut
    assert ">2.0 s</text>" in step_band(time_s[:9], usual[:9], usual[:9], spike[-9:], wait[:9], START_S, START_S + 9)
    assert step_top_s(spike, wait) == pytest.approx(0.125) and step_top_s([*usual[:-1], 0.2], wait) == 0.2


def test_markdown_has_the_same_facts() -> None:
    text = run_markdown(REPORT)
    assert "| waiting for data | 6.0 s | 60% |" in text
    assert "  - **every fourth step is slow**" in text  # hangs below its root
    both = compare_markdown(compare(REPORT, REPORT))
    assert "| step, mean | 100 ms | 100 ms | +0% |" in both
