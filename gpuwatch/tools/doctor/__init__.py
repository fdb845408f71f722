"""`gpuwatch doctor`: checks for what commonly goes wrong around gpuwatch, each with a remedy.

A check is a function of `Machine` that returns an `Outcome`. Adding one is a function and a line in CHECKS.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace
from functools import partial

from gpuwatch.tools.doctor import gpus, limits, services, software
from gpuwatch.tools.doctor.machine import Machine, in_background
from gpuwatch.tools.doctor.outcome import Outcome, problem, warning

DEADLINE_S = 3.0

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
    """Return the results of all checks, in order. All run at once: one that hangs or crashes is a result, and delays no other."""
    deadline = time.perf_counter() + deadline_s
    running = [(group, name, in_background(partial(check, machine))) for group, name, check in checks]
    return [replace(_outcome(future, deadline, deadline_s), group=group, name=name) for group, name, future in running]


def _outcome(future: Future[Outcome], deadline: float, deadline_s: float) -> Outcome:
    try:
        return future.result(max(0.0, deadline - time.perf_counter()))
    except FutureTimeout:
        hangs = "a driver, a disk or a name server that it reads hangs; see dmesg"
        return problem(f"no result within {deadline_s:g} s", hangs)
    except Exception as error:
        return warning(f"the check itself failed: {type(error).__name__}: {error}", "please report this line")
