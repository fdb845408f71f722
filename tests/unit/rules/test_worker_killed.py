"""A worker that a signal has killed is named by its exit code."""

from __future__ import annotations

from dataclasses import replace
from signal import SIGBUS, SIGKILL, SIGSEGV

import pytest

from gpuwatch.rules.worker_killed import worker_killed
from gpuwatch.window import HostFacts, Window
from gpuwatch.wire import Loader, WorkerDeath
from tests.unit.rules.windows import HEALTHY

SMALL = HostFacts(shm_size_bytes=64 << 20, shm_used_bytes=60 << 20)


def dead(signal: int, oom: bool | None = None, **changes: object) -> Window:
    return replace(HEALTHY, worker_deaths=(WorkerDeath(4711, signal, oom),), **changes)  # type: ignore[arg-type]


def test_a_bus_error_is_a_full_dev_shm_with_the_size_to_give() -> None:
    finding = worker_killed(dead(SIGBUS, host=SMALL))
    assert finding is not None and finding.severity == "critical"
    assert finding.title == "a loader worker was killed by a bus error: /dev/shm was full"
    assert "--shm-size=75m" in finding.advice  # a quarter more than the 60 MiB that were used
    assert [e.text for e in finding.evidence] == [
        "worker pid 4711 ended with SIGBUS",
        "/dev/shm is 64 MiB, at most 60 MiB of it seen used",
    ]


def test_a_bus_error_before_the_first_batch_says_that_the_size_is_not_known() -> None:
    finding = worker_killed(dead(SIGBUS, host=SMALL, loader=Loader(num_workers=4)))
    assert finding is not None and "no batch came" in finding.advice


def test_a_bus_error_beside_a_roomy_dev_shm_is_something_else() -> None:
    finding = worker_killed(dead(SIGBUS))  # 54 MiB of 8 GiB
    assert finding is not None and "not for lack of room" in finding.title and "shm-size" not in finding.advice


@pytest.mark.parametrize(
    ("oom", "title", "advice"),
    [
        (True, "for lack of memory", "num_workers 4 → 2"),
        (None, "mostly for lack of memory", "dmesg"),
        (False, "not for lack of memory", "who ends processes"),
    ],
)
def test_sigkill_is_told_by_what_the_kernel_counted(oom: bool | None, title: str, advice: str) -> None:
    finding = worker_killed(dead(SIGKILL, oom))
    assert finding is not None and finding.title.endswith(title) and advice in finding.advice


def test_a_crash_is_called_one() -> None:
    finding = worker_killed(dead(SIGSEGV))
    assert finding is not None and finding.title == "a loader worker crashed with SIGSEGV"


def test_quiet_while_all_workers_live() -> None:
    assert worker_killed(HEALTHY) is None
