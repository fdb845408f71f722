"""Pages and `gpuwatch top` with values that are valid and rare."""

from __future__ import annotations

import json
import re
from urllib.parse import parse_qs, urlsplit

import pytest
from streamlit.testing.v1 import AppTest

from gpuwatch.api import Epoch, Finding, Gpu, Series, Spread, Steps
from gpuwatch.api.client import Reply
from gpuwatch_dashboards.panels import BY_KEY
from gpuwatch_dashboards.query import Query, Scope, Span
from gpuwatch_dashboards.render import cards
from gpuwatch_dashboards.render.charts import drawn_lines, epoch_marks, legend_values
from gpuwatch_dashboards.render.timeline import RANK_STEPS, heat_card
from gpuwatch_dashboards.selection import facts_of
from gpuwatch_dashboards.sources.prometheus import QUERIES, PrometheusSource
from gpuwatch_dashboards.top import Sampled


def _draw() -> None:
    import streamlit as st

    from gpuwatch.api import Run
    from gpuwatch_dashboards.views import compare

    runs = [Run(f"r{n}", 0, f"name-{n}", "ended", 1000.0 + n, 1100.0, 1100.0) for n in range(7)]
    st.markdown(",".join(run.run for run in compare._choice(runs)))


def test_a_link_of_seven_runs_compares_the_first_six() -> None:
    app = AppTest.from_function(_draw)
    app.query_params["runs"] = ",".join(f"r{n}" for n in range(7))
    app.run(timeout=120)
    assert not app.exception, app.exception
    assert app.markdown[-1].value == "r0,r1,r2,r3,r4,r5"


def _draw_commas() -> None:
    import streamlit as st

    from gpuwatch.api import Run
    from gpuwatch_dashboards.views import compare

    names = ("c", "d", "lr=0.2,bs=32", "lr=0.1,bs=32")
    runs = [Run(name, 0, name, "ended", 1000.0 + n, 1100.0, 1100.0) for n, name in enumerate(names)]
    st.markdown(";".join(run.run for run in compare._choice(runs)))


def test_a_link_of_runs_whose_ids_have_commas_compares_them() -> None:
    first = AppTest.from_function(_draw_commas).run(timeout=30)
    first.multiselect[0].set_value(["lr=0.1,bs=32", "lr=0.2,bs=32"]).run(timeout=30)
    again = AppTest.from_function(_draw_commas)
    again.query_params["runs"] = first.query_params["runs"]
    again.run(timeout=30)
    assert not again.exception, again.exception
    assert again.markdown[-1].value == "lr=0.1,bs=32;lr=0.2,bs=32"


def stretch(first: int) -> Steps:
    steps = range(first, first + 600)
    waits = [0.01] * len(steps)
    starts = [each for each in steps if each % 300 == 0]
    return Steps(
        steps=len(steps),
        step=[*steps],
        time_s=[1000.0 + each for each in steps],
        end_s=[1001.0 + each for each in steps],
        count=[1] * len(steps),
        epochs=[Epoch(each, 1000.0 + each) for each in starts],
        columns={"data_wait_s": Spread(waits, waits, waits)},
    )


def test_the_rows_of_a_stretch_are_named_by_their_first_steps() -> None:
    option = heat_card(stretch(7200)).option
    assert option is not None
    assert option["yAxis"]["data"] == ["step 7,200", "step 7,500"]


def test_the_lines_of_a_stretch_have_no_number() -> None:
    assert not any(mark.text.startswith("epoch 1 ") for mark in epoch_marks(stretch(7200).epochs))


def test_from_the_first_step_on_epochs_are_numbered() -> None:
    option = heat_card(stretch(0)).option
    assert option is not None and option["yAxis"]["data"] == ["epoch 1", "epoch 2"]
    assert epoch_marks(stretch(0).epochs)[1].text == "epoch 2 begins with step 300"


@pytest.mark.parametrize("first", [range(8000, 9000, 10), range(0, 9000, 10)], ids=["a stretch", "the whole run"])
def test_a_run_that_was_resumed_has_a_heat_map_of_all_its_steps(first: range) -> None:
    """Under the same GPUWATCH_RUN, each of its processes counts its steps from 0."""
    step = [*first, *range(0, 300, 10)]
    waits = [0.01] * len(step)
    steps = Steps(
        bucket_steps=10,
        step=step,
        count=[10] * len(step),
        epochs=[Epoch(0, 1000.0 + len(first))],
        columns={"data_wait_s": Spread(waits, waits, waits)},
    )
    option = heat_card(steps).option
    assert option is not None
    assert len(option["series"][0]["data"]) > 0.5 * len({*step}), "cells, of a few steps each"


def test_rows_of_a_run_that_was_resumed_have_no_numbers_of_epochs() -> None:
    """Resumed within its second epoch, whose rest of 400 steps was taken for the first one, and shifted all others."""
    step = [*range(0, 1500, 10), *range(0, 2000, 10)]
    waits = [0.01] * len(step)
    epochs = [Epoch(number, 1000.0 + n) for n, number in enumerate((0, 1000, 0, 400, 1400))]
    columns, count = {"data_wait_s": Spread(waits, waits, waits)}, [10] * len(step)
    option = heat_card(Steps(bucket_steps=10, step=step, count=count, epochs=epochs, columns=columns)).option
    assert option is not None
    assert option["yAxis"]["data"] == ["step 0", "step 400", "step 1,000", "step 1,400"]


@pytest.mark.parametrize("ahead_s", [0.0, 0.7, 30.0])
def test_a_finding_is_never_there_for_less_than_nothing(ahead_s: float) -> None:
    finding = Finding("stalled", "warning", "t", 0.5, (), "", since_s=1000.0 + ahead_s)
    # Live's own "now" is a whole second: a finding of 1000.7 is drawn at 1000
    assert facts_of(finding, 1000.0)[-1] == "for 1.0 s"


NOW, NODE = 1_790_000_100.0, "[fd00::1]:9478"


@pytest.mark.parametrize("key", ["load", "sample_age", "gpu_throttled"])  # a metric, and PromQL of a panel's own
def test_a_node_on_ipv6_has_charts(key: str) -> None:
    asked: list[str] = []

    def handler(path: str, timeout_s: float) -> Reply:
        asked.extend(parse_qs(urlsplit(path).query)["query"])
        return Reply(200, json.dumps({"status": "success", "data": {"result": []}}).encode())

    source, scope, span = PrometheusSource("http://prom:9090", handler), Scope(instance=NODE), Span(NOW - 900, NOW)
    source.answers(BY_KEY[key], scope, span)
    source.evaluate([Query("gpuwatch_load1")], scope, span)
    for expr in {*asked} - {QUERIES["interval"]}:
        found = re.findall(r'instance=~("(?:[^"\\]|\\.)*")', expr)
        assert found and all(re.fullmatch(json.loads(each), NODE) for each in found), expr


def test_twelve_gpus_are_in_the_order_of_their_numbers() -> None:
    traces = [[Series({"gpu": str(n), "UUID": f"u{n}"}, ((1000.0, n / 12),)) for n in range(12)]]
    panel = BY_KEY["gpu_utilization"]
    [(line, _)] = legend_values(panel, drawn_lines(panel, traces))
    assert line.name == "GPU 0 to GPU 11:"


def test_twelve_ranks_are_in_the_order_of_their_numbers() -> None:
    lines = drawn_lines(RANK_STEPS, [[Series({"rank": str(n)}, ((1000.0, 1.0),)) for n in range(12)]])
    assert [line.name for line in lines] == [f"rank {n}" for n in range(12)]


GPU = {"gpu": "0", "UUID": "u0"}
EARLY = tuple((1000.0 + 15 * n, 1.0 if n < 3 else 0.0) for n in range(4))  # computes in three of four intervals
LATE = ((1045.0, 1.0),)  # Prometheus has no point of a rate before a counter's first sample


def states(**labels: str) -> list[Series]:
    return [Series({**labels, "state": "compute"}, EARLY), Series({**labels, "state": "held_idle"}, LATE)]


def test_a_state_that_begins_late_was_0_before_in_the_legend() -> None:
    shown = legend_values(BY_KEY["gpu_ledger"], drawn_lines(BY_KEY["gpu_ledger"], [states()]))
    assert {line.name: text for line, text in shown} == {"computing": "75%", "held idle": "25%"}


def test_a_state_that_begins_late_was_0_before_in_the_table_of_gpus() -> None:
    html = str(cards.gpu_table([Gpu("0", "u0")], states(**GPU), []))
    assert 'title="computing 75%, held idle 25%"' in html


def test_a_state_that_begins_late_was_0_before_in_top() -> None:
    known = Sampled("", 760.0, 1050.0, {"gpu states": states(**GPU)})
    assert known.gpu_shares(Gpu("0", "u0")) == {"compute": pytest.approx(0.75), "held_idle": pytest.approx(0.25)}
