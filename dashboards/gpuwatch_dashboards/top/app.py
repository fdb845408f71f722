"""The live screen: a Textual app over `pages`."""

import asyncio
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.drivers.linux_driver import LinuxDriver
from textual.geometry import Size
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widgets import Footer

from gpuwatch.errors import SourceError
from gpuwatch_dashboards.selection import key_of
from gpuwatch_dashboards.top import Facts, Reader
from gpuwatch_dashboards.top.drawing import fitted
from gpuwatch_dashboards.top.pages import Page, PageName, View, header, page, selected_run

REFRESH_S = 1.0
INTERRUPTED = 130
MOVES = {"down,j": 1, "up,k": -1, "pagedown,space": 10, "pageup": -10, "home": -1_000_000, "end": 1_000_000}


class Lines(ScrollView, can_focus=False):
    """Lines of text. Only changed lines are redrawn: little to send over SSH."""

    lines: Sequence[Text] = ()

    def show(self, lines: list[Text], width: int) -> None:
        before, self.lines = self.lines, [fitted(line, width) for line in lines]
        if len(before) != len(lines):
            self.virtual_size = Size(width, len(lines))
            if self.id != "body":
                self.styles.height = len(lines)
            self.refresh(layout=True)
        for y, (old, new) in enumerate(zip(before, self.lines, strict=False)):
            if old != new:
                self.refresh_line(y)

    def render_line(self, y: int) -> Strip:
        y += self.scroll_offset.y
        segments = self.lines[y].render(self.app.console) if y < len(self.lines) else []
        return Strip(segments).adjust_cell_length(self.size.width)


class StdoutDriver(LinuxDriver):
    """Draws on stdout. Textual's own draws on stderr: `gpuwatch top 2>log` would draw into the log."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._file = sys.__stdout__


class Top(App[None]):
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { background: ansi_default; color: ansi_default; }
    Lines { height: auto; background: ansi_default; color: ansi_default; scrollbar-size: 0 1; }
    #body { height: 1fr; overflow-y: auto; scrollbar-gutter: stable; }
    """
    BINDINGS: ClassVar = [
        *(Binding(keys, f"move({by})", show=False) for keys, by in MOVES.items()),
        Binding("J", "scroll(1)", show=False),
        Binding("K", "scroll(-1)", show=False),
        Binding("g", "page('gpus')", "GPUs"),
        Binding("f", "page('findings')", "findings"),
        Binding("p", "page('panels')", "panels"),
        Binding("question_mark,h", "page('help')", "help", key_display="?"),
        Binding("escape,r", "page('runs')", show=False),
        Binding("q,ctrl+d", "quit", "quit", key_display="q"),
        Binding("enter", "run_of_gpu", "its run", key_display="⏎"),  # last: a narrow terminal cuts it
        Binding("ctrl+c", "interrupt", show=False, priority=True),
        Binding("ctrl+z", "suspend_process", show=False),
        Binding("ctrl+l", "redraw", show=False),
    ]

    def __init__(self, reader: Reader) -> None:
        super().__init__(driver_class=StdoutDriver, ansi_color=True)  # the terminal's colours; none with NO_COLOR
        self._reader, self._again = reader, threading.Event()
        self.view = View()
        self.facts: Facts | SourceError | None = None

    def compose(self) -> ComposeResult:
        yield from (Lines(id=name) for name in ("header", "above", "body", "below"))
        yield Footer(compact=True, show_command_palette=False)

    def on_mount(self) -> None:
        self.theme = "ansi-dark"
        for number in (signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, self.exit)
        # a daemon: an agent that hangs must not delay the exit
        threading.Thread(target=self._read, name="gpuwatch-top", daemon=True).start()
        self.draw()

    def _read(self) -> None:
        while self.is_running:
            begun = time.monotonic()
            self._again.clear()
            result: Facts | Exception
            try:
                result = self._reader.read(self.view.run, self.view.page == "panels")
            except Exception as error:
                result = error
            self.call_later(self._take, result)  # in the thread of the screen
            self._again.wait(max(0.05, REFRESH_S - (time.monotonic() - begun)))

    def _take(self, result: Facts | Exception) -> None:
        if isinstance(result, Exception) and not isinstance(result, SourceError):
            raise result
        self.facts = result
        self.draw()

    def on_resize(self) -> None:
        self.draw()

    def draw(self) -> None:
        width, height = self.size
        drawn: Page = page(self.view, self.facts, width, height - 2)
        self.query_one("#header", Lines).show([header(self.facts, width)], width)
        self.query_one("#above", Lines).show(drawn.above, width)
        self.query_one("#body", Lines).show(drawn.body, width - 1)
        self.query_one("#below", Lines).show(drawn.below, width)

    def _show(self, view: View) -> None:
        """Show another page or selection, scrolled to its top."""
        if view != self.view:
            self.view = view
            self._again.set()
            self.query_one("#body", Lines).scroll_home(animate=False)
            self.refresh_bindings()
            self.draw()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return action != "run_of_gpu" or self.view.page == "gpus"

    def action_page(self, name: PageName) -> None:
        self._show(replace(self.view, page="runs" if self.view.page == name else name))

    def action_scroll(self, by: int) -> None:
        self.query_one("#body", Lines).scroll_relative(y=by, animate=False)

    def action_move(self, by: int) -> None:
        facts = self.facts if isinstance(self.facts, Facts) else None
        if self.view.page in ("findings", "panels", "help"):
            self.action_scroll(by)
        elif facts is not None and self.view.page == "gpus":
            self._show(replace(self.view, gpu=_within(self.view.gpu + by, len(facts.gpus))))
        elif facts is not None and (run := selected_run(self.view, facts)) is not None:
            keys = [key_of(each) for each in facts.runs]
            self._show(replace(self.view, run=keys[_within(keys.index(key_of(run)) + by, len(keys))]))

    def action_run_of_gpu(self) -> None:
        if isinstance(self.facts, Facts) and self.view.gpu < len(self.facts.gpus):
            held_by = self.facts.gpus[self.view.gpu].run
            if (run := next((run for run in self.facts.runs if run.run == held_by), None)) is not None:
                self._show(replace(self.view, page="runs", run=key_of(run)))

    def action_redraw(self) -> None:
        self.screen.refresh(layout=True)

    def action_interrupt(self) -> None:
        self.exit(return_code=INTERRUPTED)


def _within(index: int, count: int) -> int:
    return max(0, min(index, count - 1))


def watch(reader: Reader) -> int:
    """Show the live screen until `q`; return the exit code."""
    app = Top(reader)
    app.run(mouse=False)  # the terminal's own selection of text stays
    return app.return_code or 0
