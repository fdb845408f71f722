"""docs/evidence/agent.md: each part of the benchmark writes its own."""

from __future__ import annotations

import os
import time

from benchmarks import ROOT

PAGE = ROOT / "docs" / "evidence" / "agent.md"


def write_part(name: str, lines: list[str], load: float) -> None:
    """Replace one part of the page."""
    text = PAGE.read_text()
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    head, _, rest = text.partition(begin)
    if not rest or end not in rest:
        raise SystemExit(f"{PAGE} has no part {name}")
    where = f"*{os.cpu_count()} cores, load average {load:.1f} while it was measured, {time.strftime('%Y-%m-%d')}.*"
    PAGE.write_text(head + begin + "\n".join([*lines, "", where, ""]) + end + rest.partition(end)[2])
