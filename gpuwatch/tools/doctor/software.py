"""Versions: Python, gpuwatch and what its extras require."""

from __future__ import annotations

import re

from gpuwatch.tools.doctor.outcome import Outcome, ok, problem, skipped, warning
from gpuwatch.tools.doctor.surroundings import DISTRIBUTION, Surroundings

_OLDEST_PYTHON = (3, 10)
_REQUIREMENT = re.compile(r"^([\w.-]+)\s*(?:>=\s*([\d.]+))?\s*(?:;\s*(.*))?$")
_PYTHON = re.compile(r"^python_version (>=|<) '([\d.]+)'$")


def python(around: Surroundings) -> Outcome:
    """The interpreter that gpuwatch runs in, and so the environment that all other versions are of."""
    version, path = around.python
    if numbers(version) < _OLDEST_PYTHON:
        return problem(f"{version} ({path})", "gpuwatch needs Python 3.10 or later: make an environment with one")
    return ok(f"{version} ({path})")


def gpuwatch(around: Surroundings) -> Outcome:
    """The installed distribution against the package that is imported; PyPI's `gpuwatch` is an unrelated tool."""
    imported, installed = around.gpuwatch_version, around.version_of(DISTRIBUTION)
    if other := around.version_of("gpuwatch"):
        return problem(
            f"{imported}, and PyPI's unrelated 'gpuwatch' {other}: both own the name",
            f"pip uninstall gpuwatch && pip install --force-reinstall {DISTRIBUTION}",
        )
    if installed is None:
        return warning(f"{imported}, imported from a folder, not installed", f"pip install {DISTRIBUTION}")
    if installed != imported:
        return problem(
            f"{imported} is imported, {installed} is installed: there are two of them",
            f"look for a second copy on PYTHONPATH, or pip install --force-reinstall {DISTRIBUTION}",
        )
    return ok(imported)


def hook(around: Surroundings) -> Outcome:
    """What the hook in a training process requires: msgspec and pyzmq."""
    return _installed(around, None)


def agent_extra(around: Surroundings) -> Outcome:
    """What `gpuwatch agent` requires."""
    return _installed(around, "agent")


def dashboard_extra(around: Surroundings) -> Outcome:
    """What `gpuwatch dashboard` requires."""
    return _installed(around, "dashboard")


def pynvml(around: Surroundings) -> Outcome:
    """The deprecated distribution `pynvml` puts its own module in the place of nvidia-ml-py's."""
    maintained, deprecated = around.version_of("nvidia-ml-py"), around.version_of("pynvml")
    if deprecated is not None:
        return warning(
            f"the deprecated distribution 'pynvml' {deprecated} may shadow nvidia-ml-py {maintained or '(not installed)'}",
            "pip uninstall -y pynvml && pip install --force-reinstall nvidia-ml-py",
        )
    if maintained is None:
        return skipped("nvidia-ml-py is not installed: GPUs are not seen", "pip install nvidia-ml-py")
    return ok(f"nvidia-ml-py {maintained}, and no 'pynvml' over it")


def numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (2, 5, 1) of "2.5.1+cu124"."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def required(requirements: list[str], extra: str | None, python: tuple[int, ...]) -> list[tuple[str, str]]:
    """Return (distribution, least version or "") of an extra, or of the base for None, for this Python.

    Those under another condition, such as a platform, are left out. Source: Requires-Dist, packaging.python.org.
    """
    wanted = set() if extra is None else {f"extra == '{extra}'"}
    found = []
    for requirement in requirements:
        parts = _REQUIREMENT.match(requirement)
        if parts is None:
            continue
        conditions = {part.strip(" ()") for part in (parts[3] or "").replace('"', "'").split(" and ")} - {""}
        about_python = {each for each in conditions if _PYTHON.match(each)}
        if conditions - about_python == wanted and all(_holds(each, python) for each in about_python):
            found.append((parts[1], parts[2] or ""))
    return found


def _holds(condition: str, python: tuple[int, ...]) -> bool:
    parts = _PYTHON.match(condition)
    assert parts is not None
    return (python[:2] >= numbers(parts[2])) == (parts[1] == ">=")


def _installed(around: Surroundings, extra: str | None) -> Outcome:
    wanted = required(around.requirements(), extra, numbers(around.python[0]))
    if not wanted:
        return skipped("what it requires is not known: gpuwatch is not installed", f"pip install {DISTRIBUTION}")
    missing, old, present = [], [], []
    for name, least in wanted:
        version = around.version_of(name)
        if version is None:
            missing.append(name)
        elif numbers(version) < numbers(least):
            old.append(f"{name} {version} (needs {least})")
        else:
            present.append(f"{name} {version}")
    if not missing and not old:
        return ok(", ".join(present))
    lists = (("missing", missing), ("too old", old))
    found = "; ".join(f"{what}: {', '.join(names)}" for what, names in lists if names)
    package = DISTRIBUTION if extra is None else f"'{DISTRIBUTION}[{extra}]'"
    remedy = f"pip install --upgrade {package}"
    if extra is None or old:
        return problem(found, remedy)
    return warning(found, f"{remedy}   (needed on machines that run gpuwatch {extra})")
