"""What a training process sees of its node."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler

from gpuwatch.hook.batches import loader_settings
from gpuwatch.hook.evidence import HostWatcher, StepIdle, usable_cores
from gpuwatch.host import cgroup
from gpuwatch.host import proc as procfs
from tests.unit.hook.fakes import Clock, fake_watch, turn


class Node:
    """A /proc whose counters a test sets."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "pressure").mkdir()

    def set(self, busy_ticks: int, idle_ticks: int, cpu_us: int, workers: dict[int, int]) -> None:
        (self.root / "stat").write_text(f"cpu {busy_ticks} 0 0 {idle_ticks} 0 0 0 0 0 0\ncpu0 0\n")
        for name in ("cpu", "io"):
            (self.root / "pressure" / name).write_text(f"some avg10=0.00 total={cpu_us}\nfull total=1\n")
        for pid, ticks in workers.items():
            (self.root / str(pid)).mkdir(exist_ok=True)
            fields = " ".join("0" for _ in range(11))
            (self.root / str(pid) / "stat").write_text(f"{pid} (a) b) {fields} {ticks} 0 0 0 0 0 0 0 77 0 0")


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


TICKS = procfs.TICKS_PER_S


def test_workers_of_the_pass_before_are_evidence_until_those_of_a_new_one_are_known(node: Node, tmp_path: Path) -> None:
    watcher = HostWatcher(tmp_path, tmp_path)
    node.set(0, 0, 0, {11: 0, 12: 0, 13: 0})
    watcher.sample(100.0, [11])
    node.set(0, 0, 0, {11: 5 * TICKS, 12: 0, 13: 0})
    for at_s, pids in ((110.0, [11]), (111.0, [12]), (112.0, [13]), (113.0, [])):
        watcher.sample(at_s, pids)
        assert watcher.workers.ratios() == (0.5,)
    assert set(watcher.workers.times) <= {11, 13}, "they do not add up"
    watcher.sample(114.0, [13])
    node.set(0, 0, 0, {13: 2 * TICKS})
    watcher.sample(116.0, [13])
    assert watcher.workers.ratios() == (0.5,) and set(watcher.workers.times) == {13}


@pytest.mark.parametrize(
    ("bound_to", "tasks", "ranks", "expected"),
    [
        (12, "8(x2)", "", 96),
        (48, "8", "", 96),
        (96, "8", "", 96),
        (2, "8", "", 16),
        (12, "1", "", 12),
        (12, "8", "1", 12),  # a torchrun in each task: its ranks share that task's cores
        (24, "4", "2", 24),
        (12, "8", "8", 96),
        (96, "1", "8", 96),
    ],
)
def test_tasks_of_slurm_share_the_cores_of_all_of_them(
    monkeypatch: pytest.MonkeyPatch, bound_to: int, tasks: str, ranks: str, expected: int
) -> None:
    """A task is bound to cores of its own, to those of its NUMA node, or not at all."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(bound_to)))
    monkeypatch.setattr(cgroup, "quota", lambda groups: None)
    for name, value in {"STEP_TASKS_PER_NODE": tasks, "NTASKS_PER_NODE": "8", "CPUS_ON_NODE": "96"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert usable_cores() == expected


def test_means_over_the_run_and_each_workers_use(node: Node, tmp_path: Path) -> None:
    watcher = HostWatcher(tmp_path, tmp_path)
    node.set(0, 0, 0, {11: 0, 12: 5 * TICKS})
    watcher.sample(100.0, [11, 12])
    node.set(30 * TICKS, 10 * TICKS, 4_000_000, {11: 10 * TICKS, 12: 6 * TICKS})
    watcher.sample(110.0, [11, 12])
    facts = watcher.facts()
    assert (facts.cpu_busy_ratio, facts.cpu_pressure_ratio, facts.io_pressure_ratio) == (0.75, 0.4, 0.4)
    assert watcher.workers.ratios() == (1.0, 0.1)


def test_one_look_gives_no_rates(node: Node, tmp_path: Path) -> None:
    watcher = HostWatcher(tmp_path, tmp_path)
    assert watcher.facts().cpu_busy_ratio is None and watcher.workers.ratios() is None
    node.set(5, 5, 5, {11: 3})
    watcher.sample(1.0, [11])
    assert watcher.facts().cpu_busy_ratio is None and watcher.workers.ratios() is None


def test_workers_that_have_gone_or_just_come_are_left_out(node: Node, tmp_path: Path) -> None:
    watcher = HostWatcher(tmp_path, tmp_path)
    node.set(0, 1, 0, {11: 0})
    watcher.sample(0.0, [11, 99])
    node.set(0, 2, 0, {11: 5 * TICKS, 12: 0})
    watcher.sample(10.0, [11, 12])
    assert watcher.workers.ratios() == (0.5,)


def test_nothing_readable_is_nothing_measured(tmp_path: Path) -> None:
    watcher = HostWatcher(tmp_path / "none", tmp_path / "none")
    for at in (0.0, 1.0):
        watcher.sample(at, [1])
    facts = watcher.facts()
    assert (facts.cpu_busy_ratio, facts.cpu_pressure_ratio, facts.shm_size_bytes) == (None, None, None)


def test_memory_is_what_the_jobs_limit_leaves(tmp_path: Path) -> None:
    job = tmp_path / "sys/fs/cgroup/job"
    for path, text in (
        (tmp_path / "proc/meminfo", "MemAvailable: 8388608 kB\n"),
        (tmp_path / "proc/self/cgroup", "0::/job\n"),
        (job / "memory.max", f"{4 << 30}\n"),
        (job / "memory.current", f"{3 << 30}\n"),
        (job / "memory.stat", f"anon 1\ninactive_file {1 << 29}\n"),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    watcher = HostWatcher(tmp_path / "proc", tmp_path, sysfs=tmp_path / "sys")
    watcher.sample(0.0, [])
    assert watcher.facts().memory_available_bytes == (4 - 3 << 30) + (1 << 29)
    (job / "memory.max").write_text("max\n")
    other = HostWatcher(tmp_path / "proc", tmp_path, sysfs=tmp_path / "sys")
    other.sample(0.0, [])
    assert other.facts().memory_available_bytes == 8 << 30


def test_a_loader_tells_its_settings_and_what_it_does_not_tell_is_none() -> None:
    class Process:
        pid = 42

    class Iterator:
        _workers = (Process(), object())

    class Loader(list[int]):
        num_workers, prefetch_factor, batch_size, pin_memory, persistent_workers = 2, None, 32, True, False

    reported = loader_settings(Loader([1, 2, 3]), Iterator())
    assert (reported.num_workers, reported.prefetch_factor, reported.batch_size, reported.batches) == (
        2,
        None,
        32,
        None,
    )
    assert (reported.pin_memory, reported.persistent_workers, reported.worker_pids) == (True, False, (42,))
    silent = loader_settings((x for x in "ab"), None)
    assert (silent.num_workers, silent.batches, silent.pin_memory, silent.worker_pids) == (None, None, None, ())


class Counted(Sampler[Any]):
    """One whose length is only known by making its batches, as of many that bucket by length."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples, self.asked = samples, 0

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples)

    def __len__(self) -> int:
        self.asked += 1
        return len(self.samples)


def test_the_length_of_torchs_samplers_is_asked_for_and_that_of_the_users_not() -> None:
    """It may take long, or draw random numbers, which would change the order of the batches."""
    data: Any = list(range(8))
    torchs = RandomSampler(data), BatchSampler(RandomSampler(data), 2, drop_last=False)
    own, in_batches = Counted(data), Counted([[0, 1], [2, 3]])
    loaders = DataLoader(data, 2, sampler=torchs[0]), DataLoader(data, batch_sampler=torchs[1])
    assert [loader_settings(loader, None).batches for loader in (*loaders, DataLoader(data, None))] == [4, 4, 8]
    loaders = DataLoader(data, 2, sampler=own), DataLoader(data, batch_sampler=in_batches)
    more = DataLoader(data, batch_sampler=BatchSampler(own, 2, drop_last=False)), DataLoader(data, None, sampler=own)
    assert [loader_settings(loader, None).batches for loader in (*loaders, *more)] == [None] * 4
    assert own.asked == in_batches.asked == 0


def test_the_cores_that_a_process_keeps_busy_a_second_of_compute(tmp_path: Path) -> None:
    def busy(thread: int, run_s: float, queue_s: float) -> None:
        place = tmp_path / "self" / "task" / str(thread)
        place.mkdir(parents=True, exist_ok=True)
        (place / "schedstat").write_text(f"{int(run_s * 1e9)} {int(queue_s * 1e9)} 7\n")

    idle = StepIdle(tmp_path)
    busy(11, 5.0, 1.0)
    idle.sample(4.0)
    assert idle.cores is None
    busy(11, 8.0, 1.0)
    busy(12, 1.5, 0.5)  # a thread that has come since
    idle.sample(6.0)
    assert idle.cores == pytest.approx(2.5) and idle.ratio is None, "two seconds of compute show how many, not how idle"


def test_the_cpu_time_of_an_evaluation_is_not_that_of_the_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A minute of evaluation on four cores: the steps, of one thread, seemed to keep 61 cores busy."""
    clock, used_s = Clock(), 0.0
    watch = fake_watch(clock, monkeypatch)
    accounts = watch._publisher.accounts
    accounts.step_idle = idle = StepIdle(tmp_path)
    thread = tmp_path / "self" / "task" / "11"
    thread.mkdir(parents=True)

    def use(cpu_s: float) -> None:
        nonlocal used_s
        used_s += cpu_s
        (thread / "schedstat").write_text(f"{int(used_s * 1e9)} 0 7\n")

    def train() -> None:
        """Make 20 steps in two seconds, on one core."""
        for _ in watch.steps(range(20)):
            clock.sleep_ms(100)
        use(2.0)
        turn(watch)
        accounts.sample_host()

    try:
        train()
        train()
        assert idle.cores == pytest.approx(1.0)
        for phase in ("eval", "checkpoint", "rollout"):
            with watch.phase(phase):
                clock.sleep_ms(60_000)
                use(240.0)
            train()
            train()
            assert idle.cores == pytest.approx(1.0)
    finally:
        watch.close()
