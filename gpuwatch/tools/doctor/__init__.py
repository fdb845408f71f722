"""`gpuwatch doctor`: checks for what commonly goes wrong around gpuwatch, each with a remedy.

A check is a function of `Machine` that returns an `Outcome`. Adding one is a function and a line in CHECKS.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import asdict
from functools import partial

from gpuwatch.tools.doctor.gpus import driver, torch, visible_gpus
from gpuwatch.tools.doctor.limits import clock, cores, locked_memory, ntp, open_files, pressure, shm, tasks
from gpuwatch.tools.doctor.machine import Machine, in_background
from gpuwatch.tools.doctor.outcome import Check, Outcome, problem, warning
from gpuwatch.tools.doctor.processes import agent_port, page_port, pid_namespace, ptrace
from gpuwatch.tools.doctor.services import (
    agent,
    agent_clock,
    agent_version,
    alert_rules,
    collectors,
    history,
    hook_socket,
    prometheus,
)
from gpuwatch.tools.doctor.software import agent_extra, dashboard_extra, environment, gpuwatch, hook, pynvml, python

DEADLINE_S = 3.0

CHECKS: tuple[tuple[str, str, Callable[[Machine], Outcome]], ...] = (
    ("Software", "python", python),
    ("Software", "gpuwatch", gpuwatch),
    ("Software", "hook", hook),
    ("Software", "agent extra", agent_extra),
    ("Software", "dashboard extra", dashboard_extra),
    ("Software", "torch", torch),
    ("Software", "settings", environment),
    ("GPU", "driver", driver),
    ("GPU", "pynvml", pynvml),
    ("GPU", "visible GPUs", visible_gpus),
    ("Permissions", "pid namespace", pid_namespace),
    ("Permissions", "ptrace", ptrace),
    ("Limits", "/dev/shm", shm),
    ("Limits", "open files", open_files),
    ("Limits", "locked memory", locked_memory),
    ("Limits", "processes", tasks),
    ("Limits", "cores", cores),
    ("Limits", "pressure", pressure),
    ("Clock", "clock", clock),
    ("Clock", "NTP", ntp),
    ("Agent", "agent", agent),
    ("Agent", "collectors", collectors),
    ("Agent", "version", agent_version),
    ("Agent", "agent's clock", agent_clock),
    ("Agent", "hook socket", hook_socket),
    ("Agent", "agent port", agent_port),
    ("Agent", "page port", page_port),
    ("Agent", "history", history),
    ("Prometheus", "targets", prometheus),
    ("Prometheus", "alert rules", alert_rules),
)
"""(group, name, function) in the order in which they are shown; `--json` uses the names, which are unique."""


def examine(
    machine: Machine,
    checks: Sequence[tuple[str, str, Callable[[Machine], Outcome]]] = CHECKS,
    deadline_s: float = DEADLINE_S,
) -> list[Check]:
    """Return the results of all checks, in order. All run at once: one that hangs or crashes is a result, and delays no other."""
    deadline = time.perf_counter() + deadline_s
    running = [(group, name, in_background(partial(check, machine))) for group, name, check in checks]
    return [Check(group, name, **asdict(_outcome(future, deadline, deadline_s))) for group, name, future in running]


def _outcome(future: Future[Outcome], deadline: float, deadline_s: float) -> Outcome:
    try:
        return future.result(max(0.0, deadline - time.perf_counter()))
    except FutureTimeout:
        return problem(
            f"no result within {deadline_s:g} s", "a driver, a disk or a name server that it reads hangs; see dmesg"
        )
    except Exception as error:
        return warning(f"the check itself failed: {type(error).__name__}: {error}", "please report this line")
