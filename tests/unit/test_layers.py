"""Who may import whom: read from the source, so that a forbidden import is found even where it never runs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.programs import ROOT

PACKAGES = {
    "gpuwatch": ROOT / "gpuwatch",
    "gpuwatch_agent": ROOT / "agent/gpuwatch_agent",
    "gpuwatch_dashboards": ROOT / "dashboards/gpuwatch_dashboards",
}
MODULES = {
    ".".join(path.relative_to(base.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for base in PACKAGES.values()
    for path in base.rglob("*.py")
}
"""Every file of the product by its dotted name."""
PURE = ["metrics", "ledger", "diagnosis", "diagnosis/rules", "formatting", "alerting"]
WIRE = ["wire/__init__"]
"""Messages. Next to them are the sockets that carry them."""
IO_AND_CLOCKS = {"time", "os", "socket", "subprocess", "threading", "zmq", "pathlib", "logging", "datetime", "sqlite3"}
TRAINING_SIDE_MAY_USE = ["msgspec", "zmq"]


def imports(path: Path) -> Iterator[str]:
    """Yield the dotted names that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def sources(package: str) -> list[Path]:
    return sorted(PACKAGES[package].rglob("*.py"))


def test_agent_and_dashboards_do_not_know_each_other() -> None:
    for package, other in (("gpuwatch_agent", "gpuwatch_dashboards"), ("gpuwatch_dashboards", "gpuwatch_agent")):
        guilty = [path.name for path in sources(package) if any(name.split(".")[0] == other for name in imports(path))]
        assert guilty == []
        assert len(sources(package)) > 5


def test_gpuwatch_reaches_agent_and_dashboards_in_its_commands_only() -> None:
    guilty = [
        str(path.relative_to(ROOT))
        for path in sources("gpuwatch")
        if path.parent.name != "commands"
        and any(name.split(".")[0] in ("gpuwatch_agent", "gpuwatch_dashboards") for name in imports(path))
    ]
    assert guilty == []


@pytest.mark.parametrize("module", [*PURE, *WIRE])
def test_pure_modules_do_no_io_and_read_no_clock(module: str) -> None:
    place = PACKAGES["gpuwatch"] / module
    paths = sorted(place.glob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
    assert paths
    for path in paths:
        assert {name.split(".")[0] for name in imports(path)} & IO_AND_CLOCKS == set(), path.name


def test_what_a_training_process_imports_needs_msgspec_and_zmq_alone() -> None:
    script = """
import sys
before = set(sys.modules)
import gpuwatch
from gpuwatch.hook.publisher import import_diagnosis
at_once = set(sys.modules) - before
import_diagnosis()
print(*at_once)
print(*(set(sys.modules) - before))
"""
    at_once, later = _printed(script)
    (theirs,) = _printed(f"import sys, {', '.join(TRAINING_SIDE_MAY_USE)}; print(*sys.modules)")
    assert {name.split(".")[0] for name in later - theirs} - sys.stdlib_module_names == {"gpuwatch"}
    assert "gpuwatch.hook.watch" in at_once and "gpuwatch.commands" not in later
    # `import gpuwatch` is small: diagnosis, reports and the socket are loaded by the background thread.
    assert not at_once & {
        "zmq",
        "gpuwatch.diagnosis.rules",
        "gpuwatch.diagnosis.window",
        "gpuwatch.diagnosis.report",
        "gpuwatch.hook.evidence",
    }
    assert {
        "zmq",
        "gpuwatch.diagnosis.rules",
        "gpuwatch.diagnosis.window",
        "gpuwatch.diagnosis.report",
        "gpuwatch.hook.evidence",
    } <= later
    modules = [name for name in at_once if name.startswith("gpuwatch") and not (ROOT / name.replace(".", "/")).is_dir()]
    assert len(modules) < 57


def _printed(script: str) -> list[set[str]]:
    """Return the words of each line that a script prints in an interpreter of its own."""
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, cwd=ROOT)
    return [set(line.split()) for line in done.stdout.splitlines()]


def test_nothing_names_a_metric_that_the_catalogue_lacks() -> None:
    from gpuwatch.metrics import BY_NAME

    pattern = re.compile(r"\"(gpuwatch_[a-z0-9_]+_(?:total|seconds|bytes|ratio|info|watts|celsius|active|up))\"")
    for path in [*sources("gpuwatch"), *sources("gpuwatch_agent"), *sources("gpuwatch_dashboards")]:
        unknown = {name for name in pattern.findall(path.read_text()) if name not in BY_NAME}
        assert unknown == set(), path.name


def test_no_two_files_import_each_other() -> None:
    """Circles at run time count, those of imports inside functions too.

    A package's `__init__` stands for what it exports, and is left out.
    """
    known = {name for name, path in MODULES.items() if path.name != "__init__.py"}
    graph = {name: _modules(MODULES[name], types=False) & known - {name} for name in known}
    assert len(graph) > 100
    assert [each for each in _components(graph) if len(each) > 1] == []


def test_no_circle_of_imports_has_more_than_three_files() -> None:
    """All imports count: in a package's `__init__`, in functions, for types alone, by `import_module` with a name."""
    graph = {name: _modules(path, types=True) & MODULES.keys() - {name} for name, path in MODULES.items()}
    assert graph["gpuwatch"] >= {"gpuwatch.hook.watch", "gpuwatch.diagnosis.report"}
    assert [sorted(each) for each in _components(graph) if len(each) > 3] == []


def test_circles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c", "e"}, "c": {"d"}, "d": {"b"}, "e": {"f"}, "f": set(), "g": {"a", "f"}}
    assert sorted(map(sorted, _components(graph)), key=len)[-1] == ["b", "c", "d"] and len(_components(graph)) == 5


def test_only_the_recorder_writes_its_slots() -> None:
    writes = re.compile(r"\b_?recorder\.\w+(?:, _?recorder\.\w+)* (?:[-+|]?=) .*")
    found = {path.name: each for path in sources("gpuwatch") if (each := writes.findall(path.read_text()))}
    assert found == {}


def test_nothing_private_of_a_watch_is_used_by_other_files() -> None:
    private = re.compile(r"\b(?:watch|session|recorder|publisher|accounts)\._\w+")
    assert {path.name: found for path in sources("gpuwatch") if (found := private.findall(path.read_text()))} == {}


def _modules(path: Path, types: bool) -> set[str]:
    """Return the names that a file imports, `from package import module` as both.

    `types`: those for type checkers alone too.
    """
    found = set()
    tree = ast.parse(path.read_text())
    for block in [node for node in ast.walk(tree) if isinstance(node, ast.If)]:
        if not types and isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING":
            block.body = [ast.Pass()]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & MODULES.keys() or {node.module}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "import_module":
            found |= {each.value for each in node.args if isinstance(each, ast.Constant)}
    return found


def _components(graph: dict[str, set[str]]) -> list[set[str]]:
    """Return the strongly connected components: files that reach each other."""
    reached = {name: _reached(graph, name) for name in graph}
    left, found = set(graph), []
    while left:
        name = left.pop()
        found.append({name} | {other for other in reached[name] & left if name in reached[other]})
        left -= found[-1]
    return found


def _reached(graph: dict[str, set[str]], start: str) -> set[str]:
    reached: set[str] = set()
    todo = [start]
    while todo:
        for name in graph[todo.pop()] - reached:
            reached.add(name)
            todo.append(name)
    return reached
