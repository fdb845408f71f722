"""This machine's clocks: has it slept, does it know the date, is it synchronised."""

from __future__ import annotations

from gpuwatch.tools.doctor.outcome import Outcome, ok, problem, skipped, warning
from gpuwatch.tools.doctor.surroundings import Surroundings

_OLDEST_S = 1_704_067_200.0
"""2024-01-01: before there was a gpuwatch."""
_SLEPT_S = 1.0


def clock(around: Surroundings) -> Outcome:
    """CLOCK_MONOTONIC stands still in suspend and CLOCK_BOOTTIME does not: their difference is time that nobody measured."""
    clocks = around.clocks()
    slept_s = clocks.boot_s - clocks.monotonic_s
    if clocks.wall_s < _OLDEST_S:
        return problem("the wall clock is years behind", "set it: timedatectl set-ntp true, or chrony")
    if slept_s > _SLEPT_S:
        return warning(
            f"the machine was suspended for {slept_s:.0f} s since it booted: no run has that time",
            "systemctl mask sleep.target suspend.target, on a machine that trains",
        )
    return ok("monotonic and boot time agree: never suspended")


def ntp(around: Surroundings) -> Outcome:
    """Whether the kernel counts its clock as synchronised. Source: adjtimex(2)."""
    synchronised = around.ntp()
    if synchronised is None:
        return skipped("the kernel does not tell (a container, often)")
    if not synchronised:
        return warning(
            "the clock is not synchronised: series of several nodes will not fit together",
            "timedatectl set-ntp true, or chrony; a virtual machine may take its host's time without saying so",
        )
    return ok("synchronised")
