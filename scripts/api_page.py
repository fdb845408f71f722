"""Write the section "Fields" of docs/reference/api.md from the structs of gpuwatch/api/__init__.py, read as source.

The structs that those contain are read too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/reference/api.md"
MARK = "## Fields\n"
MODULES = (
    "gpuwatch/api/__init__.py",
    "gpuwatch/diagnosis/finding.py",
    "gpuwatch/diagnosis/rates.py",
    "gpuwatch/wire/__init__.py",
)
INTRODUCTION = (
    'Generated from `gpuwatch/api` by `scripts/api_page.py`. A name in the column "type" is another table.\n'
    "`Severity` is info, warning or critical; `RunStatus` is running, ended or lost; `Points` are [Unix time, value], oldest\n"
    "first; `Stacks` are described in [stacks](../guides/stacks.md).\n"
)


def fields(struct: ast.ClassDef, source: str) -> Iterator[tuple[ast.AnnAssign, str, str]]:
    """Yield each field of a class, its name, and its note: the comment on its line, else any docstring below."""
    lines = source.splitlines()
    for field, after in zip(struct.body, [*struct.body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            below = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            note = lines[(field.end_lineno or 0) - 1].partition("  # ")[2] or (str(after.value.value) if below else "")
            yield field, field.target.id, " ".join(note.split())


def tables_of(path: str) -> Iterator[tuple[ast.ClassDef, list[str]]]:
    """Yield the structs of a module, each with its table's rows: name, type and note of each field."""
    source = (ROOT / path).read_text()
    for struct in ast.parse(source).body:
        if isinstance(struct, ast.ClassDef) and any(word.arg == "frozen" for word in struct.keywords):
            yield struct, [row(*each) for each in fields(struct, source)]


def row(field: ast.AnnAssign, name: str, note: str) -> str:
    kind = ast.unparse(field.annotation).replace("|", "\\|")
    renamed = ast.unparse(field.value) if field.value is not None else ""
    return f"| `{'UUID' if 'UUID' in renamed else name}` | `{kind}` | {note} |"


def tables() -> Iterator[str]:
    own = {struct.name: (struct, rows) for struct, rows in tables_of(MODULES[0])}
    others = {struct.name: (struct, rows) for path in MODULES[1:] for struct, rows in tables_of(path)}
    for name, (struct, rows) in {**{n: others[n] for n in ("Verdict", "Evidence", "Cost", "Loader")}, **own}.items():
        bases = [ast.unparse(base).rpartition(".")[2] for base in struct.bases]
        inherited = [row for base in bases if base in others for row in others[base][1]]
        text = " ".join((ast.get_docstring(struct) or "").split())
        head = [f"### {name}", *([text, ""] if text else [""]), "| field | type | |", "|---|---|---|"]
        yield "\n".join([*head, *inherited, *rows, ""])


def page() -> str:
    written = PAGE.read_text().partition(MARK)[0]
    return f"{written}{MARK}{INTRODUCTION}\n" + "\n".join(tables())


if __name__ == "__main__":
    PAGE.write_text(page())
