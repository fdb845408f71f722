"""`Report.metrics()`: a flat dictionary of stable names (docs/guides/trackers.md). And the report in a notebook."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from gpuwatch.diagnosis.rates import Done
from gpuwatch.diagnosis.report import Report, make_report
from gpuwatch.ledger.states import SECTIONS
from gpuwatch.wire import Flops
from tests.unit.rules.windows import states, steps, window

DOCS = Path(__file__).parents[3] / "docs/guides/trackers.md"


def report(count: int, samples: int | None = None, evaluated_s: float = 0.0, name: str = "resnet") -> Report:
    columns = steps(count, 0.06, 0.04)
    booked = states(columns, eval=evaluated_s)
    done = Done(seconds=0.1 * count, steps=count, samples=samples)
    flops = Flops(per_step=1e12, peak=1e14)
    price = (3600.0, "USD")
    shown = window(columns, states_s=booked, device="cuda")
    return make_report(shown, done, flops, price, run="id", name=name, hook_s=0.001 * count)


def test_the_numbers_of_a_whole_run() -> None:
    found = report(100, 3200, evaluated_s=10.0).metrics()
    assert found == {
        "gpuwatch/input_wait_ratio": pytest.approx(0.3),
        "gpuwatch/transfer_ratio": 0.0,
        "gpuwatch/compute_ratio": pytest.approx(0.2),
        "gpuwatch/eval_ratio": pytest.approx(0.5),
        "gpuwatch/step_s": pytest.approx(0.1),
        "gpuwatch/samples_per_s": pytest.approx(320.0),
        "gpuwatch/flops_per_s": pytest.approx(1e13),
        "gpuwatch/mfu_ratio": pytest.approx(0.1),
        "gpuwatch/duration_s": pytest.approx(20.0),
        "gpuwatch/steps": 100.0,
        "gpuwatch/hook_s": pytest.approx(0.1),
        "gpuwatch/cost": pytest.approx(20.0),
    }
    assert all(type(value) is float for value in found.values())


def test_what_was_not_measured_is_absent() -> None:
    empty = make_report(window(steps(0, 0, 0), states_s={"startup": 3.0}), Done(0.0, 0), run="id", name="name")
    assert empty.metrics() == {"gpuwatch/startup_ratio": 1.0, "gpuwatch/duration_s": 3.0, "gpuwatch/steps": 0.0}
    assert "gpuwatch/samples_per_s" not in report(10).metrics()


def test_since_an_earlier_report_all_is_of_the_time_between() -> None:
    found = report(200, 9600, evaluated_s=10.0).metrics(since=report(100, 3200))
    assert found["gpuwatch/eval_ratio"] == pytest.approx(0.5) and found["gpuwatch/duration_s"] == pytest.approx(20.0)
    assert found["gpuwatch/steps"] == 100.0 and found["gpuwatch/samples_per_s"] == pytest.approx(640.0)
    assert found["gpuwatch/cost"] == pytest.approx(20.0) and found["gpuwatch/mfu_ratio"] == pytest.approx(0.1)


def test_a_stretch_without_time_or_a_count_that_begins_in_it() -> None:
    now = report(100, 3200)
    assert now.metrics(since=now) == {
        **dict.fromkeys(("gpuwatch/duration_s", "gpuwatch/steps", "gpuwatch/hook_s", "gpuwatch/cost"), 0.0),
    }
    shrunk = report(100).metrics(since=report(101))  # an open pause was booked otherwise meanwhile
    assert min(shrunk.values(), default=0.0) >= 0.0


def test_every_name_is_documented() -> None:
    table = set(re.findall(r"`gpuwatch/([a-z_<>]+)`", DOCS.read_text()))
    names = {name.removeprefix("gpuwatch/") for name in report(10, 320).metrics()}
    by_state = {f"{state}_ratio" for state in report(10).states}
    assert names - by_state <= table and "<state>_ratio" in table and {"tokens_per_s", "verdict"} <= table
    assert {f"compute_{section}_ratio" for section in SECTIONS} <= table


def test_a_notebook_has_the_bar_and_the_text_and_no_markup_of_the_run() -> None:
    html = report(100, name="<b>&")._repr_html_()
    assert "&lt;b&gt;&amp;" in html and "<b>" not in html
    widths = [float(width) for width in re.findall(r"height:100%;width:([\d.]+)%", html)]
    assert widths == [60.0, 40.0] and "waiting for data 60%" in html
    open_tags: list[str] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: open_tags.append(tag)  # type: ignore[method-assign]
    parser.handle_endtag = lambda tag: None if open_tags.pop() == tag else pytest.fail(tag)  # type: ignore[method-assign]
    parser.feed(html)
    assert open_tags == []
