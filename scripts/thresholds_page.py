"""Print docs/reference/thresholds.md: every number that a diagnosis or a panel compares with.

Source: `gpuwatch/diagnosis/thresholds.py`.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from api_page import fields

SOURCE = Path(__file__).parents[1] / "gpuwatch/diagnosis/thresholds.py"
_HEAD = """# Thresholds of the diagnosis

The numbers with which rules compare, and from which panels warn. Shares and ratios are 0 to 1, times are in seconds.
All of them can be set in the configuration file, which the agent reads by `--config` or `GPUWATCH_CONFIG`, and a
training, for its own verdict, by `GPUWATCH_CONFIG`; so do the pages and `gpuwatch top`, for their panels:

    [thresholds]
    input_share = 0.15

Unknown keys and shares above 1 are rejected with an error that names the key. Written by
`python scripts/thresholds_page.py > docs/reference/thresholds.md`.

| key | default | meaning |
|---|---|---|
"""


def rows(source: str) -> list[tuple[str, str, str]]:
    """Return (key, default, meaning) of each field in its order. Raises: SystemExit for a field without its meaning."""
    table = next(node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    found = [(name, ast.unparse(field.value), note) for field, name, note in fields(table, source) if field.value]
    for name, _, note in found:
        if not note:
            sys.exit(f"{SOURCE.name}: {name} has no comment on its line, nor a docstring below")
    return found


def page() -> str:
    """Return the page."""
    return _HEAD + "".join(f"| `{key}` | {value} | {meaning} |\n" for key, value, meaning in rows(SOURCE.read_text()))


if __name__ == "__main__":
    sys.stdout.write(page())
