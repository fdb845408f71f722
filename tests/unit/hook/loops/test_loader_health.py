"""What is reported of a loader before it fails, and after: /dev/shm's forecast, and how workers died."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpuwatch.diagnosis.window import HostFacts
from gpuwatch.hook.account import Accounts
from gpuwatch.hook.loader_health import LoaderHealth, OomKills, deaths, shared_bytes
from gpuwatch.hook.recorder import Recorder
from gpuwatch.wire import Loader, WorkerDeath
from tests.unit.hook.fakes import Clock, fake_watch

MIB = 1 << 20
LOADER = Loader(num_workers=4, prefetch_factor=2, batch_size=32)


class Tensor:
    """What a torch tensor is to us."""

    def __init__(self, nbytes: int, rows: int = 32) -> None:
        self.nbytes, self.shape = nbytes, (rows,)

    def share_memory_(self) -> None: ...


class Array:
    """What a numpy array is to us: it goes through a pipe."""

    nbytes, shape = 100 * MIB, (32,)


def forecast(monkeypatch: pytest.MonkeyPatch, loader: Loader | None, ranks: int) -> LoaderHealth:
    """Return what follows a loader with workers on a node whose /dev/shm has 64 MiB."""
    monkeypatch.setattr("gpuwatch.hook.loader_health.shm_bytes", lambda: (64 * MIB, 0))
    accounts = Accounts(Recorder())
    accounts.loader, accounts.local_world_size = loader, ranks
    health = LoaderHealth(accounts, quiet=False)
    health.begin_pass(SimpleNamespace(_workers=[worker(4711, None)]))
    return health


def test_the_forecast_is_said_once_a_setting_with_the_exact_size(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    health = forecast(monkeypatch, LOADER, ranks=2)
    assert capsys.readouterr().err == "", "the size of a batch is not known yet"
    health.first_batch([Tensor(10 * MIB)])
    text = capsys.readouterr().err
    assert "4 workers × 2 batches of 10 MiB need up to 160 MiB" in text
    assert "docker run --shm-size=200m" in text
    health.first_batch([Tensor(10 * MIB)])
    assert capsys.readouterr().err == ""
    health.first_batch([Tensor(5 * MIB)])
    assert "2 batches of 5 MiB" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("loader", "batch_bytes"), [(LOADER, MIB), (LOADER, None), (Loader(num_workers=0), 99 * MIB), (None, 99 * MIB)]
)
def test_nothing_is_said_where_it_fits_or_is_not_known(
    loader: Loader | None, batch_bytes: int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forecast(monkeypatch, loader, ranks=1).first_batch([] if batch_bytes is None else [Tensor(batch_bytes)])
    assert capsys.readouterr().err == ""


def test_only_torch_tensors_go_through_dev_shm() -> None:
    assert shared_bytes([Tensor(5), {"y": Tensor(7)}, Array()]) == 12
    assert shared_bytes([Array()]) is None


class Batches:
    """A DataLoader's settings, and 12 batches."""

    num_workers, prefetch_factor, batch_size, dataset = 8, 2, 32, ()

    def __init__(self, batch: Any, kind: type[Any]) -> None:
        self._batch, self._kind = batch, kind

    def __iter__(self) -> Iterator[Any]:
        iterator: Iterator[Any] = self._kind([self._batch] * 12)
        return iterator


class Own(deque[Any]):
    """A DataLoader's own iterator: nothing changes its batches on their way."""

    _dataset_kind = 0

    def __next__(self) -> Any:
        if not self:
            raise StopIteration
        return self.popleft()


@pytest.mark.parametrize(
    ("batch", "kind", "warned"), [(Tensor(8 * MIB), Own, True), (Array(), Own, False), (Array(), iter, True)]
)
def test_arrays_that_go_through_a_pipe_fill_no_dev_shm(
    batch: Any, kind: type[Any], warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JAX's numpy_collate with 8 workers in a container: "/dev/shm is nearly full", critical, and nothing was in it.

    What makes arrays of a DataLoader's batches may have got tensors.
    """
    clock = Clock()
    watch = fake_watch(clock, monkeypatch)
    room = HostFacts(shm_size_bytes=64 * MIB, shm_used_bytes=0)
    monkeypatch.setattr(watch._publisher.accounts._watcher, "facts", lambda: room)
    try:
        for _ in watch.steps(Batches(batch, kind)):
            clock.sleep_ms(100)
        assert ("shm_exhaustion" in [finding.cause for finding in watch.report().findings]) is warned
    finally:
        watch.close()


def node(directory: Path, group: int, whole: int, line: str = "0::/job") -> OomKills:
    for path, text in (
        ("proc/self/cgroup", f"{line}\n"),
        ("proc/vmstat", f"nr_free_pages 1\noom_kill {whole}\n"),
        ("sys/fs/cgroup/job/memory.events", f"low 0\noom {group}\noom_kill {group}\n"),
        ("sys/fs/cgroup/job/memory.max", f"{4 << 30}\n"),
        ("sys/fs/cgroup/job/memory.current", f"{3 << 30}\n"),
        ("sys/fs/cgroup/memory/job/memory.oom_control", f"oom_kill_disable 0\nunder_oom 0\noom_kill {group}\n"),
    ):
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_text(text)
    return OomKills(directory / "proc", directory / "sys")


@pytest.mark.parametrize("line", ["0::/job", "4:memory:/job"])
def test_kills_for_lack_of_memory_are_those_since_the_beginning(tmp_path: Path, line: str) -> None:
    kills = node(tmp_path, 3, 7, line)
    assert kills.grown() == 0
    node(tmp_path, 5, 9, line)
    assert kills.grown() == 2
    node(tmp_path, 3, 8, line)  # another job's
    assert kills.grown() == 0
    assert OomKills(tmp_path / "nowhere", tmp_path / "nowhere").grown() is None


def test_where_no_group_tells_the_nodes_count_does(tmp_path: Path) -> None:
    kills = node(tmp_path, 3, 7, "0::/none")
    node(tmp_path, 3, 8, "0::/none")
    assert kills.grown() == 1 and kills.limit_bytes() is None


def worker(pid: int, exitcode: int | None) -> Any:
    return SimpleNamespace(pid=pid, exitcode=exitcode)


def test_workers_that_were_ended_on_purpose_or_live_are_not_dead_by_a_signal(tmp_path: Path) -> None:
    workers = [worker(1, None), worker(2, 0), worker(3, -15), worker(4, 1), worker(5, -7), worker(6, -9)]
    kills = node(tmp_path, 0, 0)
    node(tmp_path, 1, 1)
    assert deaths(workers, kills, tmp_path / "none") == (WorkerDeath(5, 7), WorkerDeath(6, 9, True, 1, 4 << 30))
    assert deaths(workers[-1:], node(tmp_path, 1, 2)) == (WorkerDeath(6, 9, False, 0),)
    (bus,) = deaths(workers[4:5], kills, tmp_path)
    space = os.statvfs(tmp_path)
    assert bus.shm_free_bytes is not None and 0 < bus.shm_free_bytes <= space.f_blocks * space.f_frsize


def test_a_death_is_said_at_once_and_only_once_and_forgotten_when_training_goes_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    accounts = Accounts(Recorder())
    accounts.loader = LOADER
    health = LoaderHealth(accounts, quiet=False)
    health.begin_pass(SimpleNamespace(_workers=[worker(4711, -9)]))
    for _ in range(2):
        health.fetch_failed(RuntimeError("DataLoader worker (pid(s) 4711) exited unexpectedly"))
    assert [(death.pid, death.signal) for death in accounts.worker_deaths] == [(4711, 9)]
    output = capsys.readouterr().err
    assert output.count("worker pid 4711 ended with SIGKILL") == 1
    health.begin_pass(SimpleNamespace(_workers=[worker(4712, None)]))
    assert len(accounts.worker_deaths) == 1
    health.first_batch([])
    assert accounts.worker_deaths == ()


def test_torchs_own_word_for_a_full_dev_shm_is_translated(capsys: pytest.CaptureFixture[str]) -> None:
    health = LoaderHealth(Accounts(Recorder()), quiet=False)
    health.fetch_failed(RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left"))
    assert "--shm-size" in capsys.readouterr().err
    health.fetch_failed(RuntimeError("something else"))
    assert capsys.readouterr().err == ""


def test_quiet_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    accounts = Accounts(Recorder())
    health = LoaderHealth(accounts, quiet=True)
    health.begin_pass(SimpleNamespace(_workers=[worker(4711, -9)]))
    health.find_dead_workers()
    assert capsys.readouterr().err == "" and len(accounts.worker_deaths) == 1
