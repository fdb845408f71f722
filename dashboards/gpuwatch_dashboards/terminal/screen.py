"""The terminal itself: raw keys in, changed lines out, and everything as it was at the end.

A frame is compared with the one on the screen and only lines that differ are sent, inside a synchronized update
(https://gist.github.com/christianparpart/d8a62cc1ab659194337d73e399004036, ignored where it is not known): no flicker, and little
to carry over SSH.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType, TracebackType

from rich.color import ColorSystem
from rich.console import COLOR_SYSTEMS, Console
from rich.text import Text

from gpuwatch_dashboards.terminal.keys import decode

_ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J"  # alternate screen, no cursor, no wrap at the edge
_LEAVE = "\x1b[0m\x1b[?7h\x1b[?25h\x1b[?1049l"
_BEGIN, _END = "\x1b[?2026h", "\x1b[?2026l"


def plain_colours(console: Console) -> tuple[ColorSystem | None, bool]:
    """Return the colours that a console's terminal has, and whether the reader wants none (NO_COLOR)."""
    return COLOR_SYSTEMS.get(console.color_system or "", None), console.no_color


def ansi(line: Text, console: Console) -> str:
    """Return a line with its escape sequences."""
    system, colourless = plain_colours(console)
    parts = []
    for segment in line.render(console):
        style = segment.style
        if style is not None and colourless:
            style = style.without_color
        parts.append(style.render(segment.text, color_system=system) if style is not None else segment.text)
    return "".join(parts)


class Terminal:
    """A terminal taken over for as long as the `with` lasts."""

    def __init__(self) -> None:
        self._in, self._out = sys.stdin.fileno(), sys.stdout.fileno()
        self._console = Console(force_terminal=True, legacy_windows=False, color_system="auto")
        self._shown: list[str] = []
        self._size = (0, 0)
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        os.set_blocking(self._wake_read, False)
        self.ended = False
        """Asked to end by a signal, or the terminal is gone."""

    def __enter__(self) -> Terminal:
        self._before = termios.tcgetattr(self._in)
        self._handlers = {
            number: signal.signal(number, handler)
            for number, handler in (
                (signal.SIGWINCH, self._resized),
                (signal.SIGTERM, self._end),
                (signal.SIGHUP, self._end),
                (signal.SIGTSTP, self._stop),
            )
        }
        self._take()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._give_back()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        os.close(self._wake_read)
        write, self._wake_write = self._wake_write, -1
        os.close(write)

    def _take(self) -> None:
        tty.setcbreak(self._in, termios.TCSANOW)
        self._shown, self._size = [], (0, 0)
        self._write(_ENTER)

    def _give_back(self) -> None:
        self._write(_LEAVE)
        with suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(self._in, termios.TCSANOW, self._before)

    @property
    def size(self) -> tuple[int, int]:
        """Return (columns, lines)."""
        columns, lines = os.get_terminal_size(self._out)
        return columns or 80, lines or 24

    def wake(self) -> None:
        """Make `wait` return; from any thread."""
        with suppress(BlockingIOError, OSError):  # full: it is awake already; closed: it has ended
            os.write(self._wake_write, b".")

    def wait(self) -> list[str]:
        """Wait for keys, a signal or `wake`; return the keys."""
        ready, _, _ = select.select([self._in, self._wake_read], [], [])
        if self._wake_read in ready:
            with suppress(BlockingIOError):
                os.read(self._wake_read, 4096)
        if self._in not in ready:
            return []
        try:
            data = os.read(self._in, 1024)
        except OSError:
            data = b""
        self.ended = self.ended or not data
        return decode(data)

    def paint(self, lines: Sequence[Text]) -> None:
        """Show a frame of the terminal's size."""
        if self._size != self.size:
            self._size, self._shown = self.size, []
        drawn = [ansi(line, self._console) for line in lines]
        changed = [
            f"\x1b[{row + 1};1H{text}"
            for row, text in enumerate(drawn)
            if row >= len(self._shown) or self._shown[row] != text
        ]
        clear = "" if self._shown else "\x1b[0m\x1b[2J"
        if changed:
            self._write(_BEGIN + clear + "".join(changed) + _END)
        self._shown = drawn

    def redraw(self) -> None:
        """Forget what is on the screen: another program wrote on it."""
        self._shown = []

    def _write(self, text: str) -> None:
        data = text.encode(sys.stdout.encoding or "utf-8", "replace")
        try:
            while data:
                data = data[os.write(self._out, data) :]
        except OSError:
            self.ended = True

    def _resized(self, number: int, at: FrameType | None) -> None:
        self.wake()

    def _end(self, number: int, at: FrameType | None) -> None:
        self.ended = True
        self.wake()

    def _stop(self, number: int, at: FrameType | None) -> None:
        """Ctrl-Z: give the terminal back, stop, and take it again once continued."""
        self._give_back()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self._stop)
        self._take()
        self.wake()
