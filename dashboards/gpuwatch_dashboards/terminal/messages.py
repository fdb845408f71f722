"""What is said in place of numbers: nothing to show yet, nobody answers, which keys there are."""

from __future__ import annotations

from rich.text import Text

from gpuwatch.errors import SourceError
from gpuwatch_dashboards.palette import STATES
from gpuwatch_dashboards.terminal.bars import swatch
from gpuwatch_dashboards.terminal.lines import flowed, rule, wrapped
from gpuwatch_dashboards.terminal.looks import BOLD, DIM, words

KEYS = (("↑↓ jk", "choose"), ("g", "GPUs"), ("f", "findings"), ("?", "help"), ("q", "quit"))
_HELP = (
    ("↑ ↓  j k", "choose a run; in the list of GPUs a GPU; in findings and help: scroll"),
    ("g", "GPUs of the node, one line each, the chosen one's last minutes below; again: back"),
    ("Enter", "in the list of GPUs: the run that holds the chosen one"),
    ("f", "findings of all runs and GPUs, in full; again: back"),
    ("Esc  r", "back to the runs"),
    ("PgUp PgDn Home End", "by pages, to an end"),
    ("?", "this page"),
    ("q", "quit"),
)


def no_runs(host: str, width: int) -> list[Text]:
    """Return the message before any training was seen: the one line to add."""
    lines = [Text(), *wrapped(f"No training run on {host} yet.", width, BOLD, 2), Text()]
    lines += wrapped("Add one line to your training loop:", width, "", 2)
    lines += [Text(), Text("    import gpuwatch"), Text()]
    lines += [words("    for batch in gpuwatch.watch(loader):", "bold reverse"), Text("        ..."), Text()]
    lines += wrapped("or run the script as it is: gpuwatch run -- python train.py", width, "", 2)
    return [
        *lines,
        Text(),
        *wrapped("The run appears here by itself, with a verdict after its first steps.", width, DIM, 2),
    ]


def away(error: SourceError, width: int) -> list[Text]:
    """Return the message while the source does not answer: what, where, what to do."""
    what = f"{error.what[:1].upper()}{error.what[1:].rstrip('.')}."
    remedy = f"{error.remedy[:1].upper()}{error.remedy[1:].rstrip('.')}.".replace("`", "")
    return [
        Text(),
        *wrapped(what, width - 2, "bold reverse", 2),
        Text(),
        *wrapped(remedy, width - 2, BOLD, 2),
        Text(),
        *wrapped("gpuwatch top tries again every second and goes on by itself.", width - 2, DIM, 2),
    ]


def help_lines(width: int) -> list[Text]:
    """Return all keys, and what the states look like."""
    lines = [rule("Keys", width)]
    for keys, text in _HELP:
        paragraph = wrapped(text, width - 1, "", 21)
        paragraph[0] = words(f"  {keys:<19}", BOLD).append(paragraph[0].plain.lstrip())
        lines += paragraph
    lines.append(rule("States", width))
    lines += flowed([swatch(state).append(f" {look.name}") for state, look in STATES.items()], width, 2, "   ")
    lines.append(rule("How to read it", width))
    for text in (
        "A bar is all the time there was, divided by what it went to: its shares add up to 100%.",
        "In a legend the first number is of the last minute, the one in parentheses of the whole run.",
        "Curves are of the last 5 minutes; a gap is time in which nothing was sampled. The number is the latest.",
        "“Up to 2.6× faster” is an upper bound: throughput if no time were lost to this cause.",
    ):
        lines += wrapped(text, width - 1, "", 2)
    return lines
