"""Shares become cells exactly; curves keep their gaps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwatch.api import Series
from gpuwatch.ledger.states import GPU_STATES
from gpuwatch.tools.reports.display import STATES
from gpuwatch_dashboards.top.drawing import GLYPHS, area, bar, buckets, cells, legend, sparkline, table

LEDGERS = st.dictionaries(st.sampled_from(GPU_STATES), st.floats(0, 1e6), min_size=1)


@given(LEDGERS, st.integers(1, 200))
def test_cells_sum_to_the_width_and_each_is_within_one_of_its_share(states: dict[str, float], width: int) -> None:
    whole = sum(states.values())
    given_cells = cells(states, width)
    if whole <= 0:
        assert given_cells == {}
        return
    assert sum(given_cells.values()) == width
    for state, count in given_cells.items():
        assert abs(count - width * states[state] / whole) < 1


def test_shares_that_are_whole_cells_are_drawn_exactly_in_the_palette_s_order() -> None:
    states = {"input_wait": 62.0, "compute": 35.0, "transfer": 3.0}
    assert cells(states, 100) == {"compute": 35, "transfer": 3, "input_wait": 62}
    assert bar(states, 100).plain == "█" * 35 + "▞" * 3 + "╱" * 62


def test_the_largest_remainders_get_the_cells_that_are_left() -> None:
    assert cells({"compute": 1.0, "transfer": 1.0, "input_wait": 1.0}, 10) == {
        "compute": 4,
        "transfer": 3,
        "input_wait": 3,
    }
    assert cells({"compute": 0.94, "eval": 0.06}, 10) == {"compute": 9, "eval": 1}


def test_nothing_booked_is_dots_and_not_a_state() -> None:
    assert bar({}, 5).plain == "·····"
    assert bar({"compute": 0.0}, 5).plain == "·····"
    assert bar({"compute": 1.0}, 0).plain == ""


def test_every_state_has_a_glyph_of_its_own_one_cell_wide() -> None:
    assert set(GLYPHS) == set(STATES) == set(GPU_STATES)
    assert len(set(GLYPHS.values())) == len(GLYPHS)
    assert all(len(sign) == 1 for sign in GLYPHS.values())


def test_legend_says_both_shares_largest_first() -> None:
    entries = [
        entry.plain for entry in legend({"input_wait": 37.2, "compute": 22.8}, {"compute": 50.0, "startup": 50.0})
    ]
    assert entries == [
        "╱╱ waiting for data 62% (0%)",
        "██ computing 38% (50%)",
        "░░ start-up 0% (50%)",
    ]
    assert [entry.plain for entry in legend({}, {"eval": 1.0})] == ["▓▓ evaluation (100%)"]


def test_a_gap_is_blank_and_a_zero_is_not() -> None:
    assert sparkline([0.0, None, 0.5, 1.0], 1.0) == ["▁ ▄█"]
    assert sparkline([None, None], 1.0) == ["  "]
    assert sparkline([0.0, 0.0]) == ["▁▁"]


def test_several_rows_share_one_height() -> None:
    assert sparkline([0.25, 0.5, 1.0, None], 1.0, rows=2) == ["  █ ", "▄██ "]


def test_values_above_the_maximum_stay_in_the_cell() -> None:
    assert sparkline([3.0, -1.0], 1.0) == ["█▁"]


def test_buckets_are_means_over_equal_stretches_with_their_gaps() -> None:
    points = ((1.0, 1.0), (2.0, 3.0), (3.0, 4.0), (7.0, 8.0), (8.0, None))
    assert buckets(points, 4, 0.0, 8.0) == [2.0, 4.0, None, 8.0]


def test_columns_narrower_than_the_samples_take_the_next_sample_but_not_over_a_gap() -> None:
    assert buckets(((3.0, 1.0), (6.0, 2.0)), 6, 0.0, 6.0) == [1.0, 1.0, 1.0, 2.0, 2.0, 2.0]
    assert buckets(((3.0, 1.0), (4.0, None), (6.0, 2.0)), 6, 0.0, 6.0) == [1.0, 1.0, 1.0, None, 2.0, 2.0]


def test_samples_at_the_ends_of_the_columns_have_one_each_whatever_their_rounding() -> None:
    """Of these 61 columns 25 had none, and others two."""
    start_s, width_s = 1_700_000_000.3, 300 / 61
    points = tuple((start_s + column * width_s, float(column)) for column in range(1, 62))
    assert buckets(points, 61, start_s, start_s + 300) == [float(column) for column in range(1, 62)]


@pytest.mark.parametrize("moment", [0.0, -1.0, 8.1])
def test_points_outside_of_the_span_are_left_out(moment: float) -> None:
    assert buckets(((moment, 1.0),), 2, 0.0, 8.0) == [None, None]


def test_the_area_stacks_each_column_and_leaves_gaps_blank() -> None:
    traces = [
        Series({"state": "input_wait"}, ((1.0, 0.5), (2.0, 0.0), (3.0, None))),
        Series({"state": "compute"}, ((1.0, 0.5), (2.0, 1.0), (3.0, None))),
    ]
    assert [line.plain for line in area(traces, 3, 2, 0.0, 3.0)] == ["╱█ ", "██ "]


def test_a_control_character_in_a_table_is_seen() -> None:
    assert [line.plain for line in table([("run", 6)], [("a\rb\a",)], None, 1)] == ["  run    ", "  a·b·   "]


def test_a_table_aligns_cuts_and_keeps_the_selected_row_in_sight() -> None:
    rows = [("a long name", "1.5", "x"), ("b", "20", "y"), ("c", "3", "z")]
    columns = [("run", 6), ("left out", 0), ("p50", -4), ("rest", None)]
    filled = [(name, "", number, rest) for name, number, rest in rows]
    assert [line.plain for line in table(columns, filled, 1, 3)] == [
        "  run     p50 rest ",
        "  a lon…  1.5 x ",
        "▸ b        20 y ",
        "  c         3 z ",
    ]
    assert [line.plain for line in table(columns, filled, 2, 1)] == [
        "  run     p50 3–3 of 3  rest ",
        "▸ c         3 z ",
    ]
