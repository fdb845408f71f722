"""The live screen by Textual's pilot: keys, sizes, what it does while the source is away, and what it imports."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs
from textual.pilot import Pilot

from gpuwatch.errors import SourceError
from gpuwatch_dashboards.top import Facts
from gpuwatch_dashboards.top.app import Lines, Top
from tests.unit.top.screens import facts, run

SCREENS = Path(__file__).parents[2] / "golden/top"
AWAY = SourceError("the agent at http://127.0.0.1:1 does not answer", "start it with `gpuwatch up`")
Steps = Callable[["Driven"], Awaitable[None]]


class FakeReader:
    """A Reader without a source: what it gives, and which runs it was asked for."""

    def __init__(self, result: Facts | Exception) -> None:
        self.result = result
        self.wanted: list[str | None] = []
        self.reads, self.panels = 0, False

    def read(self, wanted: str | None = None, panels: bool = False) -> Facts:
        self.reads += 1
        self.panels = panels
        self.wanted.append(wanted)
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


class Driven:
    """A running app and its screen."""

    def __init__(self, pilot: Pilot[None], reader: FakeReader) -> None:
        self.pilot, self.reader = pilot, reader

    @property
    def lines(self) -> list[str]:
        strips = self.pilot.app.screen._compositor.render_strips()
        return ["".join(segment.text for segment in strip) for strip in strips]

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.lines)

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)
        await self.pilot.pause()

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        for _ in range(3000):  # a minute
            if condition():
                return
            await self.pilot.pause(0.02)
        raise AssertionError(self.text)


def drive(result: Facts | Exception, steps: Steps, size: tuple[int, int] = (80, 24)) -> Top:
    """Run the app on a screen without a terminal, wait for its first read, and take the steps."""

    async def main() -> Top:
        reader = FakeReader(result)
        app = Top(reader)  # type: ignore[arg-type]
        async with app.run_test(size=size) as pilot:
            driven = Driven(pilot, reader)
            await driven.wait_for(lambda: app.facts is not None and "quit" in driven.text)  # its keys are drawn last
            await pilot.pause()
            await steps(driven)
        return app

    return asyncio.run(main())


def node(gpus: int = 2) -> Facts:
    known = facts(run("a"), run("b"), run("c"), gpus=gpus)
    cards = (structs.replace(known.gpus[0], run="c"), *known.gpus[1:]) if gpus else ()
    return replace(known, node=structs.replace(known.node, gpus=cards))


def test_the_screen_at_80_by_24_from_header_to_keys() -> None:
    async def steps(top: Driven) -> None:
        lines = top.lines
        assert len(lines) == 24 and {len(line) for line in lines} == {80}
        assert lines[0].startswith(" gpuwatch top  node-17 · 3 running · agent at http://127.0.0.1:9478")
        assert lines[2].startswith("▸ name-a          ● running   9.70  103 ms █████╱╱╱╱╱╱╱╱╱   input-bound: 62%")
        assert lines[6].startswith("  input-bound: 62% of the time training waited for data")
        assert "do   num_workers 0 → 8 → up to 2.60× faster" in top.text
        assert lines[23].rstrip() == "g GPUs f findings p panels ? help q quit"

    drive(node(), steps)


@pytest.mark.parametrize("size", [(40, 24), (60, 20), (100, 30), (160, 50)])
def test_every_size_has_verdict_states_what_to_do_node_and_keys(size: tuple[int, int]) -> None:
    async def steps(top: Driven) -> None:
        assert [len(line) for line in top.lines] == [size[0]] * size[1]
        for part in (
            "▸ name-a",
            "input-bound: 62% of",
            "waiting for data 62%",
            "num_workers 0 → 8",
            "CPU 31%",
            "q quit",
        ):
            assert part in top.text, f"{part}\n{top.text}"

    drive(node(), steps, size)


@pytest.mark.parametrize("size", [(80, 24), (40, 24), (120, 40)])
@pytest.mark.parametrize(
    ("name", "key"), [("runs", ""), ("gpus", "g"), ("findings", "f"), ("panels", "p"), ("help", "question_mark")]
)
def test_golden_screen(name: str, key: str, size: tuple[int, int]) -> None:
    """Every page at three sizes, as a whole. `make golden` writes the files again."""

    async def steps(top: Driven) -> None:
        if key:
            await top.press(key)
        if name == "panels":
            await top.wait_for(lambda: top.reader.panels)
        shown = re.sub(r"\d\d:\d\d:\d\d", "HH:MM:SS", f"{top.text}\n")  # the clock is local time
        path = SCREENS / f"{name}-{size[0]}x{size[1]}.txt"
        if os.environ.get("UPDATE_GOLDEN"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(shown, encoding="utf-8")
        assert shown == path.read_text(encoding="utf-8"), "make golden"

    drive(node(), steps, size)


def test_a_resize_draws_the_screen_for_the_new_size() -> None:
    async def steps(top: Driven) -> None:
        await top.pilot.resize_terminal(40, 24)
        await top.wait_for(lambda: "▸ name-a         ●  103 ms" in top.text)
        await top.pilot.resize_terminal(160, 50)
        await top.wait_for(lambda: "NVIDIA H200" in top.text and "100%" in top.text)
        assert [len(line) for line in top.lines] == [160] * 50

    drive(node(), steps)


def test_up_and_down_choose_a_run_stop_at_the_ends_and_have_it_read_at_once() -> None:
    async def steps(top: Driven) -> None:
        for keys, name in (
            ("down", "b"), ("j", "c"), ("down", "c"), ("k", "b"), ("up", "a"), ("up", "a"), ("end", "c"), ("home", "a"),
            ("pagedown", "c"), ("pageup", "a"), ("space", "c"),
        ):  # fmt: skip
            await top.press(keys)
            assert f"▸ name-{name}" in top.text and f"── name-{name} ●" in top.text, keys
        await top.wait_for(lambda: top.reader.wanted[-1] == "c/0")

    drive(node(), steps)


def test_a_chosen_run_that_is_gone_gives_way_to_the_one_that_the_source_shows() -> None:
    async def steps(top: Driven) -> None:
        await top.press("down")
        top.reader.result = facts(run("z"), run("y"))
        await top.wait_for(lambda: "▸ name-z" in top.text)
        await top.press("down")
        assert "▸ name-y" in top.text

    drive(node(), steps)


def test_g_f_and_help_open_a_page_and_close_it() -> None:
    shown = {
        "g": "state now",
        "f": "── name-b ─",
        "p": "── Running ranks",
        "question_mark": "How to read it",
        "h": "Keys",
    }

    async def steps(top: Driven) -> None:
        runs = top.text
        for key, part in shown.items():
            for back in (key, "escape", "r"):
                await top.press(key)
                assert part in top.text and part not in runs, key
                await top.press(back)
                assert "── name-a ● running" in top.text
        await top.press("g", "f")
        assert "── name-b ─" in top.text
        await top.press("p")
        await top.wait_for(lambda: top.reader.panels)  # only this page needs the series of all panels
        await top.press("p")
        await top.wait_for(lambda: not top.reader.panels)

    drive(node(), steps, (80, 40))


def test_gpus_are_chosen_apart_from_runs_and_enter_goes_to_the_gpu_s_run() -> None:
    async def steps(top: Driven) -> None:
        await top.press("enter")
        assert "▸ name-a" in top.text  # on the runs' page Enter does nothing
        await top.press("g")
        assert "▸ 0" in top.text and "⏎ its run" in top.text
        await top.press("down", "down")
        assert "▸ 1" in top.text and "── GPU 1 · NVIDIA H200 · u1" in top.text
        await top.press("enter")
        assert "▸ 1" in top.text  # no run holds it
        await top.press("up", "enter")
        assert "▸ name-c" in top.text and "⏎" not in top.text

    drive(node(), steps)


def test_the_keys_of_other_pages_are_shown_on_the_gpus_page_of_a_narrow_terminal_too() -> None:
    async def steps(top: Driven) -> None:
        await top.press("g")
        keys = ("g GPUs", "f findings", "p panels", "? help", "q quit")
        await top.wait_for(lambda: all(key in top.text for key in keys))
        assert "CPU 31%" in top.text and [len(line) for line in top.lines] == [40] * 24
        await top.press("g")
        await top.wait_for(lambda: top.lines[-1].startswith("g GPUs f findings p panels ? help q quit"))
        assert "CPU 31%" in top.lines[-4] + top.lines[-3] + top.lines[-2]

    drive(node(), steps, (40, 24))


def test_findings_scroll_to_their_end_and_start_from_the_top_again() -> None:
    many = facts(*(run(f"r{n}") for n in range(1, 9)))

    async def steps(top: Driven) -> None:
        body = top.pilot.app.query_one("#body", Lines)
        await top.press("f")
        assert "── name-r1" in top.text and "── name-r8" not in top.text
        await top.press("down", "down")
        assert body.scroll_offset.y == 2 and "── name-r1" not in top.text
        await top.press("pagedown", "k")
        assert body.scroll_offset.y == 9  # 32 lines in 22: the end is at 10
        await top.press("end")
        assert "── name-r8" in top.text
        await top.press("f", "f")
        assert body.scroll_offset.y == 0

    drive(many, steps)


def test_what_does_not_fit_below_the_list_scrolls_by_capitals() -> None:
    async def steps(top: Driven) -> None:
        assert "step time" not in top.text
        await top.press(*"JJJJJJJJJJ")
        assert "step time" in top.text and "▸ name-a" in top.text
        await top.press(*"KKKKKKKKKK")
        assert "── name-a ●" in top.text

    drive(node(), steps, (40, 24))


@pytest.mark.parametrize(("key", "code"), [("q", 0), ("ctrl+d", 0), ("ctrl+c", 130)])
def test_q_ends_everywhere_and_without_facts_too(key: str, code: int) -> None:
    async def steps(top: Driven) -> None:
        await top.press("g", "down", key)

    for result in (node(), AWAY):
        app = drive(result, steps)
        assert (app.return_code or 0, app.is_running) == (code, False)


def test_a_source_that_goes_away_and_comes_back() -> None:
    async def steps(top: Driven) -> None:
        assert "The agent at http://127.0.0.1:1 does not answer." in top.text
        assert "Start it with gpuwatch up." in top.text and "q quit" in top.text
        top.reader.result = node()
        await top.wait_for(lambda: "▸ name-a" in top.text)
        assert "does not answer" not in top.text
        top.reader.result = AWAY
        await top.wait_for(lambda: "does not answer" in top.text)

    drive(AWAY, steps)


def test_a_mistake_of_our_own_ends_the_screen_and_is_not_taken_for_an_answer() -> None:
    async def steps(top: Driven) -> None:
        top.reader.result = ZeroDivisionError("ours")
        await top.wait_for(lambda: not top.pilot.app.is_running)

    with pytest.raises(ZeroDivisionError, match="ours"):
        drive(node(), steps)


def test_only_lines_that_changed_are_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []

    async def steps(top: Driven) -> None:
        above = top.pilot.app.query_one("#above", Lines)
        monkeypatch.setattr(Lines, "refresh_line", lambda self, y: drawn.append(y) if self is above else None)
        reads = top.reader.reads
        await top.wait_for(lambda: top.reader.reads >= reads + 2)
        assert drawn == []
        top.reader.result = facts(run("a"), run("b", name="renamed"), run("c"), gpus=2)
        await top.wait_for(lambda: drawn == [2])

    drive(node(), steps)


def test_textual_is_imported_by_the_live_screen_alone() -> None:
    program = "import sys, gpuwatch.cli, gpuwatch_dashboards.top.pages\nprint('textual' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
