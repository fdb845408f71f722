"""Run the programs, print the table, and say whether every cause was named and no healthy program alarmed.

    python -m benchmarks.diagnosis                      # all of them, about 10 minutes on two cores
    python -m benchmarks.diagnosis --only straggler     # those whose name or causes contain a text; may be given again
    python -m benchmarks.diagnosis --cuda               # those for a real GPU, which the others do without
    python -m benchmarks.diagnosis --list
    python -m benchmarks.diagnosis --write              # the whole page, docs/evidence/diagnosis.md

Exit status: 0 all named and no false alarm, 1 not so, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from datetime import datetime, timezone
from pathlib import Path

from benchmarks import ROOT
from benchmarks.prose import wrapped

from .evaluation import Evaluated
from .page import page
from .program import Program
from .programs import PROGRAMS, REALTIME
from .stage import Outcome, stage

PAGE = ROOT / "docs" / "evidence" / "diagnosis.md"


class Kept:
    """The outcomes so far, in a file where one is given."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lock = threading.Lock()
        rows = json.loads(path.read_text()) if path is not None and path.exists() else {}
        by_name = {program.name: program for program in PROGRAMS}
        self.outcome = {name: Outcome(by_name[name], **row) for name, row in rows.items() if name in by_name}

    def keep(self, outcome: Outcome) -> None:
        with self._lock:
            self.outcome[outcome.program.name] = outcome
            if self._path is not None:
                names = [each.name for each in fields(Outcome) if each.name != "program"]
                rows = {name: {each: getattr(one, each) for each in names} for name, one in self.outcome.items()}
                self._path.write_text(json.dumps(rows))


def perform(numbers: Sequence[int], at_once: int, tries: int, kept: Kept) -> list[Evaluated]:
    """Return the outcomes of these programs. Those that compute run one after another, after all others."""

    def one(number: int) -> Evaluated:
        evaluated = Evaluated(kept.outcome.get(PROGRAMS[number].name) or Outcome(PROGRAMS[number], skipped="not yet"))
        if evaluated.ok:
            return evaluated
        for attempt in range(tries):
            try:
                evaluated = Evaluated(stage(PROGRAMS[number], number, stretch=1 + attempt))
            except (OSError, RuntimeError) as error:
                evaluated = Evaluated(replace(evaluated.outcome, skipped=None, failed=str(error)))
            again = "" if evaluated.ok or attempt + 1 == tries else " (once more)"
            print(evaluated.row() + again, file=sys.stderr, flush=True)
            if not again:
                break
        kept.keep(evaluated.outcome)
        return evaluated

    quiet = [number for number in numbers if not PROGRAMS[number].cpu_bound]
    with ThreadPoolExecutor(at_once) as pool:
        done = dict(zip(quiet, pool.map(one, quiet), strict=True))
    done |= {number: one(number) for number in numbers if number not in done}
    return [done[number] for number in numbers]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.diagnosis", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--only", action="append", default=[], metavar="TEXT")
    parser.add_argument("--cuda", action="store_true", help="the programs for a real GPU, one after another")
    parser.add_argument("--list", action="store_true", help="list the programs")
    parser.add_argument("--write", action="store_true", help="write docs/evidence/diagnosis.md")
    parser.add_argument(
        "--go-on",
        type=Path,
        metavar="FILE",
        help="keep the outcomes in a file, and do not rerun programs whose cause was found",
    )
    parser.add_argument("--at-once", type=int, default=4, metavar="N", help="programs that sleep, at a time [4]")
    parser.add_argument(
        "--tries",
        type=int,
        default=1,
        metavar="N",
        help="a program that fails is run again for twice as long, N times in all [1]; 0: none is run, what --go-on kept is evaluated",
    )
    arguments = parser.parse_args()
    chosen = [
        number
        for number, program in enumerate(PROGRAMS)
        if program.cuda == arguments.cuda and _is_chosen(program, arguments.only)
    ]
    if not chosen:
        parser.error(f"no program has {' or '.join(arguments.only)} in its name or causes; --list names them")
    if arguments.list:
        for number in chosen:
            print(f"{number:3}  {PROGRAMS[number].name}: {', '.join(PROGRAMS[number].causes) or 'healthy'}")
        return 0
    if arguments.write and (arguments.only or arguments.cuda):
        parser.error("--write takes all programs: leave --only out")
    begin = time.monotonic()
    evaluated = perform(chosen, 1 if arguments.cuda else arguments.at_once, arguments.tries, Kept(arguments.go_on))
    cores = os.cpu_count() or 1
    busy = sum(each.outcome.busy_cores for each in evaluated) / len(evaluated)
    when = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    took = f"in {(time.monotonic() - begin) / 60:.0f} minutes" if arguments.tries else "in several goes"
    load = (
        f"{when}, {len(evaluated)} programs {took} on {cores} cores, of which {busy:.1f} were in use on average "
        f"(these programs and others', load average {os.getloadavg()[0]:.0f}{', some programs that hardly compute scheduled first' if os.environ.get(REALTIME) == '1' else ''}){f', {arguments.tries} tries at most' if arguments.tries else ''}"
    )
    text = page(evaluated, load)
    if arguments.write:
        PAGE.write_text(wrapped(text))
    else:
        print(text)
    return 0 if all(each.ok or each.outcome.skipped is not None for each in evaluated) else 1


def _is_chosen(program: Program, texts: Sequence[str]) -> bool:
    words = " ".join((program.name, *program.causes))
    return not texts or any(text in words for text in texts)


if __name__ == "__main__":
    sys.exit(main())
