"""A training process that the kernel has killed is named by the kernel's counts, and by no more than they tell."""

from __future__ import annotations

from signal import SIGKILL

import pytest
from msgspec.structs import replace

from gpuwatch.diagnosis.rules.killed import training_killed
from gpuwatch.diagnosis.window import MemoryKills, Window
from gpuwatch.wire import Loader, WorkerDeath
from tests.unit.rules.windows import HEALTHY

GIB = 1 << 30
KILLED = MemoryKills("group", 1, limit_bytes=4 * GIB, used_bytes=3 * GIB, peak_bytes=4 * GIB, resident_bytes=GIB)


def lost(oom: MemoryKills, **changes: object) -> Window:
    return replace(HEALTHY, oom=oom, **changes)  # type: ignore[arg-type]


def test_a_kill_in_the_runs_own_group_is_reported_with_limit_use_and_peak() -> None:
    finding = training_killed(lost(KILLED))
    assert finding is not None and finding.severity == "critical"
    assert finding.title == "the training process was killed by the OOM killer"
    assert [(e.what, e.value, e.text) for e in finding.evidence] == [
        ("oom kills", 1, "the OOM killer killed 1 process in its cgroup since the run's last message (oom_kill)"),
        ("memory limit", 4 * GIB, "its cgroup is limited to 4 GiB"),
        ("memory used", 3 * GIB, "3 GiB were in use at the last sample, 75% of the limit"),
        ("memory peak", 4 * GIB, "the peak was 4 GiB"),
        ("resident memory", GIB, "the training process alone used 1 GiB at the last sample"),
    ]  # fmt: skip
    assert finding.advice == (
        "num_workers 4 → 2, prefetch_factor=1 or smaller batches; or raise the job's memory limit of 4 GiB "
        "(docker run --memory=…, resources.limits.memory, sbatch --mem)"
    )


def test_where_the_training_process_itself_had_the_memory_it_is_to_keep_less() -> None:
    finding = training_killed(lost(replace(KILLED, resident_bytes=2 * GIB)))
    assert finding is not None and finding.advice.startswith(
        "reduce the memory of the training process (dataset caches"
    )


def test_where_what_grew_was_not_seen_both_may_be_it() -> None:
    finding = training_killed(lost(replace(KILLED, used_bytes=GIB, resident_bytes=GIB)))
    assert finding is not None and finding.advice.startswith(
        "num_workers 4 → 2, prefetch_factor=1 or smaller batches; or"
    )


def test_a_run_without_workers_is_not_to_use_fewer() -> None:
    """Eight ranks in one container, each an eighth of its memory."""
    finding = training_killed(lost(KILLED, loader=Loader(num_workers=0), world_size=8))
    assert finding is not None
    assert "fewer workers" not in finding.advice and "prefetch_factor" not in finding.advice


@pytest.mark.parametrize(
    ("oom", "world_size", "end"),
    [
        (KILLED, 2, "the OOM killer was active in its cgroup"),
        (replace(KILLED, kills=2), 1, "was killed by the OOM killer"),
        (replace(KILLED, where="around"), 1, "the OOM killer was active in a parent of its cgroup"),
        (replace(KILLED, where="node"), 1, "the OOM killer was active on this node"),
    ],
)
def test_no_more_is_said_than_is_known(oom: MemoryKills, world_size: int, end: str) -> None:
    finding = training_killed(lost(oom, world_size=world_size))
    assert finding is not None and finding.title.endswith(end)
    assert finding.title.startswith("the training process is gone, and the OOM killer") is ("was active" in end)


def test_without_a_limit_nothing_is_said_of_one() -> None:
    finding = training_killed(lost(MemoryKills("node", 3)))
    assert finding is not None and "give the job more memory (docker" in finding.advice
    assert [e.text for e in finding.evidence] == [
        "the OOM killer killed 3 processes on this node since the run's last message (oom_kill)"
    ]


def test_quiet_where_a_worker_was_what_was_killed_and_where_none_was() -> None:
    assert training_killed(lost(KILLED, worker_deaths=(WorkerDeath(4711, SIGKILL, True),))) is None
    assert training_killed(HEALTHY) is None
