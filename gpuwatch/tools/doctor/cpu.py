"""The processor's share: cores against the cgroup's quota, and the kernel's pressure figures."""

from __future__ import annotations

from gpuwatch.errors import NoData
from gpuwatch.host import proc
from gpuwatch.host.cgroup import quota
from gpuwatch.tools.doctor.outcome import Outcome, ok, warning
from gpuwatch.tools.doctor.surroundings import Surroundings


def cores(around: Surroundings) -> Outcome:
    """Cores that may be used against the quota: torch starts a thread for each core, and the quota stops them all."""
    usable, limit = around.cores(), quota(around.procfs, around.sysfs)
    if limit is None or limit.cores >= usable:
        return ok(f"{usable} usable, no quota below them")
    held = f"; throttled in {limit.throttled / limit.periods:.0%} of {limit.periods} periods" if limit.periods else ""
    least = max(1, int(limit.cores))
    return warning(
        f"{usable} cores are seen, {limit.cores:g} may be used{held}",
        f"raise it (docker run --cpus, limits.cpu), or num_workers + OMP_NUM_THREADS of at most {least}",
    )


def pressure(around: Surroundings) -> Outcome:
    """Whether the kernel tells for how long tasks waited for CPU, disk and memory (PSI)."""
    missing = []
    for what in ("cpu", "io", "memory"):
        try:
            proc.pressure_s(what, around.procfs)
        except (NoData, ValueError):
            missing.append(what)
    if missing:
        return warning(
            f"no pressure figures for {', '.join(missing)}: causes are told with less certainty",
            "a kernel of 4.20 or later, booted with psi=1",
        )
    return ok("cpu, io and memory")
