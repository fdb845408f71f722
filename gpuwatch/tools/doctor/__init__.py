"""`gpuwatch doctor`: checks for what commonly goes wrong around gpuwatch, each with a remedy.

A check is a function of `Machine` that returns an `Outcome`. Adding one is a function and a line in CHECKS.
"""

import textwrap
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

import typer

from gpuwatch import formatting
from gpuwatch.tools.doctor import gpus, limits, services, software
from gpuwatch.tools.doctor.machine import Machine, Outcome, in_background, problem, warning

DEADLINE_S = 3.0
_STYLES: dict[str, dict[str, Any]] = {
    "problem": {"fg": "red", "bold": True},
    "warning": {"fg": "yellow"},
    "ok": {"fg": "green"},
    "skipped": {"dim": True},
}

Check = tuple[str, str, Callable[[Machine], Outcome]]
CHECKS: tuple[Check, ...] = (
    ("Software", "python", software.python),
    ("Software", "gpuwatch", software.gpuwatch),
    ("Software", "hook", software.hook),
    ("Software", "agent extra", software.agent_extra),
    ("Software", "dashboard extra", software.dashboard_extra),
    ("Software", "torch", gpus.torch),
    ("Software", "settings", software.environment),
    ("GPU", "driver", gpus.driver),
    ("GPU", "pynvml", software.pynvml),
    ("GPU", "visible GPUs", gpus.visible_gpus),
    ("Permissions", "pid namespace", limits.pid_namespace),
    ("Permissions", "ptrace", limits.ptrace),
    ("Limits", "/dev/shm", limits.shm),
    ("Limits", "open files", limits.open_files),
    ("Limits", "processes", limits.tasks),
    ("Limits", "cores", limits.cores),
    ("Limits", "pressure", limits.pressure),
    ("Agent", "agent", services.agent),
    ("Agent", "collectors", services.collectors),
    ("Agent", "version", services.agent_version),
    ("Agent", "hook socket", services.hook_socket),
    ("Agent", "history", services.history),
    ("Prometheus", "targets", services.prometheus),
    ("Prometheus", "alert rules", services.alert_rules),
)
"""(group, name, function) in the order in which they are shown; `--json` uses the names, which are unique."""


def examine(machine: Machine, checks: Sequence[Check] = CHECKS, deadline_s: float = DEADLINE_S) -> list[Outcome]:
    """Return all checks' results, in order. They run at once: one that hangs or crashes is a result and delays none."""
    running = [(group, name, in_background(partial(check, machine))) for group, name, check in checks]
    wait([future for _, _, future in running], deadline_s)
    return [replace(_outcome(future, deadline_s), group=group, name=name) for group, name, future in running]


def _outcome(future: Future[Outcome], deadline_s: float) -> Outcome:
    if not future.done():
        hangs = "a driver, a disk or a name server that it reads hangs; see dmesg"
        return problem(f"no result within {deadline_s:g} s", hangs)
    if (error := future.exception()) is not None:
        return warning(f"the check itself failed: {type(error).__name__}: {error}", "please report this line")
    return future.result()


def as_text(checks: Sequence[Outcome], title: str, columns: int | None = None) -> str:
    """Return one line per check, status first, its remedy below; wrapped to `columns`, in colour, where given."""
    width = max(len(check.name) for check in checks)
    lines = [title]
    for group, members in groupby(checks, key=lambda check: check.group):
        lines += ["", group]
        for check in members:
            texts = [f"{check.status:<8} {check.name:<{width}}  {check.found}"]
            texts += [f"{'':<8} {'':<{width}}  -> {check.remedy}"] if check.remedy else []
            if columns is not None:
                indent = " " * (width + 11)
                texts = [line for text in texts for line in textwrap.wrap(text, columns, subsequent_indent=indent)]
                texts[0] = typer.style(check.status, **_STYLES[check.status]) + texts[0].removeprefix(check.status)
            lines += texts
    summary = ", ".join(f"{status}: {count}" for status, count in _counts(checks).items())
    return "\n".join([*lines, "", summary])


def as_json(checks: Sequence[Outcome], version: str, host: str) -> str:
    return formatting.as_json({"version": version, "host": host, "counts": _counts(checks), "checks": checks})


def _counts(checks: Sequence[Outcome]) -> dict[str, int]:
    return {status: sum(check.status == status for check in checks) for status in _STYLES}
