"""Print docs/reference/thresholds.md: every number that a diagnosis or a panel compares with, from `gpuwatch/diagnosis/thresholds.py`."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "gpuwatch/diagnosis/thresholds.py"
_HEAD = """# Thresholds of the diagnosis

Every number that a rule compares with or a panel warns from, once. Shares and ratios are 0 to 1, times in seconds. Any of them is changed in the configuration file, for the agent by
`--config` or `GPUWATCH_CONFIG`, for a training's own verdict by `GPUWATCH_CONFIG`:

    [thresholds]
    input_share = 0.15

A key that is none, or a share above 1, is refused by name. Written by `python scripts/thresholds_page.py > docs/reference/thresholds.md`.

| key | default | meaning |
|---|---|---|
"""


def rows(source: str) -> list[tuple[str, str, str]]:
    """Return (key, default, meaning) of each field in its order. Raises: SystemExit for a field without its meaning."""
    table = next(node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    found = []
    for node, after in zip(table.body, table.body[1:], strict=False):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            if not (isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)):
                sys.exit(f"{SOURCE.name}: {node.target.id} has no docstring under it")
            found.append((node.target.id, ast.unparse(node.value), " ".join(str(after.value.value).split())))
    return found


def page() -> str:
    """Return the page."""
    return _HEAD + "".join(f"| `{key}` | {value} | {meaning} |\n" for key, value, meaning in rows(SOURCE.read_text()))


if __name__ == "__main__":
    sys.stdout.write(page())
