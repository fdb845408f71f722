"""Small trainings in the style of public ones, each with its truth and an own clock: is gpuwatch right about it?"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass

_BLOB = zlib.compress(bytes(range(256)) * 64, 1)


class Clock:
    """A program's own measurement, which knows nothing of gpuwatch.

    `begin` is called before each pass, `got` with each batch in hand, `done` after its step.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._started: float | None = None
        self.wait_s = self.ended = self.first_s = 0.0
        self.outside_s = 0.0  # what an environment, for example, took by the program's own clock
        self.steps_s: list[float] = []
        self._asked: float | None = None
        self._is_first = False
        self.begun = 0.0

    @property
    def over(self) -> bool:
        """Whether its time is over.

        It begins with the second step, as the first one imports much of torch; without steps with the first question.
        """
        if self._started is None and not self.begun:
            self._started = time.perf_counter()
        return self._started is not None and time.perf_counter() - self._started > self.seconds

    def start(self) -> None:
        """Begin, without batches that are waited for."""
        self.begun = self._started = time.perf_counter()

    def begin(self) -> None:
        self._asked, self._is_first = time.perf_counter(), True
        if not self.begun:
            self.begun, self._started = self._asked, None

    def got(self) -> bool:
        """Note that the batch is there; return whether the program's time is over."""
        now = time.perf_counter()
        asked = self._asked or now
        self.wait_s += now - asked
        if self._is_first:
            self.first_s += now - asked
        if self.over:
            self.ended = now
        return self.over

    def done(self) -> None:
        """Note that the step is done, and the next batch is asked for."""
        now = self.ended = time.perf_counter()
        if self._started is None:
            self._started = now
        elif not self._is_first and self._asked is not None:
            self.steps_s.append(now - self._asked)
        self._asked, self._is_first = now, False

    def exhausted(self) -> None:
        """The loader had no further batch, which was waited for too."""
        self.ended = time.perf_counter()
        self.wait_s += self.ended - (self._asked or self.ended)
        self._asked = None

    def left(self) -> None:
        """What follows is no step: an evaluation, say."""
        self.ended, self._asked = time.perf_counter(), None

    def resumed(self) -> None:
        """The next batch is asked for."""
        self._asked = time.perf_counter()


@dataclass(frozen=True)
class Program:
    """A training with a known truth."""

    name: str
    main: Callable[[Clock], None]
    causes: tuple[str, ...]
    """Any of these may be named first; empty: nothing is wrong."""
    seconds: float
    run: bool
    """Under `gpuwatch run`; else the program watches its own loader, by one line."""
    agent: bool
    says: str
    """A pattern that the words in the terminal must match."""
    threads: int
    """torch's threads within an operation."""
    clocked: bool
    """Whether its clock's share can be compared with the ledger's: not where several processes or threads train."""
    cuda: bool
    """Whether it trains on a GPU."""


PROGRAMS: dict[str, Program] = {}


def program(
    *causes: str,
    seconds: float = 7.0,
    run: bool = True,
    agent: bool = False,
    says: str = "",
    threads: int = 1,
    clocked: bool = True,
    cuda: bool = False,
) -> Callable[[Callable[[Clock], None]], Callable[[Clock], None]]:
    """Add a program; its name is its function's."""

    def add(main: Callable[[Clock], None]) -> Callable[[Clock], None]:
        PROGRAMS[main.__name__] = Program(
            main.__name__, main, causes, seconds, run, agent, says, threads, clocked, cuda
        )
        return main

    return add


def workers(given: int) -> int:
    """Return the program's number of loader workers: in its second run the advised one."""
    return int(os.environ.get("PROGRAM_WORKERS", given))


def decode(cpu_s: float) -> None:
    """Unpack compressed bytes until it has cost so much CPU time."""
    end = time.thread_time() + cpu_s
    while time.thread_time() < end:
        zlib.decompress(_BLOB)
