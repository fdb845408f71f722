"""Does gpuwatch say the right thing of programs like those that people have? Each in its own process, one by one.

    python -m benchmarks.programs                    # all of them, about 15 minutes on two cores; a line for each
    python -m benchmarks.programs vae sweep          # some
    python -m benchmarks.programs --cuda             # those for a GPU, which the others do without
    python -m benchmarks.programs --words vae          # with the words in the terminal
    python -m benchmarks.programs --write            # its page of the documentation
    python -m benchmarks.programs --write vae sweep  # the page's last section, of these alone

A program is right when the first cause named (severity warning or worse) is one that its label accepts, and, where the
label has a pattern, when the words match it; a healthy one, when no cause is named. Its own clock says for how long it
waited for data. Where a number of workers is advised, the program is trained six times more, in turn as it is and with
that number, without gpuwatch: what the median of the latter achieves over that of the former is compared with the
predicted range.

Exit status: 0 when 95% are right and 90% of the predictions hold, else 1.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import ROOT
from benchmarks.programs import Program, loaders
from benchmarks.programs.registry import PROGRAMS
from benchmarks.prose import wrapped
from benchmarks.turns import AT_ONCE

PAGE = ROOT / "docs" / "evidence" / "programs.md"
RIGHT, HELD = 0.95, 0.90
TURNS = 3
"""How often a program is trained with and without the advice, in turn: cores of a virtual machine are faster and slower
by a third within seconds."""
SAMPLES_PER_S = 9
"""Of the training thread's place, in the first two minutes of a run."""
NOISE = 0.05
"""How far outside of its range an achieved gain may be: two trainings of the same program differ by that much on a
machine that others use."""
NICE = "GPUWATCH_BENCHMARK_NICE"
"""Environment variable: the programs' nice value, such as -5 (which root may set), for a machine others use too."""
_STARVED = (0.10, 0.20)
"""Below the first share of waiting by its own clock nothing is to be named, from the second on something is; between
them either is right."""
_STARVES = ("input_single_process", "input_cpu", "input_cpu_saturated", "epoch_start_pause")
_ABSURD = re.compile(r"e\+\d|num_workers(?:=| \d+ → )(\d{3,})")


def run(program: Program, *, watched: bool, used: int | None = None) -> dict[str, Any]:
    """Run a program in a process of its own; return what its clock and the hook measured, and its terminal's words."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "agent", ROOT / "dashboards")))}
    env |= {"GPUWATCH_ENDPOINT": "ipc:///tmp/gpuwatch-programs-no-agent.sock", "PROGRAM_PORT": str(_PORT[0])}
    for name in ("GPUWATCH_RUN", "PROGRAM_WORKERS"):
        env.pop(name, None)
    if used is not None:
        env["PROGRAM_WORKERS"] = str(used)
    if not watched:
        env["GPUWATCH_DISABLE"] = "1"
    command = [sys.executable, "-m", "benchmarks.programs.child", program.name, str(program.seconds)]
    if watched and program.run:
        command = [sys.executable, "-m", "gpuwatch", "run", *command]
    with tempfile.TemporaryDirectory() as folder:
        agent = None
        if watched and program.agent:
            env["GPUWATCH_ENDPOINT"] = f"ipc://{folder}/hook.sock"
            listen = [
                sys.executable,
                "-m",
                "gpuwatch",
                "agent",
                "--http",
                "127.0.0.1:0",
                "--listen",
                env["GPUWATCH_ENDPOINT"],
            ]
            history = ["--history", f"{folder}/history.sqlite"]
            agent = subprocess.Popen([*listen, *history], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120, cwd=ROOT)
        finally:
            if agent is not None:
                agent.terminate()
                agent.wait()
    begin = '{"wait_s"'  # two ranks may have printed theirs in one line
    lines = [json.JSONDecoder().raw_decode(begin + part)[0] for part in done.stdout.split(begin)[1:]]
    outcome = max(lines, key=lambda each: len(each["findings"]), default={"findings": []})
    outcome["load"] = os.getloadavg()[0]
    failed = None if done.returncode == 0 and lines else f"exit status {done.returncode}"
    return {**outcome, "words": done.stderr[-6000:], "failed": failed}


def evaluate(program: Program, outcome: dict[str, Any]) -> list[str]:
    """Return what is wrong with what gpuwatch named; empty when nothing is."""
    if outcome["failed"]:
        return [outcome["failed"]]
    named, faults = roots(outcome), []
    share = outcome["wait_s"] / outcome["wall_s"] if outcome["wall_s"] else 0.0
    if program.clocked and all(cause.startswith("input") for cause in program.causes):
        if not program.causes and share >= _STARVED[0]:  # as its own clock saw it this time
            program = replace(program, causes=_STARVES)
        if (not named and share < _STARVED[1]) or (not program.causes and share < _STARVED[0]):
            program = replace(program, causes=())
    if program.causes and not named:
        faults.append("no cause was named")
    elif named and named[0]["cause"] not in program.causes:
        faults.append(f"{named[0]['cause']} was named")
    if program.says and not re.search(program.says, outcome["words"]):
        faults.append(f"nothing says {program.says}")
    if _ABSURD.search(outcome["words"]):
        faults.append("an absurd number")
    return faults


def roots(outcome: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the findings that ask for a change, and are no consequences."""
    good = ("compute_bound", "gpu_saturated")
    return [each for each in outcome["findings"] if each["cause"] not in good and each["root"] is None]


def measure(program: Program, compare: bool = True) -> dict[str, Any]:
    """Return a program's row. `compare`: with and without the advised workers."""
    outcome = run(program, watched=True)
    row: dict[str, Any] = {
        "program": program,
        "faults": evaluate(program, outcome),
        "outcome": outcome,
        "load": os.getloadavg()[0],
    }
    if program.clocked and not outcome["failed"] and outcome["wall_s"]:
        row["share"] = outcome["wait_s"] / outcome["wall_s"]
        row["error"] = (outcome["input_wait_s"] or 0.0) / outcome["wall_s"] - row["share"]
    elif outcome.get("outside_s") and roots(outcome):
        row["share"] = outcome["outside_s"] / outcome["wall_s"]
        first = roots(outcome)[0]
        row["error"], evidence = first["ratio"] - row["share"], first["evidence"][0]
        if evidence["what"] == "Python in the step":
            share, samples = evidence["value"], SAMPLES_PER_S * outcome["wall_s"]
            row["deviation"] = 2 * (share * (1 - share) / samples) ** 0.5 * first["ratio"] / share
    advised = [
        found
        for each in roots(outcome)
        if (found := re.search(r"(?:DataLoader\(num_workers=|num_workers \d+ → )(\d+)", each["advice"]))
        and each["predicted_range"]
    ]
    if advised and compare and not outcome["failed"]:
        first = next(each for each in roots(outcome) if advised[0][0] in each["advice"])
        row["workers"], row["range"] = int(advised[0][1]), first["predicted_range"]
        turns = [
            [run(program, watched=False, used=used).get("step_s") for used in (None, row["workers"])]
            for _ in range(TURNS)
        ]
        row["load"] = max(row["load"], os.getloadavg()[0])
        if all(all(turn) for turn in turns):
            row["step_s"] = before, after = tuple(map(median, zip(*turns, strict=True)))
            row["achieved"] = before / after
    return row


def holds(row: dict[str, Any]) -> bool:
    """Whether what was achieved is within the predicted range."""
    low, high = row["range"]
    return bool(low * (1 - NOISE) <= row["achieved"] <= high * (1 + NOISE))


def show(row: dict[str, Any]) -> str:
    """Return a row of the table."""
    program, named = row["program"], roots(row["outcome"])
    truth = "nothing" if not program.causes else " or ".join(f"`{cause}`" for cause in program.causes)
    cause = f"`{named[0]['cause']}`" if named else "nothing"
    share = f"{row['share']:.1%} | {100 * row['error']:+.1f}" if "share" in row else " | "
    share += f" ± {100 * row['deviation']:.0f}" if "deviation" in row else ""
    gain = " | | | "
    if "achieved" in row:
        low, high = row["range"]
        gain = (
            f"{row['workers']} | {low:.2f} to {high:.2f} | {row['achieved']:.2f} | {'yes' if holds(row) else '**no**'}"
        )
    how = "agent" if program.agent else "run" if program.run else "one line"
    return f"| {program.name} | {how} | {truth} | {cause} | {'; '.join(row['faults']) or 'ok'} | {share} | {gain} | {row['load']:.1f} |"


_HEADER = """| program | how | what is wrong | named first | | waited | error, points | workers | predicted × | achieved × | within | load |
|---|---|---|---|---|---|---|---|---|---|---|---|"""


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Return the figures of all rows."""
    ill, healthy = ([row for row in rows if bool(row["program"].causes) is which] for which in (True, False))
    errors = sorted(abs(100 * row["error"]) for row in rows if "error" in row and "deviation" not in row)
    sampled = [abs(row["error"]) <= row["deviation"] for row in rows if "deviation" in row]
    tried = [row for row in rows if "achieved" in row]
    text = f"**{sum(not row['faults'] for row in rows)} of {len(rows)} right** ({sum(not row['faults'] for row in ill)} of {len(ill)} with "
    text += f"something wrong; {sum(bool(roots(row['outcome'])) for row in healthy)} false alarms in {len(healthy)} others)."
    if errors:
        within = sum(error <= 1 for error in errors)
        text += f" Share of waiting: median error {median(errors):.2f} points, {within} of {len(errors)} within 1, the largest {errors[-1]:.1f}."
    if sampled:
        text += f" Shares of one function, which are counted in samples: {sum(sampled)} of {len(sampled)} within two standard deviations."
    if tried:
        slower = sum(row["achieved"] < 1 - NOISE for row in tried)
        text += f" Predictions: **{sum(map(holds, tried))} of {len(tried)} within their range**; advice that made it slower: {slower}."
    return text


def page(rows: Sequence[dict[str, Any]]) -> str:
    """Return the page of the documentation."""
    text = (Path(__file__).parent / "page.md").read_text()
    return text.replace("SUMMARY", _figures(rows)).replace("TABLE", _table(rows)).replace("ABOUT", _about(rows))


_SEPARATELY = "\n## Run separately\n"


def separately(rows: Sequence[dict[str, Any]]) -> str:
    """Return the page's last section, of some programs."""
    text = """
These programs were run by the same command with their names, and `--once`: no advice was followed. The labels of the programs in
`unseen.py` and `tutorials.py` were written before gpuwatch had seen any of them. Of the twenty-one in `unseen.py`, thirteen were right at
first; of thirty-five habits of tutorials, of which twenty-one are kept, five were wrong. The faults have been fixed since, and one label
and some clocks were corrected, so this section only shows that the results stay right. The same is true of the eighteen of `heldout.py`
above, selected from 70: four of the 70 had a wrong cause or verdict at first, and for eight more the wording was wrong or vague.
"""
    return f"{_SEPARATELY}{text}\n{_figures(rows)}\n\n{_table(rows)}\n\n{_about(rows)}\n"


def _figures(rows: Sequence[dict[str, Any]]) -> str:
    loads = [row["load"] for row in rows]
    when = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    note = f"Last run: {when}, {os.cpu_count()} cores, load average {min(loads):.1f} to {max(loads):.1f} (other programs ran too)."
    return f"{note}\n\n{summary(rows)}"


def _table(rows: Sequence[dict[str, Any]]) -> str:
    return "\n".join((_HEADER, *map(show, rows)))


def _about(rows: Sequence[dict[str, Any]]) -> str:
    return "\n".join(f"- `{row['program'].name}`: {(row['program'].main.__doc__ or '').strip()}" for row in rows)


_PORT = [0]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.programs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="programs; without any, all of them")
    parser.add_argument("--write", action="store_true", help="write the page of the documentation")
    parser.add_argument("--words", action="store_true", help="print the words in the terminal too")
    parser.add_argument("--cuda", action="store_true", help="the programs for a GPU")
    parser.add_argument("--once", action="store_true", help="verdicts only: follow no advice")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.names if name not in PROGRAMS]:
        parser.error(f"no such program: {', '.join(unknown)}; there are {', '.join(PROGRAMS)}")
    if arguments.cuda and arguments.write:
        parser.error("--write is of the programs that need no GPU")
    if nice := os.environ.get(NICE):
        if os.getpid() != os.getsid(0):
            os.setsid()  # a group of its own for the scheduler, sched(7)
        os.nice(int(nice))
        with suppress(OSError):
            Path("/proc/self/autogroup").write_text(nice)
    server = loaders.store()
    _PORT[0] = server.server_address[1]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(_HEADER, flush=True)
    rows = []
    all_of_them = [each for each in PROGRAMS.values() if each.cuda == arguments.cuda]
    chosen = [PROGRAMS[name] for name in arguments.names] or all_of_them
    with ThreadPoolExecutor(AT_ONCE if arguments.cuda else 1) as pool:
        for row in pool.map(lambda program: measure(program, not arguments.once), chosen):
            rows.append(row)
            print(show(row), flush=True)
            if arguments.words:
                print(row["outcome"]["words"], flush=True)
    server.shutdown()
    print(f"\n{summary(rows)}")
    if arguments.write:
        text = PAGE.read_text().split(_SEPARATELY)[0] + separately(rows) if arguments.names else page(rows)
        PAGE.write_text(wrapped(text))
    tried = [row for row in rows if "achieved" in row]
    right = sum(not row["faults"] for row in rows) >= RIGHT * len(rows)
    return 0 if right and sum(map(holds, tried)) >= HELD * len(tried) else 1


if __name__ == "__main__":
    sys.exit(main())
