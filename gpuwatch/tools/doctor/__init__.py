"""What commonly goes wrong around gpuwatch, each with its remedy: `gpuwatch doctor`.

A check is a function of `Surroundings` that returns an `Outcome`. Adding one is a function and a line in CHECKS.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from gpuwatch.tools.doctor.agent import agent, agent_clock, agent_version, collectors
from gpuwatch.tools.doctor.clock import clock, ntp
from gpuwatch.tools.doctor.cpu import cores, pressure
from gpuwatch.tools.doctor.deadline import Background
from gpuwatch.tools.doctor.driver import driver
from gpuwatch.tools.doctor.history import history
from gpuwatch.tools.doctor.hook_socket import hook_socket
from gpuwatch.tools.doctor.limits import locked_memory, open_files, shm, tasks
from gpuwatch.tools.doctor.namespaces import pid_namespace, ptrace
from gpuwatch.tools.doctor.outcome import Check, Outcome, problem, warning
from gpuwatch.tools.doctor.ports import agent_port, page_port
from gpuwatch.tools.doctor.prometheus import alert_rules, prometheus
from gpuwatch.tools.doctor.settings import environment
from gpuwatch.tools.doctor.software import agent_extra, dashboard_extra, gpuwatch, hook, pynvml, python
from gpuwatch.tools.doctor.surroundings import Surroundings
from gpuwatch.tools.doctor.torch_build import torch
from gpuwatch.tools.doctor.visible_gpus import visible_gpus

DEADLINE_S = 3.0

Look = Callable[[Surroundings], Outcome]

CHECKS: tuple[tuple[str, str, Look], ...] = (
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
    ("Rights", "pid namespace", pid_namespace),
    ("Rights", "ptrace", ptrace),
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
"""(group, name, function) in the order in which they are shown; names are unique, and what --json calls a check."""


def examine(
    around: Surroundings, checks: Sequence[tuple[str, str, Look]] = CHECKS, deadline_s: float = DEADLINE_S
) -> list[Check]:
    """Return what every check found, in order. All run at once: one that hangs or crashes is a result, and delays no other."""
    begun_s = time.perf_counter()
    running = [(group, name, Background(_bound(look, around))) for group, name, look in checks]
    return [
        _check(group, name, call, deadline_s - (time.perf_counter() - begun_s), deadline_s)
        for group, name, call in running
    ]


def _bound(look: Look, around: Surroundings) -> Callable[[], Outcome]:
    return lambda: look(around)


def _check(group: str, name: str, call: Background[Outcome], left_s: float, deadline_s: float) -> Check:
    try:
        outcome = call.result(left_s)
    except TimeoutError:
        outcome = problem(
            f"no result within {deadline_s:g} s", "something it asks hangs: a driver, a disk, a name server; see dmesg"
        )
    except Exception as error:
        outcome = warning(f"the check itself failed: {type(error).__name__}: {error}", "please report this line")
    return Check(group, name, outcome.status, outcome.found, outcome.remedy)
