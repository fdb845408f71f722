"""Write the docs' tables whose content is in the code, between their marks: causes (also in runbooks), collectors."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

from gpuwatch.diagnosis.finding import Rule
from gpuwatch.diagnosis.rules import BY_CAUSE, RULES, roots_of
from gpuwatch.diagnosis.thresholds import THRESHOLDS
from gpuwatch_agent.collectors import name_of, node

DOCS = Path(__file__).parents[1] / "docs"
PAGES = [DOCS / "concepts/causes.md", DOCS / "deploy/agent.md", *sorted((DOCS / "runbooks").glob("*.md"))]
_MARKED = re.compile(r"(<!-- (\w+): written by scripts/tables.py -->\n).*?(<!-- end -->)", re.S)
_NUMBERS = asdict(THRESHOLDS)


def found_when(rule: Rule) -> list[str]:
    """Return a rule's docstring in paragraphs, less its first words, with thresholds' values. Exits without one."""
    text = rule.find.__doc__ or ""
    if not text.startswith("Found when"):
        sys.exit(f"{rule.cause}: its docstring does not begin with 'Found when'")
    filled = re.sub(
        r"`(\w+)`",
        lambda name: _value(name[1]) if name[1] in _NUMBERS else name[0],
        text.removeprefix("Found when").lstrip(", "),
    )
    return [" ".join(each.split()).rstrip(".") for each in filled.split("\n\n")]


def _value(name: str) -> str:
    number = _NUMBERS[name]
    if name.endswith("_bytes_per_s"):
        return f"{number / 1e9:g} GB/s" if number >= 1e9 else f"{number / 1e3:g} kB/s"
    if name.endswith("_s"):
        return f"{number / 60:g} minutes" if number >= 60 else f"{number:g} s"
    plain = isinstance(number, int) or number > 1 or name.endswith("_correlation")
    return f"{number:g}" if plain else f"{number:.0%}"


def causes() -> str:
    """Return the table of all causes, with the link to the runbook of each."""
    rows = (
        (
            f"`{rule.cause}`",
            ". ".join(found_when(rule)),
            rule.change,
            f"[{rule.runbook}](../runbooks/{rule.runbook}.md)",
        )
        for rule in RULES
    )
    return table("cause", "found when", "change", "runbook", rows=rows)


def roots() -> str:
    """Return the table of the causes that can have a root."""
    found = ((rule.cause, roots_of(rule.cause)) for rule in RULES)
    rows = ((f"`{cause}`", ", ".join(f"`{root}`" for root in roots)) for cause, roots in found if roots)
    return table("consequence", "root", rows=rows)


def findings(runbook: str) -> str:
    """Return a runbook's table of causes, those that stacks show more of, and causes elsewhere that can be roots."""
    own = [rule for rule in RULES if rule.runbook == runbook]
    text = table("finding", "found when", "change", rows=((f"`{r.cause}`", found_when(r)[0], r.change) for r in own))
    more = ", ".join(f"`{rule.cause}`" for rule in own if rule.stacks)
    line = textwrap.fill(f"`gpuwatch stacks RUN` shows the code behind {more}.", 120, break_on_hyphens=False)
    text += f"\n{line}\n" * bool(more)
    found = (BY_CAUSE[root] for rule in own for root in roots_of(rule.cause))
    elsewhere = {f"`{root.cause}` ([{root.runbook}]({root.runbook}.md))" for root in found if root not in own}
    return text + f"\nIf a finding names {' or '.join(sorted(elsewhere))} as its root, begin there.\n" * bool(elsewhere)


def collectors() -> str:
    """Return the table of the collectors of the node's files. Exits for one whose docstring names no source."""
    return table("collector", "samples", "source", rows=map(sampled, node.COLLECTORS))


def sampled(of: Callable[..., object]) -> tuple[str, ...]:
    """Return the row of a collector."""
    text = " ".join((of.__doc__ or "").split())
    found = re.match(r"(?:Return |Yield )?(?:the )?(.+?)\. (?:.*\. )?Source: (`[^`]+`)\.", text)
    if found is None:
        sys.exit(f"{name_of(of)}: its docstring does not begin with what it samples, and `Source: …` in backticks")
    return (f"`{name_of(of)}`", *found.groups())


def table(*head: str, rows: Iterable[tuple[str, ...]]) -> str:
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, ("---",) * len(head), *rows))


def written(page: Path) -> str:
    """Return a page with its tables as the code gives them. Exits for a cause's runbook without a place for it."""
    tables = {"causes": causes(), "roots": roots(), "findings": findings(page.stem), "collectors": collectors()}
    text = page.read_text()
    if page.parent.name == "runbooks" and "<!-- findings:" not in text and any(r.runbook == page.stem for r in RULES):
        sys.exit(
            f"docs/runbooks/{page.name}: two lines are missing where its causes go: copy the marks of GpuHeldIdle.md"
        )
    return _MARKED.sub(lambda found: f"{found[1]}{tables[found[2]]}{found[3]}", text)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(written(page))
