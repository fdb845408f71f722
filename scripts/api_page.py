"""Write the section "Fields" of docs/reference/api.md from the structs of gpuwatch/api/__init__.py and of what they contain, read as source."""

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
    "`Severity` is info, warning or critical; `RunStatus` running, ended or lost; `Points` are [Unix time, value], oldest first;\n"
    "`Stacks` are described in [stacks](../guides/stacks.md).\n"
)


def structs(path: str) -> Iterator[ast.ClassDef]:
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, ast.ClassDef) and any(word.arg == "frozen" for word in node.keywords):
            yield node


def rows(struct: ast.ClassDef) -> Iterator[str]:
    """Yield a table's rows: name, type, and the text below the field."""
    for field, after in zip(struct.body, [*struct.body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            text = " ".join(str(after.value.value).split()) if is_text else ""
            kind = ast.unparse(field.annotation).replace("|", "\\|")
            renamed = ast.unparse(field.value) if field.value is not None else ""
            name = "UUID" if "UUID" in renamed else field.target.id
            yield f"| `{name}` | `{kind}` | {text} |"


def tables() -> Iterator[str]:
    own = {each.name: each for each in structs(MODULES[0])}
    others = {each.name: each for path in MODULES[1:] for each in structs(path)}
    for name, struct in {**{n: others[n] for n in ("Verdict", "Evidence", "Cost", "Loader")}, **own}.items():
        bases = [ast.unparse(base).rpartition(".")[2] for base in struct.bases]
        inherited = [row for base in bases if base in others for row in rows(others[base])]
        text = " ".join((ast.get_docstring(struct) or "").split())
        yield "\n".join(
            [
                f"### {name}",
                *([text, ""] if text else [""]),
                "| field | type | |",
                "|---|---|---|",
                *inherited,
                *rows(struct),
                "",
            ]
        )


def page() -> str:
    written = PAGE.read_text().partition(MARK)[0]
    return f"{written}{MARK}{INTRODUCTION}\n" + "\n".join(tables())


if __name__ == "__main__":
    PAGE.write_text(page())
