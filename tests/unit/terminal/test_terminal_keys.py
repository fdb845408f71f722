"""Bytes become keys, keys change the view."""

from __future__ import annotations

import pytest

from gpuwatch_dashboards.terminal.facts import Facts, GpuFacts
from gpuwatch_dashboards.terminal.keys import decode
from gpuwatch_dashboards.terminal.view import View
from tests.unit.terminal.screens import run

FACTS = Facts(
    label="agent",
    time_s=0.0,
    runs=(run("a"), run("b"), run("c")),
    selected="a/0",
    gpus=(GpuFacts("0", "GPU-0", run="c"), GpuFacts("1", "GPU-1")),
)


@pytest.mark.parametrize(
    ("data", "keys"),
    [
        (b"j", ["down"]),
        (b"\x1b[A\x1b[B", ["up", "down"]),
        (b"\x1bOA", ["up"]),
        (b"gq", ["g", "q"]),
        (b"\x1b", ["escape"]),
        (b"\x1b[1;5Cq", ["q"]),
        (b"\x1b[200~x", ["x"]),
        (b"\x1bxq", ["q"]),
        (b"\xc3\xa9q", ["\ufffd", "\ufffd", "q"]),
        (b"\x0c", ["redraw"]),
        (b"", []),
    ],
)
def test_decode(data: bytes, keys: list[str]) -> None:
    assert decode(data) == keys


def after(*keys: str, view: View | None = None, scroll_end: int = 0) -> View:
    view = view or View()
    for key in keys:
        view = view.pressed(key, FACTS, scroll_end)
    return view


def test_up_and_down_choose_a_run_and_stop_at_the_ends() -> None:
    assert after("down").run == "b/0"
    assert after("down", "down", "down").run == "c/0"
    assert after("up").run == "a/0"
    assert after("end").run == "c/0"
    assert after("end", "home").run == "a/0"


def test_a_chosen_run_that_is_gone_gives_way_to_the_one_shown() -> None:
    assert after("down", view=View(run="gone/0")).run == "b/0"


def test_g_f_and_help_open_a_page_and_close_it() -> None:
    for key, page in (("g", "gpus"), ("f", "findings"), ("?", "help")):
        assert after(key).page == page
        assert after(key, key).page == "runs"
        assert after(key, "escape").page == "runs"
    assert after("g", "f").page == "findings"


def test_gpus_are_chosen_apart_from_runs_and_enter_goes_to_the_gpu_s_run() -> None:
    assert after("g", "down").gpu == 1
    assert after("g", "down", "down").gpu == 1
    assert after("g", "down").run is None
    assert after("g", "enter") == View(page="runs", run="c/0", gpu=0)
    assert after("g", "down", "enter").page == "gpus"


def test_findings_scroll_within_what_there_is() -> None:
    assert after("f", "down", "down", "down", scroll_end=2).scroll == 2
    assert after("f", "page_down", "up", scroll_end=30).scroll == 9
    assert after("f", "down", "f", "f", scroll_end=2).scroll == 0


def test_q_ends_everywhere_and_without_facts_too() -> None:
    assert after("g", "q").done
    assert View().pressed("q", None).done
    assert View().pressed("down", None) == View()
