"""A worker that a signal has killed is named by its exit code."""

from __future__ import annotations

from signal import SIGBUS, SIGKILL, SIGSEGV

import pytest
from msgspec.structs import replace

from gpuwatch.diagnosis.rules.killed import worker_killed
from gpuwatch.diagnosis.window import HostFacts, Window
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
        "/dev/shm has 64 MiB, at most 60 MiB of it used",
    ]


def test_a_bus_error_before_the_first_batch_says_that_the_size_is_not_known() -> None:
    finding = worker_killed(dead(SIGBUS, host=SMALL, loader=Loader(num_workers=4)))
    assert finding is not None and "no batch arrived" in finding.advice


def test_a_bus_error_of_workers_that_send_arrays_is_not_for_lack_of_a_batch() -> None:
    full = WorkerDeath(4711, SIGBUS, shm_size_bytes=64 << 20, shm_free_bytes=0)
    loader = Loader(num_workers=4, batch_bytes=6 << 20, shared_bytes=0)
    finding = worker_killed(replace(HEALTHY, worker_deaths=(full,), loader=loader))
    assert finding is not None and "--shm-size=128m, twice its size" in finding.advice
    finding = worker_killed(dead(SIGBUS, host=HostFacts(), loader=loader))
    assert finding is not None and "--shm-size=8g" in finding.advice


def test_a_bus_error_with_a_roomy_dev_shm_is_something_else() -> None:
    finding = worker_killed(dead(SIGBUS))  # 54 MiB of 8 GiB
    assert (
        finding is not None and "although /dev/shm was not full" in finding.title and "shm-size" not in finding.advice
    )


@pytest.mark.parametrize(
    ("free_mib", "title", "advice"),
    [
        (0, "/dev/shm was full", "--shm-size=1024m, twice its size: the loader's batches alone do not fill it"),
        (51, "/dev/shm was full", "--shm-size=1024m"),
        (52, "although /dev/shm was not full", "memory-mapped"),
    ],
)
def test_what_was_free_right_after_tells_of_a_dev_shm_that_others_filled(
    free_mib: int, title: str, advice: str
) -> None:
    death = WorkerDeath(4711, SIGBUS, shm_size_bytes=512 << 20, shm_free_bytes=free_mib << 20)
    # The run's own, which is gone with it, and not the node's.
    window = replace(HEALTHY, worker_deaths=(death,), host=HostFacts(shm_size_bytes=64 << 30, shm_used_bytes=9 << 30))
    finding = worker_killed(window)
    assert finding is not None and finding.title.endswith(title) and advice in finding.advice
    assert finding.evidence[1].text.endswith(
        f" {free_mib} {'M' if free_mib else ''}{'iB' if free_mib else 'B'} of it free right afterwards"
    )


@pytest.mark.parametrize(
    ("oom", "title", "advice"),
    [
        (True, "killed by the OOM killer", "num_workers 4 → 2"),
        (None, "probably by the OOM killer", "dmesg"),
        (False, "but not by the OOM killer", "what sent SIGKILL"),
    ],
)
def test_sigkill_is_explained_by_what_the_kernel_counted(oom: bool | None, title: str, advice: str) -> None:
    finding = worker_killed(dead(SIGKILL, oom))
    assert finding is not None and finding.title.endswith(title) and advice in finding.advice


def test_a_kill_for_lack_of_memory_tells_the_kernels_count_and_the_limit() -> None:
    finding = worker_killed(replace(HEALTHY, worker_deaths=(WorkerDeath(4711, SIGKILL, True, 2, 4 << 30),)))
    assert finding is not None and "raise the job's memory limit of 4 GiB (docker run --memory=…" in finding.advice
    assert [(e.what, e.value, e.text) for e in finding.evidence] == [
        ("exit signal", 9, "worker pid 4711 ended with SIGKILL"),
        ("oom kills", 2, "the OOM killer killed 2 processes at that time (oom_kill); its cgroup is limited to 4 GiB"),
    ]  # fmt: skip
    anywhere = worker_killed(dead(SIGKILL, True))
    assert anywhere is not None and "more memory (docker" in anywhere.advice and len(anywhere.evidence) == 1


def test_a_crash_is_called_one() -> None:
    finding = worker_killed(dead(SIGSEGV))
    assert finding is not None and finding.title == "a loader worker crashed with SIGSEGV"


def test_quiet_while_all_workers_live() -> None:
    assert worker_killed(HEALTHY) is None
