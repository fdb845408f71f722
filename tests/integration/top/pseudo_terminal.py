"""A program in a pseudo-terminal, and what its screen shows: as much of a terminal as `gpuwatch top` uses (ECMA-48)."""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import termios
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType

from tests.servers import wait_for

_SEQUENCE = re.compile(r"\x1b\[([?<>]?)([\d;]*)(\$?[A-Za-z])")
_COMMAND = re.compile(r"\x1b\][^\x07]*\x07")
_PARTIAL = re.compile(r"\x1b(\][^\x07]*)?$|\x1b(\[[?<>]?[\d;]*\$?)?$")


class Screen:
    """Characters by position. Raises AssertionError for anything unknown, which a real terminal might understand."""

    def __init__(self, columns: int, rows: int) -> None:
        self.cells = [[" "] * columns for _ in range(rows)]
        self.modes: set[str] = set()
        self.colours: set[str] = set()
        self._row = self._column = 0
        self._rest = ""

    def feed(self, text: str) -> None:
        text = self._rest + text
        partial = _PARTIAL.search(text)
        self._rest = partial.group() if partial else ""
        text = text[: len(text) - len(self._rest)]
        while text:
            if found := _SEQUENCE.match(text):
                self._control(*found.groups())
                text = text[found.end() :]
                continue
            if found := _COMMAND.match(text):  # the pointer's shape, the title
                text = text[found.end() :]
                continue
            if text[0] in "\r\n":
                self._row, self._column = (self._row, 0) if text[0] == "\r" else (self._row + 1, self._column)
                text = text[1:]
                continue
            assert text[0].isprintable(), f"{text[:20]!r}"
            if self._row < len(self.cells) and self._column < len(self.cells[0]):
                self.cells[self._row][self._column] = text[0]
            self._column += 1
            text = text[1:]

    def _control(self, private: str, parameters: str, final: str) -> None:
        if final in ("$p", "u"):  # what the terminal can do, which this one does not answer; kitty's keys
            assert private
        elif private:
            assert final in "hl"
            (self.modes.add if final == "h" else self.modes.discard)(parameters)
        elif final == "H":
            row, column = parameters.split(";")
            self._row, self._column = int(row) - 1, int(column) - 1
        elif final == "J":
            self.cells = [[" "] * len(line) for line in self.cells]
        else:
            assert final == "m", final
            self.colours.update(
                p for p in parameters.split(";") if p in ("38", "48") or (p[:1] == "3" and len(p) == 2 and p != "39")
            )

    @property
    def text(self) -> str:
        return "\n".join("".join(line).rstrip() for line in self.cells)


class PseudoTerminal:
    """A running program and its screen; ended at the end of the `with`."""

    def __init__(self, command: Sequence[str], columns: int, rows: int, environment: Mapping[str, str]) -> None:
        self._main, child = os.openpty()
        self.screen = Screen(columns, rows)
        self.received = 0
        _set_size(child, columns, rows)
        before = termios.tcgetattr(child)
        self.process = subprocess.Popen(
            command,
            stdin=child,
            stdout=child,
            stderr=subprocess.PIPE,
            env={**environment, "TERM": "xterm-256color"},
            start_new_session=True,
        )
        self.settings_before, self._child = before, child
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def press(self, keys: str) -> None:
        os.write(self._main, keys.encode())

    def resize(self, columns: int, rows: int) -> None:
        self.screen = Screen(columns, rows)
        _set_size(self._child, columns, rows)
        os.kill(self.process.pid, signal.SIGWINCH)

    def wait_for(self, *texts: str, timeout_s: float = 20.0) -> str:
        """Wait until all of these texts are on the screen; return it."""

        def shown() -> bool:
            assert self.process.poll() is None or all(text in self.screen.text for text in texts), self.errors()
            return all(text in self.screen.text for text in texts)

        try:
            wait_for(f"{texts} on the screen", shown, timeout_s, 0.05)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.screen.text}") from None
        return self.screen.text

    def ended(self, timeout_s: float = 60.0) -> int:
        """Wait for the program's end; return its exit code, after all of its output has been read."""
        code = self.process.wait(timeout_s)
        wait_for("its output is read", lambda: not select.select([self._main], [], [], 0)[0], 20, 0.05)
        self._reader.join(1.0)
        return code

    @property
    def settings(self) -> list[object]:
        return list(termios.tcgetattr(self._child))

    def errors(self) -> str:
        return self.process.stderr.read().decode() if self.process.stderr else ""

    def _read(self) -> None:
        rest = b""
        while True:
            try:
                data = os.read(self._main, 65536)
            except OSError:
                return
            if not data:
                return
            self.received += len(data)
            rest += data
            text = rest.decode("utf-8", "ignore")
            rest = rest[len(text.encode()) :]
            self.screen.feed(text)

    def __enter__(self) -> PseudoTerminal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stderr:
            self.process.stderr.close()
        os.close(self._child)
        self._reader.join(1.0)
        os.close(self._main)


def _set_size(terminal: int, columns: int, rows: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
